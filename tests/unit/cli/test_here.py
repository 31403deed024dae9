"""The runs of this machine: their states, as processes leave them, and what may be paused."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco.cli import runs as cli_runs
from diloco.cli import status as cli_status
from diloco.cli.main import main
from diloco.errors import ConfigError, SwarmError
from diloco.rundir.here import read_run
from diloco.rundir.presence import Presence, Record, data_home, pause_file, read_records
from diloco.rundir.reporting import Ready, Status

ID = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
PLACE, SEED = f"/ip4/127.0.0.1/tcp/4100/p2p/{ID}", f"/ip4/203.0.113.7/tcp/4100/p2p/{ID}"
HERE = psutil.Process()
MINE = Record("mine", HERE.pid, HERE.create_time(), platform.node(), since=1000.0)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def make(where: Path, *records: Record, **summary: Any) -> Path:
    """A run directory with these records, and perhaps a summary."""
    (where / "presence").mkdir(parents=True)
    (where / "config.yaml").touch()
    for number, record in enumerate(records):
        (where / "presence" / f"p{number}.json").write_text(json.dumps(asdict(record)))
    if summary:
        (where / "summary.json").write_text(json.dumps(summary))
    return where


def joined(name: str = "theirs", number: int = 0) -> Path:
    return data_home() / f"peer-{number}" / "runs" / name


# -- states -----------------------------------------------------------------------------------------------------------

GONE = replace(MINE, started_at=MINE.started_at - 100)  # the process id went to another process


@pytest.mark.parametrize(
    ("records", "state", "lives"),
    [
        ([replace(MINE, state="training")], "training", True),
        ([replace(MINE, state="paused", why="on battery (9 %)")], "paused: on battery (9 %)", True),
        ([replace(MINE, state="paused", why="x"), replace(MINE, state="training")], "training", True),
        ([replace(GONE, state="training")], "gone: its process ended without a word while training", False),
        ([replace(GONE, state="training", process=2**31 - 2)], "gone: its process ended without a", False),
        ([replace(GONE, state="paused"), replace(MINE, state="paused", why="y")], "paused: y", True),
        ([replace(MINE, state="done", exit=0)], "done", False),
        (
            [replace(MINE, state="failed", why="no disk", exit=2), replace(MINE, state="left", exit=0)],
            "failed: no",
            False,
        ),
        ([replace(MINE, state="training", machine="elsewhere")], "elsewhere: on elsewhere", False),
    ],
)
def test_a_run_is_what_its_processes_are(tmp_path: Path, records: list[Record], state: str, lives: bool) -> None:
    run = read_run(make(tmp_path / "run", *records))
    assert cli_runs._state_of(run).startswith(state)
    assert (run.lives, run.run_id, run.since) == (lives, "mine", 1000.0)


@pytest.mark.parametrize(("summary", "state"), [({}, "gone"), ({"exit": 0}, "done"), ({"exit": 4}, "failed")])
def test_a_run_without_records_ended_as_its_summary_says(tmp_path: Path, summary: dict[str, Any], state: str) -> None:
    (where := make(tmp_path / "old", outer_steps=7, **summary) if summary else make(tmp_path / "old"))
    (where / "manifest.json").write_text('{"run": {"id": "before"}}')
    run = read_run(where)
    assert (run.state, run.run_id, run.version, run.lives) == (state, "before", 7 if summary else None, False)
    (where / "manifest.json").write_text('{"run": 5}')
    assert read_run(where).run_id == "old"


@pytest.mark.parametrize("content", ["", "[]", "\xff", '{"process": "x", "since": null, "addresses": 3, "exit": "0"}'])
def test_a_record_that_is_damaged_is_no_failure(tmp_path: Path, content: str) -> None:
    where = make(tmp_path / "run")
    (where / "presence" / "p.json").write_text(content, encoding="latin-1")
    assert not read_run(where).lives


def test_the_newest_version_and_loss_are_at_the_end_of_the_metrics(tmp_path: Path) -> None:
    where = make(tmp_path / "run")
    lines = [json.dumps({"version": version, "loss": 9.0 - version / 1000}) for version in range(4000)]
    (where / "metrics.jsonl").write_text("\n".join([*lines, '{"version": 4000, "eval_loss": 1.0}', "[1]", '{"ver']))
    run = read_run(where)
    assert (run.version, run.loss) == (4000, pytest.approx(9.0 - 3.999))


# -- what a peer writes -----------------------------------------------------------------------------------------------


def test_a_peer_writes_what_it_does_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> Record:
        return read_records(tmp_path)["me"]

    presence = Presence(tmp_path, "me", "mine", seeds=[SEED, "@runs/mine/address"])
    with presence:
        assert not list(tmp_path.iterdir()), "a setting may still be wrong"
        presence.hear(Status(state="waiting"))
        assert now().lives and now().state == "waiting" and now().addresses == (SEED,)
        presence.hear(Ready(address=PLACE))
        presence.hear(Status(state="training"))
        assert (now().state, now().addresses) == ("training", (PLACE, SEED))
        file = tmp_path / "presence" / "me.json"
        written_at = file.stat().st_ino
        for state in ("training", "evaluating", "training"):
            presence.hear(Status(state=state))
        assert file.stat().st_ino == written_at, "nothing has changed"
        presence.hear(Status(state="paused", why="on battery"))
        assert (now().state, now().why) == ("paused", "on battery")
        presence.hear(Status(state="training"))
        assert (now().state, now().why) == ("training", "")
        presence.hear(Status(state="done"))
    assert (now().state, now().exit, now().lives) == ("done", 0, False)


def test_the_invitation_to_a_closed_run_is_named_and_never_written(tmp_path: Path) -> None:
    for name, token in (("file", "@link"), ("text", "A" * 40)):
        with Presence(joined() / name, name, "theirs", seeds=[SEED], token=token) as presence:
            (joined() / name).mkdir(parents=True)
            (joined() / name / "config.yaml").touch()
            presence.hear(Status(state="training"))
            assert "AAAA" not in (joined() / name / "presence" / f"{name}.json").read_text()
            assert read_run(joined() / name).token == (f"@{tmp_path}/link" if name == "file" else None)


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(SwarmError("nobody there"), "failed", 3), (ValueError("a bug"), "failed", 1), (KeyboardInterrupt(), "left", 0)],
)
def test_the_last_word_of_a_peer_is_its_error(tmp_path: Path, error: BaseException, state: str, code: int) -> None:
    with pytest.raises(type(error)), Presence(tmp_path, "me", "mine"):
        raise error
    assert not read_records(tmp_path), "it had not begun"
    with pytest.raises(type(error)), Presence(tmp_path, "me", "mine") as presence:
        presence.hear(Status(state="waiting"))
        raise error
    record = read_records(tmp_path)["me"]
    assert (record.state, record.exit) == (state, code)
    assert record.why == {3: "nobody there", 1: "ValueError", 0: ""}[code]


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "presence").touch()
    with Presence(tmp_path, "me", "mine") as presence:
        presence.hear(Status(state="training"))
    assert "diloco status will not know of this peer" in caplog.text


# -- what is listed ---------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_runs_of_this_folder_and_joined_ones_are_listed_living_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert shown(capsys, "status").startswith("no runs in ./runs or ")
    assert shown(capsys, "status", "--json") == '{\n  "runs": []\n}\n'
    make(tmp_path / "runs/old", replace(MINE, run_id="old", state="done", exit=0, since=5.0), exit=0, outer_steps=3)
    make(tmp_path / "runs/failed", replace(MINE, state="failed", why="no \x1b room", exit=2, since=9.0))
    make(joined(), replace(MINE, run_id="theirs", state="paused", why="diloco pause", since=time.time() - 65))
    (tmp_path / "runs" / "notes").mkdir()
    lines = shown(capsys, "status").splitlines()
    assert lines[0].strip() == "runs of this machine"
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["theirs", "mine", "old"]
    assert rows[0][1:5] == ["paused:", "diloco", "pause", "1:05"] and rows[0][-1] == str(joined())
    assert rows[1][1:3] == ["failed:", "no"] and "\x1b" not in "".join(lines) and rows[2][1] == "done"
    found = json.loads(shown(capsys, "status", "--json"))["runs"]
    assert found[0] == {
        "run_id": "theirs", "where": str(joined()), "state": "paused", "why": "diloco pause",
        "since": pytest.approx(time.time() - 65, abs=30), "version": None, "loss": None, "exit": None,
        "address": None, "peers": ["p0"],
    }  # fmt: skip
    assert (found[2]["version"], found[2]["exit"]) == (3, 0)


def test_without_an_address_the_one_living_run_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no run lives in"):
        cli_runs.only_address()
    make(joined(), replace(MINE, run_id="theirs", state="training", addresses=(SEED,)))
    (joined() / "address").write_text(PLACE + "\n")
    make(tmp_path / "runs/old", replace(MINE, run_id="old", exit=0, state="done", addresses=(SEED,)))
    assert cli_runs.only_address().peers == (PLACE, SEED), "its own first"
    make(joined(number=1), replace(MINE, run_id="theirs", state="training", addresses=(SEED,)))
    assert cli_runs.only_address().peers[-1] == SEED, "two peers of one run"
    make(tmp_path / "runs/mine", replace(MINE, state="training", addresses=(PLACE,)))
    with pytest.raises(ConfigError, match="3 runs live here"):
        cli_runs.only_address()
    for command in (["status", "--watch"], ["dashboard", "--port=0"]):
        text = shown(capsys, *command, code=2)
        assert "3 runs live here: " in text and ", mine in runs/mine" in text and "give the ADDRESS" in text


def test_a_swarm_that_does_not_answer_is_a_line_below_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(place: Any, *_: object) -> None:
        raise SwarmError(f"{place.peers[0]} cannot be reached")

    make(joined(), replace(MINE, run_id="theirs", state="paused", addresses=(SEED,)))
    monkeypatch.setattr(cli_status, "_status", nobody)
    monkeypatch.setattr(cli_status, "light_hivemind", lambda: None)
    lines = shown(capsys, "status").splitlines()
    assert lines[0].strip() == "runs of this machine" and lines[-1] == f"{SEED} cannot be reached"
    assert f"theirs: {SEED}" in lines


# -- what may be paused -----------------------------------------------------------------------------------------------


def test_the_living_run_is_paused_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = make(joined(), replace(MINE, run_id="theirs", state="training"))
    other = make(joined(number=1), replace(MINE, run_id="theirs", state="training"))  # of another accelerator
    make(tmp_path / "runs/host", replace(MINE, run_id="theirs", state="holding", unpausable="it is a host"))
    assert shown(capsys, "pause").count("theirs pauses") == 2
    assert pause_file(where).exists() and pause_file(other).exists()
    assert shown(capsys, "resume").count("theirs goes on") == 2
    assert not pause_file(where).exists() and not pause_file(other).exists()


def lists(*records: Record) -> Callable[[], Path]:
    return lambda: make(Path("runs/mine"), *records)


@pytest.mark.parametrize(
    ("typed", "found", "why"),
    [
        ("pause runs/nix", list, "RUN_DIR=runs/nix holds no run; diloco status lists those of this machine"),
        ("pause runs/mine", lists(replace(MINE, state="done", exit=0)), "no peer of it runs on this machine (done)"),
        ("pause runs/mine", lists(replace(GONE, state="training")), "no peer of it runs on this machine (gone: its"),
        ("pause", list, "no run lives in ./runs or "),
        ("pause runs/mine", lists(replace(MINE, unpausable="it is a host")), "cannot pause: it is a host; end it with"),
        (
            "pause",
            lists(replace(MINE, unpausable="it is a host")),
            "on this machine none can pause: runs/mine",
        ),
        ("resume runs/mine", lists(replace(MINE, state="training")), "was not paused by diloco pause; its peer is tr"),
        (
            "resume runs/mine",
            lists(replace(MINE, state="paused", why="on battery (9 %)")),
            "was not paused by diloco pause; it pauses by its own settings, paused: on battery (9 %)",
        ),
        (
            "resume",
            lists(replace(MINE, state="training")),
            "on this machine none was paused by diloco pause: runs",
        ),
    ],
)
def test_what_cannot_be_paused_or_resumed_is_one_line(
    typed: str, found: Callable[[], object], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found()
    text = shown(capsys, *typed.split(), code=2)
    assert text.startswith("diloco: error: ") and why in text and text.count("\n") == 1
    assert not list(Path().rglob("pause"))


def test_two_different_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        make(tmp_path / "runs" / name, replace(MINE, run_id=name, state="training"))
    assert "2 runs live on this machine; name the RUN_DIR of one: runs/one, runs/two" in shown(capsys, "pause", code=2)
    pause_file(tmp_path / "runs/one").touch()
    assert "pauses already; diloco resume runs/one has it go on" in shown(capsys, "pause", "runs/one", code=2)
    assert "runs/two: two pauses" in shown(capsys, "pause"), "the only one that does not yet"


def test_a_zombie_does_not_live(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays in the table
        record = replace(MINE, process=child, started_at=psutil.Process(child).create_time(), state="training")
        assert not record.lives
    finally:
        os.waitpid(child, 0)
