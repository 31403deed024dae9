"""Schedules of faults, figures from logs written by hand, links in virtual time; and one real pair of namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.testing.chaos.peers import Happened
from diloco.testing.chaos.report import (
    Account,
    Log,
    Stay,
    detection_s,
    digests,
    judge,
    lines_of,
    report,
)
from diloco.testing.chaos.schedule import Fault, ScheduleError, joins, parse
from diloco.testing.links.links import Links, unavailable
from diloco.testing.links.pipe import Pipe, Shape, rate_bytes

PLAN = "30:kill 2, 35:join, 60:stop 1, 65:cont 1, 80:partition 0,1|3,4, 90:heal, 100:slow 1 2mbit,104:restart 2"


def test_a_schedule_is_read_as_it_was_written() -> None:
    faults = parse(PLAN, 4)
    assert [str(fault) for fault in faults] == [
        "kill 2", "join", "stop 1", "cont 1", "partition 0,1|3,4", "heal", "slow 1 2mbit", "restart 2",
    ]  # fmt: skip
    assert [fault.at for fault in faults] == [30, 35, 60, 65, 80, 90, 100, 104]
    assert faults[4].groups == ((0, 1), (3, 4)) and faults[4].named == (0, 1, 3, 4)
    assert joins(faults) == 1 and parse("", 4) == []
    assert [fault.at for fault in parse("9.5:join, 2:kill 0", 2)] == [2, 9.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill 2", "is no fault"),
        ("3:kill", "expected 3:kill 1"),
        ("3:slow 1", "expected 3:slow 1 2mbit"),
        ("3:slow 1 fast", "'fast' is not a rate such as 2mbit"),
        ("3:kill 4, 5:join", "there is no peer 4 then"),
        ("3:kill 1, 5:stop 1", "peer 1 is ended then"),
        ("3:join 4", "too much"),
        ("3:partition 0,1", "needs the sides"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=rf"\A--schedule: .*{said}.*\Z"):  # one line, as . is no end of one
        parse(text, 4)


def stay(peer: int, steps: list[float], outer: list[float], digest: str = "a", **more: Any) -> Stay:
    """A process that ran from 0 to 100, with an outer step at each of the given times."""
    accounts = [Account(at, 100 * number, {"0": f"{number}:{digest}"}) for number, at in enumerate(outer, 1)]
    summary: Mapping[str, Any] = {"anchor_digest": digest, "outer_steps": len(outer), "eval": {"loss": 2.0}}
    known = {"started_at": 0.0, "ended_at": 100.0, "summary": summary, **more}
    return Stay(peer, **known, steps=steps, accounts=accounts)


def event(by: int, time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"by": by, "time": time, "kind": kind, **fields}


def log_of(*stays: Stay, events: Sequence[dict[str, Any]] = ()) -> Log:
    return Log(list(stays), list(events), {one.peer: {f"id{one.peer}"} for one in stays}, 10, begun_at=1.0)


def test_a_fault_is_detected_when_another_peer_names_the_victim() -> None:
    before = [(0, 4.0, "lost", "id2"), (2, 5.1, "lost", "id2"), (0, 5.2, "claim", "id2"), (0, 5.3, "lost", "id1")]
    events = [event(by, at, kind, subject=subject) for by, at, kind, subject in before]
    events += [event(1, 5.9, "missing", peers=["id2"]), event(0, 6.5, "lost", subject="id2")]
    log = log_of(*(stay(peer, [], []) for peer in range(3)), events=events)
    assert detection_s(log, Fault(5, "kill", (2,)), 5.0) == (pytest.approx(0.9), "missing")
    assert detection_s(log, Fault(7, "kill", (2,)), 7.0) == (None, "")
    assert detection_s(log, Fault(5, "stop", (2,)), 5.0, until=5.5) == (None, "")
    assert detection_s(log, Fault(5, "partition", groups=((0, 1), (2,))), 5.0)[1] == "lost"


def test_digests_are_compared_at_equal_versions() -> None:
    assert digests([stay(0, [], [1, 2]), stay(1, [], [1, 2, 3])]) == (2, {}, [])
    other = digests([stay(0, [], [1]), stay(1, [], [1, 2], digest="b")])
    assert other == (1, {"0:1": {"a": [0], "b": [1]}}, [])
    killed = stay(1, [], [1, 60], digest="b", fate="kill", ended_at=61.0)
    assert digests([stay(0, [], [1, 2], digest="b"), killed]) == (1, {}, [])
    assert digests([stay(0, [], [50, 62]), killed])[2] == ["0:2"], "it reached nobody"


def test_the_report_of_a_kill_names_what_it_cost() -> None:
    steps = [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0]
    survivor, killed = stay(0, steps, [3.5, 9.5]), stay(1, steps[:4], [3.5], fate="kill", ended_at=4.5, exit=-9)
    log = log_of(survivor, killed, events=(event(0, 4.7, "lost", subject="id1"), event(0, 4.8, "takeover")))
    happened = [Happened(Fault(3.5, "kill", (1,)), 4.5), Happened(Fault(7.5, "slow", (0,), value="1mbit"), 8.5, "no")]
    figures = report(log, happened)
    kill, slow = figures["faults"]
    assert kill["detect_s"] == pytest.approx(0.2) and (kill["gap_s"], kill["gap_of"]) == (3.0, 0)
    assert slow["skipped"] == "no" and "gap_s" not in slow
    assert (figures["takeovers"], figures["step_s"]) == (1, 1.0)
    assert figures["final_digests"] == ["a"] and figures["versions_unequal"] == {}
    assert judge(figures, None) == []
    assert judge(figures, 2.0) == ["kill 1: p0 paused 3.0 s, over 2.0 s"]
    assert any("skipped: no" in line for line in lines_of(figures, figures))


def test_what_is_wrong_is_said() -> None:
    figures = report(log_of(stay(0, [1.0], [2.0]), stay(1, [1.0], [2.0], digest="b", exit=1)), [])
    assert judge({**figures, "leftovers": [12], "tracebacks": ["p0/session-0.err"]}, 1.0) == [
        "1 fragment versions have different digests: 0:1", "2 different anchors at the end", "p1 ended with 1",
        "traceback in p0/session-0.err", "processes are left: [12]",
    ]  # fmt: skip


# -- links ------------------------------------------------------------------------------------------------------------


def test_a_rate_sends_packets_in_turn_and_drops_what_is_too_late() -> None:
    pipe = Pipe(0, Shape(delay_s=0.5, rate=1e6))
    for name in b"abcdefghij":
        pipe.push(0.0, bytes([name]) * 100_000)
    assert pipe.dropped == 5, "four tenths of a second wait, and one is on its way"
    assert [len(pipe.pull(0.5 + 0.1 * number + 0.001)) for number in range(7)] == [0, 1, 1, 1, 1, 1, 0]
    pipe.push(9.0, b"x" * 100_000)
    assert pipe.next_at == pytest.approx(9.6), "the link was idle"
    slow = Pipe(0, Shape(rate=rate_bytes("1mbit")))
    for _ in range(8):
        slow.push(0.0, bytes(65000))
    assert (len(slow.pull(10.0)), slow.dropped) == (5, 3), "it still carries large packets"


@given(
    gaps=st.lists(st.floats(0, 0.1), min_size=1, max_size=40),
    jitter_s=st.floats(0, 0.05),
    rate=st.none() | st.floats(1e3, 1e9),
)
def test_packets_keep_their_order_and_none_comes_early(gaps: list[float], jitter_s: float, rate: float | None) -> None:
    shape, now, sent = Shape(0.05, jitter_s, 0.0, rate), 0.0, []
    pipe = Pipe(3, shape)
    for number, gap in enumerate(gaps):
        now += gap
        sent.append(now)
        pipe.push(now, bytes([number]))
    came = []
    while (at := pipe.next_at) is not None:
        for packet in pipe.pull(at):
            came.append(packet[0])
            assert at >= sent[packet[0]] + 0.05 - jitter_s - 1e-12, "sums of seconds are rounded"
    assert came == sorted(came) and len(came) + pipe.dropped == len(gaps)


ECHO = """
import socket, sys
far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
far.bind((sys.argv[1], 5001))
print("ready", flush=True)
while True:
    far.sendto(*far.recvfrom(100))
