"""What the commands share: arguments, the way from overrides to a configuration, and to the module that runs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from diloco.errors import ConfigError

if TYPE_CHECKING:  # a help text does not wait for pydantic
    from diloco.config import Config
    from diloco.config.address import Address

__all__ = [
    "Command",
    "Function",
    "admission",
    "check",
    "configured",
    "implementation",
    "is_override",
    "run",
    "sweepable",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class Command(click.Command):
    """A command whose help ends with the choices of every configuration group."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if not any(parameter.name == "overrides" for parameter in self.params):
            return
        from diloco.config import choices

        with formatter.section("Groups (GROUP=CHOICE)"):
            formatter.write_dl([(group, " ".join(names)) for group, names in choices().items()])
        with formatter.section("Settings (KEY=VALUE)"):
            formatter.write_text(f"{ctx.command_path} --cfg help lists them with meaning, range and default")


def configured(function: Function) -> Function:
    """Adds what every command that takes a configuration has."""
    for decorate in (
        click.argument("overrides", nargs=-1, type=click.UNPROCESSED),
        click.option(
            "--config",
            "base",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Start from this config.yaml of a run instead of the defaults.",
        ),
        click.option(
            "--cfg",
            type=click.Choice(["job", "manifest", "help"]),
            help="Print the composed configuration, the manifest and its hash, or every setting; then stop.",
        ),
    ):
        function = decorate(function)
    return function


def sweepable(function: Function) -> Function:
    """Adds --multirun, which makes a command the same as `diloco sweep COMMAND`."""
    return click.option("--multirun", is_flag=True, help="Sweep over KEY=V1,V2 as diloco sweep does.")(function)


def run(
    command: str,
    overrides: tuple[str, ...],
    cfg: str | None,
    base: Path | None,
    given: Sequence[str] = (),
    **options: Any,
) -> int:
    """Composes the configuration, and prints it or runs the command with it.

    `overrides` are the user's, `given` those that the command adds.
    """
    from diloco.config import compose, help_text

    if options.pop("multirun", False):
        if cfg is not None:
            raise ConfigError(f"--cfg={cfg} shows one configuration; drop --multirun")
        return implementation("sweep")(command=command, overrides=overrides, base=base)
    if cfg == "help":
        return _write(help_text())
    config = compose([*overrides, *given], base=base)
    if cfg == "job":
        return _write(config.to_yaml())
    if cfg == "manifest":
        manifest = config.manifest()
        click.echo(f"manifest hash {manifest.hash()}", err=True)  # apart, so that stdout is the JSON itself
        return _write(manifest.to_json(indent=2))
    check(command, config, overrides)
    return implementation(command)(config, **options)


def check(command: str, config: Config, overrides: Sequence[str]) -> None:
    """Refuses typed settings without effect, and warns on stderr of settings that are probably not meant."""
    from diloco.config import refuse_ignored

    if command == "train" and config.run.report:
        return  # the supervisor has checked what the user typed, and adds settings of its own
    refuse_ignored(config, command, overrides)
    for doubt in config.warnings():
        click.echo(f"diloco: warning: {doubt}", err=True)


def is_override(argument: str) -> bool:
    """Whether the argument in the place of an ADDRESS is a setting."""
    return "=" in argument and not argument.startswith(("/", "@", "diloco:"))


def admission(address: Address) -> list[str]:
    """The token of a link, as the setting that carries it."""
    if address.token is None:
        return []
    return [f"swarm.token='{address.token}'"]


def implementation(command: str) -> Callable[..., int]:
    """The function that does the work of a command; imports its module."""
    run: Callable[..., int] = import_module(f"diloco.cli.{command}").run
    return run


def _write(text: str) -> int:
    try:
        click.echo(text.rstrip("\n"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
