"""`diloco eval`: held-out loss of a model directory."""

from __future__ import annotations

from pathlib import Path

import click

from diloco import data
from diloco import model as models
from diloco.config import Config
from diloco.train.evaluate import evaluate
from diloco.train.island import Island
from diloco.train.loop import autocast

__all__ = ["run"]


def run(config: Config, model: Path) -> int:
    """Print the loss of a model on the configured held-out sequences."""
    place = model / "model" if (model / "model" / "config.json").is_file() else model
    island = Island.from_environment(config.train.device)
    loaded = models.load(place, key="MODEL_DIR").to(island.device)
    dataset = data.load(config.data, config.run.seed)
    holdout = dataset.holdout(config.eval.sequences)
    with autocast(config, island.device):
        result = evaluate(loaded, holdout, config.inner.batch_size, island.device, dataset.tokenizer)
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits per byte"
    click.echo(
        f"loss {result.loss:.6f} nats per token, perplexity {result.perplexity:.4f}{bits} "
        f"({result.tokens} held-out tokens of {dataset.description})"
    )
    return 0
