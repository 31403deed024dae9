"""Schedules of faults, figures from logs written by hand, links in virtual time, and a router."""

import socket
import struct
from collections.abc import Mapping
from typing import Any

import pytest

from tests.harness.chaos.peers import Happened
from tests.harness.chaos.report import Account, Log, Stay, judge, lines_of, report
from tests.harness.chaos.schedule import ScheduledFault, ScheduleError, parse
from tests.harness.links.pipe import Pipe, Shape, rate_bytes
from tests.harness.links.router import Router

PLAN = (
    "30:kill 2, 35:join, 60:stop 1, 65:cont 1, 80:partition 0,1|3,4, 90:heal, 100:slow 1"
    " 2mbit,104:restart 2"
)


def test_a_schedule_is_read_as_it_was_written() -> None:
    faults = parse(PLAN, 4)
    assert ",".join(f"{fault.at:.0f}:{fault}" for fault in faults) == PLAN.replace(", ", ",")
    assert faults[4].groups == ((0, 1), (3, 4)) and faults[4].named == (0, 1, 3, 4)
    assert parse("", 4) == []
    assert [fault.at for fault in parse("9.5:join, 2:kill 0", 2)] == [2, 9.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5:explode 1", "'5:explode 1' is no fault; expected SECOND:KIND ..., KIND of kill, "),
        ("5:partition 0,1", "'5:partition 0,1' is wrong; expected 5:partition 0,1|2,3"),
        ("5:slow 1", "'5:slow 1' is wrong; expected 5:slow 1 2mbit"),
        ("5:slow 1 2", "'5:slow 1 2': '2' is not a rate such as 2mbit"),
        ("5:kill 9", "5:kill 9: there is no peer 9 then"),
        ("5:kill 1, 6:stop 1", "6:stop 1: peer 1 is ended then"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse(text, 4)
    assert str(error.value).startswith(f"--schedule: {said}")


def stay(peer: int, steps: list[float], outer: list[float], digest: str = "a", **more: Any) -> Stay:
    """A process that ran from 0 to 100, with an outer step at each of the given times."""
    accounts = [
        Account(at, 100 * number, {"0": f"{number}:{digest}"}) for number, at in enumerate(outer, 1)
    ]
    ends = {"outer_steps": len(outer), "eval": {"loss": 2.0}}
    summary: Mapping[str, Any] = {"peers": [{"anchor_digest": digest}], **ends}
    known = {"started_at": 0.0, "ended_at": 100.0, "summary": summary, **more}
    return Stay(peer, **known, steps=steps, accounts=accounts)


def event(by: int, time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"by": by, "time": time, "kind": kind, **fields}


def test_the_report_of_a_kill_names_what_it_cost() -> None:
    steps = [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0]
    killed = stay(1, steps[:4], [3.5], fate="kill", ended_at=4.5, exit=-9)
    happened = [event(0, 4.7, "lost", subject="id1"), event(0, 4.8, "takeover")]
    ids = {0: {"id0"}, 1: {"id1"}}
    log = Log([stay(0, steps, [3.5, 9.5]), killed], happened, ids, 10, begun_at=1.0)
    slow = Happened(ScheduledFault(7.5, "slow", (0,), value="1mbit"), 8.5, "no")
    figures = report(log, [Happened(ScheduledFault(3.5, "kill", (1,)), 4.5), slow])
    kill, skipped = figures["faults"]
    assert kill["detect_s"] == pytest.approx(0.2) and (kill["gap_s"], kill["gap_of"]) == (3.0, 0)
    assert skipped["skipped"] == "no" and "gap_s" not in skipped
    assert (figures["takeovers"], figures["step_s"]) == (1, 1.0)
    assert figures["final_digests"] == ["a"] and figures["versions_unequal"] == []
    assert judge(figures) == []
    assert judge(figures, 2.0) == ["kill 1: p0 paused 3.0 s, over 2.0 s"]
    assert any("skipped: no" in line for line in lines_of(figures, figures))


# -- links -----------------------------------------------------------------------------------------


def test_a_rate_sends_packets_in_turn_and_drops_what_is_too_late() -> None:
    pipe = Pipe(0, Shape(delay_s=0.5, rate=1e6))
    for name in b"abcdefghij":
        pipe.push(0.0, bytes([name]) * 100_000)
    assert pipe.dropped == 5, "four tenths of a second wait, and one is on its way"
    came = [len(pipe.pull(0.5 + 0.1 * number + 0.001)) for number in range(7)]
    assert came == [0, 1, 1, 1, 1, 1, 0]
    pipe.push(9.0, b"x" * 100_000)
    assert pipe.next_at == pytest.approx(9.6), "the link was idle"
    slow = Pipe(0, Shape(rate=rate_bytes("1mbit")))
    for _ in range(8):
        slow.push(0.0, bytes(65000))
    assert (len(slow.pull(10.0)), slow.dropped) == (5, 3), "it still carries large packets"


# -- a router --------------------------------------------------------------------------------------

HOME, PUBLIC, MOVED, HOST = "192.168.1.2", "203.0.113.20", "203.0.113.30", "203.0.113.7"


def checksum(data: bytes) -> int:
    """The internet checksum of an even number of bytes; 0 over what contains a right one."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def tcp(source: str, target: str, ports: tuple[int, int]) -> bytes:
    """A TCP packet with 16 bytes of data."""
    ends = socket.inet_aton(source) + socket.inet_aton(target)
    body = struct.pack(">HHIIBBHHH", *ports, 7, 9, 0x50, 0x18, 500, 0, 0) + bytes(range(240, 256))
    total = checksum(ends + struct.pack(">HH", 6, len(body)) + body)
    body = body[:16] + total.to_bytes(2) + body[18:]
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 3, 0, 64, 6, 0) + ends
    return head[:10] + checksum(head).to_bytes(2) + head[12:] + body


def test_a_router_lets_in_answers_only() -> None:
    router = Router(socket.inet_aton(PUBLIC))
    answer = tcp(HOST, PUBLIC, (4100, 5000))
    assert router.come(answer) is None, "nobody has asked"
    assert router.leave(tcp(HOME, HOST, (5000, 4100))) == tcp(PUBLIC, HOST, (5000, 4100))
    assert router.come(answer) == tcp(HOST, HOME, (4100, 5000))
    for other in (tcp(HOST, PUBLIC, (4101, 5000)), tcp(MOVED, PUBLIC, (4100, 5000))):
        assert router.come(other) is None
    router.move(socket.inet_aton(MOVED))
    assert router.come(answer) is None
    assert router.leave(tcp(HOME, HOST, (5000, 4100))) == tcp(MOVED, HOST, (5000, 4100))
    assert router.leave(tcp(HOST, HOME, (5000, 4100))) is None, "it is not from here"
