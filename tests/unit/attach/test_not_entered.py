"""Steps between `attach` and the moment when the swarm is joined would reach nobody."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.swarm import Swarm
from diloco.errors import ConfigError


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, way: str = "") -> None:
    loss = model(torch.ones(2, 4)).sum()
    if way == "scaled":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    else:
        loss.backward()
        torch.compile(optimizer.step, backend="eager")() if way == "compiled" else optimizer.step()


def swarm(run_id: str = "not-entered") -> Swarm:
    return Swarm(run_id=run_id, sync_every=2, quiet=True)


@pytest.mark.parametrize("way", ["", "scaled", "compiled", "dropped", "opened", "with", "second"])
def test_the_first_step_is_an_error_that_names_the_remedy(way: str) -> None:
    model, optimizer = parts()
    attached: Any = (model, optimizer)
    if way == "second":
        attached = tuple(map(list, zip(parts(), attached, strict=True)))
    peer = swarm()
    kept = [peer.attach(*attached)]
    if way == "dropped":
        kept.clear()
        gc.collect()
    if way in ("opened", "with"):
        peer = peer.open() if way == "opened" else peer.__enter__()
    with pytest.raises(
        ConfigError, match=r"train inside `with swarm.attach\(...\):`, or call open"
    ):
        step(model, optimizer, way)
    peer.close()
    step(model, optimizer)  # it is nobody's any more


def test_a_later_attach_takes_the_place_of_one_that_was_never_entered() -> None:
    """A cell of a notebook is run again, with another name of the run."""
    model, optimizer = parts()
    first, second = swarm(), swarm("another")
    first.attach(model, optimizer)
    second.attach(model, optimizer)
    with pytest.raises(ConfigError):
        step(model, optimizer)
    second.close()
    step(model, optimizer)


def test_a_swarm_says_that_it_is_not_joined() -> None:
    peer = swarm()
    assert repr(peer) == "Swarm(run_id='not-entered', nothing attached, not joined)"
    peer.attach(*parts())
    assert repr(peer) == "Swarm(run_id='not-entered', a model attached, not joined)"
    peer.close()
