"""A model in step with the swarm while training goes on around it; `Swarm.attach` makes it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from diloco.attach.devices import default_modes
from diloco.attach.node_link import NodeHandle, NodeLink, Position, Progress, RankLeases
from diloco.attach.optimizer import ExchangeGuard, InnerStateTransfer, decay_of, kind_of, snapshot
from diloco.attach.parameters import TrainedParams, restored_after
from diloco.attach.program import Action, Phase, Program, leave
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import NotEntered, Schedulers, StepHooks, swarm_steps
from diloco.config import OuterConfig
from diloco.errors import DivergedError
from diloco.outer.fragments import Fragment, partition
from diloco.outer.replica import Replica
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.node import ExchangeResult, Node
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.inner_state import InnerState
from diloco.swarm.wire.malloc import trim_heap

__all__ = ["Attachment"]


Exchange = Callable[[Node], Coroutine[Any, Any, ExchangeResult | None]]


class Attachment:
    """A model in step with the swarm.

    Attributes:
        version, applied_tokens: outer steps that the anchor has seen, and tokens that are in it.
        steps, tokens, discarded_tokens: this peer's own, over all its sessions.
        inner_step, target_steps: of the cycle under way; unsent_tokens: in no contribution yet.
        counted_tokens: of the coming inner step, so far.
        exchanged: whether the last `optimizer.step()` ended in an exchange.
        interrupted: whether the loop has to end before the budget is used up.
        ended_by: the signal that ends it, or 0.

    If training diverges, the exchange raises `DivergedError` before anything non-finite is sent.
    When the model trains other parameters than it did at first, it raises `ConfigError`.
    `interrupt` ends any wait; the swarm then loses the inner steps since the last exchange, and the
    checkpoint before them is good.
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
        program: Program,
        schedulers: Schedulers,
    ) -> None:
        saved = None if options is None else options.saved
        self.parameters, self.schedulers = parameters, schedulers
        self.outer, self.ranks, self.phases = outer, ranks, phases
        self.version = self._round_version = saved.steps if saved else 0
        self.applied_tokens = saved.applied_tokens if saved else 0
        self.steps = self.tokens = self.discarded_tokens = 0
        self.inner_step, self.target_steps, self.unsent_tokens = 0, outer.sync_every, 0
        self.exchanged, self.interrupted, self.ended_by = False, False, 0
        self.stop_asked: int | None = None  # by a signal of that number, or 0
        self._phase, self._in_block = Phase.NEW, True  # a `with` block ends it
        self._is_kept = False  # the model, as the loop has left it
        self._link = NodeLink(ranks, runtime, phases)
        self._optimizer, self._options, self._program = optimizer, options, program
        self._hook: NotEntered | StepHooks = NotEntered(optimizer)
        self._guard = ExchangeGuard(parameters)
        self._progress = Progress(phases, runtime.clock)
        self._inner_state = InnerStateTransfer(optimizer, parameters, ranks, program.on_event)
        self.counted_tokens = self._sequences_per_round = 0

    @property
    def view(self) -> NodeHandle | None:
        """What can be seen of the swarm node; None before entering, and on ranks > 0."""
        return self._link.view

    @property
    def node(self) -> Node | None:
        """The swarm node, which only its runtime may change; None where `view` is None."""
        return self._link.node

    # -- joining and leaving -----------------------------------------------------------------------

    def open(self) -> Attachment:
        """Enter without a `with` block; `close` ends it, or the program, without a goodbye."""
        atexit.register(self.drop_out)
        self._in_block = False
        return self.__enter__()

    def close(self, kind: type[BaseException] | None = None) -> None:
        """Leave as at the end of a `with` block, which that error ended. Can be called twice."""
        self.__exit__(kind) if self._phase.runs else self.drop_out()

    @default_modes
    def __enter__(self) -> Attachment:
        if self._phase.runs:  # opened already
            return self
        try:
            with self._program.joining(), self.phases.during("wait"):
                self._connect()
                warms_up = self._begin()
        except BaseException:
            self.drop_out()
            raise
        self._hook.remove()
        self._hook = StepHooks(self._optimizer, self._before_step, self._stepped)
        self._phase = Phase.WARMUP if warms_up else Phase.TRAINING
        self.phases.switch("compute")
        self._in_block &= not self.ended_by  # or no block comes
        self._end_loop()
        return self

    @default_modes
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._phase.runs:  # closed already
            return
        finished, self._phase = kind is None and not self.interrupted, Phase.LEFT
        try:
            if finished:
                self.finish()
            self.phases.switch(None)
            finished = finished and not self.interrupted
            self._program.on_leave(kind)
            # the loop may have said so already
            with suppress(DivergedError) if kind else nullcontext():
                self._link.call(lambda node: node.leave(finished))
            if finished:
                self._phase = Phase.FINISHED
                self._load_anchors()
                if self.node is not None:
                    self.version, self.applied_tokens = self.node.clock()
                    self.discarded_tokens = self.node.core.discarded()
            self._program.on_end(finished)
        finally:
            self.drop_out()

    def _load_anchors(self) -> None:
        """All ranks: the model is the swarm's, unless the loop has put something else into it."""
        self._is_kept = bool(*self.ranks.broadcast_floats([self.parameters.are_written()]))
        with restored_after(self.parameters) if self._is_kept else nullcontext():
            self._link.run_with_parameters(lambda node: node.load_anchors())
        if self._is_kept:
            self._program.on_event("model_kept", {})

    def _connect(self) -> None:
        """All ranks: connect to the swarm."""
        fragments = partition(self.parameters.numels, self.outer.fragments, self.outer.pattern)
        self._link.share(self.parameters, fragments)
        with self._link.serve_parameters():
            if self._options is not None:
                options, self._options = self._options, None  # its `saved` is as large as the model
                self._open(options, fragments)

    def _open(self, options: NodeOptions, fragments: Sequence[Fragment]) -> None:
        saved_steps = self.steps if options.saved is not None else 0
        self._inner_state.set_source(options.network.inner_state, saved_steps)
        replica = Replica(self._link.rows or self.parameters, fragments, self.outer)
        options = replace(options, inner_state=self._snapshot)
        told, patience_s = self._program.on_event, self._program.peer.patience_s
        view = self._link.open(options, replica, told, patience_s, self._is_asked_to_stop)
        view.node.leased.plan_round(self._sequences_per_round)
        if self.stop_asked is not None:
            self.interrupt(self.stop_asked)
        self._program.on_ready(view)

    def _snapshot(self) -> InnerState | None:
        """For a joiner, called in other threads; before the first step there is none."""
        return snapshot(self._optimizer, self.parameters) if self.steps else None

    def _begin(self) -> bool:
        """All ranks: adopt the swarm's anchor; whether the first cycle is left out."""
        state, cold, runtime = None, False, self._link.runtime
        if self.node is not None:
            state, cold = self._inner_state.fetch(self.node, runtime, self._is_asked_to_stop)
        with self._guard.exchanging():
            begun = self._link.begin(self.outer.sync_every, cold, fetched=state is not None)
        self._go_to(begun)
        if begun.cold:
            self.inner_step = 0  # it has a cycle of its own
        self._round_version = self.version
        if begun.fetched:
            self._inner_state.take_over_(state)
        self.parameters.remember()
        self.parameters.step_done()
        self._progress.begin_run(self.steps)
        return bool(begun.cold)

    def _is_asked_to_stop(self) -> bool:
        return self.stop_asked is not None

    def close_opened(self) -> None:
        """Leave because of a signal, unless the end of a with block does it."""
        if not self._in_block:
            self.close(SystemExit)

    def _end_loop(self) -> None:
        if self.ended_by and self._program.ends_loop:
            self.close_opened()
            leave(self.ended_by)

    @default_modes
    def finish(self) -> None:
        """Wait for the updates under way, as the other peers do. No inner step may follow."""
        with self._program.exchanging(), self.phases.during("comm"):
            self._link.call(lambda node: node.finish())

    def drop_out(self) -> None:
        """Leave the swarm without a goodbye, unless that was said before: after a failure."""
        atexit.unregister(self.drop_out)
        self._hook.remove()
        if self._phase.runs:
            self._phase = Phase.LEFT
            self._program.on_end(False)
        self._link.close()

    def forget(self) -> None:
        """In a process that was forked from this one, which is no peer."""
        self._phase = Phase.LEFT
        if self.view is not None:
            self.view.closed = True
        self.drop_out()

    def interrupt(self, number: int = 0) -> None:
        """Stop waiting for the swarm; a signal's handler may call it, with the number."""
        self.stop_asked = number
        # several ranks agree on the step after which they stop
        self.interrupted = self.ranks.size == 1
        self.ended_by = number if self.interrupted else 0
        self._link.call_soon(lambda node: node.interrupt)

    # -- training ----------------------------------------------------------------------------------

    def lease_units(self, sequences_per_round: int, batches_ahead: int = 0) -> RankLeases:
        """Take part in the run's common list of sequences; call it before entering.

        A sequence is one peer's at a time. Those of a peer that dies, and of a contribution that is
        discarded, are leased again.
        """
        self._sequences_per_round = sequences_per_round
        return RankLeases(self._link, batches_ahead)

    def count(self, tokens: int) -> None:
        """How many tokens the coming inner step is made of, of all ranks: its weight, or 1."""
        self.counted_tokens += tokens

    def report(self, loss: float) -> None:
        """The mean loss of the last inner steps (nats per token), for watchers of the swarm."""
        self._progress.loss = loss
        if self.node is not None:
            traffic = self.node.traffic.bytes_sent, self.node.traffic.bytes_received
            figures = self._progress.figures(self.tokens, self.discarded_tokens, *traffic)
            self._link.call_soon(lambda node: node.core.measure, figures)

    @default_modes
    def _before_step(self) -> None:
        self._guard.check_kept()
        self.parameters.step_begins(self.inner_step == 0)
        self.schedulers.step_to(swarm_steps(self, self.outer.sync_every))

    def _stepped(self) -> None:
        self._guard.check_step(kind_of(self._optimizer), decay_of(self._optimizer))
        with self._program.exchanging():
            self._after_step()
        self.parameters.step_done()
        self._end_loop()

    @default_modes
    def _after_step(self) -> None:
        tokens, self.counted_tokens = self.counted_tokens or 1, 0
        self.steps += 1
        self.tokens += tokens
        self.exchanged = False
        self._progress.measure(self.steps)
        action = self._next_action(tokens)
        if action is Action.EXCHANGE:
            self.parameters.check(self._program.on_event)
            self._exchange(lambda node: node.exchange())
        elif action is Action.TAKE_PART:
            self._phase = Phase.TRAINING
            self._exchange(lambda node: node.begin(self.outer.sync_every))

    def _next_action(self, tokens: int) -> Action:
        """All ranks: what follows an inner step, as rank 0 says; a signal may reach only some."""
        waits, position = self._link.stepped(tokens, self._progress.steps_per_s)
        asked = -1 if self.stop_asked is None else self.stop_asked
        stop, due, *there = map(int, self.ranks.broadcast_floats([asked, waits, *position]))
        if stop >= 0:
            self.interrupted, self.ended_by = True, stop
            return Action.STOP
        if self._phase is Phase.WARMUP:
            self.inner_step += 1
            return Action.TRAIN if self.inner_step < self.target_steps else Action.TAKE_PART
        self._move_on(Position(*there))
        return Action.EXCHANGE if due else Action.TRAIN

    def _exchange(self, exchange: Exchange) -> None:
        """Send what is due, and go on from what is new."""
        assert isinstance(self._hook, StepHooks)
        self._hook.free_gradients()  # their memory is what the exchange needs at its peak
        with self.phases.during("comm"):
            trim_heap()  # where gradients were, there is room now
            self._adopt(exchange)
        self._program.on_exchange()
        self._progress.restart(self.steps)

    def _adopt(self, exchange: Exchange) -> None:
        """Let rank 0 exchange, and have all ranks go on from the anchor that it has then."""
        with self._guard.exchanging():
            position = self._link.adopt(exchange)
        self.exchanged |= position.version > self.version or not self.outer.barrier
        self._move_on(position)
        if self.outer.dylu and self.node is not None:
            steps = self._progress.cycle_steps(self.outer, self.node.core.fastest_steps_per_s)
            self._link.call_soon(lambda node: node.plan_cycle, steps)

    def _move_on(self, position: Position) -> None:
        """All ranks: rank 0 says where they are; perhaps a round has ended."""
        self._go_to(position)
        ended, self._round_version = self.version > self._round_version, self.version
        if ended:
            self._progress.end_round()
            self.report(self._progress.loss)
            rounds = 0 if self.node is None else self.node.core.facts.planned[-1]
            if rounds and self.version == rounds + 1:
                self._program.on_event("rounds_over", {"rounds": rounds, "version": self.version})

    def _go_to(self, position: Position) -> None:
        if not position.done:
            self.interrupted = True
            return
        # all become smaller when another history has won
        _, self.version, self.applied_tokens, self.discarded_tokens, *cycle = position[:7]
        self.inner_step, self.target_steps, self.unsent_tokens = cycle

    def anchor_digest(self) -> str:
        """As `NodeHandle.anchor_digest`; "" on ranks > 0, which have no node."""
        return "" if self.view is None else self.view.anchor_digest()

    # -- pauses: it evaluates, or writes a checkpoint, and the others wait -------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """All ranks: the parameters are the anchor inside, and afterwards what is trained."""
        if self._phase is Phase.NEW or (self._phase is Phase.FINISHED and not self._is_kept):
            yield
            return
        with self._paused():
            if self.outer.lockstep and not (self.outer.mixing or self._is_kept):
                yield
                return
            with restored_after(self.parameters):
                with self._link.serve_parameters():
                    if self.view is not None:
                        self.view.show_anchors()
                yield

    @contextmanager
    def checkpointing(self) -> Iterator[Saved]:
        """Rank 0: the state at the last exchange. Its tensors may be live, and stay inside."""
        with self._paused():
            assert self.node is not None
            yield self._link.runtime.call(self.node.anchors.snapshot(not self.outer.lockstep))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """The peer takes no inner steps inside, and is not taken for stalled."""
        before = self._phase
        if before is Phase.PAUSED or (self.view is not None and self.view.closed):
            yield
            return
        self._phase = Phase.PAUSED
        self._link.call(lambda node: node.pause())
        try:
            yield
        finally:
            if self._phase is Phase.PAUSED:
                self._phase = before
            self._link.call(lambda node: node.resume())
            # the swarm may have gone on meanwhile; several ranks hear of it after their next step
            trains = before is Phase.TRAINING and not self.interrupted
            if trains and self.ranks.size == 1 and self.node and self.node.waits:
                with self.phases.during("comm"):
                    self._adopt(lambda node: node.exchange())
            self._progress.restart(self.steps)
