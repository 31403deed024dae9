"""`diloco compare`: runs side by side, as a table, as JSON and as curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from diloco.config.prices import Machine
from diloco.errors import ConfigError
from diloco.rundir.compare import Run, find_runs, plot_runs, read_runs, time_to_loss, worst_loss
from diloco.rundir.files import finite, prepare_run_directory
from diloco.rundir.gaps import find_gaps
from diloco.text import human_bytes, human_count, human_seconds

__all__ = ["run", "show"]


def run(
    runs: Sequence[Path], loss: float | None, out: Path | None, as_json: bool, priced: tuple[str, Machine] | None = None
) -> int:
    """Print the table or its JSON, with costs if a machine is priced; write the curves where there is a place."""
    if loss is not None and not math.isfinite(loss):
        raise ConfigError(f"--loss={loss} is no loss; give nats per token, such as 2.5")
    found = read_runs(find_runs(runs))
    if out is None and len(runs) == 1:
        out = runs[0]
    if out is not None:
        prepare_run_directory(out)
    if as_json:
        reached = worst_loss(found) if loss is None else loss
        content = {"loss": reached, "runs": [_record(one, reached, priced) for one in found], "gaps": _gaps(found)}
        click.echo(json.dumps(finite(content), indent=2))
    else:
        show(found, Console(), loss, priced)
    if out is not None:
        pictures = plot_runs(found, out)
        if not as_json:
            click.echo(f"{out}: {', '.join(picture.name for picture in pictures)}")
    return 0


def show(
    runs: Sequence[Run], console: Console, loss: float | None = None, priced: tuple[str, Machine] | None = None
) -> None:
    """The table on the console; elsewhere than on a terminal it is as wide as it needs to be."""
    reached = worst_loss(runs) if loss is None else loss
    columns: dict[str, list[str]] = {
        "run": [one.name for one in runs],
        "held-out": [_number(one.loss, ".4f") for one in runs],
        "perplexity": [_number(one.perplexity, ".2f") for one in runs],
        "tokens": [human_count(one.tokens) for one in runs],
        "virtual": [_time(one.virtual_s) for one in runs],
        "wall": [_time(one.wall_s) for one in runs],
        "sent": [human_bytes(one.bytes_sent) for one in runs],
        "busy": [_number(one.utilization, ".1%") for one in runs],
        f"to {reached:.4f}" if reached is not None else "to loss": [
            _time(None if reached is None else time_to_loss(one, reached)) for one in runs
        ],
        "exit": [{None: "unfinished", 4: "4 diverged"}.get(one.exit, str(one.exit)) for one in runs],
    }
    if priced is not None:
        name, machine = priced
        exits = columns.pop("exit")  # stays the last one
        columns |= {f"on {name}": [_dollars(one, machine) for one in runs], "exit": exits}
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "exit") else "right", no_wrap=name != "run")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*[Text(cell) for cell in row])
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        console = Console(file=console.file, width=Measurement.get(console, wide, table).maximum)
    console.print(table)
    for gap in find_gaps(runs):
        console.print(Text(str(gap)), soft_wrap=True)


def _gaps(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [asdict(gap) | {"mean": gap.mean, "spread": gap.spread} for gap in find_gaps(runs)]


def _record(one: Run, loss: float | None, priced: tuple[str, Machine] | None) -> dict[str, Any]:
    names = ("name", "loss", "perplexity", "tokens", "virtual_s", "wall_s", "bytes_sent", "utilization", "exit")
    reached_s = None if loss is None else time_to_loss(one, loss)
    record = {name: getattr(one, name) for name in names}
    record |= {"directory": str(one.directory), "time_to_loss_s": reached_s}
    if priced is not None:
        cost = one.cost(priced[1])
        record |= {"machine": priced[0], "usd": None if cost is None else cost.total}
    return record


def _dollars(one: Run, machine: Machine) -> str:
    cost = one.cost(machine)
    return "-" if cost is None else f"${cost.total:,.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 100 else human_seconds(value)
