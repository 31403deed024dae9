"""Settings as text: what `--cfg`, `--info` and `--package` print."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stdout, suppress
from typing import Any

from omegaconf import OmegaConf

from diloco.config.compose import Composed, compose, resolved, validated
from diloco.config.explain import expected, leaves, show
from diloco.config.files import hydra_for, prepared
from diloco.config.manifest import Manifest, flatten
from diloco.config.schema import Config
from diloco.config.sources import Start, choices
from diloco.errors import ConfigError

__all__ = ["cfg_text", "help_text", "info_text"]


def cfg_text(composed: Composed, which: str, package: str | None, resolve: bool) -> str:
    """The composed configuration as YAML. `job` is what a command would use, resolved and with every key.

    `package` is a part of it, such as outer or hydra.launcher. Raises ConfigError if that is not there, and for a
    configuration that is not valid.
    """
    parts: dict[str, Any] = {}
    if which in ("hydra", "all"):
        node: Any = OmegaConf.to_container(composed.tree.hydra, enum_to_str=True)
        parts["hydra"] = {name: value for name, value in node.items() if name not in ("help", "hydra_help")}
        if resolve:
            parts["hydra"] = _resolved(composed, "hydra", parts["hydra"])
    if which in ("job", "all"):
        parts |= validated(composed).model_dump(mode="json")
    if package in (None, "_global_"):
        return OmegaConf.to_yaml(OmegaConf.create(parts))
    part: Any = parts
    for name in str(package).split("."):
        if not isinstance(part, dict) or name not in part:
            raise ConfigError(f"--package={package} is not in the configuration; expected a key such as outer")
        part = part[name]
    whole = isinstance(part, dict | list)
    return f"# @package {package}\n{OmegaConf.to_yaml(OmegaConf.create(part))}" if whole else f"{show(part)}\n"


def _resolved(composed: Composed, key: str, value: Any) -> Any:
    """The values below `key` without `${...}`; what has a value only when a run starts stays as it is."""
    if isinstance(value, dict):
        return {name: _resolved(composed, f"{key}.{name}", part) for name, part in value.items()}
    if isinstance(value, str) and "${" in value:
        with suppress(ConfigError):
            return resolved(composed, key)
    return value


def info_text(composed: Composed, which: str) -> str:
    """What Hydra itself says with --info: the search path, the defaults list, its plugins."""
    root, shown = logging.getLogger(), io.StringIO()
    before, level = list(root.handlers), root.level
    try:
        with hydra_for(composed.request.places) as hydra, redirect_stdout(shown):
            name, chosen = prepared(composed.request)
            hydra.show_info(which, config_name=name, overrides=[*chosen, *composed.arguments])
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    return shown.getvalue()


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
