"""Messages from a peer to its supervisor: they survive the pipe, and no JSON object can break a reader."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.config import compose
from diloco.messages.phase_seconds import PhaseSeconds
from diloco.messages.snapshot import Contributor
from diloco.rundir import reporting
from diloco.rundir.reporting import Finished, Message, Notice, Ready, Stage, Status, read_message, to_wire
from diloco.rundir.summary import Evaluation, PeerSummary, Summary, Tokens

PEER = PeerSummary("12D3", "p0", 480, 9600, "ab12", 5, 7, PhaseSeconds(3.0, 1.0, 0.5, 0.25))
SUMMARY = Summary(
    "", "", "", 0.0, 16, Tokens(9600, 9000, 300, 300), Evaluation(2.5), [PEER], 1, 2, 0,
    [Contributor("12D3", "p0", 16, 9000, 512, 1, 16)],
)  # fmt: skip
MESSAGES = [
    Stage("p0", 1.5, "data"),
    Stage("p0", 1.5, "state", 30, 90),
    Ready("p0", 1.5, "/ip4/1.2.3.4/tcp/1", ("/ip4/1.2.3.4/tcp/1", "/ip4/127.0.0.1/tcp/1"), True, "diloco invite", "no"),
    Status("p0", 1.5, "training", 3, 16, 5, 25, True, 2.5, 2.75, 100, 10, 4.5, 7, 8, 4),
    Notice("p0", 1.5, "p1 has other data"),
    Status("p0", state="killed"),
    Finished("p0", 1.5, SUMMARY),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.t)
def test_a_message_survives_the_pipe(message: Message, capsys: pytest.CaptureFixture[str]) -> None:
    reporting.json_lines(message)
    [line] = capsys.readouterr().out.splitlines()
    assert read_message(json.loads(line)) == message
    assert json.loads(line)["t"] == message.t


def test_a_warning_of_the_log_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("diloco.some.module")
    log.addHandler(reporting.WarningLines("p0"))
    try:
        log.info("no")
        log.warning("%d files left out", 3)
    finally:
        log.handlers.clear()
    [line] = capsys.readouterr().out.splitlines()
    message = read_message(json.loads(line))
    assert isinstance(message, Notice) and (message.peer, message.text) == ("p0", "3 files left out")


def test_a_line_has_the_fields_that_readers_rely_on() -> None:
    """Objects of other kinds are passed over."""
    assert to_wire(Status("p0", 2.0, "training", 3, loss=math.nan))["loss"] is None
    assert to_wire(Status("p0", 2.0, "training", 3)).items() >= {"t": "status", "peer": "p0", "version": 3}.items()
    assert set(to_wire(MESSAGES[-1])) == {
        *("t", "peer", "time", "peer_id", "name", "steps", "tokens", "anchor_digest", "bytes_sent", "bytes_received"),
        *("seconds", "utilization", "eval", "heals", "takeovers", "outer_steps", "exit", "contributions"),
    }
    assert read_message({"t": "gossip", "peer": "p0"}) is None and read_message({}) is None


def test_the_log_has_a_line_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One per outer step, one where a step is long, and a last one."""
    caplog.set_level(logging.INFO)
    now = [0.0]
    listen = reporting.log_lines(compose([f"run.dir={tmp_path}"]), lambda: now[0])
    known = {"outer_steps": 9, "target_steps": 50, "loss": 2.5, "peers": 2, "tokens_per_s": 4100.0, "bytes_sent": 12e6}

    def status(at: float, state: str, version: int, **more: Any) -> None:
        now[0] = at
        listen(Status(state=state, version=version, **more))

    status(1, "training", 0, inner_step=1)
    assert not caplog.records, "no loss is known yet"
    status(2, "training", 0, inner_step=2, **known)
    status(31, "training", 0, inner_step=20)
    status(33, "training", 0, inner_step=22)
    status(40, "evaluating", 1)
    status(41, "training", 1, eval_loss=2.25, peers=1)
    listen(Notice(text="v1 writes x"))
    (tmp_path / "model").mkdir()
    listen(Finished(summary=replace(SUMMARY, outer_steps=9, eval=Evaluation(2.0))))
    assert [record.getMessage() for record in caplog.records] == [
        "[   2.0s] outer step 0/9, loss 2.500, 4.1k tok/s, 12.0 MB sent, 2 peers",
        "[  33.0s] outer step 0/9, inner step 22 of 50, loss 2.500, 4.1k tok/s, 12.0 MB sent, 2 peers",
        "[  41.0s] outer step 1/9, loss 2.500, held-out 2.250, 4.1k tok/s, 12.0 MB sent, 1 peer",
        "v1 writes x",
        f"{tmp_path}: outer step 9, held-out loss 2.000 nats per token; the model is in {tmp_path / 'model'}",
    ]
