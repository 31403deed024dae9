"""One argument of a command line, in Hydra's grammar: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE, ~KEY, and GROUP=CHOICE.

Text that the grammar does not know (`data.path=~/a=b`) is taken as it is; Hydra wants it in quotes.
Hydra is imported inside functions, so that a help text does not wait for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from diloco.config.explain import show
from diloco.errors import ConfigError

__all__ = ["Typed", "first_line", "key_of", "parse", "quoted", "split"]


SHORT = re.compile(r"^([+~]*)(schedule)(?==|$)")  # short for inner.schedule


class Typed(NamedTuple):
    """An argument as somebody typed it."""

    sign: str  # "", "+", "++" or "~" (the schema's default counts, not the preset's)
    key: str
    text: str  # the value as typed


def split(argument: str) -> Typed:
    """The parts of an argument, of which nothing is checked."""
    argument = SHORT.sub(r"\1inner.\2", argument)
    sign = next((one for one in ("++", "+", "~") if argument.startswith(one)), "")
    key, _, text = argument[len(sign) :].partition("=")
    return Typed(sign, key, text)


def key_of(argument: str) -> str:
    """The key or group of an argument."""
    return split(argument).key


def parse(argument: str, swept: bool = False) -> tuple[Typed, Any]:
    """The parts of an argument, and it as Hydra's parser reads it: its `input_line` is what Hydra can read again.

    Raises ConfigError for what is no override, and for several values unless they may be `swept`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    typed, argument = split(argument), SHORT.sub(r"\1inner.\2", argument)
    if not typed.key or ("=" in argument) == (typed.sign == "~"):
        raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(argument)
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
    if override.is_sweep_override() and not swept:
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
