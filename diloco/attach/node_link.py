"""How a training process uses the swarm node that runs beside it: alone, or as the ranks of one
peer together; and the figures of its training that it tells the swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from diloco.attach.parameters import is_sharded
from diloco.attach.ranks import RankGroup, ShardedParams
from diloco.config import OuterConfig
from diloco.errors import SwarmError
from diloco.messages import fields
from diloco.messages.control import Figures
from diloco.messages.snapshot import Contributor, PhaseSeconds, Snapshot
from diloco.outer.digest import anchor_digest
from diloco.outer.fragments import Fragment
from diloco.outer.local import train_on_current_stream
from diloco.outer.replica import Replica
from diloco.ranges import first
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.node import ExchangeResult, Node, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.recorder import ledger_totals
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.wire.malloc import trim_heap

AGAIN_S = 1.0
DYLU_FLOOR = 5  # inner steps (arXiv 2401.09135, the authors' code)

T = TypeVar("T")


class NodeHandle:
    """A node that lives in a runtime, seen from the training loop's thread; also a closed one."""

    def __init__(self, node: Node, runtime: Runtime) -> None:
        self.node, self._runtime = node, runtime
        self.closed = False

    def look(self, question: Callable[[Node], T]) -> T:
        """What a function finds in the node; nothing moves there meanwhile."""
        if self.closed:
            return question(self.node)

        async def here() -> T:
            return question(self.node)

        return self._runtime.call(here())

    def close(self) -> None:
        """Close the node. Can be called twice."""
        if not self.closed:
            self.closed = True
            self._runtime.call(self.node.close())

    def show_anchors(self) -> None:
        """The parameters become the anchors, also after `close`."""
        if not self.closed:
            return self._runtime.call(self.node.anchors.show())
        for fragment in range(len(self.node.replica.fragments)):
            self.node.replica.show_anchor_(fragment)

    @property
    def address(self) -> str:
        """The best address at which others reach this peer; empty when there is none."""
        return next(iter(self.node.addresses), "")

    @property
    def num_peers(self) -> int:
        """Connected peers, this one included."""
        return 1 + len(self.node.core.facts.members)

    def membership(self) -> dict[str, int]:
        """Peers: connected (`live`), training, in the newest version of fragment 0 (`merged`)."""
        merged, training = self.merged()
        return {"live": self.num_peers, "training": training, "merged": merged}

    def merged(self) -> tuple[int, int]:
        """Contributors of the newest version of fragment 0, and peers that train."""
        facts = self.node.core.facts
        return len(facts.control.tip.head.counted), facts.num_trainers()

    def contributions(self) -> list[Contributor]:
        """How much each peer contributed to this peer's anchor."""
        return self.look(lambda node: ledger_totals(node.core.facts, {}).contributions)

    def observe(self) -> Snapshot | None:
        """What this peer knows of the swarm; None when it has left, and after `recorder_failed`."""
        if self.closed:
            return None
        return self.look(lambda node: node.recorder.snapshot(node.context.now()))

    def anchor_digest(self) -> str:
        """Digest of the whole anchor (hex); equal on all peers at equal version."""
        return self.look(lambda node: anchor_digest(node.digests()))

    def anchors(self) -> dict[str, str]:
        """`version:digest` of each fragment's anchor, with the first 16 digits of its digest."""

        def both(node: Node) -> dict[str, str]:
            found = zip(node.core.facts.fragments, node.digests(), strict=True)
            return {str(f.index): f"{f.tip.head.number}:{digest[:16]}" for f, digest in found}

        return self.look(both)


def trainers(node: Node) -> list[str]:
    """The peers that train, this one included, in the order of their ids."""
    facts = node.core.facts
    trains = (
        member for member in facts.members.all() if member.hello.trains and not member.status.leaves
    )
    return sorted([facts.me, *(member.peer for member in trains)])


class Position(NamedTuple):
    """Where all ranks are after rank 0 has talked to the node; `done` is 0 after an interrupt.

    `cold`: the first cycle is left out. `fetched`: rank 0 has a donor's inner state.
    """

    done: int = 0
    version: int = 0
    applied_tokens: int = 0
    discarded_tokens: int = 0
    inner_step: int = 0
    target_steps: int = 0
    unsent_tokens: int = 0
    cold: int = 0
    fetched: int = 0


