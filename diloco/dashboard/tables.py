"""A snapshot of a swarm as tables of text, for a terminal (`render`) and a page (`page`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from diloco.dashboard.trend import trend
from diloco.messages.figures import shown
from diloco.messages.snapshot import (
    FATES,
    SHORT,
    LossPoint,
    PeerRow,
    PhaseSeconds,
    Snapshot,
    Standing,
)
from diloco.text import counted, human_bytes, human_count, human_seconds, sparkline

FEW, MANY = 6, 60  # rounds and events in a terminal, and on the page
STYLES = {
    style: names.split()
    for style, names in {
        "dim": "starting left settling",
        "green": "training collecting",
        "cyan": "exchanging fetching",
        "magenta": "evaluating",
        "yellow": "waiting leaving few",
        "red": "bad alone",
        "bold green": "done",
        "bold red": "failed killed",
    }.items()
}
STYLE_OF = {name: style for style, names in STYLES.items() for name in names}


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
    return ["-" * mark.rank + mark.title for mark in shown(kind).values() if mark.title]


def cells_of(row: Any, kind: Any) -> Row:
    """Return the cells of these columns; of no row, those of what is not known."""
    cells: Row = []
    for name, mark in shown(kind).items():
        value = getattr(row, name, None)
        is_bad = isinstance(value, int | float) and value > mark.limit
        shares = _shares(value) if isinstance(value, PhaseSeconds) else {}
        if mark.title:
            cells.append(Cell(mark.text(value), "bad" if is_bad else "", shares=shares))
    return cells


def _shares(spent: PhaseSeconds) -> dict[str, float]:
    shares = {"compute": spent.compute, "wait": spent.wait, "exchange": spent.comm + spent.outer}
    return {name: seconds / (spent.total or 1.0) for name, seconds in shares.items()}


# -- the tables ------------------------------------------------------------------------------------


def peers(snapshot: Snapshot) -> Table:
    """Return what each peer does."""
    names = snapshot.names()
    rows: list[Row] = [
        [
            *(names[row.peer_id], row.peer_id[-SHORT:]),
            Cell(("" if row.trains else "host ") + row.state, row.state),
            row.device or "-",
            f"{row.inner_step}/{row.target_steps}" if row.target_steps else "-",
            *cells_of(row, PeerRow),
        ]
        for row in snapshot.peers
    ]
    ways = Counter(row.bulk for row in snapshot.peers if row.bulk)
    bulk = ", ".join(f"{number} {way}" for way, number in sorted(ways.items(), reverse=True))
    from_ = names.get(snapshot.run.answered_by, "there")
    title = f"peers  (bulk bytes from {from_}: {bulk})" if bulk else "peers"
    columns = ["<peer", "<----id", "<state", "<----device", "-step", *columns_of(PeerRow)]
    return Table("peers", title, columns, rows)


def board(snapshot: Snapshot) -> Table:
    """Return who gave how much, the most first; the sum of those that are not listed is last."""
    names, given, hours = snapshot.names(), snapshot.ledger.contributions, snapshot.ledger.recent_s
    total, recent = sum(row.tokens for row in given) or 1, sum(row.recent_tokens for row in given)
    most = max((row.tokens for row in given if row.peer_id), default=1)

    def cells(row: Standing) -> Row:
        name = names.get(row.peer_id, "") if row.peer_id else row.name
        share = Cell(f"{row.tokens / total:.1%}", shares={"part": min(1.0, row.tokens / most)})
        lately = f"{row.recent_tokens / recent:.1%}" if recent else "-"
        return [name, row.device or "-", share, lately, *cells_of(row, Standing)]

    ranked = sorted(given, key=lambda row: (not row.peer_id, -row.tokens, row.peer_id))
    lately = f"last {hours / 3600:.0f} h" if hours >= 3600 else f"last {hours / 60:.0f} min"
    columns = ["<peer", "<device", "share", lately, *columns_of(Standing)]
    return Table("given", "who gave how much", columns, [cells(row) for row in ranked])


def rounds(snapshot: Snapshot, most: int = MANY) -> Table:
    """Return the newest versions of the control fragment; the JSON has those of all."""
    rows = list[Row]()
    for row in [row for row in snapshot.rounds if row.fragment == 0][-most:][::-1]:
        seconds: Row = ["-"] * 3
        if row.seconds is not None:
            compute_s, wait_s, *exchange_s = astuple(row.seconds)
            seconds = [f"{value:.1f} s" for value in (compute_s, wait_s, sum(exchange_s))]
        missing = "few" if row.merged < row.participating else ""
        merged = Cell(f"{row.merged} of {row.participating}", missing)
        ago = f"{human_seconds(max(0.0, snapshot.run.at - row.closed_at))} ago"
        rows.append([str(row.version), str(row.live), merged, str(row.staleness), *seconds, ago])
    columns = "version live merged -staleness compute wait -exchange closed".split()
    return Table("rounds", "rounds", columns, rows)


def fragments(snapshot: Snapshot) -> Table:
    """Return the tip of each fragment, and its author."""
    names = snapshot.names()
    rows: list[Row] = [
        [
            *(str(row.fragment), str(row.version), human_count(row.work), row.id[:8]),
            Cell(row.state, row.state),
            names.get(row.author, row.author[-SHORT:]) if row.author else Cell("nobody", "bad"),
            str(row.here),
        ]
        for row in snapshot.fragments
    ]
    columns = "fragment version -tokens <--id <state <author -here".split()
    return Table("fragments", "fragments", columns, rows)


def events(snapshot: Snapshot, most: int = MANY) -> Table:
    """Return the newest events."""
    rows = list[Row]()
    for event in snapshot.events[-most:][::-1]:
        text = event.text
        for peer, name in snapshot.names().items():
            text = text.replace(peer, name)
        ago = f"{human_seconds(max(0.0, snapshot.run.at - event.at))} ago"
        rows.append([ago, event.kind, text])
    return Table("events", "events", ["when", "<event", "<text"], rows)


def samples(snapshot: Snapshot) -> Table:
    """Return what the model writes."""
    rows: list[Row] = [
        [str(version), Cell(text, bold=prompt)] for version, prompt, text in snapshot.samples
    ]
    return Table("samples", "what the model writes", ["version", "<text"], rows)


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
    run, tables = snapshot.run, (peers, board, rounds, fragments, events, samples)
    seen_by = snapshot.names().get(run.answered_by, "")
    return {
        "run": run.run_id,
        "what": f"{run.model or 'model unnamed'}, {run.mode}, as {seen_by} sees it",
        "trend": trend(snapshot),
        "figures": figures(snapshot),
        "tables": [asdict(table(snapshot)) for table in tables],
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
    parts: list[RenderableType] = [head, loss, drawn(peers(snapshot), width, rows)]
    parts += [drawn(fragments(snapshot), width, rows)]
    parts += [drawn(rounds(snapshot, FEW), width)] if snapshot.rounds else []
    parts += [Text.assemble(("ledger", "bold"), *fates, "  tokens")]
    parts += [drawn(board(snapshot), width, rows)]
    parts += [drawn(events(snapshot, FEW), width)] if snapshot.events else []
    return Group(*(item for part in parts for item in (part, Text())))


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
