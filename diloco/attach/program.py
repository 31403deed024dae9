"""The program around a peer: the lines on stderr that it is told, and how a signal ends it.

A peer says goodbye at SIGTERM and its like, in `diloco train` and in anybody's loop. A loop that
looks at `interrupted` is told, and ends itself. Any other is ended by `SystemExit` with the status
that a shell has for the signal: at once while the program's own code runs, and else after the step
or the exchange under way.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

from diloco.attach.arguments import LOWER_RATE, PeerArguments, as_typed
from diloco.attach.data_shard import ActivePeers
from diloco.attach.node_link import NodeHandle, trainers
from diloco.attach.ranks import RankGroup
from diloco.core.events import Alone
from diloco.errors import ConfigError, UnsavedError
from diloco.process import LastingStream
from diloco.swarm.node.node import Node, OnEvent
from diloco.text import counted, human_bytes, plain

# SLURM announces the end of a job with SIGUSR1
NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AGAIN_S = 2.0  # schedulers and torchrun send the same signal twice
# what is not left half-done
WHOLE = ("diloco.attach.attachment", "diloco.attach.swarm", "torch.optim.optimizer")

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Where a peer is between `attach` and its end."""

    NEW = auto()
    WARMUP = auto()  # its first cycle, without a state of the inner optimizer, is left out
    TRAINING = auto()
    PAUSED = auto()  # it evaluates or saves, and the others wait
    LEFT = auto()
    FINISHED = auto()  # it has left, and the parameters are the last anchor

    @property
    def runs(self) -> bool:
        """Whether the peer takes part."""
        return self in (Phase.WARMUP, Phase.TRAINING, Phase.PAUSED)


class Action(Enum):
    """What comes between two inner steps."""

    TRAIN = auto()
    EXCHANGE = auto()
    TAKE_PART = auto()  # after the warm-up
    STOP = auto()


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
        ends_loop: whether a signal ends the loop, and not only sets `interrupted`.
        active: where a stream of data is shared, the peers that share it.
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
        self._tell = on_event or self._say_event
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
        self._met = False  # whether another peer was ever there

    def set_trainer(self, active: ActivePeers | None, remedy: str, signals: Sequence[int]) -> None:
        """A trainer, which handles these `signals`, looks at `interrupted` itself.

        `remedy` is for training that diverges.
        """
        self.ends_loop, self.active = False, active
        self._remedy, self._signals = remedy, signals

    def attached(
        self, sync: Any, save: Callable[[], None], on_exchange: Callable[[], None] | None
    ) -> None:
        """The program has attached a model; `save` is called where a signal ends it."""
        self._sync, self._save = sync, save
        self.on_exchange = on_exchange or (lambda: None)
        _peers.add(sync)

    # -- what the attachment tells -----------------------------------------------------------------

    def on_event(self, kind: str, fields: dict[str, object]) -> None:
        """Something has happened in the swarm."""
        node = None if self._sync is None else self._sync.node
        if node is not None and kind in ("join", "leave", "lost"):
            self._share(node)
            if kind == "join":
                self._met = True
                self.peer.remember(node)
        self._tell(kind, fields)

    def on_ready(self, view: NodeHandle) -> None:
        """The peer listens, and is about to wait for others."""
        view.look(self.peer.remember)
        self._tell_address(view.address)
        view.look(self._share)
        self._met = self._met or view.num_peers > 1
        is_first = view.look(lambda node: node.clock()[0] == 0)
        self._needed = self.peer.network.min_peers if is_first else 1
        self._say_missing(view.num_peers)
        if after_s := self.peer.alone_s:  # then nobody has to be there any more
            do = view.node.context.do
            view.look(lambda _: asyncio.get_running_loop().call_later(after_s, do, Alone()))

    def _share(self, node: Node) -> None:
        if self.active is not None:
            self.active.are(node.core.facts.me, trainers(node))

    @contextmanager
    def joining(self) -> Iterator[None]:
        """The peer joins inside; signals are watched from here to `on_end`."""
        if self.peer.typed:
            self._unwatch = watch(self._interrupt, self._sync.close_opened, self._signals)
        try:
            with as_typed(self.peer.typed):
                yield
        except BaseException:
            self._unwatch()
            raise

    def exchanging(self) -> AbstractContextManager[None]:
        """The peer exchanges inside."""
        return as_typed(self.peer.typed, self._remedy)

    def _interrupt(self, number: int) -> bool:
        name, told = signal.Signals(number).name, self._sync.stop_asked is not None
        self._sync.interrupt(number)
        if not told:
            self.say(f"{name}: leaving the swarm; another {name} ends at once")
        return self.ends_loop and bool(self._sync.ranks.size == 1)

    def on_leave(self, kind: type[BaseException] | None) -> None:
        """All ranks: before the goodbye, which this kind of error has caused."""
        if self._sync.ended_by:
            self._save()
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            self.say("leaving the swarm; Ctrl+C once more ends at once")

    def on_end(self, finished: bool) -> None:
        """The peer has left. A founder that has met nobody is told how to wait for others."""
        self._unwatch()
        sync = self._sync
        if sync is None or sync.view is None:
            return
        done = "done" if finished else "dropped out"
        at = f"after {sync.steps} inner steps, at outer step {sync.version}"
        self.say(f"{done} {at}; {human_bytes(sync.view.node.traffic.bytes_sent)} sent")
        if finished and not sync.steps:
            self.say("it made no inner step; was there any data?")
        if finished and not self._met and not self.peer.network.initial_peers:
            self.say("no other peer came; with min_peers=2 the first peer waits for a second one")

    # -- lines on stderr: the log of most programs shows warnings only -----------------------------

    def say(self, text: str) -> None:
        """A line on stderr, from rank 0; none if the peer is `quiet`."""
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
        shorter = kind != "planned" or fields["planned"][0] > fields["typed"][0] > 0
        if kind in _LINES and shorter:
            self.say(_LINES[kind](fields))
        if kind == "join":
            self._say_missing(fields.get("live", 1))


