"""Run files under crashes and several writers, phases of wall time, summaries and their merge, wandb that fails."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import types
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import Config, compose
from diloco.errors import ConfigError
from diloco.protocol.phase_seconds import PhaseSeconds
from diloco.protocol.shares import Contributor
from diloco.rundir.files import JsonLines, prepare_run_directory, read_json_lines, write_atomic
from diloco.rundir.metrics import AGGREGATE_EVERY_S, RunLog, WandbLog
from diloco.rundir.reporting import Finished, read_message, swarm_figures, to_wire
from diloco.rundir.summary import (
    Evaluation,
    PeerSummary,
    PhaseTimer,
    Summary,
    Tokens,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from tests.support.fake_swarm import snapshot
from tests.support.places import ROOT

# --- Files ------------------------------------------------------------------------------------------------------------


def append_many(path: Path, writer: int) -> None:
    with closing(JsonLines(path)) as lines:
        for index in range(200):
            lines.write({"writer": writer, "index": index, "padding": "x" * (37 * index % 500)})


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(path, number)) for number in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number in range(3):
        assert [record["index"] for record in records if record["writer"] == number] == list(range(200))


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or len(data))
    with closing(JsonLines(tmp_path / "a")) as lines:
        lines.write({"a": 1, "b": {"c": [1.5, None]}})
    assert writes == [b'{"a": 1, "b": {"c": [1.5, null]}}\n']


@given(torn=st.binary(max_size=20).filter(lambda tail: b"\n" not in tail and tail.strip(b"0123456789 ") != b""))
def test_a_torn_line_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, torn: bytes) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ' + torn)
    with closing(JsonLines(path)) as lines:
        lines.write({"c": 3})
        lines.write({"d": 4})
    assert read_json_lines(path) == [{"a": 1}, {"c": 3}, {"d": 4}]
    assert path.read_bytes().endswith(b'\n{"c": 3}\n{"d": 4}\n')


def test_a_write_cut_short_by_a_full_disk_is_closed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    lines = JsonLines(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
        lines.write({"lost": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(ConfigError, match=r"^run\.dir: cannot write .*: No space left on device; choose [^\n]*$"):
            lines.write({"refused": 2})
    lines.write({"kept": 3})
    assert read_json_lines(tmp_path / "a") == [{"kept": 3}]


def test_a_log_on_a_full_disk_loses_lines_and_says_so_once(
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


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "a")) as lines:
        lines.write({"loss": math.nan, "nested": {"list": (1.0, math.inf)}})
    assert (tmp_path / "a").read_text() == '{"loss": null, "nested": {"list": [1.0, null]}}\n'


def test_reading_passes_over_what_is_no_object_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'\n[1]\n3\n{"a": 1}\n\xff\xfe\n{"a": 2')
    assert read_json_lines(tmp_path / "a") == [{"a": 1}]
    assert read_json_lines(tmp_path / "missing") == []


def full_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, full_disk)
        with pytest.raises(ConfigError, match="No space left on device"):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]
    write_atomic(path, b"new")
    assert path.read_text() == "new"


def test_a_link_that_somebody_else_put_there_is_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.atomic.secrets.token_hex", lambda count: "foreseen")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".probe-{os.getpid()}").symlink_to(precious)
    prepare_run_directory(tmp_path)
    (tmp_path / ".a.tmp-foreseen").symlink_to(precious)
    with pytest.raises(ConfigError, match="File exists"):
        write_atomic(tmp_path / "a", "new")
    assert precious.read_text() == "mine"


def test_a_run_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    prepare_run_directory(tmp_path / "runs" / "a")
    prepare_run_directory(tmp_path / "runs" / "a")
    assert os.listdir(tmp_path / "runs" / "a") == []


def test_an_unusable_run_directory_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    expected = (
        r"^run\.dir: cannot write {}: {}; choose a directory that you may write to [^\n]*, such as run\.dir=runs/"
    )
    with pytest.raises(ConfigError, match=expected.format(".*/file/a", "Not a directory")):
        prepare_run_directory(tmp_path / "file" / "a")
    with pytest.raises(ConfigError, match=expected.format(".*/file", "File exists")):
        prepare_run_directory(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ConfigError, match=expected.format(".*/a", "No space left on device")):
        prepare_run_directory(tmp_path / "a")
    with pytest.raises(ConfigError, match=expected.format(".*/missing/x", "No such file or directory")):
        JsonLines(tmp_path / "missing" / "x")


def test_every_line_of_a_run_names_its_peer_and_time(tmp_path: Path) -> None:
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


def test_an_event_cannot_pose_as_another_peer(tmp_path: Path) -> None:
    with RunLog(tmp_path, "p0") as log, pytest.raises(AssertionError, match="has its own time and peer"):
        log.event("leave", peer="p1")


# --- Phases -----------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_second_counts_in_exactly_one_phase() -> None:
    clock = Clock()
    phases = PhaseTimer(clock=clock)
    clock.now = 5  # nothing runs yet
    assert phases.switch("compute") is None
    clock.now = 8
    with phases.during("comm"):
        clock.now = 10
        with phases.during("wait"):
            clock.now = 14
        clock.now = 15
    clock.now = 16
    assert phases.seconds() == PhaseSeconds(compute=4, wait=4, comm=3, outer=0)  # the running phase is counted
    assert phases.switch("outer") == "compute"
    clock.now = 17
    assert phases.switch(None) == "outer"
    clock.now = 99
    assert phases.seconds() == PhaseSeconds(compute=4, wait=4, comm=3, outer=1)
    assert phases.seconds().total == 12
    assert phases.seconds().utilization == 4 / 12


def test_what_a_device_was_given_counts_in_the_phase_in_which_it_was_given() -> None:
    now = [0.0]

    def settle() -> None:
        now[0] += 3.0  # the device is that much behind

    phases = PhaseTimer(clock=lambda: now[0], settle=settle)
    phases.switch("compute")
    now[0] += 1.0
    with phases.during("comm"):
        now[0] += 10.0
    assert phases.seconds() == PhaseSeconds(compute=4.0, comm=13.0)


def test_a_phase_ends_with_its_block_even_if_that_fails() -> None:
    clock = Clock()
    phases = PhaseTimer(clock=clock)
    with pytest.raises(KeyError), phases.during("comm"):
        clock.now = 2
        raise KeyError
    clock.now = 9
    assert phases.seconds() == PhaseSeconds(comm=2)


def test_a_resumed_run_adds_to_the_seconds_of_its_earlier_sessions() -> None:
    clock = Clock()
    phases = PhaseTimer(PhaseSeconds(compute=1, wait=2), clock)
    phases.switch("wait")
    clock.now = 4
    assert phases.seconds() == PhaseSeconds(compute=1, wait=6)


def test_utilization_of_nothing_is_zero() -> None:
    assert PhaseTimer().seconds().utilization == 0.0


# --- Summary ----------------------------------------------------------------------------------------------------------


def single(name: str, processed: int, applied: int, loss: float | None, outer_steps: int = 16) -> Summary:
    peer = PeerSummary(
        peer_id=f"12D3{name}",
        name=name,
        steps=processed // 10,
        tokens=processed,
        anchor_digest="ab12",
        bytes_sent=5,
        bytes_received=7,
        seconds=PhaseSeconds(compute=3, wait=1),
    )
    return Summary(
        run_id="r",
        manifest_hash="m",
        mode="diloco",
        wall_s=9.0,
        outer_steps=outer_steps,
        tokens=Tokens(processed, applied, 0, 0),
        eval=Evaluation(loss),
        peers=[peer],
        heals=1,
        takeovers=2,
        exit=0,
    )


def test_a_summary_has_the_fields_that_other_tools_rely_on(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", single("p0", 100, 90, 2.0))
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "run_id": "r",
        "manifest_hash": "m",
        "mode": "diloco",
        "wall_s": 9.0,
        "outer_steps": 16,
        "tokens": {"processed": 100, "applied": 90, "discarded": 0, "in_flight": 0},
        "eval": {"loss": 2.0, "perplexity": math.exp(2.0)},
        "peers": [
            {
                "peer_id": "12D3p0",
                "name": "p0",
                "steps": 10,
                "tokens": 100,
                "anchor_digest": "ab12",
                "bytes_sent": 5,
                "bytes_received": 7,
                "seconds": {"compute": 3, "wait": 1, "comm": 0.0, "outer": 0.0},
                "utilization": 0.75,
            }
        ],
        "heals": 1,
        "takeovers": 2,
        "exit": 0,
    }


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(None, None), (math.nan, None), (math.inf, None), (800.0, None), (0.0, 1.0)]
)
def test_a_perplexity_that_does_not_exist_is_null(loss: float | None, perplexity: float | None) -> None:
    assert Evaluation(loss).perplexity == perplexity


def through_a_pipe(summary: Summary) -> Summary:
    message = read_message(json.loads(json.dumps(to_wire(Finished("p0", 1.0, summary)))))
    assert isinstance(message, Finished)
    return message.summary


def test_merging_adds_what_peers_did_and_takes_the_swarm_clock_from_the_furthest() -> None:
    parts = [
        through_a_pipe(single("p0", 100, 170, 2.5, outer_steps=15)),
        through_a_pipe(single("p1", 80, 175, 2.4, outer_steps=16)),
        through_a_pipe(single("p2", 10, 0, None, outer_steps=17)),
    ]
    merged = merge_peer_summaries(parts, run_id="r", manifest_hash="m", mode="diloco", wall_s=11.0, exit=4)
    assert merged.tokens == Tokens(processed=190, applied=175, discarded=0, in_flight=15)
    assert (merged.outer_steps, merged.eval.loss, merged.heals, merged.takeovers) == (17, 2.4, 3, 6)
    assert (merged.wall_s, merged.exit, merged.mode) == (11.0, 4, "diloco")
    assert [peer.name for peer in merged.peers] == ["p0", "p1", "p2"]
    assert merged.peers[0] == single("p0", 100, 0, None).peers[0]


def test_the_record_of_contributions_is_the_furthest_peer_s_and_a_table_for_any_spreadsheet(tmp_path: Path) -> None:
    rows = [Contributor("id1", 'anna, "x"', 2, 30, 99, 1, 3), Contributor("=cmd", "=SUM(A1)", 1, 10, 45, 2, 2)]
    parts = [
        through_a_pipe(replace(single("p0", 1, 1, None, outer_steps=3), contributions=rows)),
        through_a_pipe(replace(single("p1", 1, 1, None, outer_steps=2), contributions=rows[1:])),
        through_a_pipe(single("p2", 1, 1, None, outer_steps=4)),
    ]
    merged = merge_peer_summaries(parts, run_id="r", manifest_hash="m", mode="diloco", wall_s=11.0, exit=0)
    assert merged.contributions == rows and merged.to_json()["contributions"][0]["peer_id"] == "id1"
    write_contributions(tmp_path / "contributions.csv", merged.contributions)
    assert (tmp_path / "contributions.csv").read_text().splitlines() == [
        "peer_id,name,outer_steps,tokens,bytes,first_version,last_version",
        'id1,"anna, ""x""",2,30,99,1,3',
        "'=cmd,'=SUM(A1),1,10,45,2,2",
    ]


