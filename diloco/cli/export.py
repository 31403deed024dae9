"""`diloco export`: a checkpoint of a run as a Hugging Face model directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from diloco import model as models
from diloco.config import Config, compose
from diloco.data import load_tokenizer
from diloco.errors import CheckpointError, ConfigError
from diloco.outer.fragments import partition, scatter_
from diloco.rundir.checkpoint import Checkpoint, CheckpointStore

__all__ = ["run"]


def run(source: Path, out: Path) -> int:
    """Write the newest checkpoint of a run directory (or of one peer's checkpoints) to `out`."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"OUT={out} is not empty; name a directory that does not exist yet")
    run_dir = next((place for place in (source, *source.parents) if (place / "config.yaml").is_file()), None)
    if run_dir is None:
        raise CheckpointError(f"{source} is no run directory: there is no config.yaml in it; name the run.dir of a run")
    config = compose([], base=run_dir / "config.yaml")
    checkpoint = _newest(run_dir / "checkpoints")
    if checkpoint is None and (run_dir / "model").is_dir():
        shutil.copytree(run_dir / "model", out, dirs_exist_ok=True)
        click.echo(f"{out}: the model of {run_dir}")
        return 0
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; let the run reach its first outer step")
    _write(config, checkpoint, out)
    click.echo(f"{out}: outer step {checkpoint.step} of run {config.run.id}")
    return 0


def _newest(directory: Path) -> Checkpoint | None:
    found = [CheckpointStore(place, keep=1).load_latest() for place in sorted(directory.glob("*")) if place.is_dir()]
    return max((one for one in found if one is not None), key=lambda one: one.step, default=None)


def _write(config: Config, checkpoint: Checkpoint, out: Path) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = models.build(config.model, config.run.seed, vocab_size=tokenizer.vocab_size)
    parameters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    anchors = checkpoint.tensors["anchor"]
    if config.outer.method == "data_parallel":
        for name, values in anchors.items():
            parameters[name].copy_(values)
    else:
        numels = {name: parameter.numel() for name, parameter in parameters.items()}
        for fragment in partition(numels, config.outer.fragments, config.outer.pattern):
            scatter_(parameters, fragment, 0, fragment.numel, anchors[str(fragment.index)])
    models.save(model, out, tokenizer)
