"""Outer optimizers and codecs from users' code: what is registered, what is refused, and what a
name may import."""

from __future__ import annotations

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
from diloco.errors import ConfigError
from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK
from diloco.outer.optimizer import OPTIMIZERS, OuterStep, Transition
from diloco.outer.payloads import LIMIT, refuse_diverged
from tests.support.extensions import MISSING, installed
from tests.support.outer import EXACT, author, gaussian, make, named, outer, payload_of

pytestmark = pytest.mark.usefixtures("registers")


class HeavyBall(OuterOptimizer):
    name = "heavy_ball"

    def push(
        self,
        theta: Any,
        momentum: Any,
        window: Any,
        delta: Any,
        lr: float,
        beta: float,
        *rest: object,
    ) -> Any:
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


def test_a_registered_class_is_all_that_a_new_optimizer_takes() -> None:
    register(Sign)
    replica, delta = (
        author({"w": torch.zeros(CHUNK + 5)}, outer(optimizer="sign", lr=0.5, **EXACT)),
        gaussian(CHUNK + 5),
    )
    assert not replica.can_follow, "as a momentum does not follow from its updates"
    assert replica.optimizer.reach(OuterStep(0, 1), 1.0) == (
        math.inf,
        (math.inf,) * 3,
    ), "it may be of any length"
    make(replica, named([payload_of(replica.up, delta)]))
    assert torch.equal(replica.anchors[0], -0.5 * delta.sign())


def test_a_registered_class_is_all_that_a_new_codec_takes() -> None:
    register(type("Published", (Thirds,), {"publishes": True}))
    settings = outer(codec_up="thirds", codec_down="thirds", lr=1, momentum=0, robust="clip")
    replica = author({"w": torch.arange(CHUNK + 5.0) % 509}, settings)
    replica.local.tensors["w"].mul_(0.5)
    make(replica, named([replica.capture(0)]))
    assert torch.equal(replica.anchors[0], replica.local.tensors["w"])


def test_a_codec_does_not_publish_unless_it_says_so() -> None:
    register(Thirds)
    assert codec("thirds").nbytes(10) == 30
    with refused(
        "codec_down=thirds is for contributions only; expected one of fp32, fp16, int8, e3m0"
    ):
        outer(codec_down="thirds")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"name": "nesterov"}, "name=nesterov is one of diloco's own; choose another"),
        ({"name": "a b"}, "name='a b' is no name; use up to 64 letters, digits, '.', '_' and '-'"),
        (
            lambda _, x, m, w, delta, *rest: (x - abs(delta), m, w),
            "is not linear in theta, momentum, window and delta",
        ),
        (lambda _, x, m, w, delta, *rest: (x - m, m + delta, w), "does not move theta by delta"),
        (
            lambda _, x, m, w, delta, *rest: (x - delta, m, m + w),
            "does not keep theta, or makes the window of the momentum",
        ),
    ],
)
def test_an_optimizer_that_cannot_work_is_not_registered(changed: Any, text: str) -> None:
    if callable(changed):
        changed, text = {"push": changed}, f"push {text}; mend it, or define transition instead"
    with refused(f"Mine.{text}"):
        register(type("Mine", (HeavyBall,), {"name": "mine", **changed}))
    assert "mine" not in OPTIMIZERS


def _twice(self: Codec, acc: Tensor, payload: Tensor, weight: float) -> None:
    Thirds.accumulate_(self, acc, payload, 2 * weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {
                "encode": (
                    lambda self, x, out: out.view(-1, 3).copy_(
                        x.view(-1, 1).view(torch.uint8)[:, 1:]
                    )
                )
            },
            "Mine.encode takes NaN; call diloco.outer.payloads.refuse_diverged first",
        ),
        ({"accumulate_": _twice}, "Mine.accumulate_ does not add what .decode gives"),
        ({"decode": Codec.decode}, "Mine lacks decode; define it"),
    ],
)
def test_a_codec_that_cannot_work_is_not_registered(changed: dict[str, Any], text: str) -> None:
    with refused(text):
        register(type("Mine", (Thirds,), {"name": "mine", **changed}))


def test_a_name_that_is_not_installed_is_said_with_the_remedy() -> None:
    with refused(f"outer.optimizer=lion {MISSING}"):
        compose(["outer.optimizer=lion"])
    with pytest.raises(
        ConfigError,
        match=r"^outer\.optimizer=nestrov is not installed here \(did you mean nesterov\?",
    ):
        compose(["outer.optimizer=nestrov"])


def test_an_entry_point_of_the_name_is_imported_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(
        installed(tmp_path, lion="lion_code", broken="nowhere_at_all", empty="json_code")
    )

    def asked(*settings: str) -> str:
        try:
            print(compose(settings).outer.optimizer)
        except ConfigError as error:
            print(error)
        return capsys.readouterr().out.strip()

    assert asked() == "nesterov" and "lion_code" not in sys.modules
    assert "(did you mean lion?)" in asked("outer.optimizer=lions")
    assert asked("outer.optimizer=json_code").startswith(
        "outer.optimizer=json_code is not installed here; "
    )
    assert asked("outer.optimizer=broken").startswith(
        "outer.optimizer=broken is not installed here: nowhere_at_all cannot be imported"
        " (ModuleNotFoundError: "
    )
    assert not {"lion_code", "json_code"} & set(sys.modules)
    assert asked("outer.optimizer=empty").startswith(
        "imported too\nouter.optimizer=empty is not installed "
    )
    assert asked("outer.optimizer=lion") == "imported\nlion"
    del sys.modules["lion_code"], sys.modules["json_code"]
