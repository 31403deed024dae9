"""Files of a run under crashes and several writers, timed phases, summaries, and wandb."""

import errno
import json
import logging
import math
import os
import sys
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.config import compose
from diloco.errors import ConfigError
from diloco.messages.snapshot import Contributor, PhaseSeconds, Tokens
from diloco.rundir import summary
from diloco.rundir.files import JsonLines, prepare_run_directory, read_json_lines, write_atomic
from diloco.rundir.metrics import AGGREGATE_EVERY_S, RunLog, WandbLog
from diloco.rundir.reporting import swarm_figures
from tests.support.fake_swarm import snapshot


def test_lines_of_several_writers_never_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, writes = tmp_path / "metrics.jsonl", os.write, list[bytes]()
    monkeypatch.setattr(os, "write", lambda file, data: (writes.append(data), real(file, data))[1])
    with closing(JsonLines(path)) as one, closing(JsonLines(path)) as other:
        for _ in range(3):
            one.write({"loss": math.nan, "nested": {"list": (1.0, math.inf)}})
            other.write({"a": 1, "b": {"c": [1.5, None]}})
    first = b'{"loss": null, "nested": {"list": [1.0, null]}}\n'
    lines = [first, b'{"a": 1, "b": {"c": [1.5, null]}}\n']
    assert writes == path.read_bytes().splitlines(keepends=True) == lines * 3


