"""Lays out the page, and updates it with each new snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from nicegui import ui

from diloco.dashboard import charts
from diloco.dashboard.poller import Poller
from diloco.protocol.snapshot import Snapshot
from diloco.text import human_count, human_seconds

__all__ = ["PageContent", "build"]

EVERY_S = 1.0
CARD = "w-full p-3 gap-1 min-w-0"
LATE_S = 5.0
FIGURES = [
    "outer step", "tokens applied", "loss", "tokens / s", "peers training", "components", "in flight", "discarded"
]  # fmt: skip
HELD_OUT = "held-out, over baseline"  # where run directories are shown beside the swarm
WIDE = "max-sm:hidden"  # hides columns for which a phone has no room
MODES = [(None, "brightness_auto", "as the system"), (True, "dark_mode", "dark"), (False, "light_mode", "light")]


class PageContent:
    """The content of all open pages, computed once per snapshot."""

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.number = 0
        self.options: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.figures: dict[str, str] = {}

    def refresh(self) -> None:
        """Computes the content again if the poller has a new snapshot."""
        snapshot = self.poller.snapshot
        if snapshot is None or self.number == self.poller.number:
            return
        self.number = self.poller.number
        for kind in (charts.loss_by_time, charts.fragment_map, charts.timeline):
            self.options[kind.__name__] = kind(snapshot)
        self.options["loss_by_tokens"] = charts.loss_by_tokens(snapshot, self.poller.runs)
        self.rows = {
            "peers": charts.peer_rows(snapshot, self.poller.paces),
            "fragments": charts.fragment_rows(snapshot),
            "contributions": charts.contribution_rows(snapshot),
            "events": charts.event_rows(snapshot),
        }
        self.figures = _figures(snapshot, self.poller.tokens_per_s)
        self.figures[HELD_OUT] = charts.held_out(self.poller.runs)

    def state(self) -> str:
        """The connection in words: "live" while a peer answers."""
        seen_s = self.poller.seen_s()
        if self.poller.snapshot is None:
            return "connecting" if self.poller.lost is None else "no answer yet"
        if self.poller.lost is not None or seen_s > LATE_S:
            return f"lost, last seen {human_seconds(seen_s)} ago"
        return "live"


def _figures(snapshot: Snapshot, tokens_per_s: float | None) -> dict[str, str]:
    run, ledger = snapshot.run, snapshot.ledger
    of_steps = "" if run.outer_steps is None else f" / {run.outer_steps}"
    of_tokens = "" if run.tokens is None else f" / {human_count(run.tokens)}"
    training = sum(row.trains and row.state in ("training", "exchanging") for row in snapshot.peers)
    return {
        "outer step": f"{run.version}{of_steps}",
        "tokens applied": f"{human_count(run.applied_tokens)}{of_tokens}",
        "loss": f"{snapshot.loss[-1].loss:.3f}" if snapshot.loss else "-",
        "tokens / s": human_count(tokens_per_s),
        "peers training": f"{training} / {len(snapshot.peers) + snapshot.left_out}",
        "components": str(len(snapshot.components)),
        "in flight": human_count(ledger.in_flight),
        "discarded": human_count(ledger.discarded),
    }


def build(content: PageContent) -> None:
    """Builds one visitor's page. A timer sends changed parts, and only these, to the browser."""
    ui.colors(primary="#3b82f6")
    ui.query(".nicegui-content").classes("p-2 sm:p-4 items-center")
    updates: list[Callable[[], None]] = []
    content.refresh()
    with ui.column().classes("w-full max-w-7xl gap-3"):
        updates.append(_head(content))
        updates.append(_numbers(content))
        with ui.grid().classes("w-full gap-3 grid-cols-1 lg:grid-cols-2"):
            updates.append(_chart(content, "Loss by tokens", "loss_by_tokens", lambda content: 260))
            updates.append(_chart(content, "Loss by time", "loss_by_time", lambda content: 260))
            updates.append(_chart(content, "Fragments by syncer", "fragment_map", lambda content: 300))
            updates.append(_table(content, "Fragments", "fragments", FRAGMENTS, 7))
        updates.append(_table(content, "Peers", "peers", PEERS, 16))
        updates.append(_chart(content, "Last rounds of each peer", "timeline", _timeline_height))
        with ui.grid().classes("w-full gap-3 grid-cols-1 lg:grid-cols-2"):
            updates.append(_table(content, "Leaderboard: tokens in the model", "contributions", CONTRIBUTIONS, 10))
            updates.append(_table(content, "Events", "events", EVENTS, 10))

    def refresh() -> None:
        content.refresh()
        for update in updates:
            update()

    refresh()
    ui.timer(EVERY_S, refresh)


def _timeline_height(content: PageContent) -> int:
    peers = len(content.options.get("timeline", {}).get("yAxis", {}).get("data", ()))
    return 90 + max(3, peers) * (26 if peers <= 16 else 16)


