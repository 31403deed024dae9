"""A training loop of one's own goes on from its checkpoints as if nothing had happened, in virtual
time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.swarm import Swarm
from diloco.errors import CheckpointError, ConfigError
from tests.support.loops import Direct, LastFlight, Loop, train

EXACT = {"sync_every": 4, "codec_up": "fp32", "codec_down": "fp32", "lr": 0.7, "momentum": 0.9}


def peers(directory: Path, rounds: int, **outer: Any) -> dict[str, Loop]:
    """Two peers until they have made so many outer steps, from wherever their checkpoints are."""

    def work(loop: Loop) -> None:
        drawn = list(loop.swarm.state.get("drawn", []))
        while loop.sync.version < rounds:
            loop.step()
            drawn.append(float(torch.rand(())))
            if loop.sync.exchanged:
                loop.swarm.save(drawn=drawn, name=loop.name)
        loop.events.append(("drawn", {"all": drawn}))

    def attach(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"schedulers": [scheduler], "checkpoints": directory / name}

    torch.manual_seed(0)
    return train("ab", work, attach=attach, **{**EXACT, **outer})


DELAYED = {"optimizer": "delayed_nesterov", "quorum": 2, "delay": 2}


@pytest.mark.parametrize("outer", [{}, DELAYED], ids=["nesterov", "delayed"])
def test_a_run_that_stopped_ends_where_an_uninterrupted_one_ends(
    outer: dict[str, Any], tmp_path: Path
) -> None:
    peers(tmp_path / "stopped", 2, **outer)
    stopped, whole = peers(tmp_path / "stopped", 4, **outer), peers(tmp_path / "whole", 4, **outer)
    assert len({loop.sync.anchor_digest() for loop in (*stopped.values(), *whole.values())}) == 1
    for name in "ab":
        here, there = stopped[name], whole[name]
        for one in (here, there):
            assert (one.sync.steps, one.sync.tokens) == (16, 16)
        assert here._optimizer.param_groups[0]["lr"] == there._optimizer.param_groups[0]["lr"]
        [drawn] = here.told("drawn")
        assert len(drawn["all"]) == 16, "the loop has its own state again"


def alone(directory: Path, steps: int, saves: bool = True) -> tuple[Swarm, float]:
    """A peer in virtual time that takes some steps, and what it would draw next."""
    drawn: list[float] = []

    def work(loop: Loop) -> None:
        loop.step(steps)
        if saves:
            loop.swarm.save()
        drawn.append(float(torch.rand(())))

    peer = train("a", work, attach=lambda name, optimizer: {"checkpoints": directory}, **EXACT)["a"]
    return peer.swarm, drawn[0]


def test_a_checkpoint_in_mid_round_goes_on_at_the_last_exchange(tmp_path: Path) -> None:
    _, then = alone(tmp_path, 6)
    again, now = alone(tmp_path, 0, saves=False)
    assert again.attachment is not None
    assert (again.steps, again.attachment.steps, again.attachment.tokens) == (4, 6, 6)
    assert again.attachment.discarded_tokens == 2 and now == then


def attached(
    directory: Path, model: nn.Module, optimizer: Any = torch.optim.SGD, **settings: Any
) -> Swarm:
    swarm = Swarm(**{"run_id": "run", "runtime": Direct(LastFlight()), **EXACT, **settings})
    swarm.attach(model, optimizer(model.parameters(), lr=0.1), checkpoints=directory)
    return swarm


def test_checkpoints_of_something_else_are_refused(tmp_path: Path) -> None:
    alone(tmp_path, 4)
    holds = "^checkpoints=.* holds"
    other = "a run with other settings .outer.sync_every is 4 there, 5 here"
    with pytest.raises(ConfigError, match=f"{holds} {other}"):
        attached(tmp_path, nn.Linear(4, 1), sync_every=5)
    sizes = r"weight is \[1, 4\] there, and \[1, 5\] here"
    with pytest.raises(ConfigError, match=f"{holds} another model .{sizes}.; build the model"):
        attached(tmp_path, nn.Linear(5, 1))
    state = "its checkpoint holds the state of SGD for 5 parameters"
    with pytest.raises(CheckpointError, match=f"^checkpoints directory: {state}"):
        attached(tmp_path, nn.Linear(4, 1), torch.optim.AdamW)


def test_two_loops_in_one_directory_are_refused(tmp_path: Path) -> None:
    in_use = "^checkpoints directory: .* is in use by another process; end that"
    with attached(tmp_path, nn.Linear(4, 1)), pytest.raises(ConfigError, match=in_use):
        attached(tmp_path, nn.Linear(4, 1))
    attached(tmp_path, nn.Linear(4, 1))


def test_saving_without_a_place_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^Swarm.save: no place for checkpoints; name a directory with"
    ):
        Swarm(run_id="run", sync_every=4).save()