@pytest.mark.parametrize("torn", [b"", b'"x', b"\xff\0", b"{}"])
def test_a_torn_line_costs_only_itself(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ' + torn)
    with closing(JsonLines(path)) as lines:
        lines.write({"c": 3})
        lines.write({"d": 4})
    assert read_json_lines(path) == [{"a": 1}, {"c": 3}, {"d": 4}]
    assert read_json_lines(path.with_name("missing")) == []
    assert path.read_bytes().endswith(b'\n{"c": 3}\n{"d": 4}\n')


def test_a_log_on_a_full_disk_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLog(tmp_path, "p0") as log:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            log.event("lost")
            log.metric(version=1, inner_step=1, tokens=1)
        log.event("kept")
    assert [event["kind"] for event in read_json_lines(tmp_path / "events.jsonl")] == ["kept"]
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


def full_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that somebody else made is not followed."""
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    for operation in ("open", "fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="No space left on d"):
            patch.setattr(os, operation, full_disk)
            write_atomic(path, "new")
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["summary.json"]
    write_atomic(path, b"new")
    assert path.read_text() == "new"

    monkeypatch.setattr("diloco.atomic.secrets.token_hex", lambda count: "foreseen")
    (tmp_path / ".a.tmp-foreseen").symlink_to(path)  # somebody else's link is not followed
    with pytest.raises(ConfigError, match="File exists"):
        write_atomic(tmp_path / "a", "other")
    assert path.read_text() == "new"


def test_a_run_directory_is_made_and_left_empty_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        prepare_run_directory(tmp_path / "runs" / "a")
    assert os.listdir(tmp_path / "runs" / "a") == []

    def refused(make: Callable[[Path], object], path: str, why: str) -> None:
        expected = rf"^run\.dir: cannot write .*/{path}: {why}; choose a directory that you may "
        with pytest.raises(ConfigError, match=expected):
            make(tmp_path / path)

    (tmp_path / "file").write_text("")
    refused(prepare_run_directory, "file/a", "Not a directory")
    refused(prepare_run_directory, "file", "File exists")
    monkeypatch.setattr(os, "fsync", full_disk)
    refused(prepare_run_directory, "a", "No space left on device")
    refused(JsonLines, "missing/x", "No such file or directory")


def test_every_line_of_a_run_names_its_peer_and_time(tmp_path: Path) -> None:
    """No event can pose as another peer's."""
    with RunLog(tmp_path, "p0", clock=lambda: 12.5) as log:
        log.metric(version=3, inner_step=7, tokens=100, loss=2.5, lr=1e-3, tokens_per_s=10.0)
        log.metric(version=3, inner_step=7, tokens=100, eval_loss=math.nan)
        log.event("heal", fragment=2)
    line = {"time": 12.5, "peer": "p0"}
    at = {**line, "version": 3, "inner_step": 7, "tokens": 100}
    assert read_json_lines(tmp_path / "metrics.jsonl") == [
        {**at, "loss": 2.5, "lr": 1e-3, "tokens_per_s": 10.0},
        {**at, "eval_loss": None},
    ]
    assert read_json_lines(tmp_path / "events.jsonl") == [{**line, "kind": "heal", "fragment": 2}]
    with RunLog(tmp_path, "p0") as log, pytest.raises(AssertionError, match="has its own time an"):
        log.event("leave", peer="p1")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_second_counts_in_exactly_one_phase() -> None:
    phases = summary.PhaseTimer(clock=(clock := Clock()))
    clock.now = 5  # nothing runs yet
    assert phases.seconds().utilization == 0.0
    assert phases.switch("compute") is None
    clock.now = 8
    with phases.during("comm"):
        clock.now = 10
        with phases.during("wait"):
            clock.now = 14
        clock.now = 15
    clock.now = 16
    # the running phase is counted
    assert phases.seconds() == PhaseSeconds(compute=4, wait=4, comm=3, outer=0)
    assert phases.switch("outer") == "compute"
    clock.now = 17
    assert phases.switch(None) == "outer"
    clock.now = 99
    assert phases.seconds() == PhaseSeconds(compute=4, wait=4, comm=3, outer=1)
    assert (phases.seconds().total, phases.seconds().utilization) == (12, 4 / 12)
    phases.move("comm", "wait", 5)  # more than there is
    assert phases.seconds() == PhaseSeconds(compute=4, wait=7, comm=0, outer=1)


def test_a_phase_has_what_a_device_was_given_and_ends_with_it() -> None:
    clock = Clock()

    def settle() -> None:
        clock.now += 3.0  # the device is that much behind

    phases = summary.PhaseTimer(clock=clock, settle=settle)
    phases.switch("compute")
    clock.now += 1.0
    with phases.during("comm"):
        clock.now += 10.0
    assert phases.seconds() == PhaseSeconds(compute=4.0, comm=13.0)
    phases = summary.PhaseTimer(PhaseSeconds(compute=1, comm=3), clock := Clock())
    with pytest.raises(KeyError), phases.during("comm"):
        clock.now = 2
        raise KeyError
    clock.now = 9
    assert phases.seconds() == PhaseSeconds(compute=1, comm=5)


HEAD: Any = {"run_id": "r", "manifest_hash": "m", "mode": "diloco"}


def single(
    name: str, processed: int, applied: int, loss: float | None, outer_steps: int = 16
) -> summary.Summary:
    seconds, steps = PhaseSeconds(compute=3, wait=1), processed // 10
    tokens, evaluation = Tokens(processed, applied, 0, 0), summary.Evaluation(loss)
    peer = summary.PeerSummary(
        peer_id=f"12D3{name}",
        name=name,
        steps=steps,
        anchor_digest="ab12",
        seconds=seconds,
        tokens=processed,
        bytes_sent=5,
        bytes_received=7,
    )
    counts = {"outer_steps": outer_steps, "heals": 1, "takeovers": 2}
    return summary.Summary(
        **HEAD, **counts, wall_s=9.0, tokens=tokens, eval=evaluation, peers=[peer]
    )


def test_a_summary_has_the_fields_that_tools_rely_on(tmp_path: Path) -> None:
    summary.write_summary(tmp_path / "summary.json", single("p0", 100, 90, 2.0))
    peer = {"peer_id": "12D3p0", "name": "p0", "steps": 10, "tokens": 100, "utilization": 0.75}
    peer |= {"anchor_digest": "ab12", "bytes_sent": 5, "bytes_received": 7}
    peer |= dict.fromkeys(["loss", "eval_loss", "tokens_per_s"])
    peer |= {"discarded": 0, "rounds": 0, "trained_s": 0.0}
    peer["seconds"] = {"compute": 3, "wait": 1, "comm": 0.0, "outer": 0.0}
    assert json.loads((tmp_path / "summary.json").read_text()) == HEAD | {
        "wall_s": 9.0,
        "outer_steps": 16,
        "tokens": {"processed": 100, "applied": 90, "discarded": 0, "in_flight": 0},
        "eval": {"loss": 2.0, "perplexity": math.exp(2.0)},
        "peers": [peer],
        "heals": 1,
        "takeovers": 2,
        "exit": 0,
    }
    assert summary.read_summary(tmp_path / "summary.json") == single("p0", 100, 90, 2.0)


def test_merging_adds_what_peers_did() -> None:
    """The swarm clock is that of the furthest."""
    parts = [single("p0", 100, 170, 2.5, 15), single("p1", 80, 175, 2.4, 16)]
    parts.append(single("p2", 10, 0, None, 17))
    whole = summary.merge_peer_summaries(parts, **HEAD, wall_s=11.0, exit=4)
    assert whole.tokens == Tokens(processed=190, applied=175, discarded=0, in_flight=15)
    assert (whole.outer_steps, whole.eval.loss, whole.heals, whole.takeovers) == (17, 2.4, 3, 6)
    assert (whole.wall_s, whole.exit, whole.mode) == (11.0, 4, "diloco")
    assert whole.peers == [part.peers[0] for part in parts]


def test_contributions_become_a_table_for_any_spreadsheet(tmp_path: Path) -> None:
    """They are the record of the furthest peer that has one."""
    rows = [
        Contributor("id1", 'anna, "x"', 2, 30, 99, 1, 3),
        Contributor("=cmd", "=SUM(A1)", 1, 10, 45, 2, 2),
    ]
    p0, p1, p2 = (single(f"p{steps}", 1, 1, None, outer_steps=steps) for steps in (3, 2, 4))
    parts = [replace(p0, contributions=rows), replace(p1, contributions=rows[1:]), p2]
    whole = summary.merge_peer_summaries(parts, **HEAD)
    assert whole.contributions == rows and whole.to_json()["contributions"][0]["peer_id"] == "id1"
    summary.write_contributions(tmp_path / "contributions.csv", whole.contributions)
    assert (tmp_path / "contributions.csv").read_text().splitlines() == [
        "peer_id,name,outer_steps,tokens,bytes,first_version,last_version",
        'id1,"anna, ""x""",2,30,99,1,3',
        "'=cmd,'=SUM(A1),1,10,45,2,2",
    ]


class FakeWandb:
    """Stands for the library and for its run, of which one call may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: str = "") -> None:
        self.fail, self.finished = fail, False
        self.arguments, self.logged = dict[str, Any](), list[dict[str, Any]]()
        monkeypatch.delenv("WANDB_MODE", raising=False)
        module = types.ModuleType("wandb")
        vars(module).update(init=self.init, Settings=lambda **options: options, Table=self.table)
        monkeypatch.setitem(sys.modules, "wandb", module)

    def init(self, **given: Any) -> Any:
        self._may_fail("init")
        self.arguments = given
        return self

    def log(self, record: dict[str, Any]) -> None:
        self._may_fail("log")
        self.logged.append(record)

    def table(self, columns: list[str], rows: list[list[Any]]) -> dict[str, Any]:
        self._may_fail("table")
        return {"columns": columns, "rows": rows}

    def finish(self) -> None:
        self._may_fail("finish")
        self.finished = True

    def _may_fail(self, call: str) -> None:
        if self.fail == call:
            raise ConnectionError("gone\naway")


def wandb_log(tmp_path: Path, *settings: str, mode: str = "offline", **options: Any) -> WandbLog:
    typed = [f"wandb.mode={mode}", f"run.dir={tmp_path}", "run.id=my.run", *settings]
    return WandbLog(compose(typed), "p0", **options)


def test_wandb_gets_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeWandb(monkeypatch)
    with RunLog(tmp_path, "p0", wandb_log(tmp_path)) as log:
        log.metric(version=1, inner_step=2, tokens=3, loss=4.0)
        log.samples(1, [("def ", "main"), ("", "x")])
    line, columns = {"version": 1, "inner_step": 2, "tokens": 3}, ["outer step", "prompt", "text"]
    table = {"columns": columns, "rows": [[1, "def ", "main"], [1, "", "x"]]}
    assert run.logged == [{**line, "loss": 4.0}, {"samples": table}] and run.finished
    told = {"group": "my.run", "id": "my-run-p0", "resume": "allow", "mode": "offline"}
    assert run.arguments.items() >= told.items()
    assert run.arguments["settings"]["console"] == "off"  # stdout belongs to the supervisor's lines


def test_the_mode_of_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no network, a cluster's profile says offline; wandb reads it itself."""
    run = FakeWandb(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_log(tmp_path, mode="online")
    assert run.arguments["mode"] is None


def test_the_aggregated_form_logs_the_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, clock, seen = FakeWandb(monkeypatch), Clock(), snapshot(3)
    wandb = wandb_log(tmp_path, "wandb.aggregate=true", clock=clock)
    with RunLog(tmp_path, "p0", wandb) as log:
        wandb.figures = lambda: swarm_figures(seen)
        for version, step in ((0, 0), (0, 1), (1, 2), (1, 3)):
            log.metric(version=version, inner_step=step, tokens=0, loss=9.0)
        assert len(run.logged) == 2
        clock.now += AGGREGATE_EVERY_S
        log.metric(version=1, inner_step=4, tokens=0, loss=9.0)
        wandb.figures = lambda: swarm_figures(None)  # it has left
        log.metric(version=1, inner_step=4, tokens=0, eval_loss=1.5)
    assert (run.arguments["name"], run.arguments["id"]) == ("swarm", "my-run-swarm")
    assert len(run.logged) == 4 and run.logged[-1] == {"swarm/held_out_loss": 1.5}
    figures = run.logged[0]
    assert figures["swarm/tokens/applied"] == seen.ledger.applied
    assert (figures["swarm/peers"], figures["swarm/loss"]) == (3, seen.loss[-1].loss)
    assert figures["swarm/seconds/compute"] > 0
    assert not any("inner_step" in name for name in figures)
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 6  # the peer's own file is as ever


@pytest.mark.parametrize("fail", ["init", "log", "finish", "figures", "import", "table"])
def test_wandb_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail: str
) -> None:
    def gone() -> dict[str, float]:
        raise ConnectionError("this node is closed")

    FakeWandb(monkeypatch, fail)
    if fail == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    wandb = wandb_log(tmp_path, f"wandb.aggregate={fail == 'figures'}", mode="online")
    with RunLog(tmp_path, "p0", wandb) as log:
        wandb.figures = gone
        for version in range(3):
            log.metric(version=version, inner_step=0, tokens=0)
        log.samples(2, [("def ", "main")])
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the run goes on" in record.message and "\n" not in record.message
    assert fail != "import" or record.message.startswith("wandb.mode=online: cannot start (")
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 3
