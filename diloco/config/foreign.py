"""What a manifest of somebody else may ask of this machine, and what it needs from elsewhere.

Whoever gives a volunteer an address chooses what the volunteer's machine reads, trains on and gives away. Therefore a
run that is joined takes its model, its text and its tokenizer from the Hugging Face hub at a commit that the manifest
names, from this package (a model from `model.config`, the standard library, bytes), or from the run's peers by digests
that the manifest has. It never takes them from a path of this machine. `data.path` is no exception, nor is
`data.paths`: the manifest does not have them, the volunteer types them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from diloco.config.data import FILES
from diloco.config.explain import show
from diloco.config.hub_names import HUB_NAME
from diloco.config.manifest import Manifest, flatten
from diloco.errors import ConfigError
from diloco.hub import TOKENIZER_FILES

__all__ = ["Source", "check_foreign", "sources_of"]


class Source(NamedTuple):
    """Something that a run needs and that this package does not contain."""

    what: str  # model, data or tokenizer
    key: str  # the setting that names it
    name: str | None  # on the hub; None: the volunteer's own text, or a model or tokenizer that the run's peers have
    revision: str | None


def sources_of(manifest: Manifest) -> Iterator[Source]:
    """Yields what the run needs from outside this package."""
    model, data = manifest.model, manifest.data
    if model.path is not None or model.weights is not None:
        yield Source("model", "model.path", model.path, model.revision)
    if data.source != "stdlib" and (not data.mixture or any(one.source != "stdlib" for one in data.mixture)):
        yield Source("data", "data.name", data.name, data.revision)
    if data.tokenizer != "bytes":
        name = None if data.tokenizer == FILES else data.tokenizer
        yield Source("tokenizer", "data.tokenizer", name, data.tokenizer_revision)


def check_foreign(manifest: Manifest) -> None:
    """Raises ConfigError, with one line, if a volunteer must not take this manifest from a swarm."""
    for key, value in flatten(manifest.model_dump(mode="json")):
        if not all(text.isprintable() for text in (key, *_texts(value))):
            raise ConfigError(
                f"{show(key)}={show(value)} of the run holds characters that nobody can see; join no such run"
            )
    for source in sources_of(manifest):
        if source.name is not None:
            _check_hub(source, source.name)
    for name in manifest.data.tokenizer_files:
        if not any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES):
            raise ConfigError(f"data.tokenizer_files.{name} of the run is no file of a tokenizer; join no such run")


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a value, which may be a list of mappings."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(part)


def _check_hub(source: Source, name: str) -> None:
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(
            f"{source.key}={show(name)} of the run is no name on the Hugging Face hub, such as allenai/c4; a run that "
            "others join takes nothing from their disks, so whoever started it has to publish it there"
        )
    if source.revision is None:
        revision = (
            "data.tokenizer_revision" if source.what == "tokenizer" else f"{source.key.partition('.')[0]}.revision"
        )
        raise ConfigError(
            f"{source.key}={name} of the run has no commit, so nobody knows what will be fetched; whoever started the "
            f"run has to set {revision}"
        )
    if Path(name).exists():
        raise ConfigError(
            f"{source.key}={name} of the run is also a path here, and libraries would read that; start in another "
            "directory"
        )
