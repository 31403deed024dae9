"""Arguments of the commands for a trained model: `eval`, `export` and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diloco.cli.commands.common import Command, configured, implementation, run

__all__ = ["evaluate", "export", "generate"]


@click.command(name="eval", cls=Command)
@click.argument("model", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@configured
def evaluate(model: Path, base: Path | None, **arguments: Any) -> int:
    """Measure the held-out loss of a model.

    \b
    diloco eval runs/quickstart/model
    diloco eval exported/ data=text data.path=notes/ eval.sequences=256

    MODEL_DIR is in Hugging Face format, or a run directory. Inside a run directory the settings of that run are the
    defaults, so its loss is reproduced.
    """
    beside = (directory / "config.yaml" for directory in (model, model.parent))
    base = base or next((file for file in beside if file.is_file()), None)
    return run("eval", base=base, model=model, **arguments)


@click.command(cls=Command)
@click.argument("source", metavar="CHECKPOINT_OR_RUN_DIR", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
def export(source: Path, out: Path) -> int:
    """Write a checkpoint as a Hugging Face model directory.

    \b
    diloco export runs/quickstart exported/
    """
    return implementation("export")(source=source, out=out)


@click.command(cls=Command)
@click.argument("model", metavar="MODEL_DIR", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.8, show_default=True, help="0 takes the likeliest token."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the sampling.")
def generate(**arguments: Any) -> int:
    """Print text from a model.

    \b
    diloco generate runs/quickstart/model --prompt 'def main(' --tokens 200

    MODEL_DIR is in Hugging Face format, or a run directory.
    """
    return implementation("generate")(**arguments)
