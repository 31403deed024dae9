"""The files of configs/outer by their names, for a program that composes no whole configuration."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from diloco.config.compose import compose_tree
from diloco.config.explain import nearest
from diloco.config.sources import Start, choices
from diloco.errors import ConfigError

__all__ = ["outer_preset"]


def outer_preset(name: str) -> dict[str, Any]:
    """All settings of the outer step, as a file of configs/outer and those that it names as its defaults have them.

    `${...}` is left as it is. Raises `ConfigError` for a name that is none of a preset.
    """
    there = [one for one in choices()["outer"] if one != "data_parallel"]  # it makes no outer steps
    if name not in there:
        guess = nearest(str(name), there)
        hint = f" (did you mean {guess[0]}?)" if guess else ""
        raise ConfigError(f"preset={name} is no file of configs/outer{hint}; there are {', '.join(there)}")
    values = OmegaConf.to_container(compose_tree([f"outer={name}"], Start()).tree.outer, resolve=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
