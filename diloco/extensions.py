"""Outer optimizers and codecs from the user's code.

    from diloco import OuterOptimizer, register

    @register
    class HeavyBall(OuterOptimizer):            outer.optimizer=heavy_ball from here on
        name = "heavy_ball"

        def push(self, theta, momentum, window, delta, lr, beta, delay, last):
            momentum = beta * momentum + delta
            return theta - lr * momentum, momentum, window

The manifest names it, so all peers of a run need it: a loop imports the module, and an installed
package has an entry point of that name, `heavy_ball = "its.module"` in the group
`diloco.extensions`, by which `diloco join` finds it too. All peers must compute alike, so another
step or another encoding takes another name.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import TypeVar

import torch

from diloco.config import OuterConfig
from diloco.config.registry import CODECS as PUBLISHES
from diloco.config.registry import OPTIMIZERS as WINDOWED
from diloco.errors import ConfigError, DivergedError
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import BLOCK
from diloco.outer.lossy import LOSSY
from diloco.outer.optimizer import OPTIMIZERS, OuterOptimizer
from diloco.outer.payloads import Codec

_Extension = TypeVar("_Extension", bound="type[OuterOptimizer] | type[Codec]")
_OURS = {*OPTIMIZERS, *CODECS, *LOSSY}


def register(cls: _Extension) -> _Extension:
    """Make an `OuterOptimizer` or a `Codec` known by its `name`; a class decorator.

    Raises `ConfigError` for a name that is one of ours, and for a class that breaks what other
    modules rely on: a `push` that is not linear, or a codec that adds another thing than it
    decodes, or takes NaN. Nothing is registered then. A class of the same name takes the place of
    the one before, so a notebook's cell may run twice.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{cls.__name__}.name={name!r} is no name; use up to 64 letters, digits, '.', '_'"
            " and '-'"
        )
    if name in _OURS:
        raise ConfigError(f"{cls.__name__}.name={name} is one of diloco's own; choose another")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{cls.__name__} lacks {missing}; define it")
    if issubclass(cls, OuterOptimizer):
        if wrong := _wrong_push(cls):
            raise ConfigError(f"{cls.__name__}.push {wrong}; mend it, or define transition instead")
        OPTIMIZERS[name] = cls
        WINDOWED[name] = cls.windowed
    elif issubclass(cls, Codec):
        one = cls()
        if wrong := _wrong_codec(one):
            raise ConfigError(f"{cls.__name__}.{wrong}")
        (CODECS if one.publishes else LOSSY)[name] = one
        PUBLISHES[name] = one.publishes
    else:
        raise ConfigError(f"{cls.__name__} is neither an OuterOptimizer nor a Codec")
    return cls


def _wrong_push(cls: type[OuterOptimizer]) -> str | None:
    """Why the coefficients of `Linear` do not say what a push does; None if they do, or if it has a
    transition."""
    if cls.transition is not OuterOptimizer.transition:
        return None
    one = cls(OuterConfig(method="diloco", sync_every=1))
    for last in (False, True):

        def pushed(values: Sequence[float], last: bool = last) -> tuple[float, float, float]:
            theta, momentum, window, delta = values
            return one.push(theta, momentum, window, delta, 0.7, 0.9, 2, last)

        some, others = (1.0, 2.0, 3.0, -5.0), (-0.5, 4.0, -0.25, 0.5)
        sums = map(sum, zip(pushed(some), pushed(others), strict=True))
        together = pushed([first + second for first, second in zip(some, others, strict=True)])
        if not all(map(math.isclose, sums, together)):
            return "is not linear in theta, momentum, window and delta"
        if pushed((0.0, 1.0, 0.0, 0.0))[2] or pushed((1.0, 0.0, 0.0, 0.0)) != (1.0, 0.0, 0.0):
            return "does not keep theta, or makes the window of the momentum"
        if not pushed((0.0, 0.0, 0.0, 1.0))[0]:
            return "does not move theta by delta"
    return None


def _wrong_codec(one: Codec) -> str | None:
    """What of the contract of codecs it breaks, with the remedy; None if nothing."""
    numel = 2 * BLOCK + 7
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    payload, decoded = (
        torch.empty(one.nbytes(numel), dtype=torch.uint8),
        torch.empty(numel, dtype=torch.float32),
    )
    one.encode(values, payload)
    one.decode(payload, decoded)
    total = torch.ones(numel, dtype=torch.float32)
    one.accumulate_(total, payload, 0.5)
    if not torch.allclose(total, 1 + 0.5 * decoded):
        return "accumulate_ does not add what .decode gives"
    try:
        one.encode(values[:BLOCK].fill_(math.nan), payload[: one.nbytes(BLOCK)])
    except DivergedError:
        return None
    return "encode takes NaN; call diloco.outer.payloads.refuse_diverged first"
