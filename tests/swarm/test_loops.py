"""Peers in the loops of other libraries, with the real libraries: the code of
diloco/docs/loops.md, and what it promises."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.peers import command

LOOPS = str(Path(__file__).with_name("loops_of_others.py"))

Found = dict[str, dict[str, Any]]


def phases(output: str) -> Found:
    """The lines of JSON that a peer has printed, by phase."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"phase"')]
    return {line["phase"]: line for line in lines}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two peers have reported that went through all libraries together."""
    directory = tmp_path_factory.mktemp("loops")
    work = "trainer trl accelerate lightning checkpoints"
    with command(LOOPS, f"a {directory} {work}", directory=directory) as a:
        with command(LOOPS, f"b {directory} {work}", directory=directory) as b:
            return [phases(one.done().stdout) for one in (a, b)]


@pytest.mark.parametrize(
    ("phase", "version", "steps", "tokens"),
    [
        ("trainer", 3, 12, 12 * 8 * 2 * 16),  # 8 samples of 16 tokens in each of two micro-batches
        ("trainer_resumed", 3, 12, 12 * 8 * 2 * 16),
        ("trl", 2, 8, 32 * (7 + 8)),  # without padding, with the end of each text
        ("accelerate", 3, 12, 12),
        ("accelerate_resumed", 6, 24, 24),
        ("lightning", 3, 12, 12 * 16),  # samples
        ("lightning_resumed", 4, 16, 16 * 16),
    ],
)
def test_two_peers_count_steps_of_the_optimizer_and_end_alike(
    peers: list[Found], phase: str, version: int, steps: int, tokens: int
) -> None:
    for one in peers:
        found = one[phase]
        assert (found["version"], found["steps"], found["tokens"]) == (version, steps, tokens)
        assert (found["applied"], found["discarded"]) == (2 * tokens, 0)
    here, there = (one[phase] for one in peers)
    assert here["model"] == there["model"] and here["peer"] != there["peer"]


@pytest.mark.parametrize("phase", ["trainer", "accelerate", "lightning"])
def test_who_goes_on_from_a_checkpoint_is_the_same_peer(peers: list[Found], phase: str) -> None:
    for one in peers:
        assert one[phase]["peer"] == one[f"{phase}_resumed"]["peer"]


def test_a_trainer_that_goes_on_from_its_middle_ends_as_if_nothing_had_happened(
    peers: list[Found],
) -> None:
    """Data, moments, outer momentum and learning rate are those of the run that was not
    interrupted."""
    for one in peers:
        assert one["trainer_resumed"]["model"] == one["trainer"]["model"]


def test_schedules_go_on_where_the_swarm_is(peers: list[Found]) -> None:
    for one in peers:
        first, second = one["accelerate"], one["accelerate_resumed"]
        assert second["clock"] == 24
        assert second["rates"] == first["rates"] == pytest.approx([1e-3])


def test_a_loop_of_ones_own_goes_on_from_its_checkpoint(peers: list[Found]) -> None:
    for one in peers:
        first, second = one["checkpoints 60"], one["checkpoints 100"]
        assert (first["version"], first["steps"], first["seen"]) == (3, 60, 60 * 16)
        assert (second["version"], second["steps"], second["seen"]) == (5, 100, 100 * 16)
        assert first["peer"] == second["peer"]
        # The schedule is a cosine of 60 steps there and back: the last step was the 99th.
        assert second["rate"] == pytest.approx(0.5e-2 * (1 + math.cos(math.pi * 99 / 60)))


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_one_peer(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --nproc-per-node=2 --standalone --tee=3"
    with command(launcher, LOOPS, f"ranks {tmp_path} ranks", directory=tmp_path) as started:
        started.done()
    lines = [re.sub(r"^\[\w+\]:", "", line) for line in started.stdout.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith('{"phase"')]
    for phase, version, steps, tokens in (
        ("trainer", 3, 12, 12 * 8 * 2 * 16 * 2),
        ("ranks", 3, 60, 60),
    ):
        one, other = (line for line in found if line["phase"] == phase)
        assert one["model"] == other["model"]
        assert {one["size"], other["size"]} == {2}
        assert (one["version"], one["steps"], one["tokens"]) == (version, steps, tokens)
        assert (one["peer"] is None) != (other["peer"] is None), "rank 0 alone is in the swarm"