def _name(fields: Mapping[str, Any]) -> str:
    """How a peer is called: many have no name of their own."""
    name, peer = plain(fields.get("name", "peer")), plain(fields.get("peer", ""))
    return f"{name} ...{peer[-6:]}" if name == "peer" else name


def _now(fields: Mapping[str, Any]) -> str:
    return f"{counted(fields.get('live', 1), 'peer')} now"


def _same_data(fields: Mapping[str, Any]) -> str:
    pairs = zip(fields["names"], fields["peers"], strict=True)
    both = " and ".join(_name({"name": name, "peer": peer}) for name, peer in pairs)
    return (
        f"{both} train on the same data (cosine of what they contribute"
        f" {fields['cosine']:.4f}), so together they learn what one learns; give each peer other"
        " data: swarm.shard(dataset), or a seed of its own (swarm.seed)"
    )


def _alone_again(fields: Mapping[str, Any]) -> str:
    wait = f" in {fields['wait_s']:.0f} s, unless somebody comes" if fields["wait_s"] else ""
    goes_on = f"it goes on alone from outer step {fields['version']}{wait}"
    return f"nobody whom this peer knew answers; {goes_on}"


_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "join": lambda of: f"{_name(of)} joined, {_now(of)}",
    "leave": lambda of: f"{_name(of)} left, {_now(of)}",
    "lost": lambda of: f"{_name(of)} vanished ({plain(of.get('why', ''))}), {_now(of)}",
    "same_data": _same_data,
    "untrained": lambda of: (
        f"{of['parameters']} of {of['of']} trained parameters {of['why']}: {of['names']}"
    ),
    "alone_again": _alone_again,
    "calls_again": lambda of: (
        f"nobody answers yet; this peer calls its swarm for {of['patience_s']:.0f} s"
    ),
    "rounds_over": lambda of: (
        f"rounds={of['rounds']} are over, and training goes on with the last outer momentum; plan"
        " as many as there are exchanges: rounds=max_steps / sync_every"
    ),
    "model_kept": lambda _: (
        "the model stays as it was written after the last step (an average, the best one?); the"
        " swarm's is in it inside `with sync.anchored():`"
    ),
    "planned": lambda of: (
        f"another peer plans {of['planned'][0]} outer steps, and this one {of['typed'][0]}: it ends"
        " before the others, and its learning rate falls sooner; give all peers the same max_steps"
    ),
    "unreachable": lambda of: (
        f"others cannot call this peer; it trains all the same ({plain(of.get('advice', ''))})"
    ),
}


# -- signals ---------------------------------------------------------------------------------------


class _Watcher(NamedTuple):
    interrupt: Callable[[int], bool]
    leave: Callable[[], None]


_watchers: list[_Watcher] = []
_before: dict[int, Any] = {}
_received: dict[int, float] = {}
_process = 0
_peers: WeakSet[Any] = WeakSet()  # what this process has attached


def _forget() -> None:
    """In a forked process, which is no peer: its parent has the threads, and the swarm."""
    for sync in list(_peers):
        sync.forget()


os.register_at_fork(after_in_child=_forget)


def watch(
    interrupt: Callable[[int], bool],
    leave: Callable[[], None] = lambda: None,
    over: Sequence[int] = (),
) -> Callable[[], None]:
    """Call `interrupt` with each signal, until the returned function is called.

    It says whether the loop may be ended here and now, by `leave` and `SystemExit`. A second signal
    of a kind ends at once. A handler of the program's own stays, unless its signal is in `over`.
    Without effect outside the main thread.
    """
    global _process
    watcher = _Watcher(interrupt, leave)
    if threading.current_thread() is threading.main_thread():
        _process = os.getpid()
        _watchers.append(watcher)
        for number in {*NUMBERS, *over}:
            here = signal.getsignal(number)
            if here == signal.SIG_DFL or (number in over and callable(here) and here is not _stop):
                _before[number] = signal.signal(number, _stop)

    def end() -> None:
        _watchers[:] = (one for one in _watchers if one is not watcher)
        if not _watchers and threading.current_thread() is threading.main_thread():
            _received.clear()
            for number, before in _before.items():
                if signal.getsignal(number) is _stop:  # nobody has put another one over it
                    signal.signal(number, before)
            _before.clear()

    return end


def leave(number: int) -> NoReturn:
    """End the program as this signal does; the innermost peer leaves first."""
    for watcher in reversed(list(_watchers)):
        watcher.leave()
    raise SystemExit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    before = _before.get(number, signal.SIG_DFL)
    if not _watchers or os.getpid() != _process:  # in a process that was forked from this one
        signal.signal(number, before)
        return os.kill(os.getpid(), number)
    interactive, now = number == signal.SIGINT, time.monotonic()
    if (interactive and number in _received) or now - _received.get(number, now) > AGAIN_S:
        os._exit(UnsavedError.exit_code if interactive else 128 + number)
    _received.setdefault(number, now)
    if callable(before) and before is not signal.default_int_handler:
        before(number, frame)
    may_end = all([watcher.interrupt(number) for watcher in list(_watchers)])
    while frame is not None and frame.f_globals.get("__name__") not in WHOLE:
        frame = frame.f_back
    if may_end and frame is None:
        leave(number)
