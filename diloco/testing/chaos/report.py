"""What a swarm under faults came to: figures, and what is wrong. Imported by `chaos`.

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

from diloco.testing.chaos.peers import Happened, PeerProcess, RealSwarm
from diloco.testing.chaos.schedule import ScheduledFault
from diloco.testing.links.pipe import WORSE

WINDOW_S = 20.0  # what a fault causes shows within this time, and before the next trouble
UNDOING = ("join", "restart", "heal", "cont", "fast")  # they end a trouble, or cause none
LAST_WORDS_S = 10.0
NOT_NAMING = ("join", "refused")  # these tell of a peer that does something


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

    @property
    def trained_until(self) -> float:
        return self.over_at or self.ended_at


@dataclass
class Log:
    """The peers of one run."""

    stays: list[Stay]
    events: list[dict[str, Any]]  # of all peers; `by` is the number of the peer that logged it
    ids: Mapping[int, set[str]]
    tokens_per_step: int
    begun_at: float

    @property
    def ended_at(self) -> float:
        return max(
            (one.accounts[-1].time for one in self.stays if one.accounts), default=self.begun_at
        )

    @property
    def applied(self) -> int:
        return max((account.applied for one in self.stays for account in one.accounts), default=0)

    @property
    def rate(self) -> float:
        """Applied tokens per second, from when all trained."""
        before = max(
            (a.applied for s in self.stays for a in s.accounts if a.time < self.begun_at), default=0
        )
        return (self.applied - before) / max(1e-9, self.ended_at - self.begun_at)


def read(crowd: RealSwarm, begun_at: float, tokens_per_step: int) -> Log:
    """The logs of all processes of a run."""
    events: list[dict[str, Any]] = []
    ids: dict[int, set[str]] = {}
    for peer in sorted({one.peer for one in crowd.sessions}):
        events += [
            {**event, "by": peer}
            for event in _json_lines(crowd.directory / f"p{peer}" / "events.jsonl")
        ]
    for one in crowd.sessions:
        if one.address is not None:
            ids.setdefault(one.peer, set()).add(one.address.rsplit("/", 1)[1])
    return Log([_stay(one) for one in crowd.sessions], events, ids, tokens_per_step, begun_at)


def _stay(session: PeerProcess) -> Stay:
    assert session.process is not None and session.ended_at is not None
    over, summaries = session.said("status", "leaving"), session.said("summary")
    summary = summaries[-1]["summary"] if summaries else None
    stay = Stay(
        session.peer, session.started_at, session.ended_at, session.fate, session.poll(), summary
    )
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
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _detection_s(
    log: Log, fault: ScheduledFault, at: float, until: float = math.inf
) -> tuple[float | None, str]:
    """Seconds until another peer's event names a victim, and its kind; from `until` on it would be
    too late."""
    # all leave at the end of the run
    silent = NOT_NAMING if fault.kind == "term" else (*NOT_NAMING, "leave")
    for event in sorted(log.events, key=lambda event: event["time"]):
        if (
            not at <= event["time"] < until
            or event["kind"] in silent
            or (fault.peers and event["by"] in fault.peers)
        ):
            continue
        named = {event.get(key) for key in ("subject", "author", "instead_of", "donor")} | set(
            event.get("peers") or ()
        )
        for victim in fault.named:
            if event["by"] != victim and named & log.ids.get(victim, set()):
                return event["time"] - at, event["kind"]
    return None, ""


def _longest_gap(times: Sequence[float], start: float, end: float, until: float) -> float:
    """Longest time without a step that touches [start, end], with what lies before but not what
    comes after.

    Steps went on, or ought to have, to `until`.
    """
    return max(
        (min(b, end) - a for a, b in pairwise([*times, until]) if b > start and a < end),
        default=0.0,
    )


def _resume_s(
    log: Log, fault: ScheduledFault, at: float, end: float, frozen: set[int]
) -> tuple[float, int | None]:
    """Longest gap between inner steps of a survivor, and whose."""
    since = at if fault.kind in UNDOING else 0.0  # what was undone had its own share of that time
    hit = frozen | set(() if fault.kind in (*WORSE, "fast") else fault.peers)
    gaps = [
        (
            _longest_gap([max(since, step) for step in one.steps], at, end, one.trained_until),
            one.peer,
        )
        for one in log.stays
        if one.peer not in hit and one.steps and one.steps[0] < at <= one.trained_until
    ]
    return max(gaps, default=(0.0, None))


def _joined_s(log: Log, stay: Stay) -> float | None:
    """From a process's start to its first contribution that was merged and not discarded; None if
    there is none."""
    discarded = [e["time"] for e in _discarded(log) if e["by"] == stay.peer]
    since = stay.started_at
    for account in stay.accounts:
        if (
            stay.steps
            and account.time > stay.steps[0]
            and not any(since < at <= account.time for at in discarded)
        ):
            return account.time - stay.started_at
        since = account.time
    return None


Unequal = dict[str, dict[str, list[int]]]  # fragment:version -> digest -> peers


def _digests(stays: Iterable[Stay]) -> tuple[int, Unequal, list[str]]:
    """How many fragment versions several peers have logged; those with different digests; and those
    that died.

    What an author made just before it was killed may have reached nobody. Another one then makes
    that version anew.
    """
    living: Unequal = {}
    dying: Unequal = {}
    for one in stays:
        for account in one.accounts:
            last_words = one.fate == "kill" and account.time > one.ended_at - LAST_WORDS_S
            seen = dying if last_words else living
            for fragment, at in account.anchors.items():
                version, digest = at.split(":")
                seen.setdefault(f"{fragment}:{version}", {}).setdefault(digest, []).append(one.peer)
    shared = sum(len({peer for who in by.values() for peer in who}) > 1 for by in living.values())
    died = [
        key for key, by in dying.items() if key in living and not by.keys() <= living[key].keys()
    ]
    return shared, {key: by for key, by in living.items() if len(by) > 1}, died


def _discarded(log: Log) -> Iterator[dict[str, Any]]:
    """Each fragment has its account; the control fragment's is the swarm's."""
    return (
        event
        for event in log.events
        if event["kind"] == "discarded" and event.get("fragment", 0) == 0
    )


def _tokens(log: Log) -> dict[str, int]:
    """Tokens: what was trained on, and what became of it."""
    processed = sum(len(one.steps) for one in log.stays) * log.tokens_per_step
    discarded = sum(int(event.get("tokens") or 0) for event in _discarded(log))
    flying = processed - log.applied - discarded
    return {
        "processed": processed,
        "applied": log.applied,
        "discarded": discarded,
        "in_flight": flying,
    }


def report(log: Log, happened: Sequence[Happened]) -> dict[str, Any]:
    """All figures of a run, as JSON."""
    shared, unequal, died = _digests(log.stays)
    ends = {
        one.summary["peers"][0]["anchor_digest"]
        for one in log.stays
        if one.summary and one.fate is None
    }
    evaluated = [
        one.summary
        for one in log.stays
        if one.summary and (one.summary.get("eval") or {}).get("loss")
    ]
    furthest = max(evaluated, key=lambda summary: int(summary["outer_steps"]), default=None)
    kinds = [event["kind"] for event in log.events]
    gaps = [b - a for one in log.stays for a, b in pairwise(one.steps)]
    return {
        "step_s": statistics.median(gaps) if gaps else 0.0,
        "seconds": log.ended_at - log.begun_at,
        "tokens": _tokens(log),
        "tokens_per_s": log.rate,
        "faults": list(_faults(log, happened)),
        "joins": [
            {"peer": one.peer, "at": one.started_at - log.begun_at, "merged_s": _joined_s(log, one)}
            for one in log.stays
            if one.started_at > log.begun_at
        ],
        "takeovers": kinds.count("takeover"),
        "heals": sum(int((one.summary or {}).get("heals") or 0) for one in log.stays),
        "digest_mismatches": kinds.count("digest_mismatch"),
        "versions_shared": shared,
        "versions_unequal": unequal,
        "versions_died": died,
        "final_digests": sorted(str(digest) for digest in ends),
        "eval_loss": furthest["eval"]["loss"] if furthest else None,
        "exits": [{"peer": one.peer, "fate": one.fate, "exit": one.exit} for one in log.stays],
    }


def _faults(log: Log, happened: Sequence[Happened]) -> Iterator[dict[str, Any]]:
    frozen: set[int] = set()
    for index, one in enumerate(happened):
        fault = one.fault
        row: dict[str, Any] = {
            "at": one.time - log.begun_at,
            "fault": str(fault),
            "skipped": one.skipped,
        }
        if one.skipped is None:
            following = (
                later.time for later in happened[index + 1 :] if later.fault.kind not in UNDOING
            )
            end = min(next(following, log.ended_at), one.time + WINDOW_S)
            row["window_s"] = end - one.time
            if fault.kind not in UNDOING:
                row["detect_s"], row["detected_by"] = _detection_s(
                    log, fault, one.time, _undone_at(happened, index)
                )
            elif fault.kind == "heal":  # to the last hello between the sides
                hellos = [
                    event["time"] - one.time for event in log.events if event["kind"] == "join"
                ]
                met = (after for after in hellos if 0 < after < end - one.time)
                row["detect_s"], row["detected_by"] = max(met, default=None), "all met"
            row["gap_s"], row["gap_of"] = _resume_s(log, fault, one.time, end, frozen)
            if fault.kind == "cont":
                steps = [
                    a.time - one.time
                    for s in log.stays
                    if s.peer in fault.peers
                    for a in s.accounts
                ]
                row["back_s"] = min((after for after in steps if after > 0), default=None)
            frozen = (
                (frozen | set(fault.peers)) if fault.kind == "stop" else frozen - set(fault.peers)
            )
        yield row


def _undone_at(happened: Sequence[Happened], index: int) -> float:
    """When a frozen peer goes on, or the sides meet again: what names the victims then has another
    reason."""
    kind = {"stop": "cont", "partition": "heal"}.get(happened[index].fault.kind)
    peers = happened[index].fault.peers
    return next(
        (o.time for o in happened[index:] if o.fault.kind == kind and o.fault.peers == peers),
        math.inf,
    )


def judge(figures: Mapping[str, Any], pause_limit_s: float | None) -> list[str]:
    """What is wrong with a run, one line each."""
    problems = []
    if figures["versions_unequal"] and not any(
        "partition" in row["fault"] for row in figures["faults"]
    ):
        some = ", ".join(list(figures["versions_unequal"])[:4])
        problems.append(
            f"{len(figures['versions_unequal'])} fragment versions have different digests: {some}"
        )
    if len(figures["final_digests"]) != 1:
        problems.append(f"{len(figures['final_digests'])} different anchors at the end")
    for row in figures["faults"]:
        if pause_limit_s is not None and row.get("gap_s", 0.0) > pause_limit_s:
            problems.append(
                f"{row['fault']}: p{row['gap_of']} paused {row['gap_s']:.1f} s, over"
                f" {pause_limit_s:.1f} s"
            )
    for one in figures["exits"]:
        if one["fate"] != "kill" and one["exit"] != 0:
            problems.append(f"p{one['peer']} ended with {one['exit']}")
    problems += [
        f"p{one['peer']} never contributed"
        for one in figures["joins"]
        if one["late"] and not one["merged_s"]
    ]
    problems += [f"traceback in {place}" for place in figures.get("tracebacks", ())]
    if figures.get("leftovers"):
        problems.append(f"processes are left: {figures['leftovers']}")
    return problems


def lines_of(figures: Mapping[str, Any], calm: Mapping[str, Any] | None) -> Iterator[str]:
    """The report as a text table."""
    yield f"{figures['seconds']:.1f} s, inner step {figures['step_s'] * 1e3:.0f} ms (median)"
    yield ""
    yield f"{'at':>7}  {'fault':24} {'T_detect':>9} {'by':18} {'T_resume':>9} {'of':4} {'back':>6}"
    for row in figures["faults"]:
        start = f"{row['at']:6.1f}s  {row['fault']:24} "
        if row["skipped"]:
            yield start + f"skipped: {row['skipped']}"
            continue
        of = "" if row["gap_of"] is None else f"p{row['gap_of']}"
        detected, back = _seconds(row.get("detect_s")), _seconds(row.get("back_s"), 6)
        yield (
            f"{start}{detected} {row.get('detected_by', ''):18} {_seconds(row['gap_s'])} {of:4}"
            f" {back}"
        )
    yield ""
    for join in figures["joins"]:
        merged = "never" if join["merged_s"] is None else f"after {join['merged_s']:.2f} s"
        yield (
            f"p{join['peer']} started at {join['at']:.1f} s; its first contribution is merged:"
            f" {merged}"
        )
    yield "tokens: " + ", ".join(f"{name} {count}" for name, count in figures["tokens"].items())
    yield ", ".join(
        f"{name.replace('_', ' ')} {figures[name]}"
        for name in ("takeovers", "heals", "digest_mismatches")
    )
    yield (
        f"fragment versions on several peers {figures['versions_shared']}, with different digests"
        f" {len(figures['versions_unequal'])}, died with their author"
        f" {len(figures['versions_died'])}; anchors at the end: {len(figures['final_digests'])}"
    )
    loss = "none" if figures["eval_loss"] is None else f"{figures['eval_loss']:.4f}"
    yield f"applied {figures['tokens_per_s']:.1f} tokens/s, held-out loss {loss}"
    if calm is not None:
        share = figures["tokens_per_s"] / max(1e-9, calm["tokens_per_s"])
        yield (
            f"without faults {calm['tokens_per_s']:.1f} tokens/s, held-out loss"
            f" {calm['eval_loss']:.4f} after {calm['tokens']['applied']} tokens: goodput"
            f" {share:.1%}"
        )


def _seconds(value: float | None, width: int = 9) -> str:
    return " " * width if value is None else f"{value:{width - 1}.2f}s"
