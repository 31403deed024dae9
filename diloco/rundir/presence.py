"""Which peer of a run directory runs in which process, and the runs of this machine that follow from that.

    RUN_DIR/presence/NAME.json    what a peer does now, or did last; its process replaces the file with each new state
    RUN_DIR/address               where others find the swarm
    RUN_DIR/pause                 while this file is there, the peers of the directory pause

A process that was killed cannot say so. Therefore a record counts only while its process lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from diloco.errors import ConfigError, DilocoError
from diloco.rundir.files import write_atomic
from diloco.rundir.reporting import Message, Ready, Status, read_fields

__all__ = ["LIVING", "Presence", "Record", "data_home", "pause_file", "read_records"]

logger = logging.getLogger(__name__)

LIVING = ("training", "holding", "waiting", "leaving", "paused")  # the most active first
SHOWN = (*LIVING, "left", "done")  # states that are worth a write
SAME_START_S = 2.0  # by so much two readings of the start of one process may differ


def data_home() -> Path:
    """Where this user's peers keep their keys and the runs that they joined."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "diloco"


def pause_file(run_dir: Path) -> Path:
    """The file that makes the peers of a run directory pause."""
    return run_dir / "pause"


@dataclass(frozen=True)
class Record:
    """What a peer does, or did last.

    process, started_at, machine: its process (an id, unix seconds, a host name).
    state: one of `SHOWN`, or "failed". why: of a pause or a failure. since: unix seconds. exit: after its end.
    unpausable: why it cannot be paused; empty if it can.
    addresses: where the swarm is; this peer's own comes first, if it has one.
    token: in a closed run, `@FILE` with this peer's invitation; the token itself is written nowhere.
    """

    run_id: str = ""
    process: int = 0
    started_at: float = 0.0
    machine: str = ""
    state: str = "waiting"
    why: str = ""
    since: float = 0.0
    exit: int | None = None
    unpausable: str = ""
    addresses: tuple[str, ...] = ()
    token: str = ""

    @property
    def elsewhere(self) -> bool:
        """Whether it is of another machine, which shares the directory."""
        return self.machine != platform.node()

    @property
    def lives(self) -> bool:
        """Whether its process runs on this machine. An id that went to another process does not count."""
        if self.exit is not None or self.elsewhere:
            return False
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            found = psutil.Process(self.process)
            same = bool(abs(found.create_time() - self.started_at) < SAME_START_S)
            return same and bool(found.status() != psutil.STATUS_ZOMBIE)
        return False


class Presence:
    """Keeps the record of one peer while the context is open, out of the messages that it hears.

    The first status begins it: what fails before, such as a wrong setting, leaves the directory as it was. A record
    that cannot be written is a warning, and the run goes on without.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        run_id: str,
        unpausable: str = "",
        seeds: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        self._path = run_dir / "presence" / f"{name}.json"
        self._written = False
        self._seeds = tuple(seed for seed in seeds if not seed.startswith("@"))
        here = psutil.Process()
        self.record = Record(
            run_id, here.pid, here.create_time(), platform.node(), unpausable=unpausable, addresses=self._seeds,
            token=f"@{Path(token[1:]).absolute()}" if token is not None and token.startswith("@") else "",
        )  # fmt: skip

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._written:
            return
        if kind is None or isinstance(error, KeyboardInterrupt):
            state = self.record.state if self.record.state == "done" else "left"
            self._say(state=state, exit=0)
        elif isinstance(error, DilocoError):
            self._say(state="failed", why=str(error), exit=error.exit_code)
        else:
            self._say(state="failed", why=kind.__name__, exit=DilocoError.exit_code)

    def hear(self, message: Message) -> None:
        """Takes in a message of the peer; writes when its state or its address has changed."""
        if isinstance(message, Ready):
            own = (message.address,) if message.address else ()
            self._say(addresses=(*own, *self._seeds))
        elif isinstance(message, Status) and message.state in SHOWN:
            why = message.why or ""
            if not self._written or (message.state, why) != (self.record.state, self.record.why):
                self._say(state=message.state, why=why)

    def _say(self, **changes: Any) -> None:
        if "state" in changes:
            changes |= {"since": time.time(), "why": changes.get("why", "")}
        self.record = replace(self.record, **changes)
        self._written = True
        try:
            self._path.parent.mkdir(exist_ok=True)
            write_atomic(self._path, json.dumps(asdict(self.record), indent=1) + "\n")
        except (ConfigError, OSError) as error:
            logger.warning("%s; diloco status will not know of this peer", error)


def read_records(run_dir: Path) -> dict[str, Record]:
    """The records of a run directory by name of the peer; a file that holds none is left out."""
    found = {}
    for path in sorted((run_dir / "presence").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                found[path.stem] = Record(**read_fields(Record, content))
    return found
