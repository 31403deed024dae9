"""What a terminal shows of a running swarm: a live table and a progress bar; elsewhere, lines of a stable format.

It shows the messages of `rundir.reporting`. A value that is missing keeps its last one: a display must never end a run.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.config import Config
from diloco.config.address import scope
from diloco.rundir.reporting import Message, Notice, Ready, Status, who_can_join
from diloco.text import counted, human_bytes, human_count, human_seconds, plain

__all__ = ["STATE_STYLES", "LiveView", "hear_warnings", "invitation", "say_who_can_join"]

Clock = Callable[[], float]

LINE_EVERY_S = 10.0  # between lines of a peer whose version does not change

STATE_STYLES = {
    "starting": "dim", "waiting": "yellow", "training": "green", "exchanging": "cyan", "evaluating": "magenta",
    "leaving": "yellow", "left": "dim", "done": "bold green", "failed": "bold red",
    "killed": "bold red",
}  # fmt: skip
_FROM = {
    "loopback": "on this machine only; swarm=network lets others in",
    "LAN": "in this network; for elsewhere forward the port and set swarm.announce=[/ip4/PUBLIC_IP/tcp/PORT]",
    "public": "from anywhere",
}
_SETTLED = frozenset({"training", "waiting", "leaving", "done"})  # the outer step and its evaluation are over


@dataclass
class _Row:
    """A peer, what is known of its state, and its last line."""

    peer: str
    line_at: float
    line_version: int | None = None
    status: Status = field(default_factory=lambda: Status(state="starting"))


class LiveView:
    """Shows the peers of one swarm; use it as a context manager around the supervisor's loop.

    On a terminal it redraws itself in place a few times a second. Elsewhere `update` prints at most one line per peer
    and outer step, and one every 10 s where a step takes longer:

        [ 12.3s] p0 v3/16 loss 2.61 held-out 2.70 4.1k tok/s 1.2 MB sent training
    """

    def __init__(
        self, console: Console, peers: Sequence[str], total_steps: int | None, title: str, clock: Clock = time.monotonic
    ) -> None:
        self._console, self._total, self._title, self._clock = console, total_steps, title, clock
        self._began = clock()
        self._rows = {peer: _Row(peer, self._began) for peer in peers}
        self._ready = False
        self._told = set[str]()
        self._first: tuple[float, int] | None = None  # when training began, and at which version
        fancy = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4) if fancy else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, message: Message) -> None:
        """Shows a message: `Ready`, `Notice` or `Status`; others are ignored."""
        if isinstance(message, Ready):
            self._show_ready(message)
        elif isinstance(message, Notice):
            if message.text not in self._told:  # peers with the same files say the same of them
                self.note(f"{message.peer}: {message.text}")
            self._told.add(message.text)
        elif isinstance(message, Status):
            peer = plain(message.peer)
            row = self._rows.setdefault(peer, _Row(peer, self._clock()))
            self._fill(row, message)
            if self._live is None:
                self._line(row, always=message.state in ("done", "left"))

    def _show_ready(self, message: Ready) -> None:
        peer, address = plain(message.peer), plain(message.address)
        if self._live is None or not self._ready:  # lines are a record; a terminal needs one address only
            self.note(f"{peer} ready" + (f" at {address}" if address else ""))
        if message.advice:
            self.note(f"{peer}: {plain(message.advice)}")
        if message.first:
            addresses = [plain(one) for one in message.addresses or [message.address]]
            first, *rest = invitation(addresses, plain(message.command))
            self.note(first)
            for line in rest:  # for copying: nothing stands before it, and it is not broken
                self._console.print(Text(line), soft_wrap=True)
        self._ready = True

    def note(self, text: str) -> None:
        """Prints a line above the table, for an event."""
        line = f"[{self._clock() - self._began:5.1f}s] {plain(text)}"
        if self._live is None:
            click.echo(line, file=self._console.file)
        else:
            self._console.print(Text(line, style="dim"), soft_wrap=True)

    def _fill(self, row: _Row, status: Status) -> None:
        row.status = replace(status.over(row.status), state=plain(status.state) or row.status.state)
        self._total = status.outer_steps or self._total
        if self._first is None and row.status.version is not None and row.status.state == "training":
            self._first = (self._clock(), row.status.version)

    def _line(self, row: _Row, always: bool) -> None:
        now = self._clock()
        stepped = row.status.version != row.line_version and row.status.state in _SETTLED
        if not always and not stepped and now - row.line_at < LINE_EVERY_S:
            return
        row.line_version, row.line_at = row.status.version, now
        click.echo(
            f"[{now - self._began:5.1f}s] {row.peer} v{self._of(row)} loss {_loss(row.status.loss)} "
            f"held-out {_loss(row.status.eval_loss)} {human_count(row.status.tokens_per_s)} tok/s "
            f"{human_bytes(row.status.bytes_sent)} sent {row.status.state}",
            file=self._console.file,
        )

    def _of(self, row: _Row) -> str:
        version = "-" if row.status.version is None else str(row.status.version)
        return version if self._total is None else f"{version}/{self._total}"

    def render(self) -> RenderableType:
        """The progress bar over the table, whose last rows have to go where the terminal has no room for them."""
        rows = list(self._rows.values())  # the refreshing thread must not see it grow
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("peer", min_width=4)
        table.add_column("state", min_width=6)
        for name in ("version", "step", "loss", "held-out", "tok/s", "sent", "received"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            one = row.status
            step = "-" if one.inner_step is None else str(one.inner_step)
            state = Text(one.state, style=STATE_STYLES.get(one.state, ""))
            table.add_row(Text(row.peer), state, self._of(row), step, *_figures(one))
        if len(rows) > 1:
            sums: dict[str, Any] = {}
            for name in ("tokens_per_s", "bytes_sent", "bytes_received"):
                known = [value for row in rows if (value := getattr(row.status, name)) is not None]
                sums[name] = sum(known) if known else None
            table.add_row("together", "", "", "", "", "", *_figures(Status(**sums))[2:], style="dim")
        return Group(Text(self._title), self._progress(rows), table)

    def _progress(self, rows: Sequence[_Row]) -> RenderableType:
        now = self._clock()
        done = max((row.status.version or 0 for row in rows), default=0)
        peers = max((row.status.peers or 0 for row in rows), default=0)
        texts = [f"{done}/{self._total or '?'}", f"{human_seconds(now - self._began)} elapsed"]
        texts += [f"{self._remaining(now, done)} to go", *([counted(peers, "peer")] if peers else [])]
        bar = [ProgressBar(total=self._total, completed=done, width=16)] if self._total else []
        grid = Table.grid(padding=(0, 1))
        grid.add_row("outer steps", *bar, *texts)
        return grid

    def _remaining(self, now: float, done: int) -> str:
        if self._total is None or self._first is None:
            return "-"
        since, version = self._first
        if done >= self._total:
            return human_seconds(0)
        return human_seconds((now - since) / (done - version) * (self._total - done)) if done > version else "-"


class _Stderr(logging.Handler):
    """Writes to `sys.stderr` as it is now: a live table takes its place, and puts the lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"diloco: {record.getMessage()}", file=sys.stderr, flush=True)


