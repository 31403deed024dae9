"""A run in a terminal: a live table and a progress bar; elsewhere, lines of a stable format."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from diloco.config import Config
from diloco.dashboard.tables import Cell, Row, Table, cells_of, columns_of, drawn
from diloco.messages.control import Figures
from diloco.messages.figures import shown, together
from diloco.process import outlast_terminal
from diloco.rundir.reporting import Lines, PeerStatus, Ready, Report, merged_of, who_can_join
from diloco.text import counted, human_seconds, plain


def is_screen(console: Console) -> bool:
    """Return True if what was written can be drawn over.

    FORCE_COLOR, which notebooks and CI set, makes rich take a file for a terminal.
    """
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


class LiveView:
    """Shows the peers of one swarm; a context manager around the loop that trains or supervises.

    On a terminal it redraws itself in place a few times a second. Elsewhere it prints `Lines`.
    """

    def __init__(
        self,
        console: Console,
        peers: Sequence[str],
        total_steps: int | None,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self._console = console
        self._lines = Lines(self._write, total_steps, clock)
        self._lines.known |= {peer: PeerStatus(peer, state="starting") for peer in peers}
        self._stage = ("", "")
        self._ready = False
        self._first: tuple[float, int] | None = None  # when training began, and at which version
        self._live: Live | None = None
        if is_screen(console):
            self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        outlast_terminal()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.transient = not self._lines.known
            self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Release the terminal for a question."""
        self.__exit__()
        yield
        self.__enter__()

    def update(self, message: Report) -> None:
        """Show a message: `Ready`, `Notice` or `PeerStatus`; others are ignored."""
        if isinstance(message, PeerStatus):
            if self._first is None and message.version is not None and message.state == "training":
                self._first = (self._lines.clock(), message.version)
            if self._live is not None:
                self._lines.learn(message)
                return
        if self._live is not None and isinstance(message, Ready):
            if self._ready and not message.advice:
                return  # a terminal needs one address only
            self._ready = True
        self._lines(message)

    def note(self, text: str) -> None:
        """Print a line above the table, for an event."""
        self._lines.note(text)

    def stage(self, name: str, text: str = "") -> None:
        """Show the stage under way and its progress; the one before becomes a line."""
        before, progress = self._stage
        if before and before != name:
            self.note(f"{before}: {progress}" if progress else before)
        self._stage = name, plain(text)

    def _write(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._console.file, flush=True)
        else:
            text = Text(line, style="dim" if line.startswith("[") else "")
            self._console.print(text, soft_wrap=True)

    def render(self) -> RenderableType:
        """Return the progress bar over the table, cut where the terminal has no room for it."""
        rows = list(self._lines.known.values())  # the refreshing thread must not see it grow
        under_way = [Text(": ".join(filter(None, self._stage)))] if self._stage[0] else []
        if not rows:
            return Group(*under_way)
        cells: list[Row] = [
            [
                *(plain(row.peer), Cell(plain(row.state), row.state), self._lines.step_of(row)),
                *("-" if row.inner_step is None else str(row.inner_step),),
                *cells_of(row.figures, Figures),
            ]
            for row in rows
        ]
        if len(rows) > 1:
            sums = together((row.figures for row in rows), Figures)
            marks = [(name, mark) for name, mark in shown(Figures).items() if mark.title]
            sum_cells = (mark.text(sums[name]) if name in sums else "" for name, mark in marks)
            cells.append(["together", "", "", "", *sum_cells])
        columns = ["<peer", "<state", "version", "step", *columns_of(Figures)]
        table = drawn(Table("", "", columns, cells), self._console.width)
        return Group(Text(self.title), self._progress(rows), table, *under_way)

    def _progress(self, rows: Sequence[PeerStatus]) -> RenderableType:
        lines, total = self._lines, self._lines.total
        elapsed = human_seconds(lines.clock() - lines.began)
        done = max((row.version or 0 for row in rows), default=0)
        peers = max((row.peers or 0 for row in rows), default=0)
        merged = merged_of(max(rows, key=lambda row: row.version or 0)).strip()
        grid = Grid.grid(padding=(0, 1))
        grid.add_row(
            "outer steps",
            *([ProgressBar(total=total, completed=done, width=16)] if total else []),
            f"{done}/{total or '?'}",
            f"{elapsed} elapsed",
            f"{self._remaining(done)} to go",
            *([counted(peers, "peer")] if peers else []),
            *([merged] if merged else []),
        )
        return grid

    def _remaining(self, done: int) -> str:
        total = self._lines.total
        if total is None or self._first is None:
            return "-"
        since, version = self._first
        if done >= total:
            return human_seconds(0)
        if done == version:
            return "-"
        each_s = (self._lines.clock() - since) / (done - version)
        return human_seconds(each_s * (total - done))


class Stderr(logging.Handler):
    """Writes to `sys.stderr` as it is now: a live table replaces it and prints above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"diloco: {record.getMessage()}", file=sys.stderr, flush=True)


def print_warnings() -> None:
    """Print warnings of the package and of libraries on the terminal, a line each."""
    logging.basicConfig(handlers=[Stderr()])


def print_who_can_join(console: Console, config: Config) -> None:
    """Print a line: red for a run that is open to the network; none without a swarm."""
    if (notice := who_can_join(config)) is not None:
        text, is_warning = notice
        console.print(text, style="bold red" if is_warning else "dim", highlight=False)
