"""Arguments of the commands that need no swarm: to use a trained model, and to study settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from diloco.cli.commands.common import PATH, Asked, Command, configured, implementation, run, sweepable
from diloco.errors import ConfigError

__all__ = ["compare", "evaluate", "export", "generate", "plan", "simulate", "sweep"]


@click.command(name="eval", cls=Command)
@click.argument("model", metavar="MODEL_DIR", type=PATH)
@configured
def evaluate(model: Path, asked: Asked, **arguments: Any) -> int:
    """Measure the held-out loss of a model.

    \b
    diloco eval runs/quickstart/model
    diloco eval exported/ data=text data.path=notes/ eval.sequences=256

    MODEL_DIR is in Hugging Face format, or a run directory. Inside a run directory the settings of that run are the
    defaults, so its loss is reproduced.
    """
    beside = (directory / "config.yaml" for directory in (model, model.parent))
    base = asked.base or next((file for file in beside if file.is_file()), None)
    return run("eval", asked=replace(asked, base=base), model=model, **arguments)


@click.command(cls=Command)
@click.argument("source", metavar="CHECKPOINT_OR_RUN_DIR", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option("--push-to-hub", "name", metavar="NAME", help="Upload OUT as this model of the Hugging Face hub, too.")
@click.option("--private", is_flag=True, help="Make a new model of the hub a private one.")
def export(source: Path, out: Path, name: str | None, private: bool) -> int:
    """Write a checkpoint as a Hugging Face model directory.

    \b
    diloco export runs/quickstart exported/
    diloco export runs/quickstart exported/ --push-to-hub me/quickstart --private

    OUT holds weights, tokenizer, chat template, generation settings, and a README.md that says what was trained.
    """
    if private and name is None:
        raise ConfigError("--private has no effect without --push-to-hub; drop it")
    return implementation("export")(source=source, out=out, name=name, private=private)


@click.command(cls=Command)
@click.argument("model", metavar="MODEL_DIR", type=PATH)
@click.option("--prompt", default="", show_default=False, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=256, help="Tokens to generate.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.8, help="0 takes the likeliest token.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of the sampling.")
def generate(**arguments: Any) -> int:
    """Print text from a model.

    \b
    diloco generate runs/quickstart/model --prompt 'def main(' --tokens 200

    MODEL_DIR is in Hugging Face format, or a run directory.
    """
    return implementation("generate")(**arguments)


@click.command(cls=Command)
@configured
@sweepable
def simulate(**arguments: Any) -> int:
    """Train with many peers in virtual time, in this process.

    \b
    diloco simulate experiment=quickstart run.dir=runs/sim
    diloco simulate experiment=smoke 'sim.step_s=[1,1.5,2,3]' local.peers=4 sim.bandwidth=1e6 sim.latency_s=0.05
    diloco simulate experiment=smoke 'sim.events=[crash:3@120,join:4@60]' local.peers=4

    Compute is real. An inner step takes sim.step_s virtual seconds, and sim.bandwidth and sim.latency_s say how long a
    transfer takes. The same settings give the same run.
    """
    return run("simulate", **arguments)


@click.command(cls=Command)
@configured
@click.option("--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Members at a time.")
@click.option("--dir", "directory", type=PATH, help="Where the members go.  [default: runs/RUN_ID-sweep]")
@click.option("--dry-run", is_flag=True, help="Check and list the members, and stop.")
def sweep(overrides: tuple[str, ...], asked: Asked, **arguments: Any) -> int:
    """Run every combination of several values.

    \b
    diloco sweep simulate experiment=smoke outer.lr=0.5,0.7,1.0 outer.sync_every=10,20
    diloco sweep local experiment=quickstart 'run.seed=range(0,3)' --jobs 2 --dir runs/seeds
    diloco sweep local 'inner.lr=interval(1e-4,1e-2)' hydra/sweeper=optuna hydra.sweeper.n_trials=20
    diloco sweep simulate experiment=lr-sweep

    The first argument is the command of a member: local (the default), train or simulate. What varies is in Hydra's
    grammar, and may also be in a file, as hydra.sweeper.params. Each member has its own run directory. The same command
    again runs the members that are not done. A member that fails does not stop the others. At the end there are the
    table of diloco compare and its curves.
    """
    command, *rest = overrides if overrides and "=" not in overrides[0] else ("local", *overrides)
    if command not in ("local", "train", "simulate"):
        raise ConfigError(f"diloco sweep {command}: a member is one of local, train, simulate")
    if asked.shows:
        raise ConfigError(f"{asked.shows} shows one configuration; use --dry-run to see the members of a sweep")
    return implementation("sweep")(command=command, overrides=tuple(rest), start=asked.start(), **arguments)


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option("--loss", type=float, help="Held-out loss to reach.  [default: the worst final loss of all]")
@click.option("--out", type=PATH, help="Directory of the curves.  [default: that of a sweep]")
@click.option("--csv", "table", type=PATH, metavar="FILE", help="Write a line per run to FILE, with what differs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(**arguments: Any) -> int:
    """Compare runs: a table, and curves by tokens, time and bytes.

    \b
    diloco compare runs/quickstart runs/baseline
    diloco compare runs/seeds --loss 2.1 --csv seeds.csv

    RUN is a run directory or the directory of a sweep. Runs that differ in their seed only are one row: mean +- their
    deviation. The lowest loss comes first. Without --out, several RUNs leave no curves.
    """
    return implementation("compare")(**arguments)


@click.command(cls=Command)
@configured
@click.option("--step-s", type=click.FloatRange(0, min_open=True), help="Seconds of an inner step; else measured here.")
@click.option("--bandwidth", default="100Mbit", help="Of each peer's link, each way.")
@click.option("--latency-ms", type=click.FloatRange(0, 60_000), default=50.0, help="From peer to peer.")
@click.option(
    "--target", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95, help="Utilization to plan for."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(bandwidth: str, **arguments: Any) -> int:
    """Predict utilization, bytes and bandwidth, with the arithmetic.

    \b
    diloco plan model=150m local.peers=8 --step-s 1 --bandwidth 100Mbit
    diloco plan experiment=quickstart --target 0.99

    local.peers is the size of the swarm, and diloco doctor measures a link. The bandwidth and the inner steps that
    reach the target are printed, too.
    """
    from diloco.train.planning import parse_bandwidth

    return run("plan", bits_per_s=parse_bandwidth(bandwidth), **arguments)