def hear_warnings() -> None:
    """Warnings of the package and of libraries go to the terminal, a line each."""
    logging.basicConfig(handlers=[_Stderr()])


def say_who_can_join(console: Console, config: Config) -> None:
    """One line: red for a run that is open to the network, quiet for one that is not, none without a swarm."""
    notice = who_can_join(config)
    if notice is not None:
        text, is_warning = notice
        console.print(text, style="bold red" if is_warning else "dim", highlight=False)


def invitation(addresses: Sequence[str], command: str = "diloco join") -> list[str]:
    """Lines to print for a swarm that has begun: the best address as a whole command, then the others by interface.

    `command` is `diloco invite ...` for a closed run: its owner makes a link for each volunteer.
    """
    if not addresses:
        return ["nobody can join through this peer, which listens nowhere"]
    best, *others = addresses
    what = "others join with this" if command == "diloco join" else "this makes a link by which one volunteer joins"
    lines = [f"{what} ({scope(best)}: {_FROM[scope(best)]}):", f"{command} {best}"]
    return lines + [f"or, {scope(other)}: {command} {other}" for other in others[:4]]


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _figures(status: Status) -> list[str]:
    rate, sent, received = human_count(status.tokens_per_s), status.bytes_sent, status.bytes_received
    return [_loss(status.loss), _loss(status.eval_loss), rate, human_bytes(sent), human_bytes(received)]
