"""Schedules of faults, and figures from logs written by hand; no process is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from chaos_peers import Happened
from chaos_report import Account, Log, Stay, accounts_of, detection_s, digests, longest_gap, rejoin, report
from chaos_schedule import Fault, ScheduleError, joins, parse, shuffled
from chaos_text import judge, lines_of

PLAN = "30:kill 2, 35:join, 60:stop 1, 65:cont 1, 80:partition 0,1|3,4, 90:heal, 100:slow 1 2mbit,104:restart 2"


def test_a_schedule_is_read_as_it_was_written() -> None:
    faults = parse(PLAN, 4)
    assert [str(fault) for fault in faults] == [
        "kill 2", "join", "stop 1", "cont 1", "partition 0,1|3,4", "heal", "slow 1 2mbit", "restart 2",
    ]  # fmt: skip
    assert [fault.at for fault in faults] == [30, 35, 60, 65, 80, 90, 100, 104]
    assert faults[4].groups == ((0, 1), (3, 4)) and faults[4].named == (0, 1, 3, 4)
    assert joins(faults) == 1
    assert parse("", 4) == []
    assert [fault.at for fault in parse("9.5:join, 2:kill 0", 2)] == [2, 9.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill 2", "is no fault"),
        ("3:explode 1", "is no fault"),
        ("3:kill", "expected 3:kill 1"),
        ("3:slow 1", "expected 3:slow 1 2mbit"),
        ("3:kill 9", "there is no peer 9 then"),
        ("3:kill 4, 5:join", "there is no peer 4 then"),
        ("3:kill 1, 5:stop 1", "peer 1 is ended then"),
        ("3:cont 1", "peer 1 is runs then"),
        ("3:restart 1", "peer 1 is runs then"),
        ("3:join 4", "too much"),
        ("3:partition 0,1", "needs the sides"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said) as refused:
        parse(text, 4)
    assert str(refused.value).startswith("--schedule: ") and "\n" not in str(refused.value)


def test_the_same_seed_draws_the_same_faults_and_they_can_be_done() -> None:
    kinds = ["kill", "stop", "term", "partition", "slow"]
    for seed in range(30):
        faults = shuffled(seed, 4, 10, 300, kinds)
        assert faults == shuffled(seed, 4, 10, 300, kinds)
        text = ", ".join(f"{fault.at}:{fault}" for fault in faults)
        assert [str(fault) for fault in parse(text, 4)] == [str(fault) for fault in faults]
    assert shuffled(1, 4, 10, 300, kinds) != shuffled(2, 4, 10, 300, kinds)
    with pytest.raises(ScheduleError, match="heal cannot be drawn"):
        shuffled(0, 4, 10, 300, ["heal"])


def test_the_longest_gap_counts_what_lies_before_a_fault_and_not_what_follows_the_next() -> None:
    steps = [0.0, 1.0, 2.0, 5.0, 6.0, 16.0]
    assert longest_gap(steps, 2.5, 5.5, 16.0) == 3.0
    assert longest_gap(steps, 2.5, 10.0, 16.0) == 4.0
    assert longest_gap(steps, 5.5, 5.6, 16.0) == pytest.approx(0.6)
    assert longest_gap(steps, 17.0, 30.0, 19.0) == 3.0, "it never took a step again"
    assert longest_gap([], 0.0, 1.0, 1.0) == 0.0


def stay(peer: int, steps: list[float], outer: list[float], digest: str = "a", **more: Any) -> Stay:
    """A process that ran from 0 to 100, with an outer step at each of the given times."""
    accounts = [
        Account(at, len([one for one in steps if one <= at]), 100 * (number + 1), {"0": f"{number + 1}:{digest}"})
        for number, at in enumerate(outer)
    ]
    summary: Mapping[str, Any] = {"anchor_digest": digest, "outer_steps": len(outer), "eval": {"loss": 2.0}}
    return Stay(
        peer, **{"started_at": 0.0, "ended_at": 100.0, "summary": summary, **more}, steps=steps, accounts=accounts
    )


def event(by: int, time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"by": by, "time": time, "kind": kind, **fields}


def log_of(*stays: Stay, events: tuple[dict[str, Any], ...] = ()) -> Log:
    return Log(list(stays), list(events), {one.peer: {f"id{one.peer}"} for one in stays}, 10, begun_at=1.0)


def test_a_fault_is_detected_by_the_first_event_of_another_peer_that_names_the_victim() -> None:
    log = log_of(
        stay(0, [], []), stay(1, [], []), stay(2, [], []),
        events=(
            event(0, 4.0, "lost", subject="id2"),
            event(2, 5.1, "lost", subject="id2"),
            event(0, 5.2, "claim", subject="id2"),
            event(0, 5.3, "lost", subject="id1"),
            event(1, 5.9, "missing", peers=["id2"]),
            event(0, 6.5, "lost", subject="id2"),
        ),
    )  # fmt: skip
    assert detection_s(log, Fault(5, "kill", (2,)), 5.0) == (pytest.approx(0.9), "missing")
    assert detection_s(log, Fault(7, "kill", (2,)), 7.0) == (None, "")
    assert detection_s(log, Fault(5, "stop", (2,)), 5.0, until=5.5) == (None, "")
    assert detection_s(log, Fault(5, "partition", groups=((0, 1), (2,))), 5.0)[1] == "lost"


def test_tokens_end_applied_discarded_or_in_flight_and_some_die() -> None:
    killed = stay(1, [1.0, 2.0, 3.0, 4.0, 5.0], [2.5], fate="kill", ended_at=5.5)
    log = log_of(stay(0, [1.0, 2.0, 3.0], [2.5]), killed, events=(event(0, 2.5, "discarded", tokens=7),))
    assert accounts_of(log) == {"processed": 80, "applied": 100, "discarded": 7, "in_flight": -27, "lost": 30}


def test_a_joiner_has_joined_when_a_contribution_of_its_was_merged() -> None:
    marks = {"imports": 13.0, "built": 14.0, "ready": 14.5}
    joiner = stay(1, [16.0, 17.0], [16.5, 18.0], started_at=10.0, marks=marks)
    log = log_of(stay(0, [], []), joiner)
    expected = {"total": 6.5, "imports": 3.0, "built": 1.0, "ready": 0.5, "first step": 1.5, "to merged": 0.5}
    assert rejoin(log, joiner) == expected
    late = log_of(stay(0, [], []), joiner, events=(event(1, 16.4, "discarded", tokens=1),))
    found = rejoin(late, joiner)
    assert found is not None and found["total"] == 8.0
    assert rejoin(log, stay(1, [16.0], [], started_at=10.0)) is None


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
    assert (figures["takeovers"], figures["step_s"], figures["calm_gap_s"]) == (1, 1.0, 1.0)
    assert figures["final_digests"] == ["a"] and figures["versions_unequal"] == {}
    assert judge(figures, None) == []
    assert judge(figures, 2.0) == ["kill 1: p0 paused 3.0 s, over 2.0 s"]
    assert any("skipped: no" in line for line in lines_of(figures, figures))


def test_what_is_wrong_is_said() -> None:
    figures = {
        **report(log_of(stay(0, [1.0], [2.0]), stay(1, [1.0], [2.0], digest="b", exit=1)), []),
        "leftovers": [12],
        "tracebacks": ["p0/session-0.err"],
    }
    assert judge(figures, 1.0) == [
        "1 fragment versions have different digests: 0:1",
        "2 different anchors at the end",
        "p1 ended with 1",
        "traceback in p0/session-0.err",
        "processes are left: [12]",
    ]
