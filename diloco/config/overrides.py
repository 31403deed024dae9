"""One argument of a command line, in Hydra's grammar: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE, ~KEY, GROUP=CHOICE.

Text that the grammar does not know (`data.path=~/a=b`) is taken as it is; Hydra wants it in quotes.
Hydra is imported inside functions, so that a help text does not wait for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from diloco.config.explain import show
from diloco.errors import ConfigError

__all__ = ["Typed", "first_line", "key_of", "parse", "quoted", "split", "value_of"]


class Typed(NamedTuple):
    """An argument as somebody typed it."""

    sign: str  # "", "+" (add), "++" (add or set) or "~" (delete)
    key: str
    text: str  # the value as typed

    @property
    def argument(self) -> str:
        """The argument as Hydra takes it."""
        return f"{self.sign}{self.key}" + ("" if self.sign == "~" and not self.text else f"={self.text}")


def split(argument: str) -> Typed:
    """The parts of an argument, of which nothing is checked."""
    sign = next((one for one in ("++", "+", "~") if argument.startswith(one)), "")
    key, _, text = argument[len(sign) :].partition("=")
    return Typed(sign, key, text)


def key_of(argument: str) -> str:
    """The key or group of an argument."""
    return split(argument).key


def value_of(argument: str) -> str:
    """The value of an argument as typed."""
    return split(argument).text


def parse(argument: str) -> tuple[Typed, Any]:
    """The parts of an argument, and it as Hydra's parser reads it. Raises ConfigError for what is no override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    typed = split(argument)
    if not typed.key or ("=" not in argument and typed.sign != "~"):
        raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(typed.argument)
    except HydraException as error:
        if typed.text[:1] in ("[", "{", "'", '"'):
            raise ConfigError(
                f"{show(typed.key)}={show(typed.text)} cannot be parsed ({first_line(error)}); "
                "check brackets and quotes"
            ) from None
        try:  # Hydra's grammar reserves some characters of ordinary text
            override = parser.parse_override(f"{typed.sign}{typed.key}={quoted(typed.text)}")
        except HydraException:
            raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE") from None
    if override.is_sweep_override():
        key, text = typed.key, typed.text
        raise ConfigError(f"{key}={text} is several values; give one value, or a list in brackets: '{key}=[{text}]'")
    return typed, override


def quoted(value: Path | str) -> str:
    """A path or a text as a value in Hydra's grammar."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), str(value))
    return f"'{escaped}'"


def first_line(error: Exception) -> str:
    """What an error of a library says first, as one line that can be printed."""
    return show(next(iter(str(error).splitlines()), type(error).__name__), limit=200)