def _head(content: PageContent) -> Callable[[], None]:
    dark = ui.dark_mode(None)
    with ui.row().classes("w-full items-center gap-x-3 flex-nowrap"):
        name = ui.label("diloco").classes("text-xl font-semibold whitespace-nowrap")
        what = ui.label().classes("text-sm opacity-70 truncate min-w-0 flex-1")
        state = ui.badge("connecting").classes("text-sm px-2 py-1 whitespace-nowrap")
        button = ui.button().props('flat round dense aria-label="light or dark"')
    why = ui.label().classes("w-full text-sm text-red-600 break-all")

    modes = cycle(MODES)

    def switch() -> None:
        mode, icon, text = next(modes)
        dark.set_value(mode)
        button.clear()
        button.props(f"icon={icon}").tooltip(text)

    button.on_click(switch)
    switch()

    def update() -> None:
        snapshot, text = content.poller.snapshot, content.state()
        state.set_text(text)
        state.props(f"color={'green-8' if text == 'live' else 'grey-7' if text == 'connecting' else 'red-8'}")
        why.set_text(content.poller.lost or "")
        why.set_visibility(content.poller.lost is not None)
        if snapshot is not None:
            run = snapshot.run
            name.set_text(run.run_id)
            called = snapshot.names().get(run.answered_by, run.answered_by[-6:])
            what.set_text(f"{run.model or 'model unnamed'}, {run.mode}, as {called} sees it")

    return update


def _numbers(content: PageContent) -> Callable[[], None]:
    labels: dict[str, ui.label] = {}
    names, columns = FIGURES, "grid-cols-2 sm:grid-cols-4 lg:grid-cols-8"
    if content.poller.directories:
        names, columns = [*FIGURES, HELD_OUT], "grid-cols-3 lg:grid-cols-9"
    with ui.grid().classes(f"w-full gap-2 {columns}"):
        for name in names:
            with ui.card().classes("p-2 gap-0 min-w-0"):
                ui.label(name).classes("text-xs opacity-70")
                labels[name] = ui.label("-").classes("text-lg font-medium tabular-nums whitespace-nowrap")

    def update() -> None:
        for name, label in labels.items():
            label.set_text(content.figures.get(name, "-"))

    return update


def _chart(content: PageContent, title: str, name: str, height: Callable[[PageContent], int]) -> Callable[[], None]:
    shown: dict[str, Any] = {}
    with ui.card().classes(CARD):
        ui.label(title).classes("text-sm font-medium")
        chart = ui.echart({}).classes("w-full").style(f"height: {height(content)}px")

    def update() -> None:
        options = content.options.get(name)
        if options is None or shown.get("options") == options:
            return
        shown["options"] = options
        chart.style(f"height: {height(content)}px")
        chart.options.clear()
        chart.options.update(options)
        chart.update()

    return update


@dataclass(frozen=True)
class Columns:
    """The fields of a table, and those for which a phone has room."""

    wide: str
    phone: str


PEERS = Columns(
    "peer short_id state device lag step pace history loss busy tokens sent received seen", "peer state lag loss seen"
)
FRAGMENTS = Columns("fragment syncer term version backup", "fragment syncer version backup")
CONTRIBUTIONS = Columns("rank peer tokens share steps bytes since", "rank peer tokens share since")
EVENTS = Columns("ago kind text", "ago kind text")
TITLES = {
    "short_id": "id", "pace": "steps/s", "history": "tokens/s, 2 min", "steps": "outer steps", "bytes": "payload",
    "kind": "event", "text": "", "rank": "",
}  # fmt: skip
UNSORTED = {"history", "tokens", "sent", "received", "step", "bytes", "since", "ago", "kind", "text"}
WRAPPED = {"text": "white-space: normal; overflow-wrap: anywhere", "since": "white-space: normal"}
# Quasar's template of a cell; colours that are readable on white and on black.
STATE = """<q-td :props="props"><q-badge outline :color="{training: 'green', exchanging: 'cyan', starting: 'orange',
ready: 'orange', leaving: 'grey', done: 'blue'}[props.value] || 'grey'">{{ props.value }}</q-badge></q-td>"""
# The share, over a bar as long as the part of the first peer's.
SHARE = """<q-td :props="props">{{ props.value }}<q-linear-progress :value="props.row.part" size="3px" rounded
class="q-mt-xs" style="min-width: 3em" /></q-td>"""
LEFT = {"peer", "short_id", "state", "device", "syncer", "backup", "kind", "text", "history"}


def _table(content: PageContent, title: str, name: str, columns: Columns, page: int) -> Callable[[], None]:
    phone = columns.phone.split()
    described = [
        {
            "name": field,
            "label": TITLES.get(field, field),
            "field": field,
            "align": "left" if field in LEFT else "right",  # numbers on the right
            "sortable": field not in UNSORTED,
            "classes": ("" if field in phone else WIDE) + (" text-primary tracking-tighter" * (field == "history")),
            "headerClasses": "" if field in phone else WIDE,
            "style": WRAPPED.get(field, ""),
        }
        for field in columns.wide.split()
    ]
    with ui.card().classes(CARD):
        ui.label(title).classes("text-sm font-medium")
        key = "id" if name != "fragments" else "fragment"
        table = ui.table(rows=[], columns=described, row_key=key, pagination=page)
        table.classes("w-full tabular-nums").props("dense flat hide-no-data :rows-per-page-options=[]")
        if name == "peers":
            table.add_slot("body-cell-state", STATE)
        if name == "contributions":
            table.add_slot("body-cell-share", SHARE)

    def update() -> None:
        rows = content.rows.get(name)
        if rows is None or table.rows == rows:
            return
        table.props(f"{'hide-pagination' if len(rows) <= page else ''}")
        table.rows = rows

    return update
