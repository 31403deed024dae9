"""`diloco compare`: runs side by side, as a table, as JSON and as curves."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diloco.cli.options import PATH, Command
from diloco.errors import ConfigError
from diloco.text import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from diloco.rundir.compare import Arm, RunComparison


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--loss", type=float, help="Held-out loss to reach.  [default: the worst final loss of all]"
)
@click.option("--out", type=PATH, help="Directory of the curves.  [default: that of a sweep]")
@click.option(
    "--csv",
    "table",
    type=PATH,
    metavar="FILE",
    help="Write a line per run to FILE, with what differs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(**arguments: Any) -> int:
    """Compare runs: a table, and curves by tokens, time and bytes.

    \b
    diloco compare runs/quickstart runs/baseline
    diloco compare runs/seeds --loss 2.1 --csv seeds.csv

    RUN is a run directory or the directory of a sweep. Runs that differ in their seed only are one
    row: mean +- their deviation. The lowest loss comes first. Without --out, several RUNs leave no
        curves.
    """
    return run(**arguments)


def run(
    runs: Sequence[Path],
    *,
    loss: float | None = None,
    out: Path | None = None,
    table: Path | None = None,
    as_json: bool = False,
) -> int:
    """Print the table or its JSON; write the curves where there is a place."""
    from diloco.rundir.compare import compare
    from diloco.rundir.files import finite, prepare_run_directory

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
        rows = found.rows(loss)
        content = {
            "loss": found.worst_loss() if loss is None else loss,
            "arms": [
                {"name": arm.name, "loss": arm.mean("loss"), "spread": arm.spread("loss")}
                | {"seeds": [one.seed for one in arm.runs]}
                | {"runs": [row["name"] for row in rows if row["arm"] == arm.name]}
                for arm in found.arms
            ],
            "runs": rows,
            "gaps": [asdict(gap) | {"mean": gap.mean, "spread": gap.spread} for gap in found.gaps],
        }
        click.echo(json.dumps(finite(content), indent=2))
    else:
        _show(found, loss)
    if out is not None:
        pictures = found.plot(out)
        if not as_json:
            click.echo(f"{out}: {', '.join(picture.name for picture in pictures)}")
    return 0


def _show(found: RunComparison, loss: float | None) -> None:
    """A row per arm; elsewhere than on a terminal the table is as wide as it needs to be."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console()
    reached = found.worst_loss() if loss is None else loss
    with_seeds = any(len(arm.runs) > 1 for arm in found.arms)
    columns = [
        "run",
        *["seeds"] * with_seeds,
        "held-out",
        "perplexity",
        "tokens",
        "virtual",
        "wall",
        "sent",
        "busy",
    ]
    columns += ["to loss" if reached is None else f"to {reached:.4f}", "exit"]
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("run", "exit") else "right", no_wrap=name != "run"
        )
    for arm in found.arms:
        cells = [
            arm.name,
            *[str(len(arm.runs))] * with_seeds,
            _spread(arm, "loss", 4),
            _spread(arm, "perplexity", 2),
        ]
        cells += [
            human_count(arm.mean("tokens")),
            _time(arm.mean("virtual_s")),
            _time(arm.mean("wall_s")),
        ]
        busy = arm.mean("utilization")
        cells += [human_bytes(arm.mean("bytes_sent")), "-" if busy is None else f"{busy:.1%}"]
        times = [None if reached is None else one.time_to_loss(reached) for one in arm.counted]
        known = [time for time in times if time is not None]
        cells += [_time(sum(known) / len(known) if len(known) == len(times) else None), _exits(arm)]
        table.add_row(*map(Text, cells))
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        console = Console(file=console.file, width=Measurement.get(console, wide, table).maximum)
    console.print(table)
    for gap in found.gaps:
        console.print(Text(str(gap)), soft_wrap=True)


def _exits(arm: Arm) -> str:
    """How its runs ended; of several seeds, how many did not end well."""
    words = [{None: "unfinished", 4: "4 diverged"}.get(one.exit, str(one.exit)) for one in arm.runs]
    ill = Counter(word for word in words if word != "0")
    if not ill or len(words) == 1:
        return words[0]
    return ", ".join(f"{count} of {len(words)}: {word}" for word, count in ill.items())


def _spread(arm: Arm, of: str, digits: int) -> str:
    mean, spread = arm.mean(of), arm.spread(of)
    text = "-" if mean is None else f"{mean:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 100 else human_seconds(value)
