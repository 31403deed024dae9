"""A run goes on where it stopped: after SIGKILL, after damage to its newest checkpoint, and not as
another run."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.rundir.files import exclusive
from diloco.train.data_parallel import DataParallel
from tests.support.command_line import Typed, typed
from tests.support.peers import SMOKE, command, events, eventually, json_lines, train_here
from tests.support.slow import slow

__all__ = ["typed"]
# A constant learning rate, so that a longer budget is the same training; each boundary gets a
# checkpoint, however slow the disk is. `diloco local` cuts the data by itself.
SEVERAL = (
    *SMOKE,
    "budget.outer_steps=6",
    "inner.schedule=constant",
    "train.threads=1",
    "checkpoint.keep=3",
    "checkpoint.background=false",
)
# One peer, whose order of the data does not depend on its identity.
ALONE = (*SEVERAL, "data.shard=0", "data.shards=1")
ENDS = ("tokens", "eval", "outer_steps")


def kept(summary: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have in common with one that was never stopped."""
    [peer] = summary["peers"]
    ends = {key: summary[key] for key in ENDS}
    # each run has its own identity
    record = [{**row, "peer_id": ""} for row in summary.get("contributions", ())]
    return {**ends, "steps": peer["steps"], "anchor": peer["anchor_digest"], "record": record}


def curve(run_dir: Path) -> dict[tuple[int, str], float]:
    """Losses by inner step; of a step that was taken twice, the later one."""
    lines = json_lines(run_dir / "metrics.jsonl")
    kinds = ("loss", "eval_loss")
    return {(one["inner_step"], kind): one[kind] for one in lines for kind in kinds if kind in one}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return run_dir, train_here(run_dir, *ALONE)


def test_a_peer_that_was_killed_at_a_boundary_ends_bit_equal_to_one_that_was_not(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    slowly = ("-m diloco.train", *ALONE, f"run.dir={run_dir} train.step_delay_s=0.02")
    with command(*slowly, directory=tmp_path) as started:
        started.reaches(3, run_dir)
        os.kill(started.process.pid, signal.SIGKILL)
        eventually(lambda: not started.family(), "its daemon to end")
    assert not (run_dir / "summary.json").exists()
    resumed = train_here(run_dir, *ALONE)
    [event] = events(run_dir, "resume")
    # that of version 3 may not have been whole yet
    assert event["version"] in (1, 2, 3) and event["skipped"] == []
    assert kept(resumed) == kept(uninterrupted[1])
    assert curve(run_dir) == curve(uninterrupted[0])
    file = run_dir / "checkpoints" / "peer" / "step-00000006" / "state.json"
    compute_s = json.loads(file.read_text())["state"]["seconds"]["compute"]
    # it slept in its first session
    assert resumed["peers"][0]["seconds"]["compute"] >= compute_s > 4 * 0.02


@pytest.mark.parametrize("stopped_at", [7, slow(10)])
def test_data_parallel_goes_on_from_the_middle_of_a_cycle(
    stopped_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "outer=data_parallel outer.sync_every=3 budget.outer_steps=5 checkpoint.every=2"
    whole, count = train_here(tmp_path / "whole", *SMOKE[:1], settings), DataParallel.count

    def counted(sync: DataParallel, tokens: int) -> None:
        count(sync, tokens)
        if sync.steps + 1 == stopped_at:
            sync.interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(DataParallel, "count", counted)
        halves = train_here(tmp_path / "halves", *SMOKE[:1], settings)
        assert halves["peers"][0]["steps"] == stopped_at
    assert kept(train_here(tmp_path / "halves", *SMOKE[:1], settings)) == kept(whole)


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    for copy in (sound, damaged):
        shutil.copytree(uninterrupted[0], copy)
    anchors = damaged / "checkpoints" / "peer" / "step-00000006" / "anchor.safetensors"
    content = bytearray(anchors.read_bytes())
    content[-100] ^= 1
    anchors.write_bytes(content)
    longer = "budget.outer_steps=8 outer.rounds=6"  # both make step 5 by one plan
    first, second = (train_here(one, *ALONE, longer) for one in (sound, damaged))
    assert first["outer_steps"] == second["outer_steps"] == 8
    assert [event["version"] for event in events(sound, "resume")] == [6]
    [event] = events(damaged, "resume")
    said = "step-00000006: anchor.safetensors is corrupt (its sha256 differs); using step-00000005"
    assert event["version"] == 5 and event["skipped"] == [f"{said} instead"]
    assert kept(first) == kept(second)


def contents(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("name", "settings"), [("train", ALONE), ("local", SEVERAL)])
def test_a_run_directory_of_another_run_or_process_is_refused_and_left_alone(
    name: str,
    settings: tuple[str, ...],
    uninterrupted: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    typed: Typed,
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    before = contents(run_dir)
    place, other = f"run.dir={run_dir}", ("outer.lr=0.4", "model.config.num_hidden_layers=1")
    typed(name, *settings, place, *other, code=2)
    assert typed.err.splitlines()[-1] == (
        f"diloco: error: {place} holds a run with other settings (model.config.num_hidden_layers: 1"
        " here, 2 there; outer.lr: 0.4 here, 0.75 there); use the same settings, or another"
        " run.dir"
    )
    held = run_dir if name == "local" else run_dir / "checkpoints" / "peer"
    with exclusive(held):
        typed(name, *settings, place, code=2)
    assert typed.err.splitlines()[-1] == (
        f"diloco: error: run.dir: {held} is in use by another process; end that process, or choose"
        " another run.dir"
    )
    assert contents(run_dir) == before


def states(checkpoints: Path) -> str:
    """What the checkpoints say that are there; the run goes on, and old ones go."""
    text = ""
    for state in checkpoints.glob("step-*/state.json"):
        with suppress(FileNotFoundError):
            text += state.read_text()
    return text


def test_who_founded_a_run_joins_those_that_went_on_when_it_comes_back(tmp_path: Path) -> None:
    here, there = tmp_path / "founder", tmp_path / "other"
    slowly = f"run.dir={here} train.step_delay_s=0.1 swarm.min_peers=2"
    train = ("-m diloco train", *ALONE, slowly)
    host = f"-m diloco host @{here / 'address'} run.dir={there} swarm.heartbeat_s=0.2"
    with command(*train, directory=tmp_path) as founder:
        founder.sees((here / "address").exists, "the founder's address")
        with command(host, directory=tmp_path) as other:
            met = lambda: "/p2p/" in states(here / "checkpoints" / "peer")  # noqa: E731
            founder.sees(met, "an address of the other in a checkpoint")
            founder.kill()
            with command(*train, directory=tmp_path) as again:
                again.done()
            other.interrupt()
    lines = [one for one in json_lines(here / "metrics.jsonl") if one["version"] == 6]
    assert [one["live"] for one in lines if "live" in one] == [2], "it went on alone"
