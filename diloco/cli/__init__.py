"""Shared parts of the `diloco` commands: options, and composing overrides into a configuration.

Modules of this folder import slow libraries inside functions, so that a help text loads neither
pydantic nor torch, and a wrong setting is reported before torch is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.config import Config, ConfigSource
    from diloco.config.address import Address


class _Path(click.Path):
    """A path argument in which ~ is the home directory even where no shell has expanded it."""

    def convert(self, value: Any, *context: Any) -> Any:
        return super().convert(os.path.expanduser(value), *context)


PATH = _Path(path_type=Path)
Function = TypeVar("Function", bound=Callable[..., Any])


class Command(click.Command):
    """A command whose help ends with the choices of every configuration group."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if not any(parameter.name == "overrides" for parameter in self.params):
            return
        from diloco.config import ConfigSource, choices

        rows = []
        for group, names in choices(ConfigSource(folder=ctx.params.get("folder"))).items():
            lines = wrap(" ".join(names), 64, break_on_hyphens=False)
            rows.append((group, "\n".join(("\b", *lines))))  # \b: click does not wrap them again
        with formatter.section("Groups (GROUP=CHOICE)"):
            formatter.write_dl(rows)
        with formatter.section("Settings (KEY=VALUE)"):
            text = f"{ctx.command_path} --cfg help lists them with meaning, range and default"
            formatter.write_text(text)


@dataclass(frozen=True)
class Options:
    """Overrides of a command, the files below them, and what --cfg prints instead of running."""

    overrides: tuple[str, ...]
    base: Path | None = None
    folder: Path | None = None
    cfg: str | None = None
    package: str | None = None

    @property
    def start(self) -> ConfigSource:
        """Return the files and folders that `compose` starts from."""
        from diloco.config import ConfigSource

        return ConfigSource(self.base, self.folder)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that the user set."""
        from diloco.config.compose import key_of

        return frozenset(map(key_of, self.overrides))

    def compose(
        self, given: Sequence[str] = (), starts: bool = False, together: bool = False
    ) -> Config:
        """Compose the user's overrides and, after them, those `given` by the command.

        `starts`: the command may begin a run, so digests replace the names of local files.
        `together`: the configuration is for all `local.peers` peers. With --cfg it is printed, and
        the command exits.
        """
        from diloco.config import compose

        if self.cfg is None and self.package is not None:
            raise ConfigError("--package goes with --cfg; add --cfg job")
        if self.cfg == "help":
            from diloco.config import help_text

            click.echo(help_text(self.start))
            raise click.exceptions.Exit
        start = replace(self.start, together=together)
        config = compose([*map(_from_stdin, self.overrides), *given], start)
        wants_digests = starts if self.cfg is None else self.cfg == "manifest"
        if wants_digests and config.names_files:
            from diloco.train.start_files import resolved

            config = resolved(config)
        if self.cfg is not None:
            self._print(config)
            raise click.exceptions.Exit
        for doubt in config.warnings():
            click.echo(f"diloco: warning: {doubt}", err=True)
        return config

    def _print(self, config: Config) -> None:
        """Print what --cfg asks for."""
        from diloco.config.compose import cfg_text

        if self.cfg == "manifest":
            manifest = config.manifest()
            click.echo(f"manifest hash {manifest.hash()}", err=True)  # stdout is the JSON itself
            click.echo(manifest.to_json(indent=2))
        else:
            click.echo(cfg_text(config, self.package).rstrip("\n"))


CFG = click.Choice(["job", "manifest", "help"])
SHOWS = "Print the composed configuration, the manifest and its hash, or every setting; then stop."
PART = "Print only this part of --cfg, such as outer."
FOLDER = "Look for choices in this folder, too; configs/ of the working directory is one anyway."
BASE = "Lay FILE over the defaults; the config.yaml of a run takes their place."
OPTIONS = (
    click.option("--package", "-p", metavar="KEY", help=PART),
    click.option("--cfg", "-c", type=CFG, help=SHOWS),
    click.option("--config-dir", "-cd", "folder", type=PATH, metavar="DIR", help=FOLDER),
    click.option("--config", "base", type=PATH, metavar="FILE", help=BASE),
    click.argument("overrides", nargs=-1, type=click.UNPROCESSED),
)


def configured(function: Function) -> Function:
    """Add OVERRIDES, --cfg and its like to a command; the function gets them as `options`."""

    @wraps(function)
    def collected(**arguments: Any) -> Any:
        given = {field.name: arguments.pop(field.name) for field in fields(Options)}
        return function(options=Options(**given), **arguments)

    for option in OPTIONS:
        option(collected)
    return cast(Function, collected)


def _from_stdin(override: str) -> str:
    """Replace `swarm.token=-` by a token from stdin, which no other user can see."""
    if override != "swarm.token=-":
        return override
    from diloco.config.address import line_of_stdin
    from diloco.config.compose import quoted

    return f"swarm.token={quoted(line_of_stdin('swarm.token').rpartition('?token=')[2])}"


def split_address(address: str | None, options: Options) -> tuple[str | None, Options]:
    """Return ADDRESS and options; an ADDRESS that is an override is moved to the options."""
    if address is not None and re.match(r"[+]*\w[\w./@]*=", address):
        return None, replace(options, overrides=(address, *options.overrides))
    return address, options


def guest_arguments(
    address: str, options: Options, allowed: Sequence[str] = ()
) -> tuple[Address, list[str]]:
    """Parse ADDRESS; return it, and the overrides that the token of a link and data.path imply.

    Raises `ConfigError` for a damaged address, and for settings of the run that are not `allowed`.
    """
    from diloco.config import Manifest
    from diloco.config.address import Address
    from diloco.config.compose import quoted
    from diloco.config.explain import setting_fields

    swarm = Address.read(address)
    groups = ("budget", "model", "data", "inner", "outer", "experiment")
    owned = tuple(f"{key}." for key, _ in setting_fields(Manifest))
    for key in sorted(options.keys.difference(allowed)):
        if key in groups or f"{key}.".startswith(owned):
            remedy = "drop it, or start your own swarm"
            raise ConfigError(f"{key} belongs to the run and comes from the swarm; {remedy}")
    given = ["data=text"] if "data.path" in options.keys else []  # the swarm says of which kind
    return swarm, given if swarm.token is None else [*given, f"swarm.token={quoted(swarm.token)}"]