counts = st.builds(Tokens, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))


@given(st.lists(counts))
def test_every_token_of_a_merged_summary_ends_in_exactly_one_place(parts: list[Tokens]) -> None:
    summaries = [Summary.from_message({"tokens": vars(part)}) for part in parts]
    tokens = merge_peer_summaries(summaries, run_id="", manifest_hash="", mode="", wall_s=0, exit=0).tokens
    assert tokens.processed == tokens.applied + tokens.discarded + tokens.in_flight
    assert tokens.processed >= sum(part.processed for part in parts)
    assert min(vars(tokens).values()) >= 0


def test_a_message_without_most_of_its_fields_is_a_summary_of_zeros() -> None:
    [peer] = Summary.from_message({"peer": "p2", "tokens": 50, "bytes_sent": None}).peers
    assert (peer.name, peer.tokens, peer.steps, peer.anchor_digest, peer.bytes_sent) == ("p2", 50, 0, None, 0)


# --- Weights & Biases -------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, fail: str) -> None:
        self.fail, self.logged, self.finished = fail, [], False  # type: ignore[var-annotated]

    def log(self, record: dict[str, Any]) -> None:
        if self.fail == "log":
            raise ConnectionError("gone\naway")
        self.logged.append(record)

    def finish(self) -> None:
        if self.fail == "finish":
            raise ConnectionError
        self.finished = True