class NodeLink:
    """The one node of a peer: rank 0 has it, and all ranks learn what came of each call.

    All ranks call `begin`, `adopt`, `run_with_parameters` and `serve_parameters` at the same point
    of their training; ranks without a node hand over and take rows of the parameters meanwhile. The
    other methods do nothing there.
    """

    def __init__(self, ranks: RankGroup, runtime: Runtime, phases: PhaseTimer) -> None:
        self.ranks, self.runtime = ranks, runtime
        self.view: NodeHandle | None = None
        self.rows: ShardedParams | None = None  # of several ranks, or of one with FSDP2
        self._parameters: Mapping[str, Tensor] = {}
        self._phases = phases

    @property
    def node(self) -> Node | None:
        """The node, which only the runtime may change; None before `open`, and on ranks > 0."""
        return None if self.view is None else self.view.node

    def share(self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment]) -> None:
        """All ranks: these parameters are meant from now on."""
        self._parameters = parameters
        if self.ranks.size > 1 or any(map(is_sharded, parameters.values())):
            self.rows = ShardedParams(parameters, fragments, self.ranks)

    def open(
        self,
        options: NodeOptions,
        replica: Replica,
        on_event: OnEvent,
        patience_s: float,
        is_asked_to_stop: Callable[[], bool],
    ) -> NodeHandle:
        """Rank 0: connect a node to the swarm, for so long again and again if nobody answers."""
        until, told = time.monotonic() + patience_s, False
        while True:
            try:
                self.view = NodeHandle(self.runtime.open(options, replica, on_event), self.runtime)
                return self.view
            except SwarmError as error:
                is_refused = "cannot be reached" not in str(error)
                if is_refused or is_asked_to_stop() or time.monotonic() >= until:
                    raise
            if not told:
                on_event("calls_again", {"patience_s": patience_s})
            told = True
            self.close()
            time.sleep(AGAIN_S)

    def close(self) -> None:
        """Drop out without a goodbye, unless that was said before. Can be called twice."""
        try:
            if self.view is not None:
                self.view.close()
        finally:
            self.runtime.close()

    def call(self, work: Callable[[Node], Coroutine[Any, Any, object]]) -> None:
        """Have rank 0 do something with the node; the other ranks do not wait."""
        if self.node is not None:
            self.runtime.call(work(self.node))

    def call_soon(self, work: Callable[[Node], Callable[..., object]], *arguments: object) -> None:
        """Have the node's loop call one of its functions; nobody waits."""
        if self.node is not None:
            self.runtime.call_soon(work(self.node), *arguments)

    def run_with_parameters(self, work: Callable[[Node], Coroutine[Any, Any, T]]) -> T | None:
        """All ranks: have rank 0 do something with the node that reads or writes parameters."""
        with self.serve_parameters():
            return None if self.node is None else self.runtime.call(work(self.node))

    @contextmanager
    def serve_parameters(self) -> Iterator[None]:
        """While rank 0 is inside, the other ranks do as it says.

        Parameters are copied in this thread's stream.
        """
        for device in {parameter.device for parameter in self._parameters.values()}:
            train_on_current_stream(device)
        if self.rows is None:
            yield
        elif self.ranks.is_rank0:
            try:
                yield
            finally:
                self.rows.release()
        else:
            self.rows.follow()
            yield

    def stepped(self, tokens: int, steps_per_s: float) -> tuple[bool, Position]:
        """Tell the node of an inner step; whether an exchange is due, and where rank 0 is."""
        if self.node is None:
            return False, Position()
        waits, *found = self.runtime.call(self.node.stepped(tokens, steps_per_s))
        return bool(waits), Position(1, *found)

    def begin(self, cycle: int, cold: bool = False, fetched: bool = False) -> Position:
        """Wait for the swarm, and go on from its anchor, which rank 0 loads into its parameters."""
        result = self.run_with_parameters(lambda node: node.begin(cycle, cold))
        return self._position(result, cold, fetched)

    def adopt(self, work: Callable[[Node], Coroutine[Any, Any, ExchangeResult | None]]) -> Position:
        """Have rank 0 exchange: what is due is sent, and updates are loaded into its parameters."""
        result = self.run_with_parameters(work)
        if self.node is not None:
            trim_heap()
        return self._position(result)

    def _position(self, result: ExchangeResult | None, *cold_and_fetched: bool) -> Position:
        found, node = Position(), self.node
        if node is not None and result is not None:
            self._phases.move("comm", "wait", result.wait_s)
            self._phases.move("comm", "outer", result.outer_s)
            clock = result.version, result.applied_tokens, result.discarded_tokens
            found = Position(1, *clock, *node.place(), *cold_and_fetched)
        return Position(*map(int, self.ranks.broadcast_floats(found)))


