"""What a swarm under faults came to: figures, and what is wrong.

All is read from what the peers wrote: a line of metrics.jsonl per inner step (`train.log_every=1`)
and per outer step, events.jsonl, and the JSON lines of stdout. All clocks are this machine's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.harness.chaos.peers import Happened, PeerProcess, RealSwarm
from tests.harness.chaos.schedule import ScheduledFault
from tests.harness.links.pipe import WORSE

WINDOW_S = 20.0  # what a fault causes shows within this time, and before the next trouble
UNDOING = ("join", "restart", "heal", "cont", "fast")  # they end a trouble, or cause none
LAST_WORDS_S = 10.0
NOT_NAMING = ("join", "refused")  # these tell of a peer that does something
NAMING = ("subject", "author", "instead_of", "donor")  # fields of an event that hold a peer


@dataclass(frozen=True)
class Account:
    """One outer step as a peer adopted it."""

    time: float
    applied: int  # swarm clock
    anchors: Mapping[str, str]  # fragment -> version:digest, of those that moved


@dataclass
class Stay:
    """One process of a peer."""

    peer: int
    started_at: float
    ended_at: float
    fate: str | None = None
    exit: int | None = 0
    summary: Mapping[str, Any] | None = None
    steps: list[float] = field(default_factory=list)  # when each inner step was done
    accounts: list[Account] = field(default_factory=list)
    over_at: float | None = None  # when it left its training loop


@dataclass
class Log:
    """The peers of one run. `by` of an event is the peer that logged it."""

    stays: list[Stay]
    events: list[dict[str, Any]]
    ids: Mapping[int, set[str]]
    tokens_per_step: int
    begun_at: float

    @property
    def ended_at(self) -> float:
        return max((one.accounts[-1].time for one in self.stays if one.accounts), default=0.0)

    def applied(self, before: float = math.inf) -> int:
        """Tokens that were applied before a time."""
        accounts = (account for one in self.stays for account in one.accounts)
        return max((one.applied for one in accounts if one.time < before), default=0)


def read(crowd: RealSwarm, begun_at: float, tokens_per_step: int) -> Log:
    """The logs of all processes of a run."""
    events: list[dict[str, Any]] = []
    ids: dict[int, set[str]] = {}
    for peer in sorted({one.peer for one in crowd.sessions}):
        logged = _json_lines(crowd.directory / f"p{peer}" / "events.jsonl")
        events += [{**event, "by": peer} for event in logged]
    for one in crowd.sessions:
        if one.address is not None:
            ids.setdefault(one.peer, set()).add(one.address.rsplit("/", 1)[1])
    events.sort(key=lambda event: event["time"])
    return Log([_stay(one) for one in crowd.sessions], events, ids, tokens_per_step, begun_at)


def _stay(session: PeerProcess) -> Stay:
    assert session.ended_at is not None
    over, summaries = session.said("status", "leaving"), session.said("summary")
    stay = Stay(session.peer, session.started_at, session.ended_at, session.fate, session.poll())
    stay.summary = summaries[-1]["summary"] if summaries else None
    stay.over_at = over[0]["time"] if over else None
    for row in _json_lines(session.directory / "metrics.jsonl"):
        if stay.started_at <= row["time"] <= stay.ended_at:
            if "loss" in row:
                stay.steps.append(row["time"])
            if "compute_s" in row:
                stay.accounts.append(Account(row["time"], row["tokens"], row.get("anchors") or {}))
    return stay


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a killed peer may have left half of one."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _detection_s(log: Log, fault: ScheduledFault, at: float, until: float) -> tuple[Any, str]:
    """Seconds until another peer's event names a victim, before `until`; and its kind."""
    # all leave at the end of the run
    silent = NOT_NAMING if fault.kind == "term" else (*NOT_NAMING, "leave")
    for event in log.events:
        if at <= event["time"] < until and event["kind"] not in silent:
            named = {event.get(key) for key in NAMING} | set(event.get("peers") or ())
            victims = [one for one in fault.named if named & log.ids.get(one, set())]
            if victims and event["by"] not in (*fault.peers, *victims):
                return event["time"] - at, event["kind"]
    return None, ""


