"""`python -m diloco.train [overrides]`: one peer without a terminal, or one rank of torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from argparse import ArgumentError, ArgumentParser
from pathlib import Path

from diloco.config import ConfigSource, compose
from diloco.errors import ConfigError
from diloco.process import end_process, guard, in_utf8, outlast_terminal


def peer(arguments: list[str]) -> int:
    """Train as one peer with these settings, to its end; return the exit code."""
    start, arguments = _start(arguments)
    config = compose(arguments, start)
    if config.names_files:
        from diloco.train.start_files import resolved

        config = resolved(config)
    outlast_terminal()
    logging.basicConfig(format="diloco: %(message)s", stream=sys.stderr)
    logging.getLogger("diloco").setLevel(logging.INFO)
    from diloco.rundir.reporting import WarningLines, json_lines, log_lines

    # after the configuration is known to be good: torch takes seconds
    from diloco.train.run import run

    if config.run.report:
        threading.Thread(target=_leave_with_supervisor, daemon=True).start()
        logging.getLogger("diloco").addHandler(WarningLines(config.run.name or "peer"))
    return run(config, json_lines if config.run.report else log_lines(config)).exit


def _start(arguments: list[str]) -> tuple[ConfigSource, list[str]]:
    """Split arguments into the files of `--config` and `--config-dir`, and the overrides."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--config-dir", "-cd", type=Path)
    try:
        options, others = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None
    return ConfigSource(options.config, options.config_dir), others


def _leave_with_supervisor() -> None:
    """Leave when standard input closes: the supervisor, if killed, cannot say so."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    in_utf8()
    end_process(guard(lambda: peer(sys.argv[1:])))
