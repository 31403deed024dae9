"""A snapshot of a swarm as tables of text, for a terminal (`render`) and a page (`page`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from diloco.dashboard.trend import trend
from diloco.messages import snapshot as schema
from diloco.messages.figures import shown
from diloco.messages.snapshot import FATES, SHORT, LossPoint, Snapshot
from diloco.text import counted, human_bytes, human_count, human_seconds, sparkline

FEW, MANY = 6, 60  # rounds and events in a terminal, and on the page
TEXTS = {"peer", "state", "text", "event"}  # units of columns that are aligned to the left
STYLES = {
    "dim": "starting left settling",
    "green": "training collecting",
    "cyan": "exchanging fetching",
    "magenta": "evaluating",
    "yellow": "waiting leaving indirect",
    "red": "bad alone",
    "bold green": "done",
    "bold red": "failed killed",
}
STYLE_OF = {name: style for style, names in STYLES.items() for name in names.split()}


@dataclass(frozen=True)
class Cell:
    """Text, after text in bold; `shares`: of a bar on the page, by class."""

    text: str
    style: str = ""
    bold: str = ""
    shares: dict[str, float] = field(default_factory=dict)


Row = list[Cell | str]


@dataclass(frozen=True)
class Table:
    """`name` is its place on the page. A title with < is of a column of texts; columns with more
    dashes before their titles go first where there is no room."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


def columns_of(kind: Any) -> list[str]:
    """Return the titles of the figures of a schema that are in tables."""
    marks = [mark for mark in shown(kind).values() if mark.title]
    return [f"{'<' * (mark.unit in TEXTS)}{'-' * mark.rank}{mark.title}" for mark in marks]


def cells_of(
    row: Any, kind: Any, at: float = 0.0, names: Mapping[str, str] | None = None, total: int = 0
) -> Row:
    """Return the cells of these columns; of no row, those of what is not known.

    at: unix seconds now. names: of peers. total: of all shares.
    """
    marks = [(name, mark) for name, mark in shown(kind).items() if mark.title]
    names, cells = names or {}, list[Cell | str]()
    for name, mark in marks:
        value: Any = getattr(row, name, None)
        text, style, shares = mark.text(value), "", dict[str, float]()
        match mark.unit:
            case "peer":
                text = "nobody" if value is None else names.get(value, value[-SHORT:])
                style = "bad" if value is None else ""
            case "state":
                text, style = f"{'' if getattr(row, 'trains', True) else 'host '}{value}", value
            case "step":
                text = f"{value}/{row.target_steps}" if row.target_steps else "-"
            case "time":
                text = f"{human_seconds(max(0.0, at - value))} ago"
            case "share":
                text = f"{value / total:.1%}" if total else "-"
                shares = {"part": value / (total or 1)}
            case "event":
                text = reduce(lambda line, peer: line.replace(*peer), names.items(), value)
            case "busy" | "spent" if value is not None:
                spent = (value.compute, value.wait, value.comm + value.outer)
                parts = zip(("compute", "wait", "exchange"), spent, strict=True)
                shares = {part: seconds / (value.total or 1.0) for part, seconds in parts}
        is_bad = isinstance(value, int | float) and value > mark.limit
        cells.append(Cell(text, "bad" if is_bad else style, shares=shares))
    return cells


def tables(seen: Snapshot, most: int = MANY) -> dict[str, Table]:
    """Return what there is to show, by name; at most so many rounds, and events."""
    ways = Counter(row.bulk for row in seen.peers if row.bulk)
    bulk = ", ".join(f"{number} {way}" for way, number in sorted(ways.items(), reverse=True))
    bulk = f"  (bulk bytes from {seen.names().get(seen.run.answered_by, 'there')}: {bulk})"
    given, lately = seen.ledger.contributions, human_seconds(seen.ledger.recent_s)
    # the sum of those that are not listed is last
    ranked = sorted(given, key=lambda row: (not row.peer_id, -row.tokens, row.peer_id))
    control = [row for row in seen.rounds if row.fragment == 0]
    kinds: list[tuple[str, str, Any, Sequence[Any]]] = [
        ("peers", bulk if ways else "", schema.PeerRow, seen.peers),
        ("fragments", "", schema.FragmentRow, seen.fragments),
        ("rounds", "", schema.Round, control[-most:][::-1]),
        ("board", f"  (lately: in the last {lately})", schema.Standing, ranked),
        ("events", "", schema.LoggedEvent, seen.events[-most:][::-1]),
    ]
    recent = sum(row.recent_tokens for row in given)
    known: Any = {"at": seen.run.at, "names": seen.names(), "total": recent}
    return {
        name: Table(
            name, name + more, columns_of(kind), [cells_of(row, kind, **known) for row in rows]
        )
        for name, more, kind, rows in kinds
    }


