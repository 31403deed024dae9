"""The settings of model and data, and of the directories where this peer has their files.

A directory, or a name on the hub, means files that other peers do not have. So
`train/start_files.py` puts into the manifest what they need: config and digests. `NAME@COMMIT` on
the hub is a name and its commit; a branch or a tag is refused, because it can move.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from diloco.config.explain import TypeHint, show
from diloco.config.registry import DATA_SOURCES, MixedSourceName, SourceName
from diloco.config.types import (
    Commit,
    Digest,
    Name,
    NotEmpty,
    PeerLocal,
    RunOwned,
    Text,
    Texts,
    Tuple,
)
from diloco.errors import ConfigError

MAX_FROZEN = 256  # digests of tensors that a manifest has room for
MAX_TOKENIZER_FILES = 32
MIXTURE_BLOCK = 10_000  # sequences; a weight counts to this part of the whole
FILES = "files"  # in a manifest, in place of a directory: digests name the files

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_NAME = re.compile(f"{_PART}/{_PART}")
_AT = re.compile(rf"({_PART}(?:/{_PART})?)@(.*)")
# Each name on the hub, the setting with its commit, and what kind of repository it names.
_ON_HUB = {
    "model.path": ("model.revision", "model"),
    "data.tokenizer": ("data.tokenizer_revision", "model"),
    "data.name": ("data.revision", "dataset"),
}
# What `train/start_files.py` derives from a name; the first tells whether it has.
_DERIVED = {
    "model.path": ("weights", "frozen", "generation", "base", "config", "directory"),
    "data.tokenizer": ("tokenizer_files", "tokenizer_directory"),
}

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
MIXTURE_HINT = (
    "a list, each {name: NAME, source: stdlib, text, json or parquet, weight: A NUMBER,"
    " field: COLUMN}"
)
FILE_SOURCES = ("text", "json", "parquet", "tokens")
RowFormat = Literal["text", "auto"]


class ModelRecipe(RunOwned):
    """A causal LM that transformers builds from a config, or loads from a directory or the hub."""

    omitted_at_default = (
        "weights",
        "frozen",
        "generation",
        "base",
        "adapter",
        "adapter_rank",
        "adapter_alpha",
        "adapter_dropout",
        "adapter_targets",
    )
    name: Name = Field(description="Name of the model in logs and summaries.")
    model_type: Name = "llama"
    """transformers model type that model.config belongs to."""
    path: Text | None = None
    """Checkpoint to start from: a directory in Hugging Face format, or NAME@COMMIT on the hub."""
    revision: Commit | None = None
    """Commit of model.path on the hub; null: that in model.path, or model.path is a directory."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the transformers config; any of them can be overridden."""
    weights: Digest | None = None
    """Digest of the trained parameters that the run starts from; filled in from model.path."""
    frozen: Annotated[dict[str, Digest], Field(max_length=MAX_FROZEN)] = Field(default_factory=dict)
    """Digests of parameters that are not trained, and of buffers; filled in from model.path."""
    generation: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of generation_config.json; filled in from model.path."""
    base: Digest | None = None
    """Digest of the list of the base's parts, which peers send; filled in from model.path."""
    adapter: Literal["none", "lora", "dora"] = "none"
    """What is trained in place of all parameters, which are frozen then."""
    adapter_rank: int = Field(8, ge=1, le=1024)
    """Rank of the adapter's matrices."""
    adapter_alpha: int = Field(16, ge=1, le=1 << 20)
    """The adapter's product is scaled by alpha / rank."""
    adapter_dropout: float = Field(0.0, ge=0, lt=1)
    """Part of the adapter's inputs that is dropped."""
    adapter_targets: Annotated[Texts, NotEmpty] = ("auto",)
    """Layers that get an adapter, such as q_proj; auto: what peft takes; all-linear: all inside."""

    @field_validator("config", "generation", mode="before")
    @classmethod
    def _is_json(cls, config: Any) -> Any:
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("model.config holds nan or an infinity; use finite numbers") from None
        return config

    @model_validator(mode="after")
    def _one_origin(self) -> ModelRecipe:
        path, weights = self.path, self.weights
        if path is not None and self.config and weights is None:
            raise ValueError(
                f"model.path={path} together with model.config (from model={self.name}) leaves open"
                " which one counts; add model=pretrained, or drop model.path"
            )
        if path is None and not self.config:
            raise ValueError(
                "model.path and model.config are both empty; set model.path=DIRECTORY or choose"
                " model=NAME"
            )
        if weights is not None and not self.config:
            raise ValueError("model.weights needs model.config; drop it")
        if weights is None and (self.frozen or self.generation):
            raise ValueError("model.frozen and model.generation need model.weights; drop them")
        if self.base is not None and (weights is None or self.adapter == "none"):
            raise ValueError("model.base needs model.weights and model.adapter; drop it")
        if path is None and self.revision is not None:
            raise ValueError(f"model.revision={self.revision} needs model.path; drop it")
        return self


