"""The manifest: the run-owned half of a configuration, as peers exchange it.

Its hash names the run on the wire, so the text that is hashed does not depend on who computed it:
JSON with sorted keys, no spaces, ASCII only, and Python's shortest floats. How long the run is does
not count there: it may rise while the run lives. A manifest from a peer is untrusted: `from_json`
accepts exactly what this version would write.

A run that is joined takes model, text and tokenizer from the Hugging Face hub at a commit that the
manifest names, from this package, or from the run's peers by digests (`check_foreign`); never from
a path of this machine, which only its user types (`data.path`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError, model_validator

from diloco.config.explain import explain, show
from diloco.config.model_data import FILES, HUB_NAME, DataRecipe, ModelRecipe
from diloco.config.run_settings import (
    BudgetConfig,
    InnerConfig,
    OuterConfig,
    RunIdentity,
    SwarmRules,
)
from diloco.config.types import RunOwned, Settings
from diloco.errors import ConfigError
from diloco.hub import TOKENIZER_FILES
from diloco.protocol import WIRE_VERSION

# A real manifest has about 1500 characters; a hostile one must not cost memory or time to parse.
MAX_MANIFEST_CHARACTERS = 65536
# How long the run is; null stays null.
RISING = ("budget.outer_steps", "budget.tokens", "outer.rounds")

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=Settings)


class Manifest(RunOwned):
    """The settings that all peers of a run must agree on."""

    run: RunIdentity
    budget: BudgetConfig
    model: ModelRecipe
    data: DataRecipe
    inner: InnerConfig
    outer: OuterConfig
    swarm: SwarmRules = Field(default_factory=SwarmRules)
    wire_version: int = Field(WIRE_VERSION, ge=1)
    """Version of the protocol between peers."""

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        check_model_fits_data(self.model, self.data)
        return self

    def to_json(self, indent: int | None = None) -> str:
        """Return canonical JSON (sorted keys, ASCII); `indent` is for files that people read."""
        separators = (",", ":" if indent is None else ": ")
        content = self.model_dump(mode="json")
        return json.dumps(
            content, sort_keys=True, separators=separators, indent=indent, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str, any_wire_version: bool = False) -> Manifest:
        """Parse an untrusted manifest; raises ConfigError for anything but a complete one.

        `any_wire_version` takes one from a run directory that an older diloco wrote.
        """
        if len(text) > MAX_MANIFEST_CHARACTERS:
            most = f"at most {MAX_MANIFEST_CHARACTERS} are accepted"
            raise ConfigError(f"manifest has {len(text)} characters; {most}")
        try:
            content = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"manifest is not JSON: {show(str(error))}") from None
        if not isinstance(content, dict):
            raise ConfigError("manifest is not a JSON object")
        if any_wire_version:
            content["wire_version"] = WIRE_VERSION
        version = content.get("wire_version")
        if type(version) is not int or version != WIRE_VERSION:
            here = f"this diloco speaks {WIRE_VERSION}; install the same version on all peers"
            raise ConfigError(f"manifest has wire version {show(version)}, {here}")
        try:
            manifest = cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"manifest: {explain(error, cls)}") from None
        # a configuration file that it is written to must not resolve it
        if "${" in manifest.to_json():
            raise ConfigError("manifest holds ${, which stands for a setting of this machine")
        return manifest

    def hash(self) -> str:
        """Return `hash_of` of its JSON."""
        return hash_of(self.to_json())

    def differences(self, other: Manifest) -> list[str]:
        """List the settings that differ, such as `outer.lr: 0.7 here, 0.4 there`."""
        trees = (manifest.model_dump(mode="json") for manifest in (self, other))
        here, there = (dict(flatten(tree)) for tree in trees)
        texts = []
        for key in sorted(here.keys() | there.keys()):
            ours, theirs = (show(tree[key]) if key in tree else "not set" for tree in (here, there))
            if ours != theirs:
                texts.append(f"{key}: {ours} here, {theirs} there")
        return texts


def hash_of(text: str) -> str:
    """Return SHA-256 (hex) of a manifest's JSON with 0 for `RISING`; of other text, as it is."""
    # a parser of manifests says what is wrong
    with suppress(ValueError, AttributeError, TypeError, RecursionError):
        content = json.loads(text)
        for group, _, name in (key.partition(".") for key in RISING):
            if content.get(group, {}).get(name) is not None:
                content[group][name] = 0
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def planned(settings: Settings) -> list[int]:
    """Return the numbers in `RISING` of a manifest or a configuration; 0 stands for null."""
    return [attrgetter(key)(settings) or 0 for key in RISING]


