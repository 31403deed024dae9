"""A model in step with the swarm while training goes on around it; `Swarm.attach` makes it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import torch

from diloco.attach.devices import default_modes
from diloco.attach.node_thread import Measured, NodeThread, Progress, RankLeases
from diloco.attach.optimizer import ExchangeGuard, InnerStateTransfer, decay_of, kind_of, snapshot
from diloco.attach.parameters import TrainedParams, is_sharded, restored_after
from diloco.attach.program import Phase, Program, leave
from diloco.attach.ranks import RankGroup, ShardedParams
from diloco.attach.schedulers import NotEntered, Schedulers, StepHooks, swarm_steps
from diloco.config import OuterConfig
from diloco.errors import DivergedError
from diloco.outer.fragments import Fragment, partition
from diloco.outer.local import train_on_current_stream
from diloco.outer.replica import Replica
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.position import Position, nothing
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.inner_state import InnerState
from diloco.swarm.wire.malloc import trim_heap

__all__ = ["Attachment"]


class Attachment(Measured):
    """A model in step with the swarm.

    Attributes:
        version, applied_tokens: outer steps that the anchor has seen, and tokens that are in it.
        steps, tokens, discarded_tokens: this peer's own, over all its sessions.
        inner_step, target_steps: of the cycle under way; unsent_tokens: in no contribution yet.
        counted_tokens: of the coming inner step, so far.
        exchanged: True if the last `optimizer.step()` ended in an exchange.
        interrupted: True if the loop has to end before the budget is used up.
        ended_by: the signal that ends it, or 0.
        node: the swarm node; None before entering, and on ranks > 0.

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
        self.stop_asked: int | None = None  # number of the signal that asked, or 0
        self._phase, self._in_block = Phase.NEW, True  # True: a `with` block closes it
        self._is_kept = False  # True: the loop wrote to the model last, so it stays as it is
        self.node: NodeThread | None = None
        self._rows: ShardedParams | None = None  # of several ranks, or of one with FSDP2
        self._runtime, self._exchange = runtime, ExitStack()  # the exchange under way
        self._optimizer, self._options, self._program = optimizer, options, program
        self._hook: NotEntered | StepHooks = NotEntered(optimizer)
        self._guard = ExchangeGuard(parameters)
        self.progress = Progress(phases, runtime.clock)
        self._inner_state = InnerStateTransfer(optimizer, parameters, ranks, program.on_event)
        self.counted_tokens = self._sequences_per_round = 0

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
                self._begin()
        except BaseException:
            self.drop_out()
            raise
        self._hook.remove()
        self._hook = StepHooks(self._optimizer, self._before_step, self._after_step)
        self._phase = Phase.TRAINING
        self.phases.switch("compute")
        self._in_block &= not self.ended_by  # a signal while joining: no block is entered
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
            # after an error in the loop, divergence would only hide it
            with suppress(DivergedError) if kind else nullcontext():
                if self.node is not None:
                    self.node.leave(finished)
            if finished:
                self._phase = Phase.FINISHED
                self._load_anchors()
            self._program.on_end(finished)
        finally:
            self.drop_out()
        if kind is None:
            self._end_loop()

    def _load_anchors(self) -> None:
        """All ranks: load the anchors into the model, unless the loop wrote to it at the end."""
        self._is_kept = bool(*self.ranks.broadcast_floats([self.parameters.are_written()]))
        with restored_after(self.parameters) if self._is_kept else nullcontext():
            position = self._of_rank0(lambda: self._door.load_anchors())
        _, self.version, self.applied_tokens, self.discarded_tokens, *_ = position
        if self._is_kept:
            self._program.on_event("model_kept", {})

    def _connect(self) -> None:
        """All ranks: connect to the swarm."""
        fragments = partition(self.parameters.numels, self.outer.fragments, self.outer.pattern)
        if self.ranks.size > 1 or any(map(is_sharded, self.parameters.values())):
            self._rows = ShardedParams(self.parameters, fragments, self.ranks)
        self._of_rank0(lambda: self._open(fragments))

    def _open(self, fragments: Sequence[Fragment]) -> None:
        options, self._options = self._options, None  # frees `saved`, as large as the model
        if options is None:
            return
        saved_steps = self.steps if options.saved is not None else 0
        self._inner_state.set_source(options.network.inner_state, saved_steps)
        self.node = NodeThread.open(
            self._runtime,
            replace(options, inner_state=self._snapshot),
            Replica(self._rows or self.parameters, fragments, self.outer),
            self._program.on_event,
            self._program.peer.patience_s,
            self._is_asked_to_stop,
        )
        self.node.plan_round(self._sequences_per_round)
        if self.stop_asked is not None:
            self.interrupt(self.stop_asked)
        self._program.on_ready(self.node)

    @property
    def _door(self) -> NodeThread:
        assert self.node is not None, "ranks > 0 have none"
        return self.node

    def _of_rank0(
        self, call: Callable[[], Position | None], prepare: Callable[[], None] = nothing
    ) -> Position:
        """All ranks: run `call` on rank 0, which may read and write parameters; return its result.

        Ranks > 0 run `prepare` before they first take part, as the node does on rank 0.
        """
        for device in {parameter.device for parameter in self.parameters.values()}:
            train_on_current_stream(device)
        try:
            if self._rows is None:
                return call() or Position()
            return Position.of(self._rows.of_rank0(lambda: call() or Position(), prepare))
        finally:
            self._exchange.close()

    def _snapshot(self) -> InnerState | None:
        """Copy the inner state for a joiner; None before the first step. Runs in other threads."""
        return snapshot(self._optimizer, self.parameters) if self.steps else None

    def _begin(self) -> None:
        """All ranks: adopt the swarm's anchor."""
        state, cold = None, False
        if self.node is not None:
            state, cold = self._inner_state.fetch(self.node, self._is_asked_to_stop)
        [is_fetched] = self.ranks.broadcast_floats([state is not None])
        with self._guard.exchanging():
            self._go_to(self._of_rank0(lambda: self._door.join(cold)))
        self._round_version = self.version
        if is_fetched:
            self._inner_state.take_over_(state)
        self.parameters.remember()
        self.parameters.step_done()
        self.progress.begin_run(self.steps)

    def _is_asked_to_stop(self) -> bool:
        return self.stop_asked is not None

    def close_opened(self) -> None:
        """Leave because of a signal, unless the end of a `with` block does so."""
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
            if self.node is not None:
                self.node.finish()

    def drop_out(self) -> None:
        """Leave the swarm without a goodbye, unless that was said before: after a failure."""
        atexit.unregister(self.drop_out)
        self._hook.remove()
        if self._phase.runs:
            self._phase = Phase.LEFT
            self._program.on_end(False)
        try:
            if self.node is not None:
                self.node.close()
        finally:
            self._runtime.close()

    def forget(self) -> None:
        """Drop this attachment in a forked process, which is not a peer."""
        self._phase = Phase.LEFT
        if self.node is not None:
            self.node.closed = True
        self.drop_out()

    def interrupt(self, number: int = 0) -> None:
        """Stop waiting for the swarm; a signal's handler may call it, with the number."""
        self.stop_asked = number
        # several ranks agree on the step after which they stop
        self.interrupted = self.ranks.size == 1
        self.ended_by = number if self.interrupted else 0
        if self.node is not None:
            self.node.interrupt(number)

    # -- training ----------------------------------------------------------------------------------

    def lease_units(self, sequences_per_round: int, batches_ahead: int = 0) -> RankLeases:
        """Take part in the run's common list of sequences; call it before entering.

        A sequence is one peer's at a time. Those of a peer that dies, and of a contribution that is
        discarded, are leased again.
        """
        self._sequences_per_round = sequences_per_round
        return RankLeases(self.ranks, lambda: self.node, batches_ahead)

    def count(self, tokens: int) -> None:
        """Add tokens of all ranks to the weight of the coming inner step (1 if never called)."""
        self.counted_tokens += tokens

    @default_modes
    def _before_step(self) -> None:
        self._guard.check_kept()
        self.parameters.step_begins(self.inner_step == 0)
        self.schedulers.step_to(swarm_steps(self, self.outer.sync_every))

    @default_modes
    def _after_step(self) -> None:
        self._guard.check_step(kind_of(self._optimizer), decay_of(self._optimizer))
        tokens, self.counted_tokens = self.counted_tokens or 1, 0
        self.steps += 1
        self.tokens += tokens
        self.exchanged = False
        self.progress.measure(self.steps)
        pace, prepare = self.progress.steps_per_s, self._prepare
        with self._program.exchanging():
            self._move_on(
                self._of_rank0(lambda: self._door.after_step(tokens, pace, prepare), prepare)
            )
        self.parameters.step_done()
        self._end_loop()

    @default_modes
    def _prepare(self) -> None:
        """Make room for an exchange, and check the model, in a thread while the loop waits."""
        self._exchange.enter_context(self.phases.during("comm"))
        self.parameters.check(self._program.on_event)
        assert isinstance(self._hook, StepHooks)
        self._hook.free_gradients()  # their memory is what the exchange needs at its peak
        trim_heap()  # where gradients were, there is room now
        self._exchange.callback(trim_heap)
        self._exchange.enter_context(self._guard.exchanging())

    def _move_on(self, position: Position) -> None:
        """All ranks: take over rank 0's position, and end the round if the version has risen."""
        before = self.version
        self._go_to(position)
        if position.exchanged and not self.interrupted:
            self.exchanged |= self.version > before or not self.outer.barrier
            self.phases.move("comm", "wait", position.wait_s)
            self.phases.move("comm", "outer", position.outer_s)
            self._program.on_exchange()
            self.progress.restart(self.steps)
        ended, self._round_version = self.version > self._round_version, self.version
        if ended:
            self.progress.end_round()
            self.report()
            rounds = 0 if self.node is None else self.node.planned_rounds
            if rounds and self.version == rounds + 1:
                self._program.on_event("rounds_over", {"rounds": rounds, "version": self.version})

    def _go_to(self, position: Position) -> None:
        if position.stopped_by >= 0:  # the signal may have reached other ranks only
            self.interrupted, self.ended_by = True, position.stopped_by
            return
        # these may decrease, when another history of the run has won
        _, self.version, self.applied_tokens, self.discarded_tokens, *cycle = position[:7]
        self.inner_step, self.target_steps, self.unsent_tokens = cycle

    def anchor_digest(self) -> str:
        """As `PeerRecord.anchor_digest`; "" on ranks > 0, which have no node."""
        return "" if self.node is None else self.node.record().anchor_digest

    # -- pauses: it evaluates, or writes a checkpoint, and the others wait -------------------------

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """All ranks: show the anchor in the parameters in the block, and restore them after it."""
        if self._phase is Phase.NEW or (self._phase is Phase.FINISHED and not self._is_kept):
            yield
            return
        with self._paused():
            if self.outer.lockstep and not (self.outer.mixing or self._is_kept):
                yield
                return
            with restored_after(self.parameters):
                self._of_rank0(lambda: self._door.show_anchors())
                yield

    @contextmanager
    def checkpointing(self) -> Iterator[Saved]:
        """Rank 0: yield the state at the last exchange. Its tensors do not change in the block."""
        with self._paused():
            yield self._door.snapshot(not self.outer.lockstep)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Tell the swarm that this peer takes no inner steps in the block, and is not stalled."""
        before, node = self._phase, self.node
        if before is Phase.PAUSED or (node is not None and node.closed):
            yield
            return
        self._phase = Phase.PAUSED
        if node is not None:
            node.pause()
        try:
            yield
        finally:
            if self._phase is Phase.PAUSED:
                self._phase = before
            # the swarm may have gone on meanwhile; several ranks hear of it after their next step
            catches_up = before is Phase.TRAINING and self.ranks.size == 1 and not self.interrupted
            if node is not None:
                pace = self.progress.steps_per_s
                with self._exchange:
                    position = node.resume(catches_up, pace, self._prepare)
                if catches_up and position.exchanged:
                    self._move_on(position)
            self.progress.restart(self.steps)
