"""Settings with several values: what a sweep varies, in Hydra's grammar, as arguments or in hydra.sweeper.params.

1. `outer.lr=0.5,0.7`, `run.seed=range(0,3)`, `model=choice(tiny,14m)` and `model=glob(*m)` are axes of a grid.
2. `inner.lr=interval(1e-4,1e-2)`, also inside `tag(log, ...)` or `int(...)`, is for sweepers that choose by themselves.
3. Everything else is one value and left to `compose`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from diloco.config.compose import Composed, compose_tree
from diloco.config.explain import show
from diloco.config.overrides import key_of, split
from diloco.config.sources import Start, choices
from diloco.errors import ConfigError

__all__ = ["Axis", "grid", "parse_axes", "plan_sweep"]

MOST_MEMBERS = 10_000


class Axis(NamedTuple):
    """One argument of a sweep; `values` are texts for a command line, and of a range of numbers its two ends."""

    key: str
    text: str  # as typed
    values: tuple[str, ...]
    continuous: bool = False


def plan_sweep(overrides: Sequence[str], start: Start) -> tuple[list[str | Axis], Composed]:
    """What a sweep varies: the arguments, and hydra.sweeper.params of a file where an argument says nothing else.

    The composed tree is that of the arguments with one value, for its node `hydra`; arguments for Hydra are in it only.
    Raises ConfigError as `parse_axes` and `compose_tree` do.
    """
    for_hydra = [one for one in overrides if key_of(one).startswith(("hydra.", "hydra/"))]
    parsed = parse_axes([one for one in overrides if one not in for_hydra], start)
    composed = compose_tree([*(one for one in parsed if isinstance(one, str)), *for_hydra], start)
    typed = {one.key if isinstance(one, Axis) else key_of(one) for one in parsed}
    params = {str(key): value for key, value in composed.block.params.items() if key not in typed}
    for key, value in params.items():
        if value is None or not str(value).strip():
            raise ConfigError(f"hydra.sweeper.params has no values for {key}; list some, such as {key}: 1,2")
    return [*parsed, *parse_axes([f"{key}={value}" for key, value in params.items()], start)], composed


def parse_axes(overrides: Sequence[str], start: Start | None = None) -> list[str | Axis]:
    """The arguments in their order, those with several values as axes.

    Raises ConfigError for a swept key that is given twice, and for an empty list of values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[str | Axis] = []
    for argument in overrides:
        sign, key, text = split(argument)
        try:
            override = parser.parse_override(argument) if "=" in argument and key and sign != "~" else None
        except HydraException:  # plain text that the grammar does not know, or an error; compose decides
            override = None
        swept = override is not None and override.is_sweep_override()
        parsed.append(_axis(key, text, override, start) if swept else argument)
    keys = [one.key if isinstance(one, Axis) else key_of(one) for one in parsed]
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


def _axis(key: str, text: str, override: Any, start: Start | None) -> Axis:
    from hydra.core.override_parser.types import Glob

    value = override.value()
    if isinstance(value, Glob):
        names = value.filter(list(choices(start).get(key, ())))
        if not names:
            raise ConfigError(f"{key}={show(text)} matches nothing; expected a pattern for {', '.join(choices(start))}")
        return Axis(key, ",".join(names), tuple(names))
    if not override.is_discrete_sweep():
        return Axis(key, text, (str(value.start), str(value.end)), continuous=True)
    values = tuple(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{key}={show(text)} has no values; check the ends and the step")
    return Axis(key, text, values)