class RankLeases:
    """The work units that the swarm leases to a peer (`data.Leases`), on all its ranks."""

    def __init__(self, link: NodeLink, batches_ahead: int) -> None:
        self._link, self._batches_ahead = link, batches_ahead
        self._coming: fields.Units = ()

    def take(self, number: int) -> fields.Units | None:
        """All ranks: the next `number` sequences, or None while so many are not leased."""
        data = None if self._link.node is None else self._link.node.leased
        taken = None if data is None else data.take(number)
        coming = () if data is None or taken is None else data.ahead(self._batches_ahead * number)
        taken, self._coming = self._link.ranks.broadcast((taken, coming))
        return taken

    def ahead(self, number: int) -> fields.Units:
        """Up to `number` sequences that would be taken after the last ones."""
        return first(self._coming, number)


class Progress:
    """How fast a peer trains, and where its time goes: what it tells the swarm.

    `steps_per_s` are inner steps per second without exchanges, since the last one; other peers plan
    with it.
    """

    def __init__(self, phases: PhaseTimer, clock: Callable[[], float]) -> None:
        self.steps_per_s = self.loss = 0.0
        self._rounds, self._seconds = 0, list[float]()  # of the last round, as in `PHASES`
        self._phases, self._clock = phases, clock
        self._began = (0, 0.0)  # inner steps and the time when the parameters were loaded last
        self._round_began = PhaseSeconds()

    def begin_run(self, steps: int) -> None:
        """The peer begins to train, after so many inner steps in its earlier sessions."""
        self._round_began = self._phases.seconds()
        self.restart(steps)

    def restart(self, steps: int) -> None:
        """Training goes on after an exchange; `steps` is the peer's count of inner steps."""
        self._began = (steps, self._clock())

    def measure(self, steps: int) -> None:
        """Another inner step is done."""
        before, at = self._began
        self.steps_per_s = (steps - before) / max(self._clock() - at, 1e-9)

    def cycle_steps(self, outer: OuterConfig, fastest: Callable[[float], float]) -> int:
        """Inner steps of the coming round with DyLU, given the pace of the fastest peer."""
        floor = min(DYLU_FLOOR, outer.sync_every)
        return dylu_steps(self.steps_per_s, fastest(self.steps_per_s), outer.sync_every, floor)

    def end_round(self) -> None:
        """A round is over: the inner steps since the one before it, and its exchange."""
        now, began = self._phases.seconds(), self._round_began
        self._rounds, self._round_began = self._rounds + 1, now
        self._seconds = [max(0.0, spent) for spent in astuple(now - began)]

    def figures(self, tokens: int, discarded: int, sent: int, received: int) -> Figures:
        """What watchers are shown; `sent` and `received` are bytes."""
        tokens = fields.at_most(tokens, fields.MAX_TOKENS)
        discarded = fields.at_most(discarded, fields.MAX_TOKENS)
        seconds = [fields.within_bounds(spent, fields.MAX_SECONDS) for spent in self._seconds]
        loss = fields.within_bounds(self.loss, fields.MAX_LOSS)
        return Figures(tokens, discarded, loss, sent, received, self._rounds, seconds)


def dylu_steps(mine: float, fastest: float, sync_every: int, floor: int = DYLU_FLOOR) -> int:
    """Inner steps in which a peer is done when the fastest has made `sync_every`.

    `mine` and `fastest` are steps per second. Dynamic local updates of Asynchronous Local-SGD
    (arXiv 2401.09135, Algorithm 2): floor(mine / fastest * H), at least `floor` and at most H. A
    peer takes H if it is the fastest, or if a speed is not known yet (0).
    """
    if not 0 < mine < fastest:
        return sync_every
    return min(sync_every, max(floor, int(mine / fastest * sync_every)))
