"""When a peer takes part and when it pauses: `diloco pause`, `volunteer.pause_when`, `swarm.upload_per_day`.

1. While a session trains, a thread of rank 0 asks for reasons to pause, and interrupts the session at the first one.
2. The session ends as with Ctrl+C: leases are handed over, a checkpoint is written. Nobody waits for this peer.
3. Its model and optimizer are freed. The process waits until no reason is left, and keeps the run directory locked.
4. The next session goes on from the checkpoint, as the same peer, through the peers whose addresses it has.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import date
from pathlib import Path

from diloco.config import Config
from diloco.errors import ConfigError, on_signals
from diloco.rundir.files import write_atomic
from diloco.rundir.presence import pause_file, read_records
from diloco.rundir.reporting import Message, Status
from diloco.swarm.wire.malloc import give_back
from diloco.text import human_bytes
from diloco.train.devices import empty_cache
from diloco.train.island import Island
from diloco.train.probes import Probe, Steady, probes
from diloco.train.session import Sync

__all__ = ["Standby", "Uploads", "joins_by", "unpausable"]

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks for `diloco pause`, and at the bytes that were sent
PROBE_S = 5.0  # between two looks at the machine
KEEP_S = 10.0  # between two writes of the count of bytes; a crash loses so much of it
BY_HAND = "diloco pause"
_PORT, _ANY_PORT = re.compile(r"/tcp/(\d+)/"), re.compile(r"/tcp/0$")


def unpausable(config: Config) -> str:
    """Why a peer of this run cannot pause; empty if it can."""
    if config.outer.method == "data_parallel":
        return "outer.method=data_parallel, where the others would wait for it"
    return ""


def joins_by(config: Config, file: Path) -> bool:
    """Whether this peer finds the swarm by the addresses in that file; with its own there it would call itself."""
    named = (Path(one[1:]) for one in config.swarm.initial_peers if one.startswith("@"))
    return any(one.absolute() == file.absolute() for one in named)


class Uploads:
    """The bytes that one peer sends on one day of local time, counted over restarts in a small file beside its key.

    A file that cannot be read counts as nothing sent; one that cannot be written is a warning.
    """

    def __init__(
        self,
        path: Path,
        limit: float,
        today: Callable[[], date] = date.today,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._limit, self._today, self._clock = path, limit, today, clock
        self._day, self.nbytes = "", 0
        self._counted = 0  # of the session under way
        self._kept_at = -math.inf
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("bytes"), int):
                self._day, self.nbytes = str(content.get("day")), max(0, content["bytes"])

    def begin_session(self) -> None:
        """What is counted from here on begins at 0."""
        self._counted = 0

    def count(self, sent: int) -> None:
        """Takes in how much the session under way has sent so far."""
        self._turn_page()
        more = sent - self._counted
        self.nbytes, self._counted = self.nbytes + more, sent
        if more and self._clock() - self._kept_at >= KEEP_S:
            self.keep()

    @property
    def spent(self) -> bool:
        """Whether nothing may be sent any more today."""
        self._turn_page()
        return self.nbytes >= self._limit

    def keep(self) -> None:
        """Writes the count."""
        self._kept_at = self._clock()
        try:
            write_atomic(self._path, json.dumps({"day": self._day, "bytes": self.nbytes}) + "\n")
        except ConfigError as error:
            logger.warning("%s; until then what is sent is not counted over a restart", error)

    def _turn_page(self) -> None:
        day = self._today().isoformat()
        if day != self._day:
            self._day, self.nbytes = day, 0


class Standby:
    """Whether one peer takes part now. The other ranks of an island have one, too, and do as rank 0 says.

    Attributes:
        why: the reason for which the last session was interrupted, or for which none begins; empty if there is none.
        joined: whether the session under way has found the swarm.
        sessions: how many have begun.
        paused_s: seconds of the last pause.
    """

    def __init__(
        self, config: Config, key: Path, leads: bool = True, on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config = config
        self.why = ""
        self._listen: tuple[str, ...] | None = None  # in a later session
        self.paused_s = 0.0
        self.joined = False
        self.sessions = 0
        self._clock = clock
        self._active = leads and not unpausable(config)
        self._file = pause_file(config.run.dir)
        self._probes: dict[str, Probe] = {}
        self._uploads: Uploads | None = None
        if not self._active:
            return
        if not any(record.lives for record in read_records(config.run.dir).values()):
            self._file.unlink(missing_ok=True)  # of an earlier process; who starts a peer wants it to train
        self._probes = probes(config.volunteer, on_gpu)
        self._steady = {reason: Steady(config.volunteer.settle_s) for reason in self._probes}
        self._found: dict[str, str] = {}  # why, of the reasons that count
        self._probed_at = -math.inf
        self._unknown: set[str] = set()
        if config.swarm.upload_per_day is not None:
            self._uploads = Uploads(key.with_suffix(".sent.json"), config.swarm.upload_per_day)

    def reason(self) -> str:
        """Why this peer should not take part now; empty if it should."""
        if not self._active:
            return ""
        if self._file.exists():
            return BY_HAND
        if self._uploads is not None and self._uploads.spent:
            limit = self._config.swarm.upload_per_day
            return f"{human_bytes(self._uploads.nbytes)} sent today, of swarm.upload_per_day={limit:g}; until midnight"
        now = self._clock()
        if self._probes and now - self._probed_at >= PROBE_S:
            self._probed_at = now
            for reason in self._probes:
                self._probe(reason, now)
        return "; ".join(self._found.values())

    def _probe(self, reason: str, now: float) -> None:
        verdicts = self._probes[reason]()
        for verdict in verdicts:
            if verdict.holds is None and verdict.why not in self._unknown:
                self._unknown.add(verdict.why)
                logger.warning("volunteer.pause_when: %s; so this is no reason to pause", verdict.why)
        holding = [verdict.why for verdict in verdicts if verdict.holds]
        if self._steady[reason].update(bool(holding), now):
            self._found.setdefault(reason, ", ".join(holding))  # the words of its beginning: figures move all the time
        else:
            self._found.pop(reason, None)

    @contextmanager
    def watching(self, sync: Sync) -> Iterator[None]:
        """Interrupts a session, from a thread, when there is a reason to pause."""
        if not self._active:
            yield
            return
        self.why = ""
        if self._uploads is not None:
            self._uploads.begin_session()
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                self._count(sync)
                self.why = self.reason()
                if self.why:
                    return sync.interrupt()

        watcher = threading.Thread(target=watch, name="standby", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def end_session(self, sync: Sync) -> None:
        """Counts what was sent on leaving."""
        self._count(sync)
        if self._uploads is not None:
            self._uploads.keep()

    def _count(self, sync: Sync) -> None:
        if self._uploads is not None and sync.view is not None:
            self._uploads.count(sync.view.node.traffic.bytes_sent)

    def remember(self, sync: Sync) -> None:
        """Keeps at which port this peer listens, because others may come back by its address."""
        addresses = () if sync.view is None else sync.view.node.addresses
        ports = {found[1] for one in addresses if (found := _PORT.search(one))}
        if len(ports) == 1:
            self._listen = tuple(_ANY_PORT.sub(f"/tcp/{next(iter(ports))}", one) for one in self._config.swarm.listen)

    def coming(self) -> Config:
        """The configuration of the coming session, which listens where the one before did."""
        self.joined, self.sessions = False, self.sessions + 1
        if self._listen is None:
            return self._config
        return self._config.model_copy(update={"swarm": self._config.swarm.model_copy(update={"listen": self._listen})})

    def forget(self) -> bool:
        """Forgets the port; returns whether there was one."""
        remembered, self._listen = self._listen, None
        return remembered is not None

    def wait(self, island: Island, tell: Callable[[Message], None]) -> bool:
        """All ranks: returns when this peer may take part; False if Ctrl+C, or notice of the machine's end, came first.

        Says once why it waits, and again when the reason has changed.
        """
        began_at, said, waited = self._clock(), "", False
        stopped = threading.Event()
        with on_signals(lambda *_: stopped.set()) if _in_main_thread() else nullcontext():
            while True:
                self.why = self.reason()
                waits, leaves = (bool(one) for one in island.agree([bool(self.why), stopped.is_set()]))
                if leaves or not waits:
                    self.paused_s = self._clock() - began_at if waited else 0.0
                    return not leaves
                if not waited:
                    waited = True
                    gc.collect()  # the model of the last session may be in a circle of references
                    empty_cache(island.device)
                    give_back()
                if self.why != said:
                    said = self.why
                    tell(Status(state="paused", why=self.why))
                stopped.wait(LOOK_S)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