def _resume_s(
    log: Log, fault: ScheduledFault, at: float, end: float, frozen: set[int]
) -> tuple[float, int | None]:
    """A survivor's longest gap between inner steps up to the next trouble, and whose it is."""
    since = at if fault.kind in UNDOING else 0.0  # what was undone had its own share of that time
    hit = frozen | set(() if fault.kind in (*WORSE, "fast") else fault.peers)
    longest: tuple[float, int | None] = 0.0, None
    for one in log.stays:
        until = one.over_at or one.ended_at
        if one.peer not in hit and one.steps and one.steps[0] < at <= until:
            times = [*(max(since, step) for step in one.steps), until]
            gaps = (min(b, end) - a for a, b in pairwise(times) if b > at and a < end)
            longest = max(longest, (max(gaps, default=0.0), one.peer), key=lambda gap: gap[0])
    return longest


def _joined_s(log: Log, stay: Stay) -> float | None:
    """From a process's start to its first merged contribution; None without one."""
    discarded = [event["time"] for event in _discarded(log) if event["by"] == stay.peer]
    since = stay.started_at
    for account in stay.accounts:
        trained = stay.steps and account.time > stay.steps[0]
        if trained and not any(since < at <= account.time for at in discarded):
            return account.time - stay.started_at
        since = account.time
    return None


def _digests(stays: Iterable[Stay]) -> tuple[int, list[str]]:
    """How many versions of fragments several peers have logged, and those with several digests.

    What an author made just before it was killed may have reached nobody. Another one then makes
    that version anew.
    """
    seen: dict[str, list[tuple[str, int]]] = {}
    for one in stays:
        until = one.ended_at - LAST_WORDS_S if one.fate == "kill" else math.inf
        for account in (account for account in one.accounts if account.time <= until):
            for fragment, at in account.anchors.items():
                version, digest = at.split(":")
                seen.setdefault(f"{fragment}:{version}", []).append((digest, one.peer))
    shared = sum(len({peer for _, peer in found}) > 1 for found in seen.values())
    return shared, [key for key, found in seen.items() if len({one for one, _ in found}) > 1]


def _discarded(log: Log) -> list[dict[str, Any]]:
    """Each fragment has its account; the control fragment's is the swarm's."""
    told = [event for event in log.events if event["kind"] == "discarded"]
    return [event for event in told if event.get("fragment", 0) == 0]


def report(log: Log, happened: Sequence[Happened]) -> dict[str, Any]:
    """All figures of a run, as JSON."""
    shared, unequal = _digests(log.stays)
    summaries = [one.summary for one in log.stays if one.summary and one.fate is None]
    losses = [(one["outer_steps"], one["eval"]["loss"]) for one in summaries if one.get("eval")]
    gaps = [b - a for one in log.stays for a, b in pairwise(one.steps)]
    adopted = [[account.time for account in one.accounts] for one in log.stays]
    rounds = [b - a for times in adopted for a, b in pairwise(times)]
    seconds = log.ended_at - log.begun_at
    processed = sum(len(one.steps) for one in log.stays) * log.tokens_per_step
    discarded = sum(int(event.get("tokens") or 0) for event in _discarded(log))
    return {
        "step_s": statistics.median(gaps) if gaps else 0.0,
        "round_s": statistics.median(rounds) if rounds else 0.0,
        "seconds": seconds,
        "tokens": {"processed": processed, "applied": log.applied(), "discarded": discarded},
        "tokens_per_s": (log.applied() - log.applied(log.begun_at)) / max(1e-9, seconds),
        "faults": list(_faults(log, happened)),
        "joins": [
            {"peer": one.peer, "at": one.started_at - log.begun_at, "merged_s": _joined_s(log, one)}
            for one in log.stays
            if one.started_at > log.begun_at
        ],
        "takeovers": sum(event["kind"] == "takeover" for event in log.events),
        "versions_shared": shared,
        "versions_unequal": unequal,
        "final_digests": sorted({str(one["peers"][0]["anchor_digest"]) for one in summaries}),
        "eval_loss": max((one for one in losses if one[1]), default=(0, None))[1],
        "exits": [{"peer": one.peer, "fate": one.fate, "exit": one.exit} for one in log.stays],
    }


