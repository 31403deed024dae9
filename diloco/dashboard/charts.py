"""Turns a snapshot into options for ECharts and rows for tables. Pure functions; called once for all pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from diloco.protocol.snapshot import LossPoint, PeerRound, Snapshot
from diloco.rundir.compare import Run
from diloco.rundir.gaps import gap_so_far, is_baseline
from diloco.text import human_bytes, human_count, human_seconds, sparkline

__all__ = [
    "contribution_rows", "event_rows", "fragment_map", "fragment_rows", "held_out", "loss_by_time", "loss_by_tokens",
    "peer_rows", "timeline",
]  # fmt: skip

COLOURS = ["#3b82f6", "#10b981", "#f59e0b", "#8b5cf6", "#ef4444", "#06b6d4", "#ec4899", "#84cc16", "#f97316", "#6366f1"]
PHASES = {"compute": "#10b981", "wait": "#f59e0b", "exchange": "#8b5cf6"}
QUIET = "#808892"  # readable on white and on black
FAINT_LINE = {"lineStyle": {"color": "rgba(128, 136, 146, 0.25)"}}
ROUNDS = 4  # per peer in the timeline
EVENTS = 60
BARS = 16
LATE_S = 5.0
UNITS = [("billion", 10**9), ("million", 10**6), ("thousand", 10**3)]

Options = dict[str, Any]
Row = dict[str, Any]


def loss_by_tokens(snapshot: Snapshot, runs: Sequence[Run] = ()) -> Options:
    """Loss over the swarm clock: the newest point at each clock value. Of `runs` the held-out loss, dashed."""
    newest = {point.tokens: point for point in snapshot.loss}
    points = list(newest.values())
    most = max(newest, default=0)
    unit, size = next((one for one in UNITS if most >= one[1]), ("", 1))
    x = [point.tokens / size for point in points]
    axis = {"type": "value", "name": f"{unit} tokens applied".lstrip(), "max": most / size or None}
    chart = _loss(x, points, axis)
    for run, colour in zip(runs, cycle(COLOURS[1:])):
        curve = [[point.tokens / size, round(point.loss, 4)] for point in run.curve if point.tokens is not None]
        style = {"lineStyle": {"width": 2, "type": "dashed"}, "itemStyle": {"color": colour}}
        line = {"name": f"held-out, {run.name}", "type": "line", "showSymbol": False}
        chart["series"].append({**line, **style, "data": curve})
    return chart


def held_out(runs: Sequence[Run]) -> str:
    """The newest held-out loss of the first run that is no baseline, and how far it is from its baseline's."""
    run = next((one for one in runs if one.curve and not is_baseline(one)), None)
    if run is None:
        return "-"
    gap = gap_so_far(run, runs)
    return f"{run.curve[-1].loss:.3f}" + ("" if gap is None else f" ({gap:+.1f} %)")


def loss_by_time(snapshot: Snapshot) -> Options:
    """Loss over time: all points."""
    x = [round(point.at * 1000) for point in snapshot.loss]
    return _loss(x, snapshot.loss, {"type": "time"})


def _loss(x: Sequence[float], points: Sequence[LossPoint], axis: Options) -> Options:
    """Three lines: the mean over the peers, and thinner the lowest and the highest peer."""

    def line(name: str, field: str, width: float, opacity: float) -> Options:
        data = [[at, round(getattr(point, field), 4)] for at, point in zip(x, points, strict=True)]
        style = {"lineStyle": {"width": width, "opacity": opacity}, "itemStyle": {"color": COLOURS[0]}}
        return {"name": name, "type": "line", "showSymbol": len(x) == 1, **style, "data": data}

    label = {"color": QUIET, "hideOverlap": True, "showMaxLabel": None if axis["type"] == "time" else False}
    return {
        "animation": False,
        "grid": {"left": 44, "right": 16, "top": 16, "bottom": 44},
        "tooltip": {"trigger": "axis"},
        "xAxis": {
            **axis,
            "axisLabel": label,
            "axisLine": FAINT_LINE,
            "splitLine": {"show": False},
            "nameLocation": "middle",
            "nameGap": 28,
            "nameTextStyle": {"color": QUIET},
        },
        "yAxis": {"type": "value", "scale": True, "axisLabel": {"color": QUIET}, "splitLine": FAINT_LINE},
        "series": [line("mean", "loss", 2, 1.0), line("lowest", "low", 1, 0.35), line("highest", "high", 1, 0.35)],
    }


