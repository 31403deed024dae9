"""Completion of commands, options, `GROUP=CHOICE` and `KEY=VALUE` in bash, zsh and fish; nothing here imports torch.

1. The user's shell evaluates `diloco -sc install=SHELL`: click's own script for it, which calls `diloco` again with
   _DILOCO_COMPLETE set, at every press of the tabulator.
2. `answer` prints what may follow. click knows commands and options, and asks `overrides` for the rest.

bash gives `outer=str` as three words, of which only the last is replaced; the others give it as one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from diloco.errors import ConfigError, DilocoError

__all__ = ["INSTEAD", "OPTIONS", "VARIABLE", "answer", "install", "overrides"]

VARIABLE = "_DILOCO_COMPLETE"
OPTIONS = ("--shell-completion", "-sc")  # Hydra's
INSTEAD = 'eval "$(diloco -sc install=bash)", or install=zsh; with fish diloco -sc install=fish | source'


def answer(cli: click.Command, instruction: str) -> int:
    """Print a script for a shell, or what may follow on its command line; returns the exit code."""
    if instruction.endswith("_source"):
        return install(cli, [f"install={instruction.removesuffix('_source')}"])
    return shell_complete(cli, {}, "diloco", VARIABLE, instruction)


def install(cli: click.Command, arguments: Sequence[str]) -> int:
    """Print the script for `install=SHELL`. Raises ConfigError for other arguments and shells."""
    kind = get_completion_class(arguments[0].removeprefix("install=")) if len(arguments) == 1 else None
    if kind is None:
        raise ConfigError(f"{' '.join([OPTIONS[1], *arguments])} cannot be done; write {INSTEAD}")
    source = kind(cli, {}, "diloco", VARIABLE).source()
    # No space stands after KEY= and SECTION., for which more is to come.
    source = source.replace("COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *[=.] ]] && compopt -o nospace")
    source = source.replace("compadd -U -V unsorted -a completions", "compadd -S '' -U -V unsorted -a completions")
    click.echo(source, nl=False)
    return 0


def overrides(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """What may stand where a command takes an ADDRESS or overrides."""
    address, given = context.params.get("address"), context.params.get("overrides") or ()
    before = [*((address,) if address else ()), *given]
    try:
        return [CompletionItem(one) for one in _found(context, before, incomplete) if one.startswith(incomplete)]
    except DilocoError:  # such as a --config-dir that is not there: whoever types on is told so in the end
        return []


def _found(context: click.Context, before: Sequence[str], incomplete: str) -> Iterator[str]:
    from diloco.config import Start, choices
    from diloco.config.compose import KEYS

    groups = choices(Start(folder=context.params.get("folder")))
    key, equals, _ = incomplete.partition("=")
    prefix = f"{key}="
    if not equals:
        key, prefix = _split_off(before, incomplete, {*groups, *KEYS}), ""
    if key:
        known = key.lstrip("+")
        yield from (f"{prefix}{value}" for value in groups.get(known) or _words(KEYS.get(known)))
        return
    if context.info_name == "sweep" and not before:
        yield from ("local", "train", "simulate")
    sign = incomplete[: len(incomplete) - len(incomplete.lstrip("+~"))]
    yield from (f"{sign}{group}=" for group in groups)
    keys = (f"{key}=" if "." in incomplete else f"{key.partition('.')[0]}." for key in KEYS)
    yield from (f"{sign}{key}" for key in dict.fromkeys(keys))


def _split_off(before: Sequence[str], incomplete: str, known: Collection[str]) -> str:
    """The key of a value that is a word of its own; where the value is empty, click has taken the word `=` away."""
    if before[-1:] == ["="]:
        return "".join(before[-2:-1])
    return before[-1] if before and not incomplete and before[-1].lstrip("+") in known else ""


def _words(field: Any) -> Iterator[str]:
    """The words that a setting takes, as an error lists them."""
    from diloco.config.explain import expected

    text = "" if field is None else expected(field)
    listed = re.match("(?:a list, each )?one of (.+?)(?:, or |$)", text)
    if listed is not None:
        yield from listed[1].split(", ")
    elif text.startswith("true or false"):
        yield from ("true", "false")
