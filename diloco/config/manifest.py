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

from diloco.config.data import FILES, DataRecipe
from diloco.config.explain import explain, show
from diloco.config.hub_names import HUB_NAME
from diloco.config.model import ModelRecipe
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

# Raised whenever peers of the old and the new version could not train together.
WIRE_VERSION = 12
# A real manifest has about 1500 characters; a hostile one must not cost memory or time to parse.
MAX_MANIFEST_CHARACTERS = 65536
# how long the run is; null stays null
RISING = ("budget.outer_steps", "budget.tokens", "outer.rounds")

logger = logging.getLogger(__name__)


S = TypeVar("S", bound=Settings)


class Manifest(RunOwned):
    """Everything that all peers of a run must agree on."""

    run: RunIdentity
    budget: BudgetConfig
    model: ModelRecipe
    data: DataRecipe
    inner: InnerConfig
    outer: OuterConfig
    swarm: SwarmRules = Field(default_factory=SwarmRules)
    wire_version: int = Field(
        WIRE_VERSION, ge=1, description="Version of the protocol between peers."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        check_model_fits_data(self.model, self.data)
        return self

    def to_json(self, indent: int | None = None) -> str:
        """Canonical JSON (sorted keys, ASCII); `indent` is for files that people read, and changes
        no value."""
        content, separators = self.model_dump(mode="json"), (",", ":" if indent is None else ": ")
        return json.dumps(
            content, sort_keys=True, separators=separators, indent=indent, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str, any_wire_version: bool = False) -> Manifest:
        """Parses an untrusted manifest; `any_wire_version` takes one from a run directory that an
        older diloco wrote.

        Raises ConfigError, with one line, for anything but a complete manifest of this wire
        version.
        """
        if len(text) > MAX_MANIFEST_CHARACTERS:
            raise ConfigError(
                f"manifest has {len(text)} characters; at most {MAX_MANIFEST_CHARACTERS} are"
                " accepted"
            )
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
            raise ConfigError(
                f"manifest has wire version {show(version)}, this diloco speaks {WIRE_VERSION}; "
                "install the same version on all peers"
            )
        try:
            manifest = cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"manifest: {explain(error, cls)}") from None
        # a configuration file that it is written to must not resolve it
        if "${" in manifest.to_json():
            raise ConfigError(
                "manifest holds ${, which stands for a setting of this machine; no run needs that"
            )
        return manifest

    def hash(self) -> str:
        """As `hash_of` its JSON."""
        return hash_of(self.to_json())

    def differences(self, other: Manifest) -> list[str]:
        """One text per setting that differs, such as `outer.lr: 0.7 here, 0.4 there`; empty for
        equal hashes."""
        trees = [dict(flatten(manifest.model_dump(mode="json"))) for manifest in (self, other)]
        here, there = ({key: show(value) for key, value in tree.items()} for tree in trees)
        return [
            f"{key}: {here.get(key, 'not set')} here, {there.get(key, 'not set')} there"
            for key in sorted(here.keys() | there.keys())
            if here.get(key) != there.get(key)
        ]


def hash_of(text: str) -> str:
    """SHA-256 in hexadecimal of a manifest's canonical JSON with 0 for the numbers in `RISING`;
    else of the text."""
    # a parser of manifests says what is wrong
    with suppress(ValueError, AttributeError, TypeError, RecursionError):
        content = json.loads(text)
        for group, _, name in (key.partition(".") for key in RISING):
            if content.get(group, {}).get(name) is not None:
                content[group][name] = 0
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def planned(settings: Settings) -> list[int]:
    """The numbers in `RISING` of a manifest or a configuration; 0 stands for null."""
    return [attrgetter(key)(settings) or 0 for key in RISING]


def raised(settings: S, plan: Sequence[float]) -> S:
    """A manifest or configuration with the greater of each number in `RISING`; says so where the
    run ends later."""
    for (group, _, name), number in zip(
        (key.partition(".") for key in RISING), map(int, plan), strict=True
    ):
        values = getattr(settings, group)
        if (here := getattr(values, name)) is not None and number > here:
            settings = settings.model_copy(update={group: values.model_copy(update={name: number})})
            if group == "budget":
                logger.warning(
                    "budget.%s=%d: the run goes on to %d, for a budget only rises",
                    name,
                    here,
                    number,
                )
    return settings