def raised(settings: S, plan: Sequence[float]) -> S:
    """Take the greater of each number in `RISING`; warn where the run ends later."""
    for key, number in zip(RISING, map(int, plan), strict=True):
        group, _, name = key.partition(".")
        values = getattr(settings, group)
        here = getattr(values, name)
        if here is None or number <= here:
            continue
        settings = settings.model_copy(update={group: values.model_copy(update={name: number})})
        if group == "budget":
            text = "budget.%s=%d: the run goes on to %d, for a budget only rises"
            logger.warning(text, name, here, number)
    return settings


def check_model_fits_data(model: ModelRecipe, data: DataRecipe) -> None:
    """Raise ValueError if the model cannot hold the tokens or the sequences of the data.

    Only numbers in the config are checked; a model of `model.path` is when it is loaded.
    """
    vocabulary = model.config.get("vocab_size")
    positions = model.config.get("max_position_embeddings")
    if data.tokenizer == "bytes" and isinstance(vocabulary, int) and vocabulary < 256:
        small = f"model.config.vocab_size={vocabulary} cannot hold bytes"
        raise ValueError(f"{small}; data.tokenizer=bytes needs at least 256")
    if isinstance(positions, int) and positions < data.sequence_length:
        most = f"model.config.max_position_embeddings={positions}"
        longer = f"data.sequence_length={data.sequence_length} is longer than {most}"
        raise ValueError(f"{longer}; lower the one or raise the other")


def check_warmup_ends(
    budget: BudgetConfig, inner: InnerConfig, outer: OuterConfig, data: DataRecipe
) -> None:
    """Raise ValueError if the learning rate would still be rising when the run ends."""
    limits = []
    if budget.outer_steps is not None:
        steps = budget.outer_steps * outer.sync_every
        limits.append((steps, "budget.outer_steps x outer.sync_every"))
    if budget.tokens is not None:  # of one peer alone; with several it ends sooner
        steps = budget.tokens // (inner.batch_size * data.sequence_length)
        limits.append((steps, "budget.tokens / (inner.batch_size x data.sequence_length)"))
    steps, why = min(limits)
    if inner.warmup_steps >= max(1, steps):
        end = f"the run ends after {steps} inner steps ({why})"
        late = f"inner.warmup_steps={inner.warmup_steps} is not over when {end}"
        raise ValueError(f"{late}; lower it, or give it as a part of the run, such as 0.25")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of the leaves of nested mappings; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class ExternalSource(NamedTuple):
    """A model, data or a tokenizer that a run needs and that this package does not contain."""

    kind: str  # model, data or tokenizer
    key: str  # the setting that names it
    name: str | None  # on the hub; None: the volunteer's own text, or files that the peers have
    revision: str | None


def sources_of(manifest: Manifest) -> Iterator[ExternalSource]:
    """Yield the sources outside this package that the run needs."""
    model, data = manifest.model, manifest.data
    if model.path is not None or model.weights is not None:
        yield ExternalSource("model", "model.path", model.path, model.revision)
    only_stdlib = data.source == "mixture" and all(x.source == "stdlib" for x in data.mixture)
    if data.source != "stdlib" and not only_stdlib:
        yield ExternalSource("data", "data.name", data.name, data.revision)
    if data.tokenizer != "bytes":
        name = None if data.tokenizer == FILES else data.tokenizer
        yield ExternalSource("tokenizer", "data.tokenizer", name, data.tokenizer_revision)


def check_foreign(manifest: Manifest) -> None:
    """Raise ConfigError if a volunteer must not take this manifest from a swarm."""
    for key, value in flatten(manifest.model_dump(mode="json")):
        if not all(text.isprintable() for text in (key, *_texts(value))):
            hidden = f"{show(key)}={show(value)} of the run holds characters that nobody can see"
            raise ConfigError(f"{hidden}; join no such run")
    for source in sources_of(manifest):
        if source.name is not None:
            _check_hub(source, source.name)
    for name in manifest.data.tokenizer_files:
        if not any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES):
            key = f"data.tokenizer_files.{name}"
            raise ConfigError(f"{key} of the run is no file of a tokenizer; join no such run")


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a value, which may be a list of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _check_hub(source: ExternalSource, name: str) -> None:
    named = f"{source.key}={show(name)} of the run"
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(
            f"{named} is no name on the Hugging Face hub, such as allenai/c4; a run that others"
            " join takes nothing from their disks, so whoever started it has to publish it there"
        )
    if source.revision is None:
        remedy = f"whoever started the run has to set {source.key}={name}@COMMIT"
        raise ConfigError(f"{named} has no commit, so nobody knows what will be fetched; {remedy}")
    if Path(name).exists():
        why = "is also a path here, and libraries would read that"
        raise ConfigError(f"{named} {why}; start in another directory")
