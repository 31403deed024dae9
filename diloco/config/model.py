"""The settings of the model: what is trained, what it starts from, and where this peer has the
files.

Users name a model by its config, by a directory, or by its name on the hub. The last two mean
files, which other peers do not have. So `train/start_files.py` puts into the manifest what they
need to build it: config and digests.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, JsonValue, field_validator, model_validator

from diloco.config.types import Digest, Name, PeerLocal, Revision, RunOwned

MAX_FROZEN = 256  # digests of tensors that a manifest has room for


class PeerModelConfig(PeerLocal):
    directory: str | None = Field(None, min_length=1)
    """Where this peer has the files of a model that the run starts from; filled in from
    model.path."""


class ModelRecipe(RunOwned):
    """A causal LM that transformers builds from a config (random weights) or loads from a directory
    or the hub."""

    later = ("weights", "frozen", "generation")
    name: Name = Field(description="Name of the model in logs and summaries.")
    model_type: Name = Field(
        "llama", description="transformers model type that model.config belongs to."
    )
    path: str | None = Field(None, min_length=1)
    """Checkpoint to start from: a directory in Hugging Face format, or NAME@COMMIT on the Hugging
    Face hub."""
    revision: Revision | None = None
    """Commit of model.path on the Hugging Face hub; null: that in model.path, or model.path is a
    directory."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the transformers config; any of them can be overridden."""
    weights: Digest | None = None
    """Digest of the trained parameters that the run starts from; filled in from model.path."""
    frozen: Annotated[dict[str, Digest], Field(max_length=MAX_FROZEN)] = Field(default_factory=dict)
    """Digests of parameters that are not trained, and of buffers; filled in from model.path."""
    generation: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of generation_config.json; filled in from model.path."""

    @field_validator("config", "generation", mode="before")
    @classmethod
    def _is_json(cls, config: Any) -> Any:
        # NaN and infinity are floats but no JSON, and the manifest is hashed as JSON.
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("model.config holds nan or an infinity; use finite numbers") from None
        return config

    @model_validator(mode="after")
    def _one_origin(self) -> ModelRecipe:
        if self.path is not None and self.config and self.weights is None:
            raise ValueError(
                f"model.path={self.path} together with model.config (from model={self.name}) leaves"
                " open which one counts; add model=pretrained, or drop model.path"
            )
        if self.path is None and not self.config:
            raise ValueError(
                "model.path and model.config are both empty; set model.path=DIRECTORY or choose"
                " model=NAME"
            )
        if self.weights is not None and not self.config:
            raise ValueError("model.weights without model.config says nothing; drop it")
        if self.weights is None and (self.frozen or self.generation):
            raise ValueError(
                "model.frozen and model.generation belong to model.weights, which is null; drop"
                " them"
            )
        if self.revision is not None and self.path is None:
            raise ValueError(
                f"model.revision={self.revision} is a commit of model.path, which is null; drop it"
            )
        return self


class ModelConfig(PeerModelConfig, ModelRecipe):
    """What is trained, and where this peer has its files."""
