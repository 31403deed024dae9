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
    "PATH",
    "Command",
    "Function",
    "configured",
    "guest",
    "implementation",
    "run",
    "split_address",
    "sweepable",
    "with_digests",
]

PATH = click.Path(path_type=Path)
Function = TypeVar("Function", bound=Callable[..., Any])

# The function that does the work of a command, where it is not `run` in a module of the command's own.
WORKERS = {
    "train": "peer.train", "host": "peer.host",
    "eval": "model.evaluate", "export": "model.export", "generate": "model.generate",
    "keygen": "keys.keygen", "invite": "keys.invite", "revoke": "keys.revoke",
}  # fmt: skip


STARTERS = ("local", "train", "host", "simulate")  # may begin a run, whose manifest has no path of this machine


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
    function = click.argument("overrides", nargs=-1, type=click.UNPROCESSED)(function)
    function = click.option(
        "--config", "base", type=PATH, metavar="FILE",
        help="Start from this config.yaml of a run instead of the defaults.",
    )(function)  # fmt: skip
    return click.option(
        "--cfg",
        type=click.Choice(["job", "manifest", "help"]),
        help="Print the composed configuration, the manifest and its hash, or every setting; then stop.",
    )(function)


sweepable = click.option("--multirun", is_flag=True, help="Sweep over KEY=V1,V2 as diloco sweep does.")
"""For commands that are the same as `diloco sweep COMMAND` with it."""


def run(
    command: str,
    overrides: tuple[str, ...],
    cfg: str | None = None,
    base: Path | None = None,
    given: Sequence[str] = (),
    multirun: bool = False,
    **options: Any,
) -> int:
    """Composes the configuration, and prints it or runs the command with it.

    `overrides` are the user's, `given` those that the command adds. A typed setting without effect is refused, and one
    that is probably not meant is a warning on stderr.
    """
    from diloco.config import compose, help_text, refuse_ignored

    if multirun:
        if cfg is not None:
            raise ConfigError(f"--cfg={cfg} shows one configuration; drop --multirun")
        return implementation("sweep")(command=command, overrides=overrides, base=base)
    if cfg == "help":
        return _write(help_text())
    overrides = tuple(map(_from_stdin, overrides))
    config = compose([*overrides, *given], base=base)
    if cfg == "job":
        return _write(config.to_yaml())
    if cfg == "manifest":
        config = with_digests(config)
        manifest = config.manifest()
        click.echo(f"manifest hash {manifest.hash()}", err=True)  # apart, so that stdout is the JSON itself
        return _write(manifest.to_json(indent=2))
    if command != "train" or not config.run.report:  # a supervisor has checked what the user typed, and adds its own
        refuse_ignored(config, command, overrides)
        if command in STARTERS:
            config = with_digests(config)
        for doubt in config.warnings():
            click.echo(f"diloco: warning: {doubt}", err=True)
    return implementation(command)(config, **options)


def _from_stdin(override: str) -> str:
    """`swarm.token=-` with the token that is on stdin, where no other user of this machine sees it."""
    if override != "swarm.token=-":
        return override
    from diloco.config.address import line_of_stdin
    from diloco.config.sweeps import quoted

    return f"swarm.token={quoted(line_of_stdin('swarm.token').rpartition('?token=')[2])}"


def with_digests(config: Config) -> Config:
    """The configuration with digests in place of the files that it names, if it names any."""
    if not config.names_files:
        return config
    from diloco.train.origin import resolved  # torch takes seconds

    return resolved(config)


def split_address(address: str | None, overrides: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """ADDRESS and overrides, where the first argument may have been an override already."""
    if address is not None and "=" in address and not address.startswith(("/", "@", "diloco:")):
        return None, (address, *overrides)
    return address, overrides


def guest(address: str, overrides: Sequence[str], allowed: Sequence[str] = ()) -> tuple[Address, list[str]]:
    """The ADDRESS of a swarm whose run is its own, and the token of a link as the setting that carries it.

    `ConfigError` for a damaged address, and for typed settings of the run that are not `allowed`.
    """
    from diloco.config import refuse_run_owned
    from diloco.config.address import Address
    from diloco.config.sweeps import quoted

    found = Address.read(address)
    refuse_run_owned(overrides, allowed)
    return found, [] if found.token is None else [f"swarm.token={quoted(found.token)}"]


def implementation(command: str) -> Callable[..., int]:
    """The function that does the work of a command; imports its module."""
    module, _, name = WORKERS.get(command, f"{command}.run").partition(".")
    work: Callable[..., int] = getattr(import_module(f"diloco.cli.{module}"), name)
    return work


def _write(text: str) -> int:
    try:
        click.echo(text.rstrip("\n"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
