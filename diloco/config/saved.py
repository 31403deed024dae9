"""The file of `--config`: the config.yaml of a run, or some settings of somebody's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from diloco.config.explain import leaves
from diloco.config.overrides import first_line
from diloco.config.schema import Config
from diloco.errors import ConfigError

__all__ = ["Saved", "read_saved"]

# Settings of earlier versions that say nothing about a run: a saved configuration may still name them.
RETIRED = ("sim.mode",)


class Saved(NamedTuple):
    """The settings of a file."""

    file: Path
    text: str  # as JSON, which can be compared
    whole: bool  # every setting without a default is there, so the file needs nothing else

    def content(self) -> dict[str, Any]:
        """A new mapping of the settings."""
        content: dict[str, Any] = json.loads(self.text)
        return content


def read_saved(file: Path) -> Saved:
    """Reads and checks a file. Raises ConfigError if it is not readable, no YAML or no settings, or holds ${...}."""
    try:
        saved = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(f"{file} is not YAML: {line}{getattr(error, 'problem', None) or first_line(error)}") from None
    plain = OmegaConf.to_container(saved)
    text = json.dumps(plain, ensure_ascii=False, default=str)
    if "${" in text:
        # A part of it may come from a peer. To resolve it would put secrets of this machine into a setting.
        raise ConfigError(f"{file} holds ${{...}}, which is resolved in configs/ only; write the value itself")
    if not isinstance(saved, DictConfig) or saved.keys().isdisjoint({*Config.model_fields, "hydra", "defaults"}):
        raise ConfigError(f"{file} is not a configuration; expected the config.yaml of a run directory")
    if "defaults" in saved:
        raise ConfigError(
            f"{file} has a defaults list; start from it with --config-dir {file.parent} --config-name {file.stem}"
        )
    for key in RETIRED:
        group, _, name = key.partition(".")
        if isinstance(saved.get(group), DictConfig):
            saved[group].pop(name, None)
    required = (key for key, field in leaves(Config) if field.is_required())
    whole = all(OmegaConf.select(saved, key, default=None) is not None for key in required)
    return Saved(file, json.dumps(OmegaConf.to_container(saved), default=str), whole)