def fragment_map(snapshot: Snapshot) -> Options:
    """A treemap with an area per syncer, and in it a tile for each fragment that it holds, with the version."""
    names = snapshot.names()
    held: dict[str, list[Row]] = {}
    for row in snapshot.fragments:
        tile = {"name": f"{row.fragment}  v{row.version}", "value": 1}
        held.setdefault(_called(row.syncer, names), []).append(tile)
    tiles = [
        {
            "name": syncer,
            "children": held[syncer],
            "itemStyle": {"color": "#dc2626" if syncer == "nobody" else COLOURS[index % len(COLOURS)]},
        }
        for index, syncer in enumerate(sorted(held))
    ]
    treemap = {
        "type": "treemap", "data": tiles, "animation": False, "animationDurationUpdate": 0,
        "roam": False, "nodeClick": False, "breadcrumb": {"show": False},
        **dict.fromkeys(("left", "right", "top", "bottom"), 0),
        "upperLabel": {"show": True, "height": 18, "color": QUIET},
        "label": {"color": "#fff", "overflow": "truncate"},
        "itemStyle": {"borderColor": "transparent", "borderWidth": 1, "gapWidth": 1},
        "levels": [{"itemStyle": {"borderWidth": 0, "gapWidth": 3}, "upperLabel": {"show": False}}],
    }  # fmt: skip
    return {"animation": False, "tooltip": {"formatter": "fragment {b}"}, "series": [treemap]}


def timeline(snapshot: Snapshot) -> Options:
    """The last rounds of each peer as consecutive bars; the axis ends when the newest round ended."""
    names = snapshot.names()
    rounds: dict[str, list[PeerRound]] = {row.peer_id: [] for row in snapshot.peers}
    for row in snapshot.timeline:
        if row.peer_id in rounds:
            rounds[row.peer_id].append(row)
    rounds = {peer: rows[-ROUNDS:] for peer, rows in rounds.items() if rows}
    peers = sorted(rounds, key=lambda peer: names[peer], reverse=True)
    end = max((row.ended_at for rows in rounds.values() for row in rows), default=0.0)
    begin = min((rows[0].ended_at - rows[0].seconds.total for rows in rounds.values()), default=end)
    bars = [_bars(rounds[peer], begin) for peer in peers]
    series = [
        {
            "name": name, "type": "bar", "stack": "round", "barCategoryGap": "30%",
            "itemStyle": {"color": PHASES.get(name, "transparent")},
            "tooltip": {"show": bool(name)}, "silent": not name,
            "data": [round(row[index], 3) for row in bars],
        }
        for index, name in enumerate(["", *PHASES] * ROUNDS)
    ]  # fmt: skip
    return {
        "animation": False,
        "grid": {"left": 76, "right": 16, "top": 32, "bottom": 40},
        "legend": {"data": list(PHASES), "textStyle": {"color": QUIET}, "top": 0, "selectedMode": False},
        "tooltip": {"trigger": "item", "formatter": "{b}: {a} {c} s"},
        "xAxis": {
            "type": "value",
            "max": round(max(end - begin, 0.001), 3),
            "axisLabel": {"color": QUIET, "formatter": "{value} s", "showMaxLabel": False, "hideOverlap": True},
            "splitLine": FAINT_LINE,
        },
        "yAxis": {
            "type": "category",
            "data": [names[peer] for peer in peers],
            "axisLabel": {"color": QUIET, "width": 64, "overflow": "truncate", "interval": 0},
            "axisLine": FAINT_LINE,
        },
        "series": series,
    }


