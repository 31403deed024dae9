"""Outer optimizers and codecs from users' code: what is registered, what is refused, and what a name may import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco import Codec, OuterOptimizer, register
from diloco.config import compose
from diloco.errors import ConfigError
from diloco.outer.bounds import Bound, Moved
from diloco.outer.codecs import codec
from diloco.outer.optimizer import OPTIMIZERS, OuterStep, Transition
from diloco.outer.payloads import LIMIT, buffer, refuse_diverged
from tests.support.extensions import MISSING, installed, outer
from tests.support.places import ROOT

pytestmark = pytest.mark.usefixtures("registers")


class HeavyBall(OuterOptimizer):
    name = "heavy_ball"

    def push(
        self, theta: Any, momentum: Any, window: Any, delta: Any, lr: float, beta: float, delay: int, last: bool
    ) -> Any:
        momentum = beta * momentum + delta
        return theta - lr * momentum, momentum, window


class SignStep(Transition):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def move_(self, master: Tensor, mean: Tensor, vectors: Sequence[Tensor]) -> None:
        master.add_(mean.sign(), alpha=-self.lr)

    def follow_(self, vectors: Sequence[Tensor], moved: Tensor) -> None:
        pass


class Sign(OuterOptimizer):
    name = "sign"

    def transition(self, step: OuterStep) -> Transition:
        return SignStep(self.rates(step)[0])


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

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        values = buffer("values", torch.float32, acc.numel())
        self.decode(payload, values)
        acc.add_(values, alpha=weight)


# -- what is registered -----------------------------------------------------------------------------------------------


def test_a_linear_optimizer_is_bounded_and_audited_as_ours_are() -> None:
    register(HeavyBall)
    settings = outer(optimizer="heavy_ball", lr=0.5, momentum=0.9)
    assert settings.audited and not settings.windowed
    bound, step = Bound(settings), OuterStep(0, 1)
    assert bound.wrong(step, {"a": 2.0}, Moved(1.0, 0.0)) is None
    assert bound.wrong(step, {"a": 2.0}, Moved(1.1, 0.0)) == "it moves by 1.1, and what was contributed allows 1"


def test_nobody_bounds_or_audits_a_step_that_is_not_linear() -> None:
    register(Sign)
    assert not Sign.linear and not Sign.can_follow and HeavyBall.linear and HeavyBall.can_follow
    settings = outer(optimizer="sign")
    assert not settings.audited and outer().audited
    bound = Bound(settings)
    for version in range(3):
        step, lengths = OuterStep(version, 2), {"a": 1.0, "b": 2.0, "c": 3.0}
        assert bound.wrong(step, lengths, Moved(1e6, 0.0)) is None
        bound.follow(step, lengths, Moved(1e6, 0.0))
    assert bound.limit() == 32.0  # contributions still have one


def test_a_transition_may_say_that_it_is_linear() -> None:
    class Said(Sign):
        name = "said"
        linear = True

        def transition(self, step: OuterStep) -> Transition:
            return OPTIMIZERS["nesterov"](self.settings).transition(step)

    assert Said.linear and Said.can_follow


def test_a_codec_is_found_by_name_and_does_not_publish_unless_it_says_so() -> None:
    register(Thirds)
    assert codec("thirds").nbytes(10) == 30
    assert outer(codec_up="thirds").judging == "recent"  # two bytes per value or more
    with pytest.raises(ConfigError) as error:
        outer(codec_down="thirds")
    assert str(error.value) == ("codec_down=thirds is for contributions only; expected one of fp32, fp16, int8, e3m0")
    register(type("Published", (Thirds,), {"publishes": True}))
    assert not outer(codec_down="thirds", codec_up="int8").audited and outer(codec_up="int8").audited


def test_a_setting_without_effect_beside_an_own_optimizer_is_refused_when_it_is_typed() -> None:
    register(Sign)
    with pytest.raises(ConfigError, match=r"^outer.eager=true takes a part of the next nesterov step ahead, and "):
        compose(["outer.optimizer=sign", "outer.eager=true", "outer.overlap=${outer.sync_every}"])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"name": "nesterov"}, "Mine.name=nesterov is one of diloco's own; choose another"),
        ({"name": "a b"}, "Mine.name='a b' is no name; use up to 64 letters, digits, '.', '_' and '-'"),
        (
            {"push": lambda self, theta, m, w, delta, *rest: (theta - abs(delta), m, w)},
            "Mine.push is not linear in theta, momentum, window and delta; mend it, or define transition instead",
        ),
        (
            {"push": lambda self, theta, m, w, delta, *rest: (theta - m, m + delta, w)},
            "Mine.push does not move theta by delta; mend it, or define transition instead",
        ),
        (
            {"push": lambda self, theta, m, w, delta, *rest: (theta - delta, m, m + w)},
            "Mine.push does not keep theta, or makes the window of the momentum; mend it, or define transition instead",
        ),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_when_it_is_registered(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        register(type("Mine", (HeavyBall,), {"name": "mine", **changed}))
    assert str(error.value) == text and "mine" not in OPTIMIZERS


def _twice(self: Codec, acc: Tensor, payload: Tensor, weight: float) -> None:
    Thirds.accumulate_(self, acc, payload, 2 * weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"encode": lambda self, x, out: out.view(-1, 3).copy_(x.view(-1, 1).view(torch.uint8)[:, 1:])},
            "Mine.encode takes NaN; call diloco.outer.payloads.refuse_diverged first",
        ),
        ({"accumulate_": _twice}, "Mine.accumulate_ does not add what .decode gives"),
        (
            {"decode": lambda self, payload, out: Thirds.decode(self, payload.flip(0), out)},
            "Mine.encode mixes blocks of 4096 values; it must encode each alone, each part for all blocks in order",
        ),
        ({"decode": Codec.decode}, "Mine lacks decode; define it"),
    ],
)
def test_a_codec_that_cannot_work_is_refused_when_it_is_registered(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        register(type("Mine", (Thirds,), {"name": "mine", **changed}))
    assert str(error.value) == text


# -- what a name may import -------------------------------------------------------------------------------------------


def test_a_name_that_is_not_installed_is_said_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["outer.optimizer=lion"])
    assert str(error.value) == f"outer.optimizer=lion {MISSING}"
    with pytest.raises(
        ConfigError, match=r"^outer\.optimizer=nestrov is not installed here \(did you mean nesterov\?\)"
    ):
        compose(["outer.optimizer=nestrov"])


def asked(folder: str, *settings: str) -> str:
    code = (
        "import sys\nfrom diloco.config import compose\nfrom diloco.errors import ConfigError\n"
        "try:\n    print(compose(sys.argv[1:]).outer.optimizer)\nexcept ConfigError as error:\n    print(error)\n"
    )
    root = str(ROOT)
    ran = subprocess.run(
        [sys.executable, "-c", code, *settings], cwd=folder, env={"PYTHONPATH": f"{folder}:{root}"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return ran.stdout.strip()


def test_an_entry_point_of_the_name_is_imported_and_no_other_module(tmp_path: Path) -> None:
    folder = installed(tmp_path, lion="lion_code", broken="nowhere_at_all", empty="json_code")
    assert asked(folder, "outer.optimizer=lion") == "imported\nlion"
    assert asked(folder) == "nesterov"
    assert asked(folder, "outer.optimizer=json_code").startswith("outer.optimizer=json_code is not installed here; ")
    assert asked(folder, "outer.optimizer=broken").startswith(
        "outer.optimizer=broken is not installed here: nowhere_at_all cannot be imported (ModuleNotFoundError: "
    )
    assert asked(folder, "outer.optimizer=empty").startswith("imported too\nouter.optimizer=empty is not installed ")
    assert "(did you mean lion?)" in asked(folder, "outer.optimizer=lions")
