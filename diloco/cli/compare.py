"""`diloco compare`: runs side by side, as a table, as JSON and as curves."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from diloco.errors import ConfigError
from diloco.rundir.compare import time_to_loss, worst_loss
from diloco.rundir.comparison import Arm, Comparison, compare
from diloco.rundir.files import finite, prepare_run_directory
from diloco.text import human_bytes, human_count, human_seconds

__all__ = ["run", "show"]


def run(runs: Sequence[Path], loss: float | None, out: Path | None, table: Path | None, as_json: bool) -> int:
    """Print the table or its JSON; write the curves where there is a place."""
    if loss is not None and not math.isfinite(loss):
        raise ConfigError(f"--loss={loss} is no loss; give nats per token, such as 2.5")
    found = compare(*runs)
    if out is None and len(runs) == 1:
        out = runs[0]
    if out is not None:
        prepare_run_directory(out)
    if table is not None:
        found.to_csv(table, loss)
    if as_json:
        content = {
            "loss": worst_loss(found.runs) if loss is None else loss,
            "arms": [_arm(one) for one in found.arms],
            "runs": found.rows(loss),
            "gaps": [asdict(gap) | {"mean": gap.mean, "spread": gap.spread} for gap in found.gaps],
        }
        click.echo(json.dumps(finite(content), indent=2))
    else:
        show(found, Console(), loss)
    if out is not None:
        pictures = found.plot(out)
        if not as_json:
            click.echo(f"{out}: {', '.join(picture.name for picture in pictures)}")
    return 0


def show(found: Comparison, console: Console, loss: float | None = None) -> None:
    """A row per arm on the console; elsewhere than on a terminal the table is as wide as it needs to be."""
    reached, arms = worst_loss(found.runs) if loss is None else loss, found.arms
    columns: dict[str, list[str]] = {
        "run": [arm.name for arm in arms],
        "seeds": [str(len(arm.runs)) for arm in arms],
        "held-out": [_spread(arm, "loss", ".4f") for arm in arms],
        "perplexity": [_spread(arm, "perplexity", ".2f") for arm in arms],
        "tokens": [human_count(arm.mean("tokens")) for arm in arms],
        "virtual": [_time(arm.mean("virtual_s")) for arm in arms],
        "wall": [_time(arm.mean("wall_s")) for arm in arms],
        "sent": [human_bytes(arm.mean("bytes_sent")) for arm in arms],
        "busy": [_number(arm.mean("utilization"), ".1%") for arm in arms],
        f"to {reached:.4f}" if reached is not None else "to loss": [_time(_time_to(arm, reached)) for arm in arms],
        "exit": [_exits(arm) for arm in arms],
    }
    if all(len(arm.runs) == 1 for arm in arms):
        del columns["seeds"]
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "exit") else "right", no_wrap=name != "run")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*[Text(cell) for cell in row])
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        console = Console(file=console.file, width=Measurement.get(console, wide, table).maximum)
    console.print(table)
    for gap in found.gaps:
        console.print(Text(str(gap)), soft_wrap=True)


def _arm(arm: Arm) -> dict[str, Any]:
    names = [one.name for one in arm.runs]
    return {"name": arm.name, "loss": arm.mean("loss"), "spread": arm.spread("loss"), "seeds": arm.seeds, "runs": names}


def _time_to(arm: Arm, loss: float | None) -> float | None:
    """The mean seconds to a loss; None if one of the seeds never reached it."""
    times = [None if loss is None else time_to_loss(one, loss) for one in arm.counted]
    known = [time for time in times if time is not None]
    return sum(known) / len(known) if len(known) == len(times) else None


def _exits(arm: Arm) -> str:
    """How its runs ended; of several seeds, how many did not end well."""
    words = [{None: "unfinished", 4: "4 diverged"}.get(one.exit, str(one.exit)) for one in arm.runs]
    ill = Counter(word for word in words if word != "0")
    if not ill or len(words) == 1:
        return words[0]
    return ", ".join(f"{count} of {len(words)}: {word}" for word, count in ill.items())


def _spread(arm: Arm, of: str, form: str) -> str:
    spread = arm.spread(of)
    return _number(arm.mean(of), form) + ("" if spread is None else f" ± {spread:{form}}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 100 else human_seconds(value)
