"""Settings as text: what `--cfg` prints."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from diloco.config.compose import compose
from diloco.config.explain import expected, leaves, show
from diloco.config.manifest import Manifest, flatten
from diloco.config.schema import Config
from diloco.config.sources import Start, choices
from diloco.errors import ConfigError

__all__ = ["cfg_text", "help_text"]


def cfg_text(config: Config, package: str | None) -> str:
    """The configuration as YAML, with every key, or a part of it such as outer. ConfigError if that is not there."""
    part: Any = config.model_dump(mode="json")
    for name in () if package is None else package.split("."):
        if not isinstance(part, dict) or name not in part:
            raise ConfigError(f"--package={package} is not in the configuration; expected a key such as outer")
        part = part[name]
    return OmegaConf.to_yaml(OmegaConf.create(part)) if isinstance(part, dict | list) else f"{show(part)}\n"


def help_text(start: Start | None = None) -> str:
    """Every group with its choices and every setting with meaning, expected value, default and owner, as plain text."""
    run_owned = dict(leaves(Manifest))
    values = dict(flatten(compose().model_dump(mode="json")))
    lines = ["Groups (GROUP=CHOICE):"]
    lines += [f"  {group}: {' '.join(names)}" for group, names in choices(start).items()]
    lines += [
        "",
        "Settings (KEY=VALUE), with their defaults; those marked * define the run and are equal on all its peers:",
    ]
    for key, field in leaves(Config):
        empty = "[]" if field.default == () else "see --cfg job"  # an empty mixture is in no dump
        default = show(values[key]) if key in values else empty
        lines.append(f"  {key}={default}{' *' if key in run_owned else ''}")
        lines.append(f"      {field.description} Expects {expected(field)}.")
    return "\n".join(lines)
