"""Optimizers that train copies of the parameters are refused before a swarm is joined; others notice nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.train.api import Swarm
from diloco.train.masters import refuse_masters

OPTIMIZERS = [
    torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.AdamW, torch.optim.ASGD, torch.optim.LBFGS,
    torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, torch.optim.SparseAdam,
]  # fmt: skip


class Mastered(torch.optim.SGD):
    """SGD on fp32 copies of the parameters, which are made at once or in the first step."""

    def __init__(self, parameters: Any, at_once: bool) -> None:
        super().__init__(parameters, lr=0.1, weight_decay=0.1)
        self.masters: dict[Any, torch.Tensor] = {}
        if at_once:
            self._copy()

    def _copy(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.masters.setdefault(one, one.detach().float().clone())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._copy()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.masters[one].add_(one.grad.float(), alpha=-group["lr"])
                    one.copy_(self.masters[one])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 2))


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_found_and_the_parameter_is_named(at_once: bool, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"^1\.bias is moved by a step of Mastered without gradient"):
        refuse_masters(Mastered(model.parameters(), at_once), named(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_masters_of_some_parameters_are_found() -> None:
    model = Net()
    model[0].bfloat16()
    step = Mastered(model.parameters(), True).step

    class Partly(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if any(one.grad is not None and one.dtype == torch.bfloat16 for one in model.parameters()):
                step()

    with pytest.raises(ConfigError, match=r"^0\.bias is moved by a step of Partly"):
        refuse_masters(Partly(model.parameters(), lr=0.1), named(model))


def test_nobody_is_called_before_the_optimizer_is_refused() -> None:
    model = Net()
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"
    with Swarm(run_id="mine", address=nobody, sync_every=2) as swarm:
        with pytest.raises(ConfigError, match="which would undo every outer step"):
            swarm.attach(model, Mastered(model.parameters(), True))


class Decaying(torch.optim.SGD):
    """SGD that decays weights beside the learning rate."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, weight_decay=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.mul_(1 - group["weight_decay"]).add_(one.grad, alpha=-group["lr"])


@pytest.mark.parametrize("made", [*OPTIMIZERS, Decaying], ids=lambda made: made.__name__)
@pytest.mark.parametrize("stepped", [False, True])
def test_the_check_leaves_no_trace(made: Callable[..., torch.optim.Optimizer], stepped: bool) -> None:
    class Own(made):  # type: ignore[misc, valid-type]
        """A class that is not known."""

    model, calls = Net(), []
    optimizer: Any = Own(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def loss() -> float:
        found = model(torch.ones(1, 3)).square().sum()
        found.backward()
        return float(found.detach())

    if stepped and made is not torch.optim.SparseAdam:
        loss()
        optimizer.step(loss) if made is torch.optim.LBFGS else optimizer.step()
        calls.clear()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients, state = [one.grad for one in model.parameters()], dict(optimizer.state)
    attributes, generator = dict(vars(optimizer)), torch.get_rng_state()
    refuse_masters(optimizer, named(model))
    assert not calls
    assert torch.equal(generator, torch.get_rng_state())
    assert all(one.grad is gradient for one, gradient in zip(model.parameters(), gradients, strict=True))
    assert optimizer.state.keys() == state.keys() and all(optimizer.state[one] is kept for one, kept in state.items())
    assert vars(optimizer) == attributes
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
