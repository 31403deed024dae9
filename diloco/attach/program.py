"""The program around a peer: its lines on stderr, and how a signal ends it.

On SIGTERM and similar signals a peer says goodbye, in `diloco train` and in a custom loop. A loop
that reads `interrupted` ends by itself. In any other loop `SystemExit`, with the signal's exit code
in a shell, is raised after the next step of the optimizer, or when the attachment is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any, NoReturn
from weakref import WeakSet

from diloco.attach.arguments import LOWER_RATE, PeerArguments, as_typed
from diloco.attach.data_shard import ActivePeers
from diloco.attach.node_thread import NodeThread
from diloco.attach.ranks import RankGroup
from diloco.errors import ConfigError
from diloco.process import LastingStream
from diloco.rundir.events import EventText
from diloco.signals import watch
from diloco.swarm.node.node import OnEvent
from diloco.swarm.node.recorder import PeerRecord
from diloco.text import counted, human_bytes

logger = logging.getLogger(__name__)


class Phase(Enum):
    """State of a peer between `attach` and its end."""

    NEW = auto()
    TRAINING = auto()
    PAUSED = auto()  # it evaluates or saves, and the others wait
    LEFT = auto()
    FINISHED = auto()  # it has left, and the parameters are the last anchor

    @property
    def runs(self) -> bool:
        """Return True while the peer takes part in the swarm."""
        return self in (Phase.TRAINING, Phase.PAUSED)


def check_not_spawned() -> None:
    """Raise `ConfigError` in a process that is still importing the script of its parent."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "attach: this process is a worker that imports the script again (multiprocessing's"
            " spawn and forkserver do); train below `if __name__ == '__main__':`"
        )


