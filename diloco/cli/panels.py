"""A snapshot of a swarm as tables for a terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import compress

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from diloco.cli.table import STATE_STYLES
from diloco.protocol.phase_seconds import PHASES
from diloco.protocol.shares import Contributor
from diloco.protocol.snapshot import SHORT, FragmentRow, PeerRow, Round, Snapshot
from diloco.text import counted, human_bytes, human_count, human_seconds, sparkline

__all__ = ["render"]

ROUNDS = 6
EVENTS = 6
LATE_S = 5.0  # since the last message of a peer

Cell = Text | str


@dataclass(frozen=True)
class Column:
    """A column. Where there is no room the least important columns are dropped first; None is never dropped."""

    title: str
    importance: int | None = None
    left: bool = False


def render(snapshot: Snapshot, console: Console, rows: int = 1000, lost: str | None = None) -> RenderableType:
    """Everything that `diloco status` shows; at most so many rows of peers, fragments and contributions each."""
    names = snapshot.names()
    parts: list[RenderableType] = [_head(snapshot, lost), _loss(snapshot, console.width)]
    parts += [_peers(snapshot, names, console, rows), _fragments(snapshot, console, rows)]
    if snapshot.rounds:
        parts.append(_rounds(snapshot, console))
    parts.append(_ledger(snapshot, console, rows))
    if snapshot.events:
        parts.append(_events(snapshot, console.width))
    return Group(*(item for part in parts for item in (part, Text())))


def _head(snapshot: Snapshot, lost: str | None) -> Text:
    run, peers = snapshot.run, snapshot.peers
    budget = "" if run.outer_steps is None else f"/{run.outer_steps}"
    text = Text(f"{run.run_id}", style="bold")
    facts = [
        f"{run.model or 'model unnamed'}, {run.mode}",
        f"outer step {run.version}{budget}",
        f"{human_count(run.applied_tokens)}{'' if run.tokens is None else '/' + human_count(run.tokens)} tokens",
        counted(len(peers) + snapshot.left_out, "peer"),
    ]
    text.append("  " + "  ".join(facts), style="not bold")
    if len(snapshot.components) > 1:
        elsewhere = sum(len(group) for group in snapshot.components[1:])
        text.append(
            f"\nsplit: {counted(elsewhere, 'more peer')} in the DHT cannot be reached from here", style="bold red"
        )
    if lost is not None:
        text.append(f"\n{lost}", style="bold red")
    return text


def _loss(snapshot: Snapshot, width: int) -> Text:
    points = snapshot.loss
    if not points:
        return Text("loss  none yet", style="dim")
    first, last = f"loss {points[0].loss:.3f} ", f" {points[-1].loss:.3f}"
    line = Text(first)
    line.append(sparkline([point.loss for point in points], width - len(first) - len(last)), style="cyan")
    return line.append(last)


def _peers(snapshot: Snapshot, names: Mapping[str, str], console: Console, rows: int) -> Table:
    columns = [Column("peer", left=True), Column("id", 1, left=True), Column("state", left=True)]
    columns += [Column("device", 2, left=True), Column("lag", 7), Column("step", 4), Column("steps/s", 8)]
    columns += [Column("loss", 9), Column("busy", 5), Column("tokens", 10), Column("sent", 6), Column("received", 3)]
    columns.append(Column("seen"))
    return _table("peers", columns, [_peer_cells(row, names) for row in snapshot.peers], console, rows)


def _peer_cells(row: PeerRow, names: Mapping[str, str]) -> list[Cell]:
    role = "" if row.trains else "host "
    return [
        names[row.peer_id],
        row.short_id,
        Text(role + row.state, style=STATE_STYLES.get(row.state, "")),
        row.device or "-",
        Text(str(row.version_lag), style="yellow" if row.version_lag else ""),
        f"{row.inner_step}/{row.target_steps}" if row.target_steps else "-",
        f"{row.steps_per_s:.2f}" if row.steps_per_s else "-",
        "-" if row.loss is None else f"{row.loss:.2f}",
        "-" if row.seconds is None or not row.seconds.total else f"{row.seconds.utilization:.0%}",
        human_count(row.tokens),
        human_bytes(row.bytes_sent),
        human_bytes(row.bytes_received),
        Text(f"{row.last_seen_s:.0f} s", style="red" if row.last_seen_s > LATE_S else ""),
    ]


def _fragments(snapshot: Snapshot, console: Console, rows: int) -> Table:
    columns = [Column("fragment"), Column("syncer", left=True), Column("term"), Column("version")]
    columns.append(Column("backup", left=True))
    names = snapshot.names()

    def cells(row: FragmentRow) -> list[Cell]:
        syncer = Text("nobody", style="red") if row.syncer is None else _called(row.syncer, names)
        backup = Text("none", style="yellow") if row.backup is None else _called(row.backup, names)
        return [str(row.fragment), syncer, str(row.term), str(row.version), backup]

    return _table("fragments", columns, [cells(row) for row in snapshot.fragments], console, rows)


def _called(peer: str, names: Mapping[str, str]) -> str:
    return names.get(peer, peer[-SHORT:])


def _rounds(snapshot: Snapshot, console: Console) -> Table:
    """The contributions to the control fragment; the JSON has those of all fragments."""
    columns = [Column("version"), Column("live"), Column("training"), Column("merged"), Column("staleness", 1)]
    columns += [Column("compute"), Column("wait"), Column("exchange"), Column("outer", 2), Column("closed")]

    def cells(row: Round) -> list[Cell]:
        spent = ["-"] * len(PHASES) if row.seconds is None else [f"{value:.2f} s" for value in astuple(row.seconds)]
        merged = Text(str(row.merged), style="yellow" if row.merged < row.participating else "")
        ago = f"{human_seconds(max(0.0, snapshot.run.at - row.closed_at))} ago"
        return [str(row.version), str(row.live), str(row.participating), merged, str(row.staleness), *spent, ago]

    newest = [row for row in snapshot.rounds if row.fragment == 0][-ROUNDS:]
    return _table("rounds", columns, [cells(row) for row in newest], console, ROUNDS)


def _ledger(snapshot: Snapshot, console: Console, rows: int) -> RenderableType:
    ledger = snapshot.ledger
    counts = [
        f"{human_count(getattr(ledger, name))} {name.replace('_', ' ')}"
        for name in ("processed", "applied", "discarded", "in_flight")
    ]
    head = Text("ledger", style="bold").append("  " + "  ".join(counts) + "  tokens", style="not bold")
    columns = [Column("peer", left=True), Column("tokens"), Column("share"), Column("outer steps")]
    columns += [Column("payload"), Column("versions", 1)]
    total, names = max(1, sum(row.tokens for row in ledger.contributions)), snapshot.names()

    def cells(row: Contributor) -> list[Cell]:
        name = names.get(row.peer_id, row.name or row.peer_id[-SHORT:])
        versions = f"{row.first_version} to {row.last_version}"
        share, steps = f"{row.tokens / total:.1%}", str(row.outer_steps)
        return [name, human_count(row.tokens), share, steps, human_bytes(row.bytes), versions]

    # The sum of the peers that are too many to list comes last.
    ranked = sorted(ledger.contributions, key=lambda row: (not row.peer_id, -row.tokens, row.peer_id))
    return Group(head, Text(), _table("contributions", columns, [cells(row) for row in ranked], console, rows))


def _events(snapshot: Snapshot, width: int) -> Text:
    text, names = Text("events", style="bold"), snapshot.names()
    for event in snapshot.events[-EVENTS:]:
        said = event.text
        for peer, name in names.items():
            said = said.replace(peer, name)
        shown = f"{human_seconds(max(0.0, snapshot.run.at - event.at)):>7} ago  {event.kind} {said}"
        text.append("\n" + (shown if len(shown) <= width else shown[: width - 1] + "…"), style="not bold")
    return text


def _table(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], console: Console, limit: int
) -> Table:
    """Without the columns that the terminal has no room for, and the rows after the limit."""
    optional = [column for column in columns if column.importance is not None]
    optional.sort(key=lambda column: column.importance or 0)

    def table(without: Sequence[Column]) -> Table:
        table = Table(title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        kept = [column not in without for column in columns]
        for column in compress(columns, kept):
            table.add_column(column.title, justify="left" if column.left else "right", header_style="dim")
        for row in rows[:limit]:
            table.add_row(*[cell if isinstance(cell, Text) else Text(cell) for cell in compress(row, kept)])
        if len(rows) > limit:
            table.add_row(Text(f"{len(rows) - limit} more", style="dim"))
        return table

    for number in range(len(optional) + 1):
        fitting = table(optional[:number])
        if Measurement.get(console, console.options.update(width=10_000), fitting).maximum <= console.width:
            break
    return fitting