"""
PING = """
import socket, sys, time
near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
near.settimeout(float(sys.argv[2]))
near.connect((sys.argv[1], 5001))
for _ in range(5):
    begun_at = time.monotonic()
    near.send(b"x")
    near.recv(100)
    print(time.monotonic() - begun_at)
"""


@pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")
def test_an_emulated_link_delays_cuts_heals_and_leaves_nothing() -> None:
    def trips(patience_s: float) -> list[float]:
        command = [*links.command(0), sys.executable, "-c", PING, links.address(1), str(patience_s)]
        return [float(line) for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]

    with closing(Links(os.getpid(), Shape(delay_s=0.02))) as links:
        links.add(0)
        links.add(1)
        echo = [*links.command(1), sys.executable, "-c", ECHO, links.address(1)]
        with subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as far:
            try:
                assert far.stdout is not None and far.stdout.readline() == "ready\n"
                assert len(calm := trips(60)) == 5 and min(calm) >= 0.04
                assert links.worsen(1, "delay", "30ms") is None
                assert len(late := trips(60)) == 5 and min(late) >= 0.1
                assert links.fast(1) is None
                links.partition([[0], [1]])
                assert trips(0.05) == []
                links.heal()
                assert len(trips(60)) == 5
            finally:
                far.kill()
    assert f"-{os.getpid()}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
