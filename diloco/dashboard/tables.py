"""A snapshot of a swarm as tables for a terminal, readable at 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.dashboard.live import STATE_STYLES
from diloco.messages.snapshot import (
    PHASES,
    SHORT,
    Contributor,
    FragmentRow,
    PeerRow,
    Round,
    Snapshot,
)
from diloco.text import counted, human_bytes, human_count, human_seconds, sparkline

ROUNDS = EVENTS = 6
LATE_S = 5.0  # since the last message of a peer
ID_DIGITS = 8  # of a head
FRAGMENT_STYLES = {"collecting": "green", "fetching": "cyan", "settling": "dim", "alone": "red"}

Cell = Text | str


def render(
    snapshot: Snapshot, console: Console, rows: int = 1000, lost: str | None = None
) -> RenderableType:
    """Return the tables of `diloco status`: at most `rows` peers, fragments, contributions each."""
    names = snapshot.names()
    parts: list[RenderableType] = [_head(snapshot, lost), _loss(snapshot, console.width)]
    parts += [_peers(snapshot, names, rows), _fragments(snapshot, names, rows)]
    if snapshot.rounds:
        parts.append(_rounds(snapshot))
    parts.append(_ledger(snapshot, names, rows))
    if snapshot.events:
        parts.append(_events(snapshot, console.width))
    return Group(*(item for part in parts for item in (part, Text())))


def _head(snapshot: Snapshot, lost: str | None) -> Text:
    run = snapshot.run
    budget = "" if run.outer_steps is None else f"/{run.outer_steps}"
    tokens = "" if run.tokens is None else f"/{human_count(run.tokens)}"
    facts = [
        f"{run.model or 'model unnamed'}, {run.mode}",
        f"outer step {run.version}{budget}",
        f"{human_count(run.applied_tokens)}{tokens} tokens",
        counted(len(snapshot.peers) + snapshot.left_out, "peer"),
    ]
    text = Text(run.run_id, style="bold")
    text.append("  " + "  ".join(facts), style="not bold")
    if lost is not None:
        text.append(f"\n{lost}", style="bold red")
    return text


def _loss(snapshot: Snapshot, width: int) -> Text:
    losses = [point.loss for point in snapshot.loss]
    if not losses:
        return Text("loss  none yet", style="dim")
    first, last = f"loss {losses[0]:.3f} ", f" {losses[-1]:.3f}"
    bars = sparkline(losses, width - len(first) - len(last))
    return Text(first).append(bars, style="cyan").append(last)


def _peers(snapshot: Snapshot, names: Mapping[str, str], rows: int) -> Table:
    def cells(row: PeerRow) -> list[Cell]:
        spent = row.seconds
        busy = f"{spent.utilization:.0%}" if spent is not None and spent.total else "-"
        state = ("" if row.trains else "host ") + row.state
        return [
            names[row.peer_id],
            Text(state, style=STATE_STYLES.get(row.state, "")),
            Text(str(row.version_lag), style="yellow" if row.version_lag else ""),
            f"{row.inner_step}/{row.target_steps}" if row.target_steps else "-",
            f"{row.steps_per_s:.2f}" if row.steps_per_s else "-",
            "-" if row.loss is None else f"{row.loss:.2f}",
            busy,
            human_count(row.tokens),
            human_bytes(row.bytes_sent),
            Text(f"{row.last_seen_s:.0f} s", style="red" if row.last_seen_s > LATE_S else ""),
        ]

    columns = "<peer <state lag step steps/s loss busy tokens sent seen"
    ways = Counter(row.bulk for row in snapshot.peers if row.bulk)
    bulk = ", ".join(f"{number} {way}" for way, number in sorted(ways.items(), reverse=True))
    from_ = names.get(snapshot.run.answered_by, "there")
    title = f"peers  (bulk bytes from {from_}: {bulk})" if bulk else "peers"
    return _table(title, columns, map(cells, snapshot.peers), rows)


def _fragments(snapshot: Snapshot, names: Mapping[str, str], rows: int) -> Table:
    def cells(row: FragmentRow) -> list[Cell]:
        author: Cell = Text("nobody", style="red")
        if row.author is not None:
            author = names.get(row.author, row.author[-SHORT:])
        state = Text(row.state, style=FRAGMENT_STYLES.get(row.state, ""))
        tip = [str(row.version), human_count(row.work), row.id[:ID_DIGITS]]
        return [str(row.fragment), *tip, state, author, str(row.here)]

    columns = "fragment version tokens <id <state <author here"
    return _table("fragments", columns, map(cells, snapshot.fragments), rows)


def _rounds(snapshot: Snapshot) -> Table:
    """Return the contributions to the control fragment; the JSON has those of all fragments."""

    def cells(row: Round) -> list[Cell]:
        spent = ["-"] * len(PHASES)
        if row.seconds is not None:
            spent = [f"{value:.1f} s" for value in astuple(row.seconds)]
        merged = Text(str(row.merged), style="yellow" if row.merged < row.participating else "")
        ago = f"{human_seconds(max(0.0, snapshot.run.at - row.closed_at))} ago"
        return [str(row.version), str(row.live), str(row.participating), merged, *spent[:3], ago]

    newest = [row for row in snapshot.rounds if row.fragment == 0][-ROUNDS:]
    columns = "version live training merged compute wait exchange closed"
    return _table("rounds", columns, map(cells, newest), ROUNDS)


def _ledger(snapshot: Snapshot, names: Mapping[str, str], rows: int) -> RenderableType:
    ledger = snapshot.ledger
    fates = ("processed", "applied", "discarded", "in_flight")
    counts = [f"{human_count(getattr(ledger, fate))} {fate.replace('_', ' ')}" for fate in fates]
    head = Text("ledger", style="bold")
    head.append("  " + "  ".join(counts) + "  tokens", style="not bold")
    total = max(1, sum(row.tokens for row in ledger.contributions))

    def cells(row: Contributor) -> list[Cell]:
        name = names.get(row.peer_id, row.name or row.peer_id[-SHORT:])
        share, steps = f"{row.tokens / total:.1%}", str(row.outer_steps)
        versions = f"{row.first_version}-{row.last_version}"
        return [name, human_count(row.tokens), share, steps, human_bytes(row.bytes), versions]

    ranked = sorted(ledger.contributions, key=lambda row: (-row.tokens, row.peer_id))
    ranked.sort(key=lambda row: not row.peer_id)  # the sum of those that are not listed is last
    columns = "<peer tokens share steps payload versions"
    return Group(head, Text(), _table("contributions", columns, map(cells, ranked), rows))


def _events(snapshot: Snapshot, width: int) -> Text:
    text, names = Text("events", style="bold"), snapshot.names()
    for event in snapshot.events[-EVENTS:]:
        message = event.text
        for peer, name in names.items():
            message = message.replace(peer, name)
        ago = human_seconds(max(0.0, snapshot.run.at - event.at))
        line = f"{ago:>7} ago  {event.kind} {message}"
        text.append("\n" + (line if len(line) <= width else line[: width - 1] + "…"), "not bold")
    return text


def _table(title: str, columns: str, cells: Iterable[Sequence[Cell]], limit: int) -> Table:
    """Return `limit` rows, and a count of the others; < before a title aligns its column left."""
    bold = Text(title, style="bold")
    table = Table(title=bold, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for name in columns.split():
        justify: JustifyMethod = "left" if name.startswith("<") else "right"
        name, dim = name.removeprefix("<"), "dim"
        table.add_column(name, justify=justify, header_style=dim, overflow="ellipsis", no_wrap=True)
    rows = list(cells)
    for row in rows[:limit]:
        table.add_row(*[cell if isinstance(cell, Text) else Text(cell) for cell in row])
    if len(rows) > limit:
        table.add_row(Text(f"{len(rows) - limit} more", style="dim"))
    return table
