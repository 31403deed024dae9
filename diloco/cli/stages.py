"""The stages of joining a swarm: which one is under way, its progress, and how long each one took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from diloco.text import plain

__all__ = ["Stages"]

BAR_WIDTH = 24


@dataclass
class _Stage:
    name: str
    began_at: float | None = None
    seconds: float | None = None
    done: float = 0.0  # from 0, which shows no bar, to 1
    text: str = ""


class Stages:
    """Shows stages one after the other; use it as a context manager.

    On a terminal it redraws itself in place; elsewhere each stage that is over prints one line:

        [  1.2s] manifest: quickstart, tiny on stdlib
    """

    def __init__(self, console: Console, names: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._began_at = clock()
        self._stages = [_Stage(name) for name in names]
        self._at = -1
        self._failed = False
        fancy = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=8) if fancy else None
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> Stages:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._failed = kind is not None
        self.close()

    def close(self) -> None:
        """Leave what is shown as it is."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a question: what is shown stays as it is, and goes on below."""
        self.close()
        yield
        if self._live is not None:
            self._live.start()

    @property
    def name(self) -> str | None:
        """Name of the stage under way; None before the first and after the last."""
        return self._stages[self._at].name if 0 <= self._at < len(self._stages) else None

    def go_to(self, name: str) -> None:
        """End the stages before this one, and begin it."""
        while self.name != name and self._at < len(self._stages):
            self.advance()

    def advance(self) -> None:
        """End the stage under way and begin the next."""
        now = self._clock()
        if 0 <= self._at < len(self._stages):
            stage = self._stages[self._at]
            stage.seconds = now - (now if stage.began_at is None else stage.began_at)
            if self._live is None:
                text = f": {stage.text}" if stage.text else ""
                click.echo(f"[{now - self._began_at:5.1f}s] {stage.name}{text}", file=self.console.file)
        self._at += 1
        if self._at < len(self._stages):
            self._stages[self._at].began_at = now

    def show(self, text: str, done: float = 0.0) -> None:
        """Sets the text of the stage under way, and its progress from 0 to 1."""
        if 0 <= self._at < len(self._stages):
            self._stages[self._at].text = plain(text)
            self._stages[self._at].done = min(1.0, done)

    def render(self) -> RenderableType:
        """A line per stage."""
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for number, stage in enumerate(self._stages):
            mark: RenderableType = Text(" ")
            seconds = stage.seconds
            if seconds is not None:
                mark = Text("✓", style="green")
            elif number == self._at:
                mark = Text("✗", style="bold red") if self._failed else self._spinner
                seconds = self._clock() - (stage.began_at or self._clock())
            shown: RenderableType = Text(stage.text)
            if number == self._at and stage.done:
                shown = Table.grid(padding=(0, 1))
                shown.add_row(ProgressBar(total=1.0, completed=stage.done, width=BAR_WIDTH), stage.text)
            took = "" if seconds is None else f"{seconds:.1f} s"
            style = "" if number <= self._at else "dim"
            grid.add_row(mark, Text(stage.name, style=style), Text(took, style="dim", justify="right"), shown)
        return grid
