"""The runs of this machine: their states, as processes leave them, and what may be paused."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco.cli import runs as cli_runs
from diloco.cli import status as cli_status
from diloco.errors import ConfigError, SwarmError
from diloco.rundir.here import read_run
from diloco.rundir.presence import Presence, Record, data_home, pause_file, read_records
from diloco.rundir.reporting import Ready, Status
from tests.support.command_line import Typed

ID = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
PLACE, SEED = f"/ip4/127.0.0.1/tcp/4100/p2p/{ID}", f"/ip4/203.0.113.7/tcp/4100/p2p/{ID}"
HERE = psutil.Process()
MINE = Record("mine", HERE.pid, HERE.create_time(), platform.node(), since=1000.0, state="training")


@pytest.fixture(autouse=True)
def place(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def joined(number: int = 0) -> Path:
    return data_home() / f"peer-{number}" / "runs" / "theirs"


GONE = replace(MINE, started_at=MINE.started_at - 100)  # the process id went to another process
DONE, HOST = replace(MINE, state="done", exit=0), replace(MINE, unpausable="it is a host")
THEIRS = replace(MINE, run_id="theirs", addresses=(SEED,))


@pytest.mark.parametrize(
    ("records", "state", "lives"),
    [
        ([MINE], "training", True),
        ([replace(MINE, state="paused", why="on battery (9 %)")], "paused: on battery (9 %)", True),
        ([replace(MINE, state="paused", why="x"), MINE], "training", True),
        ([GONE], "gone: its process ended without a word while training", False),
        ([replace(GONE, process=2**31 - 2)], "gone: its process ended without a", False),
        ([replace(GONE, state="paused"), replace(MINE, state="paused", why="y")], "paused: y", True),
        ([DONE], "done", False),
        ([replace(MINE, state="failed", why="no disk", exit=2), replace(DONE, state="left")], "failed: no", False),
        ([replace(MINE, machine="elsewhere")], "elsewhere: on elsewhere", False),
    ],
)
def test_a_run_is_what_its_processes_are(tmp_path: Path, records: list[Record], state: str, lives: bool) -> None:
    run = read_run(make(tmp_path / "run", *records))
    assert cli_runs._state_of(run).startswith(state)
    assert (run.lives, run.run_id, run.since) == (lives, "mine", 1000.0)


@pytest.mark.parametrize(("summary", "state"), [({}, "gone"), ({"exit": 0}, "done"), ({"exit": 4}, "failed")])
def test_a_run_without_records_ended_as_its_summary_says(tmp_path: Path, summary: dict[str, Any], state: str) -> None:
    where = make(tmp_path / "old", **({**summary, "outer_steps": 7} if summary else {}))
    (where / "manifest.json").write_text('{"run": {"id": "before"}}')
    run = read_run(where)
    assert (run.state, run.run_id, run.version, run.lives) == (state, "before", 7 if summary else None, False)
    (where / "manifest.json").write_text('{"run": 5}')
    assert read_run(where).run_id == "old"


def test_a_record_that_is_damaged_is_no_failure(tmp_path: Path) -> None:
    where = make(tmp_path / "run")
    for content in ("", "[]", "\xff", '{"process": "x", "since": null, "addresses": 3, "exit": "0"}'):
        (where / "presence" / "p.json").write_text(content, encoding="latin-1")
        assert not read_run(where).lives


def test_the_newest_loss_is_at_the_end_of_the_metrics(tmp_path: Path) -> None:
    where = make(tmp_path / "run")
    lines = [json.dumps({"version": version, "loss": 9.0 - version / 1000}) for version in range(4000)]
    (where / "metrics.jsonl").write_text("\n".join([*lines, '{"version": 4000, "eval_loss": 1.0}', "[1]", '{"ver']))
    run = read_run(where)
    assert (run.version, run.loss) == (4000, pytest.approx(9.0 - 3.999))


def test_a_peer_writes_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
    def told(state: str, **fields: Any) -> Record:
        presence.hear(Status(state=state, **fields))
        return read_records(tmp_path)["me"]

    with Presence(tmp_path, "me", "mine", seeds=[SEED, "@runs/mine/address"]) as presence:
        assert not list(tmp_path.iterdir()), "a setting may still be wrong"
        now = told("waiting")
        assert now.lives and now.state == "waiting" and now.addresses == (SEED,)
        presence.hear(Ready(address=PLACE))
        now = told("training")
        assert (now.state, now.addresses) == ("training", (PLACE, SEED))
        file = tmp_path / "presence" / "me.json"
        written_at = file.stat().st_ino
        for state in ("training", "evaluating", "training"):
            told(state)
        assert file.stat().st_ino == written_at, "nothing has changed"
        for state, why in (("paused", "on battery"), ("training", "")):
            now = told(state, why=why)
            assert (now.state, now.why) == (state, why)
        told("done")
    now = read_records(tmp_path)["me"]
    assert (now.state, now.exit, now.lives) == ("done", 0, False)


def test_an_invitation_is_named_and_never_written(tmp_path: Path) -> None:
    for name, token, kept in (("file", "@link", f"@{tmp_path}/link"), ("text", "A" * 40, None)):
        where = joined() / name
        with Presence(where, name, "theirs", seeds=[SEED], token=token) as presence:
            where.mkdir(parents=True)
            (where / "config.yaml").touch()
            presence.hear(Status(state="training"))
            assert "AAAA" not in (where / "presence" / f"{name}.json").read_text()
            assert read_run(where).token == kept


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (SwarmError("nobody there"), ("failed", 3, "nobody there")),
        (ValueError("a bug"), ("failed", 1, "ValueError")),
        (KeyboardInterrupt(), ("left", 0, "")),
    ],
)
def test_the_last_word_of_a_peer_is_its_error(tmp_path: Path, error: BaseException, last: tuple[object, ...]) -> None:
    with pytest.raises(type(error)), Presence(tmp_path, "me", "mine"):
        raise error
    assert not read_records(tmp_path), "it had not begun"
    with pytest.raises(type(error)), Presence(tmp_path, "me", "mine") as presence:
        presence.hear(Status(state="waiting"))
        raise error
    record = read_records(tmp_path)["me"]
    assert (record.state, record.exit, record.why) == last


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "presence").touch()
    with Presence(tmp_path, "me", "mine") as presence:
        presence.hear(Status(state="training"))
    assert "diloco status will not know of this peer" in caplog.text


def test_runs_of_this_folder_and_joined_ones_are_listed(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that live come first."""
    monkeypatch.setenv("COLUMNS", "300")
    assert typed("status").startswith("no runs in ./runs or ")
    assert typed("status", "--json") == '{\n  "runs": []\n}\n'
    make(Path("runs/old"), replace(DONE, run_id="old", since=5.0), exit=0, outer_steps=3)
    make(Path("runs/failed"), replace(MINE, state="failed", why="no \x1b room", exit=2, since=9.0))
    began = time.time() - 65
    make(joined(), replace(MINE, run_id="theirs", state="paused", why="diloco pause", since=began))
    Path("runs/notes").mkdir()
    lines = typed("status").splitlines()
    assert lines[0].strip() == "runs of this machine"
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["theirs", "mine", "old"]
    assert rows[0][1:4] == ["paused:", "diloco", "pause"] and rows[0][-1] == str(joined())
    assert re.fullmatch(r"\d+:\d\d(:\d\d)?", rows[0][4])
    assert rows[1][1:3] == ["failed:", "no"] and "\x1b" not in "".join(lines) and rows[2][1] == "done"
    found = json.loads(typed("status", "--json"))["runs"]
    assert found[0] == {
        "run_id": "theirs", "where": str(joined()), "state": "paused", "why": "diloco pause", "since": began,
        "version": None, "loss": None, "exit": None, "address": None, "peers": ["p0"],
    }  # fmt: skip
    assert (found[2]["version"], found[2]["exit"]) == (3, 0)


