"""Work units on their way: no sequence is in the model twice, and those of the dead are handed out again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.protocol.ledger import count, intersection, union
from tests.support.peers import SMOKE, command, eventually, json_lines


def starting(ranks: int) -> tuple[str, ...]:
    """The command of a peer that is one process, or an island of several."""
    if ranks == 1:
        return ("-m", "diloco", "train")
    return (
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--standalone",
        "-m",
        "diloco.train",
    )


def train_two(directory: Path, outer_steps: int, ranks: Sequence[int]) -> None:
    """Two peers of one run, each of so many processes and with a directory of its own, to that outer step."""
    both = (*SMOKE, f"budget.outer_steps={outer_steps}", "swarm.min_peers=2")
    both = (*both, "checkpoint.every=1", "train.step_delay_s=0.05", "inner.schedule=constant")
    (directory / "a" / "address").unlink(missing_ok=True)
    with command(*starting(ranks[0]), *both, "run.dir=a", "run.name=a", directory=directory) as first:
        eventually((directory / "a" / "address").exists, "an address")
        joining = ("run.dir=b", "run.name=b", "swarm.initial_peers=@a/address")
        with command(*starting(ranks[1]), *both, *joining, directory=directory) as second:
            first.done()
            second.done()


@pytest.mark.slow
def test_two_real_peers_learn_from_different_units_and_so_they_do_after_a_restart(tmp_path: Path) -> None:
    for outer_steps, sizes in ((4, (2, 1)), (8, (1, 2))):  # an island and a single process, each once as the other
        train_two(tmp_path, outer_steps, sizes)
        events = [event for peer in "ab" for event in json_lines(tmp_path / peer / "events.jsonl")]
        told = {peer: [e["units"] for e in events if e["kind"] == "units" and e["peer"] == peer] for peer in "ab"}
        units = [unit for contributions in told.values() for contributed in contributions for unit in contributed]
        assert all(len(contributions) >= outer_steps - 2 for contributions in told.values())
        assert count(units) == count(union(units)) >= 2 * (outer_steps - 2) * 4 * 2
        assert not [event for event in events if event["kind"] == "units_twice"]
        for peer in "ab":
            [file] = tmp_path.glob(f"{peer}/checkpoints/*/step-*{outer_steps}/state.json")
            content = json.loads(file.read_text())
            cursor, open_ = content.get("state", content)["units"]
            assert union(open_, units) == [(0, cursor)] and not intersection(open_, units)
