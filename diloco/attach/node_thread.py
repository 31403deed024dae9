"""Calls from a training loop to the swarm node in another thread; the sequences that the node
leases to the loop, and the training figures that the node shows to the swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from diloco.attach.ranks import RankGroup
from diloco.errors import SwarmError
from diloco.messages import fields
from diloco.messages.control import Figures
from diloco.messages.snapshot import PhaseSeconds, Snapshot
from diloco.outer.replica import Replica
from diloco.ranges import first
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.position import Position
from diloco.swarm.node.recorder import PeerRecord
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.inner_state import InnerLayout, InnerState

AGAIN_S = 1.0

T = TypeVar("T")


class NodeThread:
    """Node of a peer, as the thread that trains sees it.

    Each method is one call to the thread of the node, and returns when it is done there; a
    property, `interrupt`, `measure` and `end_alone_after` do not wait. Properties of a closed node
    can still be read. The error of a failed task of the node is raised in the methods that wait.
    """

    def __init__(self, node: Node, runtime: Runtime) -> None:
        self.node, self._runtime = node, runtime
        self.closed = False

    @classmethod
    def open(
        cls,
        runtime: Runtime,
        options: NodeOptions,
        replica: Replica,
        on_event: OnEvent,
        patience_s: float = 0.0,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> NodeThread:
        """Connect a node to the swarm; retry for so many seconds if nobody answers."""
        until, calls = time.monotonic() + patience_s, 0
        while True:
            try:
                return cls(runtime.open(options, replica, on_event), runtime)
            except SwarmError as error:
                is_refused = "cannot be reached" not in str(error)
                if is_refused or is_asked_to_stop() or time.monotonic() >= until:
                    raise
            if not calls:
                on_event("calls_again", {"patience_s": patience_s})
            calls += 1
            runtime.close()
            time.sleep(AGAIN_S)

    # -- training ----------------------------------------------------------------------------------

    def is_late(self) -> bool:
        """Wait until this peer has what the others have; return True if it is not at the start."""
        return self._runtime.call(self.node.wait_until_ready())

    def fetch_inner(self, layout: InnerLayout) -> InnerState | None:
        """Fetch the inner optimizer state of a peer that trains; None if no peer has one."""
        return self._runtime.call(self.node.fetch_inner(layout))

    def join(self, cold: bool) -> Position:
        """Wait for the swarm, and load its anchor into the parameters."""
        return self._runtime.call(self.node.begin(cold))

    def after_step(self, tokens: int, steps_per_s: float, prepare: Callable[[], None]) -> Position:
        """Tell the node of an inner step. If an exchange is due, it follows after `prepare`."""
        return self._runtime.call(self.node.after_step(tokens, steps_per_s, prepare))

    def finish(self) -> None:
        """Wait until this peer's contributions are in a version, or can no longer be."""
        self._runtime.call(self.node.finish())

    def leave(self, finished: bool) -> None:
        """Say goodbye; unless training is `finished`, send what was learned before."""
        self._runtime.call(self.node.leave(finished))

    def close(self) -> None:
        """Close the node. Can be called twice."""
        if not self.closed:
            self.closed = True
            self._runtime.call(self.node.close())

    def interrupt(self, number: int) -> None:
        """End all waiting, now and later; can be called by the handler of the signal `number`."""
        self._runtime.call_soon(self.node.interrupt, number)

    # -- pauses ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Tell that the loop takes no inner steps until `resume`."""
        self._runtime.call(self.node.pause())

    def resume(self, exchanges: bool, steps_per_s: float, prepare: Callable[[], None]) -> Position:
        """Continue after `pause`; with `exchanges`, catch up with the swarm first."""
        return self._runtime.call(self.node.resume(exchanges, steps_per_s, prepare))

    def snapshot(self, copies: bool) -> Saved:
        """Return the state at the last exchange, as `Anchors.snapshot`."""
        return self._runtime.call(self.node.anchors.snapshot(copies))

    def load_anchors(self) -> Position:
        """Load the anchors into the parameters."""
        return self._runtime.call(self.node.load_anchors())

    def show_anchors(self) -> None:
        """Show the anchors in the parameters for a while, also after `close`."""
        if not self.closed:
            return self._runtime.call(self.node.anchors.show())
        for fragment in range(len(self.node.replica.fragments)):
            self.node.replica.show_anchor_(fragment)

    # -- what it knows -----------------------------------------------------------------------------

    def _look(self, question: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the node, or here once the node is closed."""
        if self.closed:
            return question(*arguments)

        async def ask() -> T:
            return question(*arguments)

        return self._runtime.call(ask())

    def record(self) -> PeerRecord:
        """Return the state of this peer's part of the swarm."""
        return self._look(self.node.record)

    def observe(self) -> Snapshot | None:
        """Return a snapshot of the swarm; None when it has left, and after `recorder_failed`."""
        return None if self.closed else self._look(self.node.observe)

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses at which others reach this peer, the best one first."""
        return self.node.addresses

    @property
    def address(self) -> str:
        """Best of the `addresses`; empty when there is none."""
        return next(iter(self.node.addresses), "")

    @property
    def advice(self) -> str:
        """Advice for the user, if others cannot connect to this peer."""
        return self.node.advice

    @property
    def num_peers(self) -> int:
        """Connected peers, this one included."""
        return 1 + len(self.node.core.facts.members)

    @property
    def merged(self) -> tuple[int, int]:
        """Contributors of the newest version of fragment 0, and peers that train."""
        facts = self.node.core.facts
        return len(facts.control.tip.head.counted), facts.num_trainers()

    @property
    def planned_rounds(self) -> int:
        """Exchanges over which the outer momentum rises; 0 if no peer plans any."""
        return self.node.core.facts.planned[-1]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return self.node.traffic.bytes_sent, self.node.traffic.bytes_received

    # -- what it is told ---------------------------------------------------------------------------

    def measure(self, figures: Figures) -> None:
        """Show figures to watchers with the next heartbeat."""
        self._runtime.call_soon(self.node.core.measure, figures)

    def add_samples(self, version: int, written: Sequence[tuple[str, str]]) -> None:
        """Show watchers the continuations of prompts by the model of that version."""
        self._look(self.node.recorder.add_samples, version, written)

    def end_alone_after(self, seconds: float) -> None:
        """Begin alone if no peer that this one knew has come after so many seconds."""
        self._runtime.call_soon(self.node.end_alone_after, seconds)

    # -- its data ----------------------------------------------------------------------------------

    def plan_round(self, sequences: int) -> None:
        """Have sequences leased for a loop that takes so many in a round."""
        self.node.leased.plan_round(sequences)

    def take(self, number: int, ahead: int) -> tuple[fields.Units | None, fields.Units]:
        """Take the next `number` sequences, None while so many are not leased; and look at `ahead`
        of those that would be next."""
        taken = self.node.leased.take(number)
        return taken, () if taken is None else self.node.leased.ahead(ahead)


class RankLeases:
    """Work units that the swarm leases to a peer (`data.Leases`), on all its ranks.

    `node` returns the node, once there is one; None on ranks > 0.
    """

    def __init__(
        self, ranks: RankGroup, node: Callable[[], NodeThread | None], batches_ahead: int
    ) -> None:
        self._ranks, self._node, self._batches_ahead = ranks, node, batches_ahead
        self._coming: fields.Units = ()

    def take(self, number: int) -> fields.Units | None:
        """All ranks: take the next `number` sequences; None while fewer are leased."""
        node = self._node()
        taken = (None, ()) if node is None else node.take(number, self._batches_ahead * number)
        units, self._coming = self._ranks.broadcast(taken)
        return units

    def ahead(self, number: int) -> fields.Units:
        """Up to `number` sequences that would be taken after the last ones."""
        return first(self._coming, number)


class Progress:
    """Training speed of a peer, the phases of its rounds, and what its loop measured.

    Attributes:
        steps_per_s: inner steps per second since the last exchange, without the time of exchanges;
            other peers plan with it.
        measured: by the names of `Figures`, what the loop reported last.
        earlier_traffic: bytes sent and received in sessions before this one.
    """

    def __init__(self, phases: PhaseTimer, clock: Callable[[], float]) -> None:
        self.steps_per_s, self.measured = 0.0, dict[str, float | None]()
        self.earlier_traffic: Sequence[int] = (0, 0)
        self._rounds, self._seconds = 0, list[float]()  # of the last round, as in `PHASES`
        self._phases, self._clock = phases, clock
        self._began = (0, 0.0)  # inner steps and time when parameters were loaded last
        self._round_began = PhaseSeconds()

    def begin_run(self, steps: int) -> None:
        """Start measuring; `steps` were made in earlier sessions."""
        self._round_began = self._phases.seconds()
        self.restart(steps)

    def restart(self, steps: int) -> None:
        """Measure the speed anew after an exchange; `steps` is the peer's count of inner steps."""
        self._began = (steps, self._clock())

    def measure(self, steps: int) -> None:
        """Update the speed after an inner step."""
        before, at = self._began
        self.steps_per_s = (steps - before) / max(self._clock() - at, 1e-9)

    def end_round(self) -> None:
        """Close the figures of a round, which is its inner steps and its exchange."""
        now, began = self._phases.seconds(), self._round_began
        self._rounds, self._round_began = self._rounds + 1, now
        self._seconds = [max(0.0, spent) for spent in astuple(now - began)]

    def figures(self, tokens: int, discarded: int, traffic: Sequence[int]) -> Figures:
        """Return the peer's figures; `traffic` is bytes sent and received in this session."""
        sent, received = (sum(both) for both in zip(self.earlier_traffic, traffic, strict=True))
        return fields.bounded(
            Figures,
            tokens=tokens,
            discarded=discarded,
            bytes_sent=sent,
            bytes_received=received,
            rounds=self._rounds,
            seconds=self._seconds,
            trained_s=self._phases.seconds().total,
            **self.measured,
        )


class Measured:
    """The base of what counts a peer's steps: it makes the figures of the peer."""

    node: NodeThread | None
    progress: Progress
    tokens: int
    discarded_tokens: int

    def report(self, loss: float | None = None, **measured: float | None) -> None:
        """Show watchers the mean loss of the last inner steps (nats per token), and other figures
        by their names in `Figures`."""
        self.progress.measured |= measured if loss is None else {"loss": loss, **measured}
        if self.node is not None and not self.node.closed:
            self.node.measure(self.figures())

    def figures(self) -> Figures:
        """Return what this peer did, as every display shows it."""
        traffic = (0, 0) if self.node is None else self.node.traffic
        return self.progress.figures(self.tokens, self.discarded_tokens, traffic)