def _bars(rows: Sequence[PeerRound], begin: float) -> list[float]:
    """Seconds of gap, compute, wait and exchange in each of the last `ROUNDS` rounds; missing rounds are zeros."""
    values, at = [], begin
    for row in rows:
        phases = row.seconds
        gap = max(0.0, row.ended_at - phases.total - at)
        values += [gap, phases.compute, phases.wait, phases.comm + phases.outer]
        at = max(at, row.ended_at)
    return values + [0.0] * (4 * ROUNDS - len(values))


def peer_rows(snapshot: Snapshot, paces: Callable[[str], list[float]]) -> list[Row]:
    """Rows of the table of peers; `paces(peer_id)` returns its recent tokens per second, from old to new."""
    names = snapshot.names()
    return [
        {
            "id": peer.peer_id,
            "peer": names[peer.peer_id],
            "short_id": peer.short_id,
            "state": peer.state if peer.trains else f"host, {peer.state}",
            "device": peer.device or "-",
            "lag": peer.version_lag,
            "step": f"{peer.inner_step}/{peer.target_steps}" if peer.target_steps else "-",
            "pace": round(peer.steps_per_s, 2),
            "history": sparkline(history, BARS) if any(history := paces(peer.peer_id)) else "",
            "loss": None if peer.loss is None else round(peer.loss, 3),
            "busy": "-" if peer.seconds is None or not peer.seconds.total else f"{peer.seconds.utilization:.0%}",
            "tokens": human_count(peer.tokens),
            "sent": human_bytes(peer.bytes_sent),
            "received": human_bytes(peer.bytes_received),
            "seen": f"{peer.last_seen_s:.0f} s" if peer.last_seen_s > LATE_S else "now",
        }
        for peer in snapshot.peers
    ]


def fragment_rows(snapshot: Snapshot) -> list[Row]:
    """Rows of the table of fragments, with names of peers for their ids."""
    names = snapshot.names()
    return [
        row.model_dump() | {"syncer": _called(row.syncer, names), "backup": _called(row.backup, names)}
        for row in snapshot.fragments
    ]


def _called(peer: str | None, names: Mapping[str, str]) -> str:
    return "nobody" if peer is None else names.get(peer, peer[-6:])


def contribution_rows(snapshot: Snapshot) -> list[Row]:
    """Rows of the table of contributions, a leaderboard by applied tokens: `part` is of the first peer's tokens.

    The sum of the peers that are too many to list has no rank and comes last. `since` is the first outer step with a
    contribution, and how long ago that was, as far back as the rounds of the snapshot go.
    """
    names, contributions = snapshot.names(), snapshot.ledger.contributions
    total = max(1, sum(row.tokens for row in contributions))
    most = max([1, *(row.tokens for row in contributions if row.peer_id)])
    closed_at = {row.version: row.closed_at for row in snapshot.rounds if row.fragment == 0}
    ranked = sorted(contributions, key=lambda row: (not row.peer_id, -row.tokens, row.peer_id))

    def since(version: int) -> str:
        ago = f", {human_seconds(max(0.0, snapshot.run.at - closed_at[version]))} ago" if version in closed_at else ""
        return f"step {version}{ago}"

    return [
        {
            "id": row.peer_id,
            "rank": rank if row.peer_id else "",
            "peer": names.get(row.peer_id, row.name or row.peer_id[-6:]),
            "tokens": human_count(row.tokens),
            "share": f"{row.tokens / total:.1%}",
            "part": min(1.0, round(row.tokens / most, 3)),
            "steps": row.outer_steps,
            "bytes": human_bytes(row.bytes),
            "versions": f"{row.first_version} to {row.last_version}",
            "since": since(row.first_version),
        }
        for rank, row in enumerate(ranked, 1)
    ]


def event_rows(snapshot: Snapshot) -> list[Row]:
    """Rows of the table of events, the newest first, with names of peers for their ids."""
    names, rows = snapshot.names(), []
    for index, event in enumerate(reversed(snapshot.events[-EVENTS:])):
        text = event.text
        for peer, name in names.items():
            text = text.replace(peer, name)
        ago = human_seconds(max(0.0, snapshot.run.at - event.at))
        rows.append({"id": len(snapshot.events) - index, "ago": ago, "kind": event.kind, "text": text})
    return rows
