"""What a volunteer's machine is asked to do, and whether its user says yes.

A run that needs nothing from outside this package is joined without a question: it trains a model from its config on
Python's standard library. Any other run makes this machine fetch what somebody published, or read files of its user.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.config import Config
from diloco.config.foreign import Source, sources_of
from diloco.errors import ConfigError
from diloco.text import human_bytes, human_count, plain

__all__ = ["consent", "needs_consent", "terms"]


def needs_consent(config: Config) -> bool:
    """Whether the run needs anything from outside this package."""
    return any(True for _ in sources_of(config.manifest()))


def consent(console: Console, config: Config, parameters: int, memory_bytes: float, device: str, yes: bool) -> None:
    """Show what will be fetched, trained and sent, and ask; `yes` is the answer of a script.

    Raises ConfigError if there is nobody to ask, or if the answer is no.
    """
    grid = Table.grid(padding=(0, 2))
    for name, text in terms(config, parameters, memory_bytes, device):
        grid.add_row(Text(name, style="bold"), Text(plain(text)))
    console.print(grid)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"run {config.run.id} needs more than this package, and there is no terminal to ask on; if you agree with "
            "the above, add --yes"
        )
    if not click.confirm("Join this run?", default=False):
        raise ConfigError("nothing was fetched, and this machine has not joined")


def terms(config: Config, parameters: int, memory_bytes: float, device: str) -> Iterator[tuple[str, str]]:
    """Yields what a volunteer has to know as (name, text)."""
    manifest = config.manifest()
    needed = {source.what: source for source in sources_of(manifest)}
    owner = "anybody may have started it, and anybody may join"
    if manifest.run.key is not None:
        owner = f"its owner, who has key {manifest.run.key[:16]}, signed these settings"
    yield "run", f"{manifest.run.id}: {owner}"
    made = f"{human_count(parameters)} parameters"
    if manifest.model.weights is not None:
        yield "model", f"{_published(needed['model'])}, {made}, whose weights come from the run's peers"
    elif "model" in needed:
        yield "model", f"{_published(needed['model'])}, {_size(needed['model'])}, {made}"
    else:
        yield "model", f"{manifest.model.name}, random weights, {made}"
    data = needed.get("data")
    if data is None:
        yield "data", "the standard library of Python, which is here"
    elif data.name is None:
        own = [*(config.data.path or ()), *(path for paths in config.data.paths.values() for path in paths)]
        yield "data", f"YOUR files: {', '.join(own)}"
    else:
        subset = f", {manifest.data.subset}" if manifest.data.subset else ""
        yield (
            "data",
            f"{_published(data)}{subset}, {manifest.data.split}; fetched piece by piece, for as long as you train",
        )
    if manifest.data.tokenizer_files:
        count = len(manifest.data.tokenizer_files)
        yield "tokenizer", f"{_published(needed['tokenizer'])}, {count} files from the run's peers"
    elif "tokenizer" in needed:
        yield "tokenizer", f"{_published(needed['tokenizer'])}, {_size(needed['tokenizer'])}"
    yield (
        "here",
        f"trains on {device}, in some {human_bytes(memory_bytes)} of memory, until Ctrl+C; writes to {config.run.dir}",
    )
    yield "sends", "what it learns, to the other peers: parts of the text that it trained on can be read out of that"


def _published(source: Source) -> str:
    if source.name is None or source.revision is None:
        return f"a {source.what} of whoever started the run"
    return f"{source.name} at {source.revision[:12]}, published by {source.publisher}"


def _size(source: Source) -> str:
    from diloco.hub import MODEL_FILES, TOKENIZER_FILES, size_at

    assert source.name is not None and source.revision is not None
    files = MODEL_FILES if source.what == "model" else TOKENIZER_FILES
    size = size_at(source.key, source.name, source.revision, files)
    return "in the cache (offline mode)" if size is None else human_bytes(size)