def _faults(log: Log, happened: Sequence[Happened]) -> Iterator[dict[str, Any]]:
    frozen: set[int] = set()
    for index, one in enumerate(happened):
        fault, at = one.fault, one.time
        row = {"at": at - log.begun_at, "fault": str(fault), "skipped": one.skipped}
        if one.skipped is None:
            later = (one.time for one in happened[index + 1 :] if one.fault.kind not in UNDOING)
            end = min(next(later, log.ended_at), at + WINDOW_S)
            if fault.kind not in UNDOING:
                until = _undone_at(happened, index)
                row["detect_s"], row["detected_by"] = _detection_s(log, fault, at, until)
            row["gap_s"], row["gap_of"] = _resume_s(log, fault, at, end, frozen)
            stops = fault.kind == "stop"
            frozen = frozen | set(fault.peers) if stops else frozen - set(fault.peers)
        yield row


def _undone_at(happened: Sequence[Happened], index: int) -> float:
    """When a frozen peer goes on, or the sides meet: then victims are named for that reason."""
    fault = happened[index].fault
    kind = {"stop": "cont", "partition": "heal"}.get(fault.kind)
    undoing = (one for one in happened[index:] if one.fault.kind == kind)
    return next((one.time for one in undoing if one.fault.peers == fault.peers), math.inf)


def judge(figures: Mapping[str, Any], pause_limit_s: float = math.inf) -> list[str]:
    """What is wrong with a run, one line each."""
    problems, unequal = [], figures["versions_unequal"]
    if unequal and not any("partition" in row["fault"] for row in figures["faults"]):
        problems.append(f"{len(unequal)} versions have different digests: {unequal[:4]}")
    if len(figures["final_digests"]) != 1:
        problems.append(f"{len(figures['final_digests'])} different anchors at the end")
    for row in figures["faults"]:
        if (gap_s := row.get("gap_s", 0.0)) > pause_limit_s:
            said = f"p{row['gap_of']} paused {gap_s:.1f} s, over {pause_limit_s:.1f} s"
            problems.append(f"{row['fault']}: {said}")
    for one in figures["exits"]:
        if one["fate"] != "kill" and one["exit"] != 0:
            problems.append(f"p{one['peer']} ended with {one['exit']}")
    late = [one for one in figures["joins"] if one["late"] and not one["merged_s"]]
    problems += [f"p{one['peer']} never contributed" for one in late]
    problems += [f"traceback in {place}" for place in figures.get("tracebacks", ())]
    if figures.get("leftovers"):
        problems.append(f"processes are left: {figures['leftovers']}")
    return problems


def lines_of(figures: Mapping[str, Any], calm: Mapping[str, Any] | None) -> Iterator[str]:
    """The report as a text table."""
    yield (
        f"{figures['seconds']:.1f} s, inner step {figures['step_s'] * 1e3:.0f} ms, outer step"
        f" {figures['round_s']:.2f} s (medians)"
    )
    yield ""
    yield f"{'at':>7}  {'fault':24} {'T_detect':>9} {'by':18} {'T_resume':>9} of"
    for row in figures["faults"]:
        start = f"{row['at']:6.1f}s  {row['fault']:24} "
        if row["skipped"]:
            yield start + f"skipped: {row['skipped']}"
            continue
        seconds = row.get("detect_s")
        detected = " " * 9 if seconds is None else f"{seconds:8.2f}s"
        of = "" if row["gap_of"] is None else f"p{row['gap_of']}"
        yield f"{start}{detected} {row.get('detected_by', ''):18} {row['gap_s']:8.2f}s {of}"
    yield ""
    for one in figures["joins"]:
        merged = "never" if one["merged_s"] is None else f"after {one['merged_s']:.2f} s"
        yield f"p{one['peer']} started at {one['at']:.1f} s; first contribution merged {merged}"
    counts = [f"{name} {count}" for name, count in figures["tokens"].items()]
    yield f"tokens: {', '.join(counts)}; takeovers {figures['takeovers']}"
    shared, unequal = figures["versions_shared"], len(figures["versions_unequal"])
    yield f"versions of fragments on several peers {shared}, with different digests {unequal}"
    loss = "none" if figures["eval_loss"] is None else f"{figures['eval_loss']:.4f}"
    yield f"applied {figures['tokens_per_s']:.1f} tokens/s, held-out loss {loss}"
    if calm is not None:
        share = figures["tokens_per_s"] / max(1e-9, calm["tokens_per_s"])
        yield (
            f"without faults {calm['tokens_per_s']:.1f} tokens/s, outer step"
            f" {calm['round_s']:.2f} s, held-out loss {calm['eval_loss']:.4f} after"
            f" {calm['tokens']['applied']} tokens: goodput {share:.1%}"
        )