def fake_wandb(monkeypatch: pytest.MonkeyPatch, fail: str = "") -> tuple[FakeRun, dict[str, Any]]:
    run, arguments = FakeRun(fail), {}

    def init(**given: Any) -> FakeRun:
        if fail == "init":
            raise ConnectionError("cannot reach the service")
        arguments.update(given)
        return run

    module = types.ModuleType("wandb")
    vars(module).update(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return run, arguments


def with_wandb(mode: str, tmp_path: Path, *settings: str) -> Config:
    return compose([f"wandb.mode={mode}", f"run.dir={tmp_path}", "run.id=my.run", *settings])


def test_wandb_gets_every_metric_under_an_id_that_survives_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = fake_wandb(monkeypatch)
    with RunLog(tmp_path, "p0", WandbLog(with_wandb("offline", tmp_path), "p0")) as log:
        log.metric(version=1, inner_step=2, tokens=3, loss=4.0)
    assert run.logged == [{"version": 1, "inner_step": 2, "tokens": 3, "loss": 4.0}]
    assert run.finished
    assert (arguments["group"], arguments["id"], arguments["resume"]) == ("my.run", "my-run-p0", "allow")
    assert arguments["mode"] == "offline"
    assert arguments["settings"]["console"] == "off"  # stdout belongs to the supervisor's lines


def test_the_aggregated_form_logs_the_swarm_once_per_outer_step_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = fake_wandb(monkeypatch)
    now = [0.0]
    seen = [snapshot(3)]
    wandb = WandbLog(with_wandb("offline", tmp_path, "wandb.aggregate=true"), "p0", clock=lambda: now[0])
    with RunLog(tmp_path, "p0", wandb) as log:
        wandb.figures = lambda: swarm_figures(seen[0])
        for version, step in ((0, 0), (0, 1), (1, 2), (1, 3)):
            log.metric(version=version, inner_step=step, tokens=0, loss=9.0)
        assert len(run.logged) == 2
        now[0] += AGGREGATE_EVERY_S
        log.metric(version=1, inner_step=4, tokens=0, loss=9.0)
        wandb.figures = lambda: swarm_figures(None)  # it has left
        log.metric(version=1, inner_step=4, tokens=0, eval_loss=1.5)
    assert (arguments["name"], arguments["id"], arguments["resume"]) == ("swarm", "my-run-swarm", "allow")
    assert len(run.logged) == 4
    assert run.logged[-1] == {"swarm/held_out_loss": 1.5}
    figures = run.logged[0]
    ledger = seen[0].ledger
    assert figures["swarm/tokens/applied"] == ledger.applied
    assert (figures["swarm/peers"], figures["swarm/loss"]) == (3, seen[0].loss[-1].loss)
    assert figures["swarm/seconds/compute"] > 0
    assert not any("inner_step" in name for name in figures)
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 6  # the peer's own file is as ever


def test_an_observation_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_wandb(monkeypatch)

    def gone() -> dict[str, float]:
        raise ConnectionError("this node is closed")

    wandb = WandbLog(with_wandb("offline", tmp_path, "wandb.aggregate=true"), "p0")
    with RunLog(tmp_path, "p0", wandb) as log:
        wandb.figures = gone
        for version in range(3):
            log.metric(version=version, inner_step=0, tokens=0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("fail", ["init", "log", "finish"])
def test_wandb_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail: str
) -> None:
    fake_wandb(monkeypatch, fail)
    with RunLog(tmp_path, "p0", WandbLog(with_wandb("online", tmp_path), "p0")) as log:
        for step in range(3):
            log.metric(version=0, inner_step=step, tokens=0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the run goes on" in record.message
    assert "\n" not in record.message
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 3


def test_wandb_that_is_not_installed_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    WandbLog(with_wandb("online", tmp_path), "p0").log({"loss": 1.0})
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["wandb.mode=online: cannot start"]


def test_neither_wandb_nor_matplotlib_is_imported_unless_asked_for() -> None:
    script = (
        "import sys, diloco.rundir.plot\n"
        "from diloco.config import compose\n"
        "from diloco.rundir.metrics import WandbLog\n"
        "WandbLog(compose(), 'p0')\n"
        "assert not {'wandb', 'matplotlib', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