class Program:
    """The program around one peer: it hears what happens in the swarm, and a signal may end it.

    Attributes:
        ends_loop: True if a signal ends the loop; False if it only sets `interrupted`.
        active: the peers that share a stream of data; None without a shared stream.
        on_exchange: called after each exchange.
    """

    def __init__(
        self,
        peer: PeerArguments,
        quiet: bool,
        on_event: OnEvent | None,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        self.peer, self._quiet = peer, quiet
        self._tell, self._text = on_event or self._say_event, EventText()
        self._tell_address = on_ready or self._say_address
        self.ends_loop = True
        self.active: ActivePeers | None = None
        self._signals: Sequence[int] = ()
        self._remedy = LOWER_RATE
        self._sync: Any = None
        self._save: Callable[[], None] = lambda: None
        self.on_exchange: Callable[[], None] = lambda: None
        self._unwatch: Callable[[], None] = lambda: None
        self._needed = 1  # peers that have to be there before the first inner step
        self._met = False  # True once another peer was there

    def __str__(self) -> str:
        """Name the run, and what this peer has of it."""
        sync, run = self._sync, f"run_id={self.peer.run_id!r}"
        if sync is None or sync.node is None:
            return f"{run}, {'nothing' if sync is None else 'a model'} attached, not joined"
        left = ", left" if sync.node.closed else ""
        return f"{run}, peers={sync.node.num_peers}, round={sync.version}{left}"

    def set_trainer(self, active: ActivePeers | None, remedy: str, signals: Sequence[int]) -> None:
        """Leave the end to a trainer, which reads `interrupted` and handles these `signals` itself.

        `remedy` replaces the advice of a `DivergedError`.
        """
        self.ends_loop, self.active = False, active
        self._remedy, self._signals = remedy, signals

    def attached(
        self, sync: Any, save: Callable[[], None], on_exchange: Callable[[], None] | None
    ) -> None:
        """Note the attached model; `save` is called when a signal ends the program."""
        self._sync, self._save = sync, save
        self.on_exchange = on_exchange or (lambda: None)
        _peers.add(sync)

    # -- what the attachment tells -----------------------------------------------------------------

    def on_event(self, kind: str, fields: dict[str, object]) -> None:
        """Report an event of the swarm; called in the thread of the node."""
        node = None if self._sync is None else self._sync.node
        if node is not None and kind in ("join", "leave", "lost"):
            self._met |= kind == "join"
            if self.active is not None or self.peer.runtime is None:  # else nobody asks
                record = node.node.record()
                self._share(record)
                if kind == "join":
                    self.peer.remember(record)
        self._tell(kind, fields)

    def on_ready(self, node: NodeThread) -> None:
        """Report that the peer listens, before it waits for others."""
        self.peer.remember(node.record())
        self._tell_address(node.address)
        record = node.record()
        self._share(record)
        self._met = self._met or record.live > 1
        self._needed = 1 if record.version else self.peer.network.min_peers
        self._say_missing(record.live)
        if self.peer.alone_s:  # after this time it trains with fewer peers
            node.end_alone_after(self.peer.alone_s)

    def _share(self, record: PeerRecord) -> None:
        if self.active is not None:
            self.active.are(record.peer, record.trainers)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Context in which the peer joins; signals are handled from here to `on_end`."""
        if self.peer.typed:
            self._unwatch = watch(self._interrupt, self._signals)
        try:
            with as_typed(self.peer.typed):
                yield
        except BaseException:
            self._unwatch()
            raise

    def exchanging(self) -> AbstractContextManager[None]:
        """Context in which the peer exchanges."""
        return as_typed(self.peer.typed, self._remedy)

    def _interrupt(self, number: int) -> None:
        name, is_first = signal.Signals(number).name, self._sync.stop_asked is None
        self._sync.interrupt(number)
        if is_first:
            self.say(f"{name}: leaving the swarm; another {name} ends at once")

    def on_leave(self, kind: type[BaseException] | None) -> None:
        """All ranks: called before the goodbye; `kind` is the error that ends training, or None."""
        if self._sync.ended_by:
            self._save()
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            self.say("leaving the swarm; Ctrl+C once more ends at once")

    def on_end(self, finished: bool) -> None:
        """Report the end. A founder that has met no peer is told how to wait for others."""
        self._unwatch()
        sync = self._sync
        if sync is None or sync.node is None:
            return
        done = "done" if finished else "dropped out"
        at = f"after {sync.steps} inner steps, at outer step {sync.version}"
        self.say(f"{done} {at}; {human_bytes(sync.node.traffic[0])} sent")
        if finished and not sync.steps:
            self.say("it made no inner step; was there any data?")
        if finished and not self._met and not self.peer.network.initial_peers:
            self.say("no other peer came; with min_peers=2 the first peer waits for a second one")

    # -- lines on stderr: the log of most programs shows warnings only -----------------------------

    def say(self, text: str) -> None:
        """Write a line to stderr from rank 0, unless the peer is `quiet`."""
        if not self._quiet and RankGroup.rank_and_size()[0] == 0:
            print(f"diloco: {text}", file=LastingStream(sys.stderr), flush=True)

    def _say_address(self, address: str) -> None:
        if address:
            self.say(f"others join with address={address!r}")

    def _say_missing(self, live: int) -> None:
        if live < self._needed:
            self.say(f"waiting for {self._needed - live} of {counted(self._needed, 'peer')}")

    def _say_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        logger.info("%s %s", kind, fields)
        if (text := self._text(kind, fields)) is not None:
            self.say(text)
        if kind == "join":
            self._say_missing(fields.get("live", 1))


# -- the peers of this process ---------------------------------------------------------------------

_peers: WeakSet[Any] = WeakSet()  # attachments of this process


def _forget() -> None:
    """Drop the attachments in a forked process, as only its parent has the node's threads."""
    for sync in list(_peers):
        sync.forget()


os.register_at_fork(after_in_child=_forget)


def leave(number: int) -> NoReturn:
    """Close the peers that no `with` block closes, then exit with the signal's status."""
    for sync in list(_peers):
        sync.close_opened()
    raise SystemExit(128 + number)
