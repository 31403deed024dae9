"""What the commands share: arguments, the way from overrides to a configuration, and to the module that runs one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from diloco.errors import ConfigError

if TYPE_CHECKING:  # a help text does not wait for pydantic
    from diloco.config import Config, Start
    from diloco.config.address import Address

__all__ = ["PATH", "Asked", "Command", "configured", "guest", "implementation", "run", "split_address", "sweepable"]

PATH = click.Path(path_type=Path)
Function = TypeVar("Function", bound=Callable[..., Any])

# The function that does the work of a command, where it is not `run` in a module of the command's own.
WORKERS = {
    "train": "peer.train", "host": "peer.host", "dashboard": "status.dashboard",
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
        from diloco.config import Start, choices

        folder = ctx.params.get("folder")
        with formatter.section("Groups (GROUP=CHOICE)"):
            formatter.write_dl([(group, " ".join(names)) for group, names in choices(Start(folder=folder)).items()])
        with formatter.section("Settings (KEY=VALUE)"):
            formatter.write_text(f"{ctx.command_path} --cfg help lists them with meaning, range and default")


@dataclass(frozen=True)
class Asked:
    """Where the settings come from, and what to print of them instead of running the command."""

    base: Path | None = None
    folder: Path | None = None
    cfg: str | None = None
    package: str | None = None

    @property
    def shows(self) -> str | None:
        """The option that prints something, as typed; None: the command runs."""
        if self.cfg is None and self.package is not None:
            raise ConfigError("--package goes with --cfg; add --cfg job")
        return None if self.cfg is None else f"--cfg={self.cfg}"

    def start(self) -> Start:
        """The same for `compose`."""
        from diloco.config import Start

        return Start(self.base, self.folder)


OPTIONS = (
    click.option("--package", "-p", metavar="KEY", help="Print only this part of --cfg, such as outer."),
    click.option("--cfg", "-c", type=click.Choice(["job", "manifest", "help"]),
                 help="Print the composed configuration, the manifest and its hash, or every setting; then stop."),
    click.option("--config-dir", "-cd", "folder", type=PATH, metavar="DIR",
                 help="Look for choices in this folder, too; configs/ of the working directory is looked at anyway."),
    click.option("--config", "base", type=PATH, metavar="FILE",
                 help="Lay FILE over the defaults; the config.yaml of a run takes their place."),
)  # fmt: skip


def configured(function: Function) -> Function:
    """Adds what every command that takes a configuration has; the function gets it as `asked`."""

    @wraps(function)
    def collected(**arguments: Any) -> Any:
        asked = Asked(**{field.name: arguments.pop(field.name) for field in fields(Asked)})
        return function(asked=asked, **arguments)

    for option in (*OPTIONS, click.argument("overrides", nargs=-1, type=click.UNPROCESSED)):
        option(collected)
    return cast(Function, collected)


sweepable = click.option("--multirun", "-m", is_flag=True, help="Sweep over KEY=V1,V2 as diloco sweep does.")
"""For commands that are the same as `diloco sweep COMMAND` with it."""


def run(
    command: str, overrides: tuple[str, ...], asked: Asked, given: Sequence[str] = (), multirun: bool = False,
    **options: Any,
) -> int:  # fmt: skip
    """Composes the configuration, and prints it or runs the command with it.

    `overrides` are the user's, `given` those that the command adds. A setting that is probably not meant is a warning
    on stderr.
    """
    from diloco.config import compose

    start = asked.start()
    if asked.shows:
        if multirun:
            raise ConfigError(f"{asked.shows} shows one configuration; drop --multirun")
        return _show(overrides, given, asked, start)
    if multirun:
        return implementation("sweep")(command=command, overrides=overrides, start=start)
    overrides = tuple(map(_from_stdin, overrides))
    config = compose([*overrides, *given], start)
    if command != "train" or not config.run.report:  # a supervisor has checked what the user typed, and adds its own
        if command in STARTERS:
            config = with_digests(config)
        for doubt in config.warnings():
            click.echo(f"diloco: warning: {doubt}", err=True)
    return implementation(command)(config, **options)


def _show(overrides: tuple[str, ...], given: Sequence[str], asked: Asked, start: Start) -> int:
    """Prints what --cfg asks for."""
    from diloco.config import compose, help_text
    from diloco.config.compose import cfg_text

    if asked.cfg == "help":
        click.echo(help_text(start).rstrip("\n"))
        return 0
    config = compose([*map(_from_stdin, overrides), *given], start)
    if asked.cfg == "manifest":
        manifest = with_digests(config).manifest()
        click.echo(f"manifest hash {manifest.hash()}", err=True)  # apart, so that stdout is the JSON itself
        click.echo(manifest.to_json(indent=2))
    else:
        click.echo(cfg_text(config, asked.package).rstrip("\n"))
    return 0


def _from_stdin(override: str) -> str:
    """`swarm.token=-` with the token that is on stdin, where no other user of this machine sees it."""
    if override != "swarm.token=-":
        return override
    from diloco.config.address import line_of_stdin
    from diloco.config.overrides import quoted

    return f"swarm.token={quoted(line_of_stdin('swarm.token').rpartition('?token=')[2])}"


def with_digests(config: Config) -> Config:
    """The configuration with digests in place of the files that it names, if it names any."""
    if not config.names_files:
        return config
    from diloco.train.start_files import resolved  # torch takes seconds

    return resolved(config)


def split_address(address: str | None, overrides: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """ADDRESS and overrides, where the first argument may have been an override already."""
    if address is not None and re.match(r"[+]*\w[\w./@]*=", address):
        return None, (address, *overrides)
    return address, overrides


def guest(address: str, overrides: Sequence[str], allowed: Sequence[str] = ()) -> tuple[Address, list[str]]:
    """The ADDRESS of a swarm whose run is its own, and settings to add: the token of a link, and, where data.path is
    typed, that there is text; the swarm will say of which kind.

    `ConfigError` for a damaged address, and for typed settings of the run that are not `allowed`.
    """
    from diloco.config import Manifest
    from diloco.config.address import Address
    from diloco.config.explain import leaves
    from diloco.config.overrides import key_of, quoted

    found = Address.read(address)
    owned = [key for key, _ in leaves(Manifest)]
    typed = list(map(key_of, overrides))
    for key in typed:
        chosen = key in ("budget", "model", "data", "inner", "outer", "experiment")
        if key not in allowed and (chosen or any(f"{key}.".startswith(f"{one}.") for one in owned)):
            raise ConfigError(f"{key} belongs to the run and comes from the swarm; drop it, or start your own swarm")
    given = ["data=text"] if "data.path" in typed else []
    return found, given if found.token is None else [*given, f"swarm.token={quoted(found.token)}"]


def implementation(command: str) -> Callable[..., int]:
    """The function that does the work of a command; imports its module."""
    module, _, name = WORKERS.get(command, f"{command}.run").partition(".")
    work: Callable[..., int] = getattr(import_module(f"diloco.cli.{module}"), name)
    return work
