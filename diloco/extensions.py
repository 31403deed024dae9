"""Optimizers, merge rules, codecs and data sources from the user's code.

    from diloco import OuterOptimizer, register

    @register
    class HeavyBall(OuterOptimizer):            outer.optimizer=heavy_ball from here on
        name = "heavy_ball"

        def push(self, theta, momentum, window, delta, lr, beta, delay, last):
            momentum = beta * momentum + delta
            return theta - lr * momentum, momentum, window

A loop imports the module. The command imports the files of `run.code`, and installed packages by
their entry points (`config.registry`). docs/extend.md has an example of each kind.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, TypeVar

import torch

from diloco.config import OuterConfig
from diloco.config.registry import DATA_SOURCES, INNER_OPTIMIZERS, Registry
from diloco.data.sources import DataSource
from diloco.errors import ConfigError, DivergedError
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import BLOCK
from diloco.outer.merging import MERGE_RULES, MergeRule
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterOptimizer
from diloco.outer.payloads import Codec

_Extension = TypeVar("_Extension", bound=type)


def register(cls: _Extension) -> _Extension:
    """Register a class under its `name`; a class decorator.

    It is an `OuterOptimizer`, a `MergeRule`, a `Codec`, a `DataSource`, or a
    `torch.optim.Optimizer` that is made with parameter groups and the settings of `inner`.

    Raises `ConfigError` for a name that is one of ours, and for a class that breaks what other
    modules rely on: a `push` that is not linear, or a codec that adds another thing than it
    decodes, or takes NaN. Nothing is registered then. A class of the same name takes the place of
    the one before, so a notebook's cell may run twice.
    """
    name, registry = getattr(cls, "name", None), _registry_of(cls)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{cls.__name__}.name={name!r} is no name; use up to 64 letters, digits, '.', '_'"
            " and '-'"
        )
    if name in registry.own:
        raise ConfigError(f"{cls.__name__}.name={name} is one of diloco's own; choose another")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__")))  # noqa: B009
        raise ConfigError(f"{cls.__name__} lacks {missing}; define it")
    if issubclass(cls, OuterOptimizer):
        if wrong := _wrong_push(cls):
            raise ConfigError(f"{cls.__name__}.push {wrong}; mend it, or define transition instead")
        registry.add(name, cls, cls.windowed)
    elif issubclass(cls, Codec):
        codec = cls()
        if wrong := _wrong_codec(codec):
            raise ConfigError(f"{cls.__name__}.{wrong}")
        registry.add(name, codec, codec.publishes)
    else:
        registry.add(name, cls if issubclass(cls, torch.optim.Optimizer) else cls())
    return cls


def _registry_of(cls: type) -> Registry[Any]:
    kinds: dict[type, Registry[Any]] = {
        OuterOptimizer: OUTER_OPTIMIZERS,
        MergeRule: MERGE_RULES,
        Codec: CODECS,
        DataSource: DATA_SOURCES,
        torch.optim.Optimizer: INNER_OPTIMIZERS,
    }
    for base, registry in kinds.items():
        if issubclass(cls, base):
            return registry
    names = ", ".join(base.__name__ for base in kinds)
    raise ConfigError(f"{cls.__name__} is none of {names}; derive it from one")


def _wrong_push(cls: type[OuterOptimizer]) -> str | None:
    """Return why `Linear`'s coefficients do not describe a push; None if they do, or if the class
    has a transition."""
    if cls.transition is not OuterOptimizer.transition:
        return None
    optimizer = cls(OuterConfig(method="diloco", sync_every=1))
    for last in (False, True):

        def pushed(*values: float, last: bool = last) -> tuple[float, float, float]:
            theta, momentum, window, delta = values
            return optimizer.push(theta, momentum, window, delta, 0.7, 0.9, 2, last)

        some, others = (1.0, 2.0, 3.0, -5.0), (-0.5, 4.0, -0.25, 0.5)
        sums = map(sum, zip(pushed(*some), pushed(*others), strict=True))
        together = pushed(*map(sum, zip(some, others, strict=True)))
        if not all(map(math.isclose, sums, together)):
            return "is not linear in theta, momentum, window and delta"
        if pushed(0.0, 1.0, 0.0, 0.0)[2] or pushed(1.0, 0.0, 0.0, 0.0) != (1.0, 0.0, 0.0):
            return "does not keep theta, or makes the window of the momentum"
        if not pushed(0.0, 0.0, 0.0, 1.0)[0]:
            return "does not move theta by delta"
    return None


def _wrong_codec(codec: Codec) -> str | None:
    """Return the rule of codecs that it breaks, with the remedy; None if it breaks none."""
    numel = 2 * BLOCK + 7
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    decoded, total = torch.empty_like(values), torch.ones_like(values)
    codec.encode(values, payload)
    codec.decode(payload, decoded)
    codec.accumulate_(total, payload, 0.5)
    if not torch.allclose(total, 1 + 0.5 * decoded):
        return "accumulate_ does not add what .decode gives"
    try:
        codec.encode(values[:BLOCK].fill_(math.nan), payload[: codec.nbytes(BLOCK)])
    except DivergedError:
        return None
    return "encode takes NaN; call diloco.outer.payloads.refuse_diverged first"
