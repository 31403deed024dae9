"""A run goes on where it stopped: after SIGKILL, after damage to its newest checkpoint, and not as
another run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import main
from diloco.config import compose
from diloco.train.data_parallel import DataParallel
from diloco.train.run import run
from tests.support.peers import SMOKE, command, events, eventually, json_lines
from tests.support.slow import slow

# One peer, whose order of the data does not depend on its identity; a constant learning rate, so
# that a longer budget is the same training.
ALONE = (
    *SMOKE,
    *("budget.outer_steps=6", "inner.schedule=constant"),
    *("data.shard=0", "data.shards=1", "train.threads=1", "checkpoint.keep=3"),
    "checkpoint.background=false",  # each boundary gets a checkpoint, however slow the disk is
)

# diloco local cuts the data by itself
SEVERAL = [one for one in ALONE if not one.startswith("data.")]


def train(run_dir: Path, *overrides: str, settings: Sequence[str] = ALONE) -> dict[str, Any]:
    """`diloco train` in this process; its summary as its supervisor hears it."""
    content = run(
        compose([*settings, f"run.dir={run_dir}", *overrides]), lambda message: None
    ).to_json()
    return {**content["peers"][0], **content}


def kept(summary: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have in common with one that was never stopped."""
    return {
        key: summary[key] for key in ("steps", "tokens", "anchor_digest", "eval", "outer_steps")
    } | {
        # each run has its own identity
        "contributions": [{**row, "peer_id": ""} for row in summary["contributions"]]
    }


def curve(run_dir: Path) -> dict[tuple[int, str], float]:
    """Losses by inner step; of a step that was taken twice, the later one."""
    lines = json_lines(run_dir / "metrics.jsonl")
    return {
        (line["inner_step"], kind): line[kind]
        for line in lines
        for kind in ("loss", "eval_loss")
        if kind in line
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    return run_dir, train(run_dir)


def test_a_peer_that_was_killed_at_a_boundary_ends_bit_equal_to_one_that_was_not(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    overrides = [*ALONE, f"run.dir={run_dir}", "run.report=true", "train.step_delay_s=0.02"]
    with command(
        "-m", "diloco.train", *overrides, directory=tmp_path, stdin=subprocess.PIPE
    ) as started:
        started.wait_for_version(3)
        os.kill(started.process.pid, signal.SIGKILL)
        eventually(lambda: not started.family(), "its daemon to end")
    assert not (run_dir / "summary.json").exists()
    resumed = train(run_dir)
    [event] = events(run_dir, "resume")
    assert event["version"] in (1, 2, 3) and event["skipped"] == [], (
        "that of version 3 may not have been whole yet"
    )
    assert kept(resumed) == kept(uninterrupted[1])
    assert curve(run_dir) == curve(uninterrupted[0])
    state = json.loads(
        (run_dir / "checkpoints" / "peer" / "step-00000006" / "state.json").read_text()
    )["state"]
    assert resumed["seconds"]["compute"] >= state["seconds"]["compute"] > 4 * 0.02, (
        "it slept in its first session"
    )


@pytest.mark.parametrize("stopped_at", [7, slow(10)])
def test_data_parallel_goes_on_from_the_middle_of_a_cycle(
    stopped_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        *SMOKE[:1],
        "outer=data_parallel",
        "outer.sync_every=3",
        "budget.outer_steps=5",
        "checkpoint.every=2",
    )

    def ends(name: str) -> dict[str, Any]:
        summary = train(tmp_path / name, settings=settings)
        return {
            key: summary[key] for key in ("steps", "tokens", "anchor_digest", "eval", "outer_steps")
        }

    whole, count = ends("whole"), DataParallel.count

    def counted(sync: DataParallel, tokens: int) -> None:
        count(sync, tokens)
        if sync.steps + 1 == stopped_at:
            sync.interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(DataParallel, "count", counted)
        assert ends("halves")["steps"] == stopped_at
    assert ends("halves") == whole


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
    longer = ("budget.outer_steps=8", "outer.rounds=6")  # both make step 5 by one plan
    first, second = train(sound, *longer), train(damaged, *longer)
    assert first["outer_steps"] == second["outer_steps"] == 8
    assert [event["version"] for event in events(sound, "resume")] == [6]
    [event] = events(damaged, "resume")
    assert event["version"] == 5
    assert event["skipped"] == [
        "step-00000006: anchor.safetensors is corrupt (its sha256 differs); using step-00000005"
        " instead"
    ]
    assert kept(first) == kept(second)


@pytest.mark.parametrize("name", ["train", "local"])
def test_another_run_in_its_directory_is_refused_naming_the_settings(
    name: str,
    uninterrupted: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run_dir)
    before = contents(run_dir)
    settings = ALONE if name == "train" else SEVERAL
    overrides = [
        *settings,
        f"run.dir={run_dir}",
        "outer.lr=0.4",
        "model.config.num_hidden_layers=1",
    ]
    assert (
        refusal(capsys, name, *overrides)
        == f"run.dir={run_dir} holds a run with other settings (model.config.num_hidden_layers: 1"
        " here, 2 there; outer.lr: 0.4 here, 0.75 there); use the same settings, or another"
        " run.dir"
    )
    assert contents(run_dir) == before


def test_two_processes_do_not_share_a_run_directory(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diloco.rundir.files import exclusive

    shutil.copytree(uninterrupted[0], tmp_path / "run")
    before = contents(tmp_path / "run")
    for name, settings, held in (
        ("train", ALONE, tmp_path / "run" / "checkpoints" / "peer"),
        ("local", SEVERAL, tmp_path / "run"),
    ):
        with exclusive(held):
            text = refusal(capsys, name, *settings, f"run.dir={tmp_path / 'run'}")
        assert (
            text
            == f"run.dir: {held} is in use by another process; end that process, or choose another"
            " run.dir"
        )
    assert contents(tmp_path / "run") == before


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    [line] = [line for line in shown.err.splitlines() if not line.startswith("diloco: warning: ")]
    assert line.startswith("diloco: error: ")
    return line.removeprefix("diloco: error: ")


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def states(checkpoints: Path) -> str:
    """What the checkpoints say that are there; the run goes on, and old ones go."""
    text = ""
    for state in checkpoints.glob("step-*/state.json"):
        with suppress(FileNotFoundError):
            text += state.read_text()
    return text


def test_who_founded_a_run_joins_those_that_went_on_when_it_comes_back(tmp_path: Path) -> None:
    here, there = tmp_path / "founder", tmp_path / "other"
    train = ("train", *ALONE, f"run.dir={here}", "train.step_delay_s=0.1", "swarm.min_peers=2")
    host = (
        "-m",
        "diloco",
        "host",
        f"@{here / 'address'}",
        f"run.dir={there}",
        "swarm.heartbeat_s=0.2",
    )
    with command("-m", "diloco", *train, directory=tmp_path) as founder:
        eventually((here / "address").exists, "the founder's address")
        with command(*host, directory=tmp_path) as other:
            checkpoints = here / "checkpoints" / "peer"
            eventually(
                lambda: "/p2p/" in states(checkpoints), "an address of the other in a checkpoint"
            )
            for process in founder.family():
                os.kill(process, signal.SIGKILL)
            founder.process.wait()
            with command("-m", "diloco", *train, directory=tmp_path) as again:
                again.done()
            other.process.send_signal(signal.SIGINT)
            other.done()
    live = [
        line["live"]
        for line in json_lines(here / "metrics.jsonl")
        if line["version"] == 6 and "live" in line
    ]
    assert live == [2], "it went on alone"
