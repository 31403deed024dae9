"""`Config`: everything one peer knows before it starts, validated and frozen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from pydantic import Field, ValidationError, model_validator

from diloco.config import peer_settings, run_settings
from diloco.config.address import reachability
from diloco.config.explain import explain
from diloco.config.manifest import Manifest, check_foreign, check_model_fits_data, check_warmup_ends
from diloco.config.model_data import FILES, DataConfig, ModelConfig
from diloco.config.types import Settings
from diloco.errors import ConfigError


class Config(Settings):
    """The whole configuration of one peer; `compose` builds it."""

    run: run_settings.RunConfig
    budget: run_settings.BudgetConfig
    local: peer_settings.LocalConfig = Field(default_factory=peer_settings.LocalConfig)
    model: ModelConfig
    data: DataConfig
    inner: run_settings.InnerConfig
    outer: run_settings.OuterConfig
    swarm: run_settings.SwarmConfig = Field(default_factory=run_settings.SwarmConfig)
    sim: peer_settings.SimConfig = Field(default_factory=peer_settings.SimConfig)
    train: peer_settings.TrainConfig = Field(default_factory=peer_settings.TrainConfig)
    checkpoint: peer_settings.CheckpointConfig = Field(
        default_factory=peer_settings.CheckpointConfig
    )
    eval: peer_settings.EvalConfig = Field(default_factory=peer_settings.EvalConfig)
    wandb: peer_settings.WandbConfig = Field(default_factory=peer_settings.WandbConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        check_model_fits_data(self.model, self.data)
        check_warmup_ends(self.budget, self.inner, self.outer, self.data)
        return self

    @property
    def only_here(self) -> bool:
        """True if no other machine can connect to this peer."""
        return all(reachability(address) == "loopback" for address in self.swarm.listen)

    @property
    def joining_command(self) -> str:
        """The command before an address: to join, or in a closed run to invite."""
        swarm = self.swarm
        if swarm.admit == "anyone" or (self.run.key is None and swarm.key_path is None):
            return "diloco join"
        key, run = shlex.quote(swarm.key_path or "run.key"), shlex.quote(self.run.id)
        return f"diloco invite --key {key} --run {run}"

    @property
    def names_files(self) -> bool:
        """True if the manifest would name files that have no digests yet."""
        model, data = self.model, self.data
        return (model.path is not None and model.weights is None) or (
            data.tokenizer not in ("bytes", FILES) and not data.tokenizer_files
        )

    def manifest(self) -> Manifest:
        """Return the run-owned half."""
        halves: dict[str, Any] = {}
        for group, field in Manifest.model_fields.items():
            half: Any = field.annotation
            if group in Config.model_fields:
                mine = getattr(self, group)
                values = {key: getattr(mine, key) for key in half.model_fields}
                halves[group] = mine if type(mine) is half else half.model_validate(values)
        return Manifest(**halves)

    def adopt(self, manifest: Manifest) -> Config:
        """Replace the run-owned half by that of `manifest`, as a joiner does.

        Raises ConfigError if they do not fit, as data.source=text there without a data.path here.
        """
        mine, theirs = self.model_dump(), manifest.model_dump(exclude={"wire_version"})
        both = {group: {**mine[group], **theirs[group]} for group in theirs}
        try:
            return Config.model_validate({**mine, **both})
        except ValidationError as error:
            why = explain(error, Config)
            raise ConfigError(f"the manifest of the run does not fit this peer: {why}") from None

    def to_yaml(self) -> str:
        """Return YAML with every key; `compose(base=FILE)` reads it back."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))

    def warnings(self) -> list[str]:
        """List, a line each, settings that work but are probably not meant."""
        return list(_doubtful(self))


def _doubtful(config: Config) -> Iterator[str]:
    vocabulary = config.model.config.get("vocab_size")
    if config.data.tokenizer == "bytes" and isinstance(vocabulary, int) and vocabulary > 1024:
        fitting = "NAME or DIRECTORY"
        if vocabulary == 32_000:
            fitting = "TinyLlama/TinyLlama_v1.1, which is on the hub"
        yield (
            f"data.tokenizer=bytes uses 256 of model.config.vocab_size={vocabulary}; set"
            f" data.tokenizer={fitting}, or model.config.vocab_size=256"
        )
    if not config.only_here and config.outer.method == "diloco":
        try:
            check_foreign(config.manifest())
        except ConfigError as error:
            yield f"nobody can join this run with diloco join: {error}"
