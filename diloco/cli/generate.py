"""`diloco generate`: text from a model directory."""

from __future__ import annotations

from pathlib import Path

import click

from diloco import model as models
from diloco.data import load_tokenizer
from diloco.train.evaluate import generate

__all__ = ["run"]


def run(model: Path, prompt: str, tokens: int, temperature: float, seed: int) -> int:
    """Print the prompt and what the model writes after it."""
    place = model / "model" if (model / "model" / "config.json").is_file() else model
    loaded = models.load(place, key="MODEL_DIR")
    tokenizer = load_tokenizer(str(place))
    text = generate(loaded, tokenizer, prompt, max_new_tokens=tokens, temperature=temperature, seed=seed)
    click.echo(prompt + text)
    return 0
