"""What users' code adds: one file of code and one of settings; what is refused, and what a name may
import."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco import Codec, OuterOptimizer, register
from diloco.config import compose
from diloco.config.registry import REGISTRIES
from diloco.errors import ConfigError
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import CHUNK
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterStep, Transition
from diloco.outer.payloads import LIMIT, refuse_diverged
from tests.support.extensions import OWN, installed
from tests.support.outer import EXACT, author, gaussian, make, named, outer, payload_of
from tests.support.simulated import digests, simulated

pytestmark = pytest.mark.usefixtures("registers")


class HeavyBall(OuterOptimizer):
    name = "heavy_ball"

    def push(self, theta: Any, momentum: Any, window: Any, delta: Any, *rest: Any) -> Any:
        lr, beta, *_ = rest
        momentum = beta * momentum + delta
        return theta - lr * momentum, momentum, window


class Step(Transition):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def move_(self, master: Tensor, mean: Tensor, vectors: Sequence[Tensor]) -> None:
        master.sub_(mean.sign(), alpha=self.lr)

    def follow_(self, vectors: Sequence[Tensor], moved: Tensor) -> None:
        pass


class Sign(OuterOptimizer):
    name = "sign"

    def transition(self, step: OuterStep) -> Transition:
        return Step(self.rates(step)[0])


class Thirds(Codec):
    """Three bytes of each fp32."""

    name = "thirds"

    def widths(self, numel: int) -> list[int]:
        return [3 * numel]

    def encode(self, x: Tensor, out: Tensor) -> None:
        refuse_diverged(x, self.name, LIMIT)
        out.view(-1, 3).copy_(x.view(-1, 1).view(torch.uint8)[:, 1:])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.pieces(payload, out.numel())
        out.zero_()
        out.view(-1, 1).view(torch.uint8)[:, 1:].copy_(payload.view(-1, 3))


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as error:
        yield
    assert str(error.value) == text


def simulated_with(
    folder: Path, name: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> set[str | None]:
    """Anchors after two rounds of two peers, with one file of code and one of settings."""
    place = folder / "configs" / "experiment"
    place.mkdir(parents=True)
    (folder / f"{name}.py").write_text(OWN[name])
    (place / "mine.yaml").write_text(f"# @package _global_\nrun: {{code: {name}.py}}\n{settings}\n")
    monkeypatch.chdir(folder)
    return digests(simulated(folder / "run", "local.peers=2", "experiment=[smoke,mine]"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("weighted_median", "outer: {merge: weighted_median}"),
        ("lion", "inner: {optimizer: lion, lr: 3.0e-4, betas: [0.9, 0.99]}"),
        ("int6", "outer: {codec_up: int6}"),
        ("poems", "data: {source: poems}"),
    ],
)
def test_a_file_of_code_and_one_of_settings_are_all_it_takes(
    name: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated_with(tmp_path, name, settings, monkeypatch)
    assert len(found) == 1 and None not in found
    assert found != digests(simulated(tmp_path / "plain", "local.peers=2"))


def test_a_file_of_code_that_does_not_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import nowhere_at_all")
    with pytest.raises(ConfigError, match=r"^run\.code=.*mine\.py, which cannot be imported \(Mod"):
        compose([f"run.code={file}"])
    file.write_text("import diloco\n@diloco.register\nclass Mine: name = 'mine'")
    with pytest.raises(ConfigError, match=r"mine\.py.*Mine is none of OuterOptimizer, MergeRule, "):
        compose([f"run.code={file}"])


def test_every_own_name_has_what_it_stands_for() -> None:
    for registry in REGISTRIES[:3]:
        assert set(registry.found) == registry.own
    for registry in REGISTRIES:
        with pytest.raises(KeyError, match=f"{registry.setting}=x is unknown; expected one of "):
            registry["x"]
        key = registry.setting
        with pytest.raises(ConfigError, match=f"^{key}=x is not installed here; expected one of "):
            compose([f"{key}=x"])


def test_a_step_that_is_not_linear_needs_a_transition_only() -> None:
    register(Sign)
    delta = gaussian(CHUNK + 5)
    replica = author({"w": torch.zeros(CHUNK + 5)}, outer(optimizer="sign", lr=0.5, **EXACT))
    assert not replica.can_follow, "as a momentum does not follow from its updates"
    reach = replica.optimizer.reach(OuterStep(0, 1), 1.0)
    assert reach == (math.inf, (math.inf,) * 3), "it may be of any length"
    make(replica, named([payload_of(replica.up, delta)]))
    assert torch.equal(replica.anchors[0], -0.5 * delta.sign())


def test_a_codec_publishes_if_it_says_so() -> None:
    register(Thirds)
    assert CODECS["thirds"].nbytes(10) == 30
    only = "codec_down=thirds is for contributions only; expected one of fp32, fp16, int8, e3m0"
    with refused(only):
        outer(codec_down="thirds")
    register(type("Published", (Thirds,), {"publishes": True}))
    settings = outer(codec_up="thirds", codec_down="thirds", lr=1, momentum=0, robust="clip")
    replica = author({"w": torch.arange(CHUNK + 5.0) % 509}, settings)
    replica.local.tensors["w"].mul_(0.5)
    make(replica, named([replica.capture(0)]))
    assert torch.equal(replica.anchors[0], replica.local.tensors["w"])


LINEAR = "is not linear in theta, momentum, window and delta"
WINDOW = "does not keep theta, or makes the window of the momentum"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"name": "nesterov"}, "name=nesterov is one of diloco's own; choose another"),
        ({"name": "a b"}, "name='a b' is no name; use up to 64 letters, digits, '.', '_' and '-'"),
        (lambda _, x, m, w, d, *rest: (x - abs(d), m, w), LINEAR),
        (lambda _, x, m, w, d, *rest: (x - m, m + d, w), "does not move theta by delta"),
        (lambda _, x, m, w, d, *rest: (x - d, m, m + w), WINDOW),
    ],
)
def test_an_optimizer_that_cannot_work_is_not_registered(changed: Any, text: str) -> None:
    if callable(changed):
        changed, text = {"push": changed}, f"push {text}; mend it, or define transition instead"
    with refused(f"Mine.{text}"):
        register(type("Mine", (HeavyBall,), {"name": "mine", **changed}))
    assert "mine" not in OUTER_OPTIMIZERS


def careless(self: Codec, x: Tensor, out: Tensor) -> None:
    out.view(-1, 3).copy_(x.view(-1, 1).view(torch.uint8)[:, 1:])


def twice(self: Codec, acc: Tensor, payload: Tensor, weight: float) -> None:
    Codec.accumulate_(self, acc, payload, 2 * weight)


NAN = "Mine.encode takes NaN; call diloco.outer.payloads.refuse_diverged first"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"encode": careless}, NAN),
        ({"accumulate_": twice}, "Mine.accumulate_ does not add what .decode gives"),
        ({"decode": Codec.decode}, "Mine lacks decode; define it"),
    ],
)
def test_a_codec_that_cannot_work_is_not_registered(changed: dict[str, Any], text: str) -> None:
    with refused(text):
        register(type("Mine", (Thirds,), {"name": "mine", **changed}))


def test_an_entry_point_of_the_name_is_imported_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"lion": "lion_code", "broken": "nowhere_at_all", "empty": "json_code"}
    monkeypatch.syspath_prepend(installed(tmp_path, **points))

    def asked(*settings: str) -> str:
        try:
            print(compose(settings).outer.optimizer)
        except ConfigError as error:
            print(error)
        return capsys.readouterr().out.strip()

    missing = "is not installed here"
    wrong = "nowhere_at_all cannot be imported (ModuleNotFoundError"
    assert asked() == "nesterov" and "lion_code" not in sys.modules
    assert "(did you mean lion?)" in asked("outer.optimizer=lions")
    assert f"=json_code {missing}; " in asked("outer.optimizer=json_code")
    assert f"=broken {missing}: {wrong}: " in asked("outer.optimizer=broken")
    assert not {"lion_code", "json_code"} & set(sys.modules)
    assert asked("outer.optimizer=empty").startswith("imported too\nouter.optimizer=empty is not")
    assert asked("outer.optimizer=lion") == "imported\nlion"
    del sys.modules["lion_code"], sys.modules["json_code"]