def figures(snapshot: Snapshot) -> dict[str, str]:
    """Return the figures of the whole swarm, by title."""
    run, training = snapshot.run, [row for row in snapshot.peers if row.trains]
    timed = [row.seconds.utilization for row in training if row.seconds is not None]
    tokens = "" if run.tokens is None else f"/{human_count(run.tokens)}"
    return {
        "outer step": f"{run.version}" + ("" if run.outer_steps is None else f"/{run.outer_steps}"),
        "tokens applied": f"{human_count(run.applied_tokens)}{tokens}",
        "loss": f"{snapshot.loss[-1].loss:.3f}" if snapshot.loss else "-",
        "tokens / s": human_count(sum(row.tokens_per_s or 0.0 for row in training)),
        "peers training": f"{len(training)} of {len(snapshot.peers) + snapshot.left_out}",
        "utilization": f"{sum(timed) / len(timed):.0%}" if timed else "-",
        "sent by all": human_bytes(sum(row.bytes_sent for row in snapshot.peers)),
        "in flight": human_count(snapshot.ledger.in_flight),
        "discarded": human_count(snapshot.ledger.discarded),
    }


def page(snapshot: Snapshot) -> dict[str, Any]:
    """Return all that the page shows."""
    run = snapshot.run
    rows: list[Row] = [[str(at), Cell(text, bold=prompt)] for at, prompt, text in snapshot.samples]
    samples = Table("samples", "what the model writes", ["version", "<text"], rows)
    seen_by = snapshot.names().get(run.answered_by, "")
    return {
        "run": run.run_id,
        "what": f"{run.model or 'model unnamed'}, {run.mode}, as {seen_by} sees it",
        "trend": trend(snapshot),
        "figures": figures(snapshot),
        "tables": [asdict(table) for table in (*tables(snapshot).values(), samples)],
        "loss": _points(snapshot.loss),
        "held_out": _points(snapshot.held_out),
    }


def _points(curve: Sequence[LossPoint]) -> list[dict[str, float]]:
    return [{name: getattr(point, name) for name in LossPoint.__struct_fields__} for point in curve]


# -- a terminal ------------------------------------------------------------------------------------


def render(
    snapshot: Snapshot, console: Console, rows: int = 1000, lost: str | None = None
) -> RenderableType:
    """Return the tables of `diloco status`: at most `rows` peers, fragments, contributions each."""
    run, ledger, width, named = snapshot.run, snapshot.ledger, console.width, figures(snapshot)
    what = f"  {run.model or 'model unnamed'}, {run.mode}  outer step {named['outer step']}"
    everybody = counted(len(snapshot.peers) + snapshot.left_out, "peer")
    head = Text.assemble((run.run_id, "bold"), what, f"  {named['tokens applied']} tokens  ")
    head.append(everybody).append("" if lost is None else f"\n{lost}", "bold red")
    fates = [f"  {human_count(getattr(ledger, fate))} {fate.replace('_', ' ')}" for fate in FATES]
    losses = [point.loss for point in snapshot.loss]
    loss = Text("loss  none yet", style="dim")
    if losses:
        first, last = f"loss {losses[0]:.3f} ", f" {losses[-1]:.3f}"
        bars = sparkline(losses, width - len(first) - len(last))
        loss = Text.assemble(first, (bars, "cyan"), last, "\n", trend(snapshot))
    total = Text.assemble(("ledger", "bold"), *fates, "  tokens")
    parts = {
        name: drawn(table, width, rows)
        for name, table in tables(snapshot, FEW).items()
        if table.rows
    }
    everything: list[RenderableType] = [head, loss, total, *parts.values()]
    return Group(*(item for part in everything for item in (part, Text())))


def drawn(table: Table, width: int, limit: int = 1000) -> RichTable:
    """Return the columns that have room, `limit` rows, and a count of the others."""
    rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in table.rows]
    title = Text(table.title, style="bold") if table.title else None
    made = RichTable(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    names = [column.lstrip("<-") for column in table.columns]
    texts = [names, *([cell.text for cell in row] for row in rows[:limit])]
    widths = [2 + max(map(len, column)) for column in zip(*texts, strict=True)]
    ranks, kept = [column.count("-") for column in table.columns], list(range(len(names)))
    while sum(widths[at] for at in kept) - 2 > width and any(ranks[at] for at in kept):
        kept.remove(max(kept, key=lambda at: (ranks[at], at)))
    for at in kept:
        side: Any = "left" if table.columns[at].startswith("<") else "right"
        style: Any = {"header_style": "dim", "overflow": "ellipsis", "no_wrap": True}
        made.add_column(names[at], justify=side, **style)
    for row in rows[:limit]:
        made.add_row(*(Text(row[at].text, STYLE_OF.get(row[at].style, "")) for at in kept))
    if len(rows) > limit:
        made.add_row(Text(f"{len(rows) - limit} more", style="dim"))
    return made