def test_without_an_address_the_one_living_run_is_meant(typed: Typed) -> None:
    with pytest.raises(ConfigError, match="no run lives in"):
        cli_runs.only_address()
    make(joined(), THEIRS)
    (joined() / "address").write_text(PLACE + "\n")
    make(Path("runs/old"), replace(DONE, run_id="old", addresses=(SEED,)))
    assert cli_runs.only_address().peers == (PLACE, SEED), "its own first"
    make(joined(1), THEIRS)
    assert cli_runs.only_address().peers[-1] == SEED, "two peers of one run"
    make(Path("runs/mine"), replace(MINE, addresses=(PLACE,)))
    for command in (["status", "--watch"], ["dashboard", "--port=0"]):
        text = typed.refused(*command)
        assert "3 runs live here: " in text and ", mine in runs/mine" in text and "give the ADDRESS" in text


def test_a_swarm_that_does_not_answer_is_a_line_below_the_list(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(place: Any, *_: object) -> None:
        raise SwarmError(f"{place.peers[0]} cannot be reached")

    make(joined(), replace(THEIRS, state="paused"))
    monkeypatch.setattr(cli_status, "_status", nobody)
    monkeypatch.setattr(cli_status, "light_hivemind", lambda: None)
    lines = typed("status").splitlines()
    assert lines[0].strip() == "runs of this machine" and lines[-1] == f"{SEED} cannot be reached"
    assert f"theirs: {SEED}" in lines


def test_the_living_run_is_paused_and_goes_on(typed: Typed) -> None:
    both = [make(joined(number), THEIRS) for number in range(2)]  # of two accelerators
    make(Path("runs/host"), replace(HOST, run_id="theirs", state="holding"))
    for command, said, paused in (("pause", "theirs pauses", True), ("resume", "theirs goes on", False)):
        assert typed(command).count(said) == 2
        assert [pause_file(where).exists() for where in both] == [paused] * 2


def test_of_two_runs_one_is_named_to_be_paused(typed: Typed) -> None:
    one, _ = (make(Path("runs") / name, replace(MINE, run_id=name)) for name in ("one", "two"))
    assert "2 runs live on this machine; name the RUN_DIR of one: runs/one, runs/two" in typed.refused("pause")
    pause_file(one).touch()
    assert "pauses already; diloco resume runs/one has it go on" in typed.refused("pause", "runs/one")
    assert "runs/two: two pauses" in typed("pause"), "the only one that does not yet"


OWN = "was not paused by diloco pause; it pauses by its own settings, paused: on battery (9 %)"


@pytest.mark.parametrize(
    ("line", "record", "why"),
    [
        ("pause runs/nix", None, "RUN_DIR=runs/nix holds no run; diloco status lists those of this machine"),
        ("pause runs/mine", DONE, "no peer of it runs on this machine (done)"),
        ("pause runs/mine", GONE, "no peer of it runs on this machine (gone: its"),
        ("pause", None, "no run lives in ./runs or "),
        ("pause runs/mine", HOST, "cannot pause: it is a host; end it with"),
        ("pause", HOST, "on this machine none can pause: runs/mine"),
        ("resume runs/mine", MINE, "was not paused by diloco pause; its peer is tr"),
        ("resume runs/mine", replace(MINE, state="paused", why="on battery (9 %)"), OWN),
        ("resume", MINE, "on this machine none was paused by diloco pause: runs"),
    ],
)
def test_what_cannot_be_paused_or_resumed_is_one_line(line: str, record: Record | None, why: str, typed: Typed) -> None:
    if record is not None:
        make(Path("runs/mine"), record)
    assert why in typed.refused(*line.split())
    assert not list(Path().rglob("pause"))


def test_a_zombie_does_not_live() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays in the table
        assert not replace(MINE, process=child, started_at=psutil.Process(child).create_time()).lives
    finally:
        os.waitpid(child, 0)