class PeerModelConfig(PeerLocal):
    directory: Text | None = None
    """Where this peer has the files that the run starts from; filled in from model.path."""


class ModelConfig(PeerModelConfig, ModelRecipe):
    """The model, and the directories of its files on this peer."""


class MixedSource(RunOwned):
    """One source of a mixture. Each peer gives the path of its own files in `data.paths`."""

    name: Name
    source: MixedSourceName
    weight: float = Field(gt=0, le=1e9)
    field: Text = "text"
    format: RowFormat = "text"

    omitted_at_default = ("format",)


class DataRecipe(RunOwned):
    omitted_at_default = ("mixture", "tokenizer_files", "format", "dtype")
    source: SourceName
    """stdlib: Python's library; hub: streamed; mixture: several; tokens: files of ids; else text"""
    sequence_length: int = Field(128, ge=2, le=1 << 20)
    """Tokens of one packed sequence."""
    tokenizer: Text = "bytes"
    """'bytes', a directory, or NAME@COMMIT on the hub; unset: that of model.path, or else bytes."""
    tokenizer_revision: Commit | None = None
    """Commit of data.tokenizer on the hub; null: that in data.tokenizer, or it is a directory."""
    tokenizer_files: Annotated[dict[FileName, Digest], Field(max_length=MAX_TOKENIZER_FILES)] = (
        Field(default_factory=dict)
    )
    """Names and digests of the tokenizer's files; filled in from data.tokenizer."""
    field: Text = Field("text", description="Column that holds the text (json, parquet, hub).")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the ids in .bin files (tokens)."""
    format: RowFormat = "text"
    """text: data.field of each row; auto: conversations, of which the answers are learned."""
    holdout: float = Field(0.02, ge=0, lt=1)
    """Part of the documents kept for evaluation, by hash; 0: none, so no held-out loss."""
    name: Text | None = None
    """Dataset on the Hugging Face hub, such as allenai/c4 or allenai/c4@COMMIT (hub)."""
    revision: Commit | None = None
    """Commit of data.name on the hub; null: that in data.name, or the newest (hub)."""
    subset: Text | None = Field(None, description="Configuration of the dataset, such as en (hub).")
    split: Text = Field("train", description="Split of the dataset (hub).")
    mixture: Annotated[tuple[MixedSource, ...], Tuple, TypeHint(MIXTURE_HINT)] = ()
    """Sources and how much of each: weights of sequences, of any sum; files are in data.paths."""

    @model_validator(mode="after")
    def _fits_source(self) -> DataRecipe:
        source = self.source
        if source == "hub" and self.name is None:
            raise ValueError("data.source=hub needs a dataset; set data.name, such as allenai/c4")
        if self.tokenizer == FILES and not self.tokenizer_files:
            raise ValueError(
                "data.tokenizer=files is of a manifest; give the directory of the files"
            )
        if self.tokenizer == "bytes" and self.tokenizer_files:
            raise ValueError("data.tokenizer_files has no effect with bytes; drop it")
        for key in ("name", "revision", "subset"):
            if source != "hub" and (value := getattr(self, key)) is not None:
                unused = f"data.{key}={value} has no effect with data.source={source}"
                raise ValueError(f"{unused}; drop it, or use data=hub")
        kinds = [(source, self.format), *((part.source, part.format) for part in self.mixture)]
        for kind, rows in kinds:
            if rows == "auto" and kind not in ("json", "parquet", "hub"):
                raise ValueError(
                    f"data.format=auto reads rows of JSON or Parquet, and no {kind}; give such"
                    " files by data=chat data.path=FILE"
                )
        for problem in self._problems_of_mixture():
            raise ValueError(problem)
        return self

    def _problems_of_mixture(self) -> Iterator[str]:
        if self.source == "mixture" and not self.mixture:
            example = "data.mixture=[{name: NAME, source: text, weight: 1}, ...]"
            yield f"data.source=mixture needs sources; set {example}"
        total = sum(part.weight for part in self.mixture)
        for part in self.mixture:
            if part.weight * MIXTURE_BLOCK < total:
                small = f"the weight {part.weight:g} of {part.name} is less than 1/{MIXTURE_BLOCK}"
                yield f"data.mixture: {small} of all; raise it, or leave it out"
        if len({part.name for part in self.mixture}) < len(self.mixture):
            yield "data.mixture has two sources of one name; give each a name of its own"


class PeerDataConfig(PeerLocal):
    path: Texts | None = None
    """Files or directories with this peer's data (text, json, parquet, tokens); also .gz, .zst"""
    paths: dict[str, Texts] = Field(default_factory=dict)
    """The same for each source of data.mixture that has files, by its name."""
    tokenizer_directory: Text | None = None
    """Where this peer has the tokenizer's files; filled in from data.tokenizer."""
    cache: Text | None = "auto"
    """Directory for tokens of files; auto: ~/.cache/diloco/tokens; null: none, only memory."""
    shard: int | None = Field(None, ge=0)
    """Which of data.shards parts this peer reads; null derives it."""
    shards: int | None = Field(None, ge=1)
    """Parts that the data is cut into; null derives it."""

    @model_validator(mode="after")
    def _shard_exists(self) -> PeerDataConfig:
        shard, shards = self.shard, self.shards
        if (shard is None) != (shards is None):
            raise ValueError("data.shard and data.shards belong together; set both or neither")
        if shard is not None and shards is not None and shard >= shards:
            raise ValueError(
                f"data.shard={shard} does not exist with data.shards={shards}; expected 0 to"
                f" {shards - 1}"
            )
        return self


