"""One argument of a command line, in Hydra's grammar: KEY=VALUE or GROUP=CHOICE. A + before it
changes nothing.

Text that the grammar does not know (`data.path=~/a=b`) is taken as it is; Hydra wants it in quotes.
Hydra is imported inside functions, so that a help text does not wait for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from diloco.config.explain import show
from diloco.errors import ConfigError


class Override(NamedTuple):
    """An argument as somebody typed it."""

    key: str
    text: str  # the value as typed


def _split(argument: str) -> Override:
    key, _, text = argument.lstrip("+").partition("=")
    return Override("inner.schedule" if key == "schedule" else key, text)


def key_of(argument: str) -> str:
    """The key or group of an argument, of which nothing is checked."""
    return _split(argument).key


def parse(argument: str, swept: bool = False) -> tuple[Override, Any]:
    """The parts of an argument, and it as Hydra's parser reads it: its `input_line` is what Hydra
    can read again.

    Raises ConfigError for what is no override, and for several values unless they may be `swept`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    typed = _split(argument)
    key, text = typed
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"{key}={text}")
    except HydraException as error:
        if text[:1] in ("[", "{", "'", '"'):
            why = first_line(error)
            raise ConfigError(
                f"{show(key)}={show(text)} cannot be parsed ({why}); check brackets and quotes"
            ) from None
        try:  # Hydra's grammar reserves some characters of ordinary text
            override = parser.parse_override(f"{key}={quoted(text)}")
        except HydraException:
            override = None
    if override is None or "=" not in argument or override.is_delete():
        raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE")
    if override.is_sweep_override() and not swept:
        raise ConfigError(
            f"{key}={text} is several values; give one value, or a list in brackets:"
            f" '{key}=[{text}]'"
        )
    return typed, override


def quoted(value: Path | str) -> str:
    """A path or a text as a value in Hydra's grammar."""
    escaped = re.sub(
        r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), str(value)
    )
    return f"'{escaped}'"


def first_line(error: Exception) -> str:
    """What an error of a library says first, as one line that can be printed."""
    return show(next(iter(str(error).splitlines()), type(error).__name__), limit=200)