def check_model_fits_data(model: ModelRecipe, data: DataRecipe) -> None:
    """Raises ValueError if the model cannot hold the tokens or the sequences of the data.

    Only what the config itself says is checked; a model from `model.path` is checked when it is
    loaded.
    """
    vocabulary, positions = (
        model.config.get("vocab_size"),
        model.config.get("max_position_embeddings"),
    )
    if data.tokenizer == "bytes" and isinstance(vocabulary, int) and vocabulary < 256:
        small = f"model.config.vocab_size={vocabulary} cannot hold bytes"
        raise ValueError(f"{small}; data.tokenizer=bytes needs at least 256")
    if isinstance(positions, int) and positions < data.sequence_length:
        longer = (
            f"data.sequence_length={data.sequence_length} is longer than"
            " model.config.max_position_embeddings"
        )
        raise ValueError(f"{longer}={positions}; lower the one or raise the other")


def check_warmup_ends(
    budget: BudgetConfig, inner: InnerConfig, outer: OuterConfig, data: DataRecipe
) -> None:
    """Raises ValueError if the learning rate would still be rising when the run ends."""
    limits = []
    if budget.outer_steps is not None:
        limits.append(
            (budget.outer_steps * outer.sync_every, "budget.outer_steps x outer.sync_every")
        )
    if budget.tokens is not None:  # of one peer alone; with several it ends sooner
        tokens = inner.batch_size * data.sequence_length
        limits.append(
            (budget.tokens // tokens, "budget.tokens / (inner.batch_size x data.sequence_length)")
        )
    steps, why = min(limits)
    if inner.warmup_steps >= max(1, steps):
        late = (
            f"inner.warmup_steps={inner.warmup_steps} is not over when the run ends after {steps}"
            f" inner steps ({why})"
        )
        raise ValueError(f"{late}; lower it, or give it as a part of the run, such as 0.25")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of the leaves of nested mappings; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class ExternalSource(NamedTuple):
    """Something that a run needs and that this package does not contain."""

    what: str  # model, data or tokenizer
    key: str  # the setting that names it
    # on the hub; None: the volunteer's own text, or a model or tokenizer that the run's peers have
    name: str | None
    revision: str | None


def sources_of(manifest: Manifest) -> Iterator[ExternalSource]:
    """Yields what the run needs from outside this package."""
    model, data = manifest.model, manifest.data
    if model.path is not None or model.weights is not None:
        yield ExternalSource("model", "model.path", model.path, model.revision)
    if data.source != "stdlib" and (
        not data.mixture or any(one.source != "stdlib" for one in data.mixture)
    ):
        yield ExternalSource("data", "data.name", data.name, data.revision)
    if data.tokenizer != "bytes":
        name = None if data.tokenizer == FILES else data.tokenizer
        yield ExternalSource("tokenizer", "data.tokenizer", name, data.tokenizer_revision)


def check_foreign(manifest: Manifest) -> None:
    """Raises ConfigError, with one line, if a volunteer must not take this manifest from a
    swarm."""
    for key, value in flatten(manifest.model_dump(mode="json")):
        if not all(text.isprintable() for text in (key, *_texts(value))):
            hidden = f"{show(key)}={show(value)} of the run holds characters that nobody can see"
            raise ConfigError(f"{hidden}; join no such run")
    for source in sources_of(manifest):
        if source.name is not None:
            _check_hub(source, source.name)
    for name in manifest.data.tokenizer_files:
        if not any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES):
            raise ConfigError(
                f"data.tokenizer_files.{name} of the run is no file of a tokenizer; join no"
                " such run"
            )


def _texts(value: object) -> Iterator[str]:
    """Yields every text in a value, which may be a list of mappings."""
    if isinstance(value, str):
        yield value
    for part in (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    ):
        yield from _texts(part)


def _check_hub(source: ExternalSource, name: str) -> None:
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise ConfigError(
            f"{source.key}={show(name)} of the run is no name on the Hugging Face hub, such as"
            " allenai/c4; a run that others join takes nothing from their disks, so whoever"
            " started it has to publish it there"
        )
    named = f"{source.key}={name}"
    if source.revision is None:
        why = "has no commit, so nobody knows what will be fetched"
        raise ConfigError(
            f"{named} of the run {why}; whoever started the run has to set {named}@COMMIT"
        )
    if Path(name).exists():
        why = "is also a path here, and libraries would read that"
        raise ConfigError(f"{named} of the run {why}; start in another directory")