class DataConfig(PeerDataConfig, DataRecipe):
    """The text to train on, and where this peer finds its part."""

    @property
    def has_conversations(self) -> bool:
        """True if sequences hold conversations, which do not attend to each other."""
        return "auto" in (self.format, *(source.format for source in self.mixture))

    @property
    def tokenizer_place(self) -> tuple[str, str | None]:
        """Name and commit of the tokenizer, or the directory of its files on this peer."""
        if self.tokenizer_directory is not None:
            return self.tokenizer_directory, None
        return self.tokenizer, self.tokenizer_revision

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataConfig:
        is_files = self.source in FILE_SOURCES
        if is_files and not self.path:
            raise ValueError(
                f"data.source={self.source} needs files; set data.path=FILE_OR_DIRECTORY"
            )
        if not is_files and self.path is not None and self.source in DATA_SOURCES.own:
            unused = f"data.path={self.path[0]} has no effect with data.source={self.source}"
            remedy = "drop it, or add data=text, data=json or data=parquet"
            if self.source == "mixture":
                remedy = "set data.paths.NAME"
            raise ValueError(f"{unused}; {remedy}")
        for name in (source.name for source in self.mixture if source.source in FILE_SOURCES):
            if not self.paths.get(name):
                need = f"set data.paths.{name}=FILE_OR_DIRECTORY"
                raise ValueError(f"data.mixture: {name} needs files; {need}")
        return self


def split_commits(settings: dict[str, Any], typed: Collection[str]) -> None:
    """Split each `NAME@COMMIT` in the settings, by group and name, into a name and a commit.

    Settings derived from another name than a `typed` key has are dropped. Raises ConfigError for a
    branch, with the commit that the hub has for it, and for two commits.
    """
    for key, (commit_key, kind) in _ON_HUB.items():
        group, _, name = key.partition(".")
        values, at = settings.get(group), commit_key.partition(".")[2]
        if not isinstance(values, dict):
            continue
        derived = _DERIVED.get(key, ())
        if derived and values.get(derived[0]) and not {key, commit_key}.isdisjoint(typed):
            for setting in derived:
                if f"{group}.{setting}" not in typed:
                    values.pop(setting, None)
        typed_name, commit = values.get(name), values.get(at)
        if not isinstance(typed_name, str):
            continue
        if match := _AT.fullmatch(typed_name):
            _check_commit(kind, f"{key}={show(typed_name)}", match[1], match[2])
            if commit not in (None, match[2]):
                both = f"{key}={show(typed_name)} and {commit_key}={show(commit)}"
                raise ConfigError(f"{both} differ; drop one")
            values[name], values[at] = match[1], match[2]
        elif isinstance(commit, str):
            _check_commit(kind, f"{commit_key}={show(commit)}", typed_name, commit)


def _check_commit(kind: str, setting: str, name: str, commit: str) -> None:
    """Raise ConfigError if `commit` is a branch or a tag."""
    if re.fullmatch("[0-9a-f]{40}", commit):
        return
    from diloco.hub import commit_of

    remedy = "write the 40 hexadecimal digits that the hub shows"
    if commit and (resolved := commit_of(kind, name, commit)):
        remedy = f"write {name}@{resolved}, which it is now"
    raise ConfigError(f"{setting} names no commit, and what is not a commit can change; {remedy}")
