"""The settings of the data: what text is trained on, and where this peer finds its part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from diloco.config.explain import TypeHint
from diloco.config.peer_settings import PeerDataConfig
from diloco.config.types import Digest, Name, Revision, RunOwned, Tuple

# in place of a directory, in the manifest: the files themselves are named by their digests
FILES = "files"
MAX_TOKENIZER_FILES = 32
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
MIXTURE_BLOCK = 10_000  # sequences; a weight counts to this part of the whole

LocalSource = Literal["stdlib", "text", "json", "parquet"]


class MixedSource(RunOwned):
    """One source of a mixture. Where its files are each peer says itself, in `data.paths`."""

    name: Name
    source: LocalSource
    weight: float = Field(gt=0, le=1e9)
    field: str = Field("text", min_length=1)


class DataRecipe(RunOwned):
    later = ("mixture", "tokenizer_files")
    source: Literal[LocalSource, "hub", "mixture"]
    """stdlib: Python's own standard library; text, json, parquet: files; hub: a streaming dataset;
    mixture: several."""
    sequence_length: int = Field(
        128, ge=2, le=1 << 20, description="Tokens of one packed sequence."
    )
    tokenizer: str = Field("bytes", min_length=1)
    """'bytes', a directory, or NAME@COMMIT on the hub; where nothing is set, that of model.path, or
    else bytes."""
    tokenizer_revision: Revision | None = None
    """Commit of data.tokenizer on the Hugging Face hub; null: that in data.tokenizer, the newest,
    or a directory."""
    tokenizer_files: Annotated[dict[FileName, Digest], Field(max_length=MAX_TOKENIZER_FILES)] = (
        Field(default_factory=dict)
    )
    """Names and digests of the tokenizer's files; filled in from data.tokenizer."""
    field: str = Field(
        "text", min_length=1, description="Column that holds the text (json, parquet, hub)."
    )
    holdout: float = Field(0.02, ge=0, lt=1)
    """Part of the documents kept for evaluation, by hash; 0: none, and there is no held-out
    loss."""
    name: str | None = Field(None, min_length=1)
    """Dataset on the Hugging Face hub, such as allenai/c4 or allenai/c4@COMMIT (hub)."""
    revision: Revision | None = None
    """Commit of data.name on the hub; null: that in data.name, or the newest (hub)."""
    subset: str | None = Field(
        None, min_length=1, description="Configuration of the dataset, such as en (hub)."
    )
    split: str = Field("train", min_length=1, description="Split of the dataset (hub).")
    mixture: Annotated[
        tuple[MixedSource, ...],
        Tuple,
        TypeHint(
            "a list, each {name: NAME, source: stdlib, text, json or parquet, weight: A NUMBER,"
            " field: COLUMN}"
        ),
    ] = ()
    """Sources and how much of each: weights of sequences, of any sum (mixture). Their files are in
    data.paths."""

    @model_validator(mode="after")
    def _fits_source(self) -> DataRecipe:
        if self.source == "hub" and self.name is None:
            raise ValueError(
                "data.source=hub needs a dataset; set data.name=NAME, such as data.name=allenai/c4"
            )
        if (self.tokenizer == FILES) > bool(self.tokenizer_files):
            raise ValueError(
                "data.tokenizer=files is what a run says of a directory; give the directory"
            )
        if self.tokenizer == "bytes" and self.tokenizer_files:
            raise ValueError(
                "data.tokenizer_files has no effect with data.tokenizer=bytes; drop it"
            )
        for key in ("name", "revision", "subset"):
            if self.source != "hub" and (value := getattr(self, key)) is not None:
                without = f"data.{key}={value} has no effect with data.source={self.source}"
                raise ValueError(f"{without}; drop it, or use data=hub")
        if self.source == "mixture" and not self.mixture:
            example = "data.mixture=[{name: NAME, source: text, weight: 1}, ...]"
            raise ValueError(f"data.source=mixture needs sources; set {example}")
        total = sum(one.weight for one in self.mixture)
        for one in self.mixture:
            if one.weight * MIXTURE_BLOCK < total:
                small = (
                    f"the weight {one.weight:g} of {one.name} is less than 1/{MIXTURE_BLOCK} of all"
                )
                raise ValueError(f"data.mixture: {small}; raise it, or leave it out")
        if len({one.name for one in self.mixture}) < len(self.mixture):
            raise ValueError(
                "data.mixture has two sources of one name; give each a name of its own"
            )
        return self


class DataConfig(PeerDataConfig, DataRecipe):
    """Which text is trained on, and where this peer finds its part."""

    @property
    def tokenizer_place(self) -> tuple[str, str | None]:
        """Name and commit of the tokenizer, or the directory where this peer has its files."""
        if self.tokenizer_directory is not None:
            return self.tokenizer_directory, None
        return self.tokenizer, self.tokenizer_revision

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataConfig:
        if self.source in ("text", "json", "parquet") and not self.path:
            raise ValueError(
                f"data.source={self.source} needs files; set data.path=FILE_OR_DIRECTORY"
            )
        if self.source in ("stdlib", "hub", "mixture") and self.path is not None:
            mixed = self.source == "mixture"
            remedy = (
                "set data.paths.NAME"
                if mixed
                else "drop it, or add data=text, data=json or data=parquet"
            )
            raise ValueError(
                f"data.path={self.path[0]} has no effect with data.source={self.source}; {remedy}"
            )
        for one in self.mixture:
            if one.source != "stdlib" and not self.paths.get(one.name):
                raise ValueError(
                    f"data.mixture: {one.name} needs files; set"
                    f" data.paths.{one.name}=FILE_OR_DIRECTORY"
                )
        return self
