"""Which optimizers go on from what the swarm gives, and which return to a copy of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.attach.optimizer import unwrap_optimizer
from diloco.errors import ConfigError

Params = list[nn.Parameter]


class Masters(torch.optim.Optimizer):
    """Trains fp32 copies, which it has from the beginning; or, without, what is no copy."""

    def __init__(self, params: Params, copy: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.masters = {one: one.detach().to(torch.float32, copy=copy) for one in params}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for one, master in self.masters.items():
            if one.grad is not None:
                one.copy_(master.sub_(one.grad.float(), alpha=0.1))


class Returning(torch.optim.SGD):
    """Every so many steps it goes a part of the way back to slow weights, or to an average in
    each."""

    def __init__(self, params: Params, every: int, part: float = 0.5) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.every, self.part, self.taken = every, part, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = self.param_groups[0]["params"]
        slow = [self.state[one].setdefault("slow", one.clone()) for one in own]
        super().step()
        self.taken += 1
        if self.taken % self.every == 0:
            for one, kept in zip(own, slow, strict=True):
                one.copy_(kept.lerp_(one, self.part))


class Switched(torch.optim.SGD):
    """As those of schedulefree, which refuse a step before train()."""

    def train(self) -> None: ...
    def eval(self) -> None: ...
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError


def params() -> Params:
    return [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((3, 4), (4,), ())]


COPY = "returns to a copy of the parameters .* [0-9]+% of a change"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Masters, COPY),
        (lambda p: Returning(p, 1, 0.1), COPY),
        (lambda p: Returning(p, 10), COPY),
        (Switched, r"has two sequences .* its train\(\) and eval\(\) exchange"),
    ],
)
def test_what_does_not_go_on_from_the_parameters_is_refused(made: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer=\w+ {said}") as one:
        unwrap_optimizer(made(params()))
    assert "\n" not in str(one.value)


class Honest(torch.optim.AdamW):
    """It draws random numbers, keeps where it began, and has the state and the groups of many
    steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for one in self.param_groups[0]["params"]:
            self.state[one].setdefault("began", one.clone())
            one.add_(torch.randn_like(one), alpha=0.1 * self.param_groups[0]["lr"])


class Closed(torch.optim.Optimizer):
    """It cannot be tried out."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize(
    "made",
    [
        lambda p: Honest(p, lr=3.0, weight_decay=0.5),
        lambda p: torch.optim.SGD(p, lr=10.0, momentum=0.99, weight_decay=0.1),
        Closed,
        lambda p: Masters([nn.Parameter(one.detach().float()) for one in p], copy=False),
    ],
)
def test_others_are_attached_as_they_are(made: Callable[[Params], torch.optim.Optimizer]) -> None:
    """Nothing about them changes, nor about random generators."""
    own = params()
    optimizer = made(own)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it wraps step
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a step"))

    def everything() -> list[Tensor]:
        state = [value for kept in optimizer.state.values() for value in kept.values()]
        return [one.clone() for one in (*own, *state, torch.get_rng_state())]

    before = everything()
    assert unwrap_optimizer(optimizer) is optimizer
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    assert all(one.grad is None for one in own)
