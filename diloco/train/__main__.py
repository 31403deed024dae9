"""`python -m diloco.train [overrides]`: one peer without a terminal, and each rank of `torchrun -m diloco.train`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from diloco.config import compose, refuse_ignored
from diloco.errors import ConfigError, guard

__all__: list[str] = []


def _main(arguments: list[str]) -> int:
    base = None
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ConfigError("--config needs a file")
        base = Path(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    config = compose(arguments, base=base)
    if not config.run.report:  # a supervisor has checked what the user typed, and adds settings of its own
        refuse_ignored(config, "train", arguments)
    if config.names_files:
        from diloco.train.origin import resolved

        config = resolved(config)
    logging.basicConfig(level=logging.INFO, format="diloco: %(message)s", stream=sys.stderr)
    from diloco.rundir.reporting import json_lines, log_lines
    from diloco.train.run import run  # after the configuration is known to be good: torch takes seconds

    if config.run.report:
        threading.Thread(target=_leave_with_supervisor, daemon=True).start()
    return run(config, json_lines if config.run.report else log_lines(config)).exit


def _leave_with_supervisor() -> None:
    """A supervisor that was killed cannot say so; but its end of our standard input closes."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    code = guard(lambda: _main(sys.argv[1:]))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Nothing is left to do, and the usual end of a process now and then aborts a rank, or waits for one that is
        # gone: a thread of torch's process group outlives what it belongs to.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
