"""Arguments with several values: what a sweep varies, in Hydra's grammar, and Hydra's own multirun for its plugins.

1. `outer.lr=0.5,0.7`, `run.seed=range(0,3)`, `model=choice(tiny,14m)` and `model=glob(*m)` are axes of a grid.
2. `inner.lr=interval(1e-4,1e-2)`, also inside `tag(log, ...)` or `int(...)`, is for sweepers that choose by themselves.
3. Everything else is one value and left to `compose`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from diloco.config.compose import choices
from diloco.config.explain import show
from diloco.errors import ConfigError

__all__ = ["Axis", "grid", "hydra_multirun", "parse_axes", "quoted", "require_plugin"]

MOST_MEMBERS = 10_000
PLUGINS = {"optuna": "hydra_optuna_sweeper", "submitit": "hydra_submitit_launcher"}


class Axis(NamedTuple):
    """One argument of a sweep; `values` are texts for a command line, and of a range of numbers its two ends."""

    key: str
    text: str  # as typed
    values: tuple[str, ...]
    continuous: bool = False


def parse_axes(overrides: Sequence[str]) -> list[str | Axis]:
    """The arguments in their order, those with several values as axes.

    Raises ConfigError for a swept key that is given twice, and for an empty list of values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[str | Axis] = []
    for argument in overrides:
        key, equals, text = argument.lstrip("+").partition("=")
        try:
            override = parser.parse_override(f"{key}={text}") if equals and key else None
        except HydraException:  # plain text that the grammar does not know, or an error; compose decides
            override = None
        swept = override is not None and override.is_sweep_override()
        parsed.append(_axis(key, text, override) if swept else argument)
    keys = [one.key if isinstance(one, Axis) else one.lstrip("+").partition("=")[0] for one in parsed]
    for one in parsed:
        if isinstance(one, Axis) and keys.count(one.key) > 1:
            raise ConfigError(f"{one.key}={show(one.text)} is swept and given again; give {one.key} once")
    return parsed


def grid(parsed: Sequence[str | Axis]) -> list[tuple[tuple[str, ...], tuple[tuple[str, str], ...]]]:
    """Every combination: all arguments with one value each, and the (key, value) pairs of the swept ones.

    The last axis varies fastest. Raises ConfigError for an axis that is no list of values, or too many combinations.
    """
    axes = [one for one in parsed if isinstance(one, Axis)]
    size = 1
    for axis in axes:
        if axis.continuous:
            raise ConfigError(
                f"{axis.key}={show(axis.text)} is a range of numbers; list values, or choose them with --sweeper optuna"
            )
        size *= len(axis.values)
    if size > MOST_MEMBERS:
        raise ConfigError(f"{' x '.join(axis.key for axis in axes)} are {size} members; at most {MOST_MEMBERS} are run")
    combinations = []
    for values in product(*(axis.values for axis in axes)):
        chosen = tuple((axis.key, value) for axis, value in zip(axes, values, strict=True))
        texts = iter(f"{key}={value}" for key, value in chosen)
        combinations.append((tuple(next(texts) if isinstance(one, Axis) else one for one in parsed), chosen))
    return combinations


def require_plugin(name: str) -> None:
    """Raises ConfigError if the Hydra sweeper or launcher `name` belongs to a plugin that is not installed."""
    module = next((module for word, module in PLUGINS.items() if name.startswith(word)), None)
    try:
        missing = module is not None and find_spec(f"hydra_plugins.{module}") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigError(f"{show(name)} is a plugin of Hydra that is not installed: pip install 'diloco[sweep]'")


def hydra_multirun(
    axes: Sequence[Axis],
    task: Callable[[int, tuple[tuple[str, str], ...]], float],
    directory: Path,
    *,
    sweeper: str,
    launcher: str | None,
    options: Sequence[str] = (),
) -> None:
    """Lets a sweeper of Hydra choose values of the axes and its launcher call `task(number, chosen)` with them.

    Hydra sees the axes only, under names without dots; `task` returns what the sweeper minimises. `options` are
    arguments for Hydra, such as `hydra.sweeper.n_trials=20`. Raises ConfigError for what Hydra refuses.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    keys = {axis.key.replace(".", "__"): axis.key for axis in axes}
    ConfigStore.instance().store("diloco_sweep", dict.fromkeys(keys))

    def member(config: Any) -> float:
        job = HydraConfig.get()
        pairs = [text.lstrip("+").partition("=") for text in job.overrides.task]
        return task(int(job.job.num), tuple((keys[name], value) for name, _, value in pairs))

    arguments = [
        "--multirun",
        *([f"hydra/sweeper={sweeper}"] if sweeper not in ("grid", "basic") else []),
        *([f"hydra/launcher={launcher}"] if launcher else []),
        *(f"hydra.sweep.dir={quoted(directory)}", "hydra.sweep.subdir=.", "hydra.output_subdir=null"),
        *("hydra/job_logging=none", "hydra/hydra_logging=none"),
        *options,
        *(f"{axis.key.replace('.', '__')}={axis.text}" for axis in axes),
    ]
    # hydra.main reads its arguments from the process, and hides errors unless told not to.
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["diloco", *arguments], "1"
    try:
        hydra.main(config_path=None, config_name="diloco_sweep", version_base="1.3")(member)()
    except HydraException as error:
        raise ConfigError(f"--sweeper={sweeper}: {show(str(error).splitlines()[0], limit=200)}") from None
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def _axis(key: str, text: str, override: Any) -> Axis:
    from hydra.core.override_parser.types import Glob

    value = override.value()
    if isinstance(value, Glob):
        names = value.filter(list(choices().get(key, ())))
        if not names:
            raise ConfigError(f"{key}={show(text)} matches nothing; expected a pattern for {', '.join(choices())}")
        return Axis(key, ",".join(names), tuple(names))
    if not override.is_discrete_sweep():
        return Axis(key, text, (str(value.start), str(value.end)), continuous=True)
    values = tuple(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{key}={show(text)} has no values; check the ends and the step")
    return Axis(key, text, values)


def quoted(value: Path | str) -> str:
    """A path or a text as a value in Hydra's grammar."""
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
