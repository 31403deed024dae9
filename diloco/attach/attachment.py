"""A model in step with the swarm while training goes on around it; made by `api.Swarm.attach`, which says how.

Rank 0 talks to the node; the other ranks learn by broadcast what came of it.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from diloco.attach.console_log import Listener
from diloco.attach.devices import usual
from diloco.attach.inner_optimizer import InnerStateTransfer, snapshot
from diloco.attach.leases import RankLeases
from diloco.attach.node_link import NodeHandle, NodeLink, Position
from diloco.attach.parameters import TrainedParams
from diloco.attach.progress import Progress
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers, StepHooks, swarm_steps
from diloco.attach.sharded import restored_after
from diloco.attach.signals import leave
from diloco.config import OuterConfig
from diloco.errors import DivergedError, SwarmError
from diloco.messages.control import Figures
from diloco.messages.fields import MAX_LOSS, MAX_SECONDS, MAX_TOKENS, at_most, within_bounds
from diloco.outer.fragments import Fragment, partition
from diloco.outer.replica import Replica
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.node import ExchangeResult, Node
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.malloc import trim_heap

__all__ = ["Attachment"]

AGAIN_S = 1.0


class Attachment:
    """A model in step with the swarm.

    Attributes:
        version: outer steps that the anchor has seen. steps: inner steps of this peer, over all its sessions.
        applied_tokens: the swarm clock. tokens, discarded_tokens: this peer's own, over all its sessions.
        inner_step, target_steps: of the cycle under way. unsent_tokens: of inner steps that are in no contribution yet.
        exchanged: whether the last `optimizer.step()` ended in an exchange.
        interrupted: whether the loop has to end before the budget is used up.
        view: what can be seen of the swarm node; None before entering, and on ranks other than 0.

    If training diverges, the exchange raises `DivergedError` before anything non-finite is sent. When the model trains
    other parameters than it did at first, it raises `ConfigError`. `interrupt` ends any wait; the swarm then loses the
    inner steps since the last exchange, and the checkpoint before them is good.
    """

    def __init__(
        self,
        parameters: TrainedParams,
        optimizer: torch.optim.Optimizer,
        outer: OuterConfig,
        options: NodeOptions | None,
        ranks: RankGroup,
        phases: PhaseTimer,
        runtime: Runtime,
        listener: Listener,
        schedules: Schedulers,
    ) -> None:
        saved = None if options is None else options.saved
        self.parameters = parameters
        self.view: NodeHandle | None = None
        self.outer, self.ranks, self.phases = outer, ranks, phases
        self.version = self._round_version = saved.steps if saved else 0
        self.applied_tokens = saved.applied_tokens if saved else 0
        self.steps = self.tokens = self.discarded_tokens = 0
        self.exchanged = self.interrupted = self._asked_to_stop = False
        self.asked_by = self.ended_by = 0  # the signal, and the one that all ranks end by
        self._link = NodeLink(ranks, runtime, phases)
        self._optimizer, self._options = optimizer, options
        self._listener, self.schedules = listener, schedules
        self._hook: Any = None
        self.inner_step, self.target_steps, self.unsent_tokens = 0, outer.sync_every, 0
        self._progress = Progress(phases, runtime.clock)
        self._inner_start = InnerStateTransfer(optimizer, ranks, listener.on_event)
        self._counted_tokens = self._sequences_per_round = 0
        self._given: tuple[Tensor, Tensor] | None = None  # a sample of the parameters, before and after an exchange
        self._is_kept = False  # whether training was seen to go on from what an exchange gave
        self._cold = False  # in a first round that is left out
        self._left = self._is_opened = False
        self.patience_s = 0.0  # in which somebody may come who can be called
        self._is_paused = False
        self._settled = False  # the parameters are the last anchor, for good

    @property
    def node(self) -> Node | None:
        """The swarm node, which only its runtime may change; None before entering, and on ranks other than 0."""
        return self._link.node

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def open(self) -> Attachment:
        """As entering, for a loop that is in no `with` block; `close` ends it. Without that, the peer drops out when
        the program ends.
        """
        atexit.register(self.drop_out)
        self._is_opened = True
        return self.__enter__()

    def close(self, kind: type[BaseException] | None = None) -> None:
        """Leave the swarm as at the end of a `with` block, which this kind of error has ended. Can be called twice."""
        if self._hook is None or self._left:
            return self.drop_out()
        self.__exit__(kind, None, None)

    @usual
    def __enter__(self) -> Attachment:
        if self._hook is not None and not self._left:  # opened already
            return self
        try:
            with self._listener.joining(), self.phases.during("wait"):
                self._connect()
                self._begin()
        except BaseException:
            self.drop_out()
            raise
        self._hook = StepHooks(self._optimizer, self._before_step, self._stepped)
        self.phases.switch("compute")
        self._is_opened |= bool(self.ended_by)  # no with block comes
        self._end_loop()
        return self

    @usual
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._left:  # closed already
            return
        self._hook.remove()
        finished, self._left = kind is None and not self.interrupted, True
        try:
            if finished:
                self.finish()
            self.phases.switch(None)
            finished = finished and not self.interrupted
            self._listener.on_leave(kind)
            with suppress(DivergedError) if kind else nullcontext():  # the loop may have said so already
                self._link.call(lambda node: node.leave(finished))
            if finished:
                self._settled = True
                self._link.move(lambda node: node.load_anchors())
                if self.node is not None:
                    self.version, self.applied_tokens = self.node.clock()
                    self.discarded_tokens = self.node.core.discarded()
            self._listener.on_end(finished)
        finally:
            self.drop_out()

    def _connect(self) -> None:
        """All ranks: connect to the swarm."""
        fragments = partition(self.parameters.numels, self.outer.fragments, self.outer.pattern)
        self._link.share(self.parameters, fragments)
        with self._link.handing():
            self._open(fragments)

    def _open(self, fragments: Sequence[Fragment]) -> None:
        if self._options is None:
            return
        options, self._options = self._options, None  # its `saved` is as large as the model
        if not (options.saved and self._inner_start.has_state):  # a checkpoint may be older than the first step
            self._inner_start.source = options.network.inner_state
        replica = Replica(self._link.rows or self.parameters, fragments, self.outer)
        # For a joiner, called in other threads; before the first step there is none.
        options = replace(options, inner_state=lambda: snapshot(self._optimizer) if self.steps else None)
        self.view = view = self._call(options, replica)
        view.node.leased.plan_round(self._sequences_per_round)
        if self._asked_to_stop:
            self.interrupt(self.asked_by)
        self._listener.on_ready(view.address)

    def _call(self, options: NodeOptions, replica: Replica) -> NodeHandle:
        """Connect; a peer that comes back calls again for a while, because others may come back, too."""
        until, waits = time.monotonic() + self.patience_s, False
        while True:
            try:
                return self._link.open(options, replica, self._listener.on_event)
            except SwarmError as error:
                if time.monotonic() >= until or "cannot be reached" not in str(error) or self._asked_to_stop:
                    raise
            if not waits:
                self._listener.on_event("calls_again", {"patience_s": self.patience_s})
            waits = True
            self._link.close()
            time.sleep(AGAIN_S)

    def _begin(self) -> None:
        """All ranks: wait for the swarm and adopt its anchor."""
        state, cold = None, False
        if self.node is not None:
            state, cold = self._inner_start.fetch(self.node, self._link.runtime, lambda: self._asked_to_stop)
        begun = self._link.begin(self.outer.sync_every, cold, fetched=state is not None)
        self._cold = bool(begun.cold)
        self._go_along(begun)
        if self._cold:
            self.inner_step = 0  # it has a cycle of its own
        self._round_version = self.version
        if begun.fetched:
            self._inner_start.take_over_(state)
        self.parameters.remember()
        self._progress.begin_run(self.steps)

    def _go_along(self, where: Position) -> None:
        """All ranks: rank 0 says where they are."""
        if not where.done:
            self.interrupted = True
            return
        # All are less than before when another history won.
        self.version, self.applied_tokens = where.version, where.applied_tokens
        self.discarded_tokens = where.discarded_tokens
        self.inner_step, self.target_steps, self.unsent_tokens = where.position, where.cycle, where.unsent_tokens

    def close_opened(self) -> None:
        """Leave because of a signal, unless the end of a with block does it."""
        if self._is_opened:
            self.close(SystemExit)

    def _end_loop(self) -> None:
        if self.ended_by and self._listener.ends_loop:
            self.close_opened()
            leave(self.ended_by)

    @usual
    def finish(self) -> None:
        """Wait for the updates that are under way, for which the other peers wait, too. No inner step may follow."""
        with self._listener.exchanging(), self.phases.during("comm"):
            self._link.call(lambda node: node.finish())

    def drop_out(self) -> None:
        """Drop out of the swarm without a goodbye, unless that was said before: after a failure."""
        atexit.unregister(self.drop_out)
        if self._hook is not None and not self._left:
            self._left = True
            self._listener.on_end(False)
        self._link.close()

    def interrupt(self, number: int = 0) -> None:
        """Stop waiting for the swarm; may be called from the handler of a signal, with its number."""
        self._asked_to_stop, self.asked_by = True, number
        self.interrupted = self.ranks.size == 1  # several ranks agree on the step after which they stop
        self.ended_by = number if self.interrupted else 0
        self._link.call_soon(lambda node: node.interrupt)

    # -- training -----------------------------------------------------------------------------------------------------

    def lease_units(self, sequences_per_round: int, batches_ahead: int = 0) -> RankLeases:
        """Take part in the run's common list of sequences, so many in a round; call it before entering.

        Returns what gives the next ranges of that list to train on, or None while there are not enough (`take`, which
        all ranks call), and says what comes after them, for so many batches. Every sequence is leased to one peer at a
        time; other peers get those of a peer that dies, or whose contribution is discarded.
        """
        self._sequences_per_round = sequences_per_round
        return RankLeases(self.ranks, lambda: None if self.node is None else self.node.leased, batches_ahead)

    def count(self, tokens: int) -> None:
        """Tell how many tokens the coming inner step is made of (of all ranks), by which it is weighted. A loop
        that never calls this counts every step as one token.
        """
        self._counted_tokens += tokens

    @property
    def is_counted(self) -> bool:
        """Whether somebody has told of the coming inner step."""
        return self._counted_tokens > 0

    def report(self, loss: float) -> None:
        """Tell the mean loss of the last inner steps (nats per token), for watchers of the swarm."""
        own, node = self._progress, self.node
        own.loss = loss
        if node is not None:
            figures = Figures(
                at_most(self.tokens, MAX_TOKENS), at_most(self.discarded_tokens, MAX_TOKENS),
                within_bounds(loss, MAX_LOSS), node.traffic.bytes_sent, node.traffic.bytes_received, own.rounds,
                [within_bounds(spent, MAX_SECONDS) for spent in own.seconds],
            )  # fmt: skip
            self._link.call_soon(lambda node: node.core.measure, figures)

    @usual
    def _before_step(self) -> None:
        given, self._given = self._given, None
        if given is not None:
            self._is_kept = self.parameters.check_kept(*given)
        self.schedules.step_to(swarm_steps(self, self.outer.sync_every))

    def _stepped(self) -> None:
        with self._listener.exchanging():
            self._after_step()
        self._end_loop()

    @usual
    def _after_step(self) -> None:
        tokens, self._counted_tokens = self._counted_tokens or 1, 0
        self.steps += 1
        self.tokens += tokens
        self.exchanged = False
        self._progress.measure(self.steps)
        waits, where = self._link.stepped(tokens, self._progress.steps_per_s)
        # Rank 0 decides: a signal may have reached only some of the ranks, and at different steps.
        stops, by, *rest = map(int, self.ranks.broadcast_floats([self._asked_to_stop, self.asked_by, waits, *where]))
        self.interrupted, self.ended_by = bool(stops), by
        if self.interrupted:
            return
        if self._cold:
            return self._warm_up()
        self._went(Position(*rest[1:]))
        if rest[0]:
            self._exchange()

    def _exchange(self) -> None:
        """Send what is due, and go on from what is new."""
        self.parameters.check(self._listener.on_event)
        self._hook.free_gradients()  # their memory is what the exchange needs at its peak
        with self.phases.during("comm"):
            trim_heap()  # where gradients were, there is room now
            self._adopt(lambda node: node.exchange())
        self._progress.restart(self.steps)

    def _warm_up(self) -> None:
        """A step of a cold peer's first round, which is left out; after the last one it takes part."""
        self.inner_step += 1
        if self.inner_step < self.target_steps:
            return
        self._cold = False
        self._hook.free_gradients()
        with self.phases.during("comm"):
            self._adopt(lambda node: node.begin(self.outer.sync_every))
        self._progress.restart(self.steps)

    def _adopt(self, exchange: Callable[[Node], Coroutine[Any, Any, ExchangeResult | None]]) -> None:
        """Let rank 0 exchange, and have all ranks go on from the anchor that it has then."""
        before = None if self._is_kept else self.parameters.sample
        where = self._link.adopt(exchange)
        self._given = None if before is None else (before, self.parameters.sample)
        self.exchanged |= where.version > self.version or not self.outer.barrier
        self._went(where)
        if self.outer.dylu and self.node is not None:
            steps = self._progress.cycle_steps(self.outer, self.node.core.fastest_steps_per_s)
            self._link.call_soon(lambda node: node.plan_cycle, steps)

    def _went(self, where: Position) -> None:
        """All ranks: where they are, and whether a round has ended."""
        self._go_along(where)
        ended, self._round_version = self.version > self._round_version, self.version
        if ended:
            own = self._progress
            own.end_round()
            self.report(own.loss)
            rounds = 0 if self.node is None else self.node.core.facts.planned[-1]
            if rounds and self.version == rounds + 1:
                self._listener.on_event("rounds_over", {"rounds": rounds, "version": self.version})

    def anchor_digest(self) -> str:
        """As `NodeHandle.anchor_digest`."""
        assert self.view is not None
        return self.view.anchor_digest()

    # -- pauses: it evaluates, or writes a checkpoint, and the others wait --------------------------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """All ranks: the parameters are the anchor inside; what is trained comes back afterwards."""
        if self._hook is None or self._settled:
            yield
            return
        with self._paused():
            if self.outer.lockstep and not self.outer.mixing:
                yield
                return
            with restored_after(self.parameters):
                self._link.show_anchors()
                yield

    @contextmanager
    def checkpointing(self) -> Iterator[Saved]:
        """Rank 0: the state at the last exchange, to be written in this context: at a barrier the tensors are the live
        ones, which stay as they are, and other peers wait.
        """
        with self._paused():
            assert self._link.node is not None
            yield self._link.runtime.call(self._link.node.snapshot(copies=not self.outer.lockstep))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The peer takes no inner steps inside, and is not taken for stalled. Afterwards it trains on."""
        view = self._link.view
        if self._is_paused or (view is not None and view.closed):
            yield
            return
        self._is_paused = True
        self._link.call(lambda node: node.pause())
        try:
            yield
        finally:
            self._is_paused = False
            self._link.call(lambda node: node.resume())
            # The swarm may have gone on in the pause. Several ranks hear of it after their next step.
            alone = None if self.ranks.size > 1 or self._cold or self.interrupted else self.node
            if alone is not None and alone.waits:
                with self.phases.during("comm"):
                    self._adopt(lambda node: node.exchange())
            self._progress.restart(self.steps)
