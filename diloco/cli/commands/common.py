"""What the commands share: arguments, the way from overrides to a configuration, and to the module that runs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from diloco.errors import ConfigError

__all__ = [
    "Command",
    "Function",
    "admission",
    "configured",
    "implementation",
    "is_override",
    "run",
    "sweepable",
    "warn",
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


def run(command: str, overrides: tuple[str, ...], cfg: str | None, base: Path | None, **options: Any) -> int:
    """Composes the configuration, and prints it or runs the command with it."""
    from diloco.config import compose, help_text

    if options.pop("multirun", False):
        if cfg is not None:
            raise ConfigError(f"--cfg={cfg} shows one configuration; drop --multirun")
        return implementation("sweep")(command=command, overrides=overrides, base=base)
    if cfg == "help":
        return _write(help_text())
    config = compose(overrides, base=base)
    if cfg == "job":
        return _write(config.to_yaml())
    if cfg == "manifest":
        manifest = config.manifest()
        click.echo(f"manifest hash {manifest.hash()}", err=True)  # apart, so that stdout is the JSON itself
        return _write(manifest.to_json(indent=2))
    warn(command, config, overrides)
    return implementation(command)(config, **options)


def warn(command: str, config: Any, overrides: Sequence[str]) -> None:
    """Says on stderr what works but is probably not meant."""
    warnings = [] if config.run.report else config.warnings(overrides)  # a supervisor has said them already
    if command not in ("local", "simulate", "plan"):
        typed = [override.partition("=")[0] for override in overrides]
        warnings += [f"{key} has no effect with diloco {command}" for key in typed if key.startswith("local.")]
    for warning in warnings:
        click.echo(f"diloco: warning: {warning}", err=True)


def is_override(argument: str) -> bool:
    """Whether what stands in the place of an ADDRESS is a setting already."""
    return "=" in argument and not argument.startswith(("/", "@", "diloco:"))


def admission(address: Any) -> list[str]:
    """The token of a link, as the setting that carries it."""
    if address.token is None:
        return []
    from diloco.config import SwarmConfig

    if "token" not in SwarmConfig.model_fields:
        raise ConfigError("ADDRESS holds a token, which this diloco does not know; install a newer one")
    return [f"swarm.token='{address.token}'"]


def implementation(command: str) -> Callable[..., int]:
    """What does the work of a command; its module is imported now."""
    run: Callable[..., int] = import_module(f"diloco.cli.{command}").run
    return run


def _write(text: str) -> int:
    try:
        click.echo(text.rstrip("\n"))
        sys.stdout.flush()
    except BrokenPipeError:  # `diloco train --cfg job | head` has seen enough; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
