"""Reports from a peer to its supervisor survive the pipe; every event of a run is documented."""

import ast
import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.config import compose
from diloco.dashboard.live import LiveView
from diloco.messages.control import Figures
from diloco.messages.snapshot import Contributor, PhaseSeconds, Tokens
from diloco.rundir import reporting
from diloco.rundir.events import EventKind
from diloco.rundir.metrics import RunLog
from diloco.rundir.reporting import Finished, Notice, PeerStatus, Ready, Report, Stage, read_report
from diloco.rundir.summary import Evaluation, PeerSummary, Summary
from tests.support.places import PACKAGE

PEER = PeerSummary(
    peer_id="12D3",
    name="p0",
    steps=480,
    tokens=9600,
    anchor_digest="ab12",
    bytes_sent=5,
    bytes_received=7,
    seconds=PhaseSeconds(3.0, 1.0, 0.5, 0.25),
)
FIGURES = Figures(2.5, 2.75, 4.5, 7, 8, 100, 10, 1, 9.0, [1.0] * 4)
RECORD = [Contributor("12D3", "p0", 16, 9000, 512, 1, 16)]
SUMMARY = Summary(
    outer_steps=16, tokens=Tokens(9600, 9000, 300, 300), peers=[PEER], contributions=RECORD
)
ADDRESSES = ("/ip4/1.2.3.4/tcp/1", "/ip4/127.0.0.1/tcp/1")
REPORTS = [
    Stage("p0", 1.5, "data"),
    Stage("p0", 1.5, "state", 30, 90),
    Ready("p0", 1.5, ADDRESSES[0], ADDRESSES, True, "diloco invite", "no"),
    PeerStatus("p0", 1.5, "training", 3, 16, 5, 25, True, FIGURES, 4),
    Notice("p0", 1.5, "p1 has other data"),
    PeerStatus("p0", state="killed"),
    Finished("p0", 1.5, SUMMARY),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_survives_the_pipe(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    reporting.json_lines(report)
    [line] = capsys.readouterr().out.splitlines()
    assert read_report(line) == report


def test_a_warning_of_the_log_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("diloco.some.module")
    log.addHandler(reporting.WarningLines("p0"))
    try:
        log.info("no")
        log.warning("%d files left out", 3)
    finally:
        log.handlers.clear()
    [line] = capsys.readouterr().out.splitlines()
    report = read_report(line)
    assert isinstance(report, Notice)
    assert (report.peer, report.text) == ("p0", "3 files left out")


def test_a_line_has_the_fields_that_readers_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    reporting.json_lines(
        PeerStatus("p0", 2.0, "training", 3, figures=Figures(tokens_per_s=math.nan))
    )
    line = json.loads(capsys.readouterr().out)
    assert line.items() >= {"t": "status", "peer": "p0", "version": 3}.items()
    assert line["figures"] == {"kind": "figures", "tokens_per_s": None}
    wrong = ['{"t": "gossip", "peer": "p0"}', '{"t": "status", "version": "x"}']
    for other in (*wrong, "{}", "12 files", "\x00"):
        assert read_report(other) is None


def test_the_log_has_a_line_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    listen = reporting.log_lines(compose([f"run.dir={tmp_path}"]), lambda: 2.0)
    listen(Ready("p0", first=True, address="/ip4/127.0.0.1/tcp/1/p2p/12D3"))
    state: Any = {"state": "training", "version": 0}
    figures = Figures(loss=2.5, tokens_per_s=4100.0, bytes_sent=12_000_000)
    listen(PeerStatus("p0", outer_steps=9, **state, figures=figures))
    listen(PeerStatus("p0", **state))
    (tmp_path / "model").mkdir()
    listen(Finished(summary=Summary(outer_steps=9, eval=Evaluation(2.0))))
    assert [record.getMessage() for record in caplog.records] == [
        "open run, on this machine only",
        "[  0.0s] p0 ready at /ip4/127.0.0.1/tcp/1/p2p/12D3",
        "[  0.0s] others join with this (loopback: on this machine only; swarm=network lets others"
        " in):",
        "diloco join /ip4/127.0.0.1/tcp/1/p2p/12D3",
        "[  0.0s] p0 v0/9 loss 2.50 held-out - tok/s 4.1k sent 12.0 MB training",
        (
            f"{tmp_path}: outer step 9, held-out loss 2.000 nats per token; the model is in"
            f" {tmp_path / 'model'}"
        ),
    ]


EMITTERS = {"note", "on_event", "_on_event", "event", "_event"}
ELSEWHERE = {"join", "leave", "lost"}  # chosen by a condition; core/peer.py


def test_every_kind_of_event_is_documented() -> None:
    found = set()
    for folder in ("core", "swarm", "attach", "train", "rundir"):
        for file in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    kind = node.args[0]
                    if name in EMITTERS and isinstance(kind, ast.Constant):
                        found.add(kind.value)
    assert found | ELSEWHERE == set(EventKind)


PEERS = {"anna": "12D3KooWanna", "bob": "12D3KooWbob"}
STORY = [  # what happens to a peer, and what people read of it
    ("join", {"name": "anna", "live": 2}, None),
    ("join", {"name": "bob", "live": 3}, None),
    ("leave", {"name": "bob", "live": 2}, None),
    ("tip", {}, None),
    (
        *("lost", {"name": "anna", "why": "silent", "live": 1}),
        "anna vanished (silent); no other peer can be reached now, and this one goes on calling",
    ),
    ("join", {"name": "bob", "live": 2}, "bob joined, 2 peers now"),
    ("join", {"name": "anna", "live": 3}, "anna is back, 3 peers now"),
    ("lost", {"name": "bob", "why": "reset", "live": 2}, "bob vanished (reset), 2 peers now"),
    ("join", {"name": "bob", "live": 3}, "bob is back, 3 peers now"),
    (
        *("store_away", {"url": "s3://b/r", "why": "no network"}),
        "s3://b/r does not answer, and this peer goes on calling (no network)",
    ),
    ("store_back", {"url": "s3://b/r", "seconds": 61.0}, "s3://b/r answers again, after 61 s"),
    ("slept", {"seconds": 43.2}, "this machine slept for 43 s"),
    (
        *("missed", {"version": 3, "fragment": 0, "steps": 4, "cycle": 9, "round_s": 2.5}),
        "left out of version 3 of fragment 0: it had made 4 of 9 inner steps; the round took 2.5 s",
    ),
    (
        *("left_out", {"version": 4, "fragment": 1, "peers": ["12D3KooWbobobo"], "why": "so"}),
        "version 4 of fragment 1 leaves out what ...bobobo contributed: so",
    ),
    ("micro_batch", {"sequences": 4}, "memory is short: from now on 4 sequences at a time"),
]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("coloured", [False, True])  # by FORCE_COLOR
def test_people_read_what_happens_in_every_view(
    coloured: bool, terminal: bool, tmp_path: Path
) -> None:
    file = io.StringIO()
    file.isatty = lambda: terminal  # type: ignore[method-assign]
    console = Console(file=file, force_terminal=coloured or None, width=300)
    view = LiveView(console, [], None, "run")
    assert (view._live is not None) == terminal
    with RunLog(tmp_path, "p0", say=lambda text: view.update(Notice("p0", text=text))) as log:
        for kind, fields, _ in STORY:
            peer = {"peer": PEERS[name]} if (name := fields.get("name")) else {}
            log.swarm_event(kind, {**fields, **peer})
        log.swarm_event("lost", {"peer": "x", "name": "bob", "why": "reset", "live": 2})
    told = [line.split("p0: ")[1] for line in file.getvalue().splitlines()]
    expected = [text for _, _, text in STORY if text is not None]
    expected.append("bob vanished (reset), 2 peers now")  # again
    assert len(told) == len(expected)
    assert all(map(str.startswith, told, expected)), told
