"""Reads the directories that a swarm left, judges its figures and prints them. Imported by `chaos`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.testing.chaos.peers import Crowd, Session
from diloco.testing.chaos.report import Account, Log, Stay

__all__ = ["judge", "lines_of", "read"]


def read(crowd: Crowd, begun_at: float, tokens_per_step: int) -> Log:
    """The logs of all processes of a run."""
    events: list[dict[str, Any]] = []
    ids: dict[int, set[str]] = {}
    for peer in sorted({one.peer for one in crowd.sessions}):
        events += [{**event, "by": peer} for event in _json_lines(crowd.directory / f"p{peer}" / "events.jsonl")]
    for one in crowd.sessions:
        if one.address is not None:
            ids.setdefault(one.peer, set()).add(one.address.rsplit("/", 1)[1])
    return Log([_stay(one) for one in crowd.sessions], events, ids, tokens_per_step, begun_at)


def _stay(session: Session) -> Stay:
    assert session.process is not None and session.ended_at is not None
    summaries = session.said("summary")
    over = session.said("status", "leaving")
    stay = Stay(
        session.peer,
        session.started_at,
        session.ended_at,
        session.fate,
        session.poll(),
        _marks(session),
        summaries[-1] if summaries else None,
        over_at=over[0]["time"] if over else None,
    )
    for row in _json_lines(session.directory / "metrics.jsonl"):
        if stay.started_at <= row["time"] <= stay.ended_at:
            if "loss" in row:
                stay.steps.append(row["time"])
            if "compute_s" in row:
                stay.accounts.append(Account(row["time"], row["inner_step"], row["tokens"], row.get("anchors") or {}))
    return stay


def _marks(session: Session) -> dict[str, float]:
    marks = {}
    checkpoints = session.directory / "checkpoints"
    # The first thing after the imports, and touched by nothing later; a peer that comes back finds it there.
    if session.number == 0 and checkpoints.is_dir():
        marks["imports"] = checkpoints.stat().st_mtime
    for name, said in (("built", session.said("status", "waiting")), ("ready", session.said("ready"))):
        if said:
            marks[name] = said[0]["time"]
    return marks


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a killed peer may have left half of one."""
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def judge(figures: Mapping[str, Any], pause_limit_s: float | None) -> list[str]:
    """What is wrong with a run, one line each."""
    problems = []
    if figures["versions_unequal"] and not any("partition" in row["fault"] for row in figures["faults"]):
        some = ", ".join(list(figures["versions_unequal"])[:4])
        problems.append(f"{len(figures['versions_unequal'])} fragment versions have different digests: {some}")
    if len(figures["final_digests"]) != 1:
        problems.append(f"{len(figures['final_digests'])} different anchors at the end")
    for row in figures["faults"]:
        if pause_limit_s is not None and row.get("gap_s", 0.0) > pause_limit_s:
            problems.append(f"{row['fault']}: p{row['gap_of']} paused {row['gap_s']:.1f} s, over {pause_limit_s:.1f} s")
    for one in figures["exits"]:
        if one["fate"] != "kill" and one["exit"] != 0:
            problems.append(f"p{one['peer']} ended with {one['exit']}")
    problems += [f"p{one['peer']} never contributed" for one in figures["joins"] if one["late"] and not one["parts"]]
    problems += [f"traceback in {place}" for place in figures.get("tracebacks", ())]
    if figures.get("leftovers"):
        problems.append(f"processes are left: {figures['leftovers']}")
    return problems


def lines_of(figures: Mapping[str, Any], calm: Mapping[str, Any] | None) -> Iterator[str]:
    """The report as a text table."""
    tokens = figures["tokens"]
    yield (
        f"{figures['seconds']:.1f} s, inner step {figures['step_s'] * 1e3:.0f} ms (median), longest gap between steps "
        f"before the first fault {figures['calm_gap_s'] * 1e3:.0f} ms"
    )
    yield ""
    yield f"{'at':>7}  {'fault':24} {'T_detect':>9} {'by':18} {'T_resume':>9} {'of':4} {'back':>6}"
    for row in figures["faults"]:
        start = f"{row['at']:6.1f}s  {row['fault']:24} "
        if row["skipped"]:
            yield start + f"skipped: {row['skipped']}"
            continue
        of = "" if row["gap_of"] is None else f"p{row['gap_of']}"
        detected = _seconds(row.get("detect_s"))
        yield (
            start
            + f"{detected} {row.get('detected_by', ''):18} {_seconds(row['gap_s'])} {of:4} "
            + _seconds(row.get("back_s"), 6)
        )
    yield ""
    for join in figures["joins"]:
        parts = join["parts"] or {}
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if name != "total")
        total = f"{parts['total']:.2f} s ({shown})" if parts else "never merged"
        yield f"p{join['peer']} started at {join['at']:.1f} s; to its first merged contribution: {total}"
    yield "tokens: " + ", ".join(f"{name} {count}" for name, count in tokens.items())
    yield (
        f"takeovers {figures['takeovers']} (momentum restarted {figures['momentum_restarted']}), heals "
        f"{figures['heals']}, digest mismatches {figures['digest_mismatches']}"
    )
    yield (
        f"fragment versions on several peers {figures['versions_shared']}, with different digests "
        f"{len(figures['versions_unequal'])}, died with their syncer {len(figures['versions_died'])}; anchors at the "
        f"end: {len(figures['final_digests'])}"
    )
    loss = "none" if figures["eval_loss"] is None else f"{figures['eval_loss']:.4f}"
    yield f"applied {figures['tokens_per_s']:.1f} tokens/s, held-out loss {loss}"
    if calm is not None:
        share = figures["tokens_per_s"] / max(1e-9, calm["tokens_per_s"])
        yield (
            f"without faults {calm['tokens_per_s']:.1f} tokens/s, held-out loss {calm['eval_loss']:.4f} after "
            f"{calm['tokens']['applied']} tokens, longest gap {calm['calm_gap_s'] * 1e3:.0f} ms: goodput {share:.1%}"
        )


def _seconds(value: float | None, width: int = 9) -> str:
    return " " * width if value is None else f"{value:{width - 1}.2f}s"
