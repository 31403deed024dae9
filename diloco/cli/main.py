"""The command line.

1. click parses the arguments that modules of this folder declare beside the commands. The others
   are overrides such as `outer.lr=0.5` or `model=14m`.
2. `diloco.config.compose` turns overrides into a `Config`. A bad override ends here, before torch
   is imported.
3. The command does the work and returns the exit code.

`main` maps errors to one line and an exit code through `diloco.process.guard`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import chain

import click
from click.shell_completion import shell_complete

from diloco import __version__
from diloco.cli import doctor, join, keys, local, model, plan, status, sweep, train, worker
from diloco.errors import ConfigError
from diloco.process import end_process, guard, in_utf8

SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Train": (local.local, train.train, join.join, train.host),
    "Train in the background": (worker.start, worker.stop, worker.logs),
    "Look at a swarm": (status.status, status.dashboard, doctor.doctor),
    "Use a model": (model.generate, model.evaluate, model.export),
    "Choose settings": (plan.plan, train.simulate, sweep.sweep, sweep.compare),
    "Close a run": (keys.keygen, keys.invite, keys.revoke),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; the console script and `python -m diloco` call this."""
    if arguments is None:
        in_utf8()
    # Into a terminal that knows ASCII only, click would write UTF-8.
    vars(click.utils).update(
        _default_text_stdout=lambda: sys.stdout, _default_text_stderr=lambda: sys.stderr
    )
    end_process(guard(lambda: _invoke(list(sys.argv[1:] if arguments is None else arguments))))


def _invoke(arguments: list[str]) -> int:
    if instruction := os.environ.get("_DILOCO_COMPLETE"):  # click's name for it
        return shell_complete(cli, {}, "diloco", "_DILOCO_COMPLETE", instruction)
    # Not cli.main(): it turns Ctrl+C into its own Abort and any broken pipe, even a peer's socket,
    # into exit code 1.
    try:
        with cli.make_context("diloco", arguments or ["--help"]) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as finished:
        return finished.exit_code
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "diloco")
        raise ConfigError(f"{error.format_message()} See {command} --help") from None


class _Sections(click.Group):
    """A group whose help lists its commands by purpose, not by name."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            rows = [
                (f"{command.name:{width}}", command.get_short_help_str(formatter.width - 6 - width))
                for command in commands
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(
    cls=_Sections,
    commands=list(chain(*SECTIONS.values())),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="diloco")
def cli() -> None:
    """Serverless DiLoCo: peers anywhere train one model, without a server.

    \b
    diloco local experiment=quickstart       four peers on this machine, in three minutes
    diloco generate runs/quickstart/model    text from the result
    """
