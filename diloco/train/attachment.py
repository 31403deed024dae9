"""A model in step with the swarm while training goes on around it; made by `api.Swarm.attach`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco.outer.digest import anchor_digest
from diloco.outer.fragments import partition
from diloco.outer.rates import dylu_steps
from diloco.outer.replica import Replica
from diloco.protocol.ledger import Units
from diloco.protocol.schedule import Due, Schedule
from diloco.rundir.summary import Phases, Seconds
from diloco.swarm.conversations.inner_state import InnerState
from diloco.swarm.node.rounds import Exchanged
from diloco.swarm.node.runner import NodeRunner
from diloco.swarm.node.saved import Saved
from diloco.swarm.node.spot import Loss
from diloco.train.island import Island
from diloco.train.moments import layout_of, load_moments_, moments, snapshot

if TYPE_CHECKING:
    from diloco.train.api import Swarm

__all__ = ["Attachment"]

DYLU_FLOOR = 5  # inner steps (arXiv 2401.09135, the authors' code)


class Attachment:
    """A model in step with the swarm; made by `Swarm.attach`.

    Attributes:
        version: outer steps that the anchor has seen. steps: inner steps of this peer, over all its sessions.
        inner_step, target_steps: inner steps since the last exchange, and of the whole round.
        applied_tokens: the swarm clock. tokens, discarded_tokens: this peer's own, over all its sessions.
        exchanged: whether the last `optimizer.step()` ended in an exchange.
        node: the swarm node (rank 0 of an island only).

    If training diverges, the exchange raises `DivergedError` before anything non-finite is sent. `interrupt` ends any
    wait; the inner steps since the last exchange are then lost to the swarm, not to the checkpoint before them.

    A peer that joins a run past version 0, with nothing saved, gets the optimizer's state (AdamW, Adam, Muon, SGD) from
    a donor: its memory again on both sides, while it is under way. When nobody has any (or the optimizer is another
    one) it starts cold: its first H inner steps warm the optimizer up, the swarm does not wait for them, and their
    tokens count as discarded.
    """

    def __init__(
        self,
        swarm: Swarm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        island: Island,
        saved: Saved | None,
        phases: Phases,
    ) -> None:
        self.swarm = swarm
        self.island = island
        self.phases = phases
        self.parameters = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
        self.version = saved.versions[0] if saved else 0
        self.applied_tokens = saved.applied_tokens if saved else 0
        outer = swarm.outer
        self._schedule = Schedule(outer.fragments, outer.sync_every, outer.staggered, outer.overlap)
        self.steps = self.tokens = self.discarded_tokens = 0
        self.exchanged = False
        self.interrupted = self._asked_to_stop = False
        self.node: NodeRunner | None = None
        self._settled = False  # the parameters are the last anchor, for good
        self._optimizer = optimizer
        self._counted_tokens = 0
        self._sent = [(0, 0)] * outer.fragments  # steps and tokens when each fragment was sent last
        self._paced = (0, 0.0)
        self._steps_per_s = 0.0
        self._loss = 0.0
        self._rounds = 0
        self._last_round: Seconds | None = None
        self._round_began = Seconds()
        self._round_version = self.version
        self._hook: Any = None
        self._joins = saved is None
        self._cold = False  # in a first round that is left out
        if island.leads:
            self.node = self._make_node(saved)
            self.node.options = replace(self.node.options, inner_state=self._snapshot)

    def _make_node(self, saved: Saved | None) -> NodeRunner:
        outer = self.swarm.outer
        numels = {name: parameter.numel() for name, parameter in self.parameters.items()}
        fragments = partition(numels, outer.fragments, outer.pattern)
        replica = Replica(self.parameters, fragments, outer)
        options = self.swarm.options(self.parameters, saved, device=self.island.device_name)
        return NodeRunner(options, replica, self.swarm.on_event)

    # -- context ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Attachment:
        self.swarm.attachment = self
        try:
            with self.phases.during("wait"):
                self.start()
                self.begin()
        except BaseException:
            self.close()
            raise
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        self.phases.switch("compute")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.phases.switch(None)
        self._hook.remove()
        try:
            if self.node is not None and (kind is None or not issubclass(kind, KeyboardInterrupt)):
                if kind is None and not self.interrupted and self._schedule.flying:
                    self.node.receive(self._schedule.flying)  # the others have sent these, too
                self.node.leave(finished=kind is None and not self.interrupted)
                if kind is None and not self.interrupted:
                    self.version, self._settled = self.node.settle(), True
            if kind is None and not self.interrupted:
                self.island.share_(self.parameters.values())
        finally:
            self.close()

    def start(self) -> None:
        """Connect to the swarm (first half of entering)."""
        if self.node is not None:
            self.node.start()
            self.swarm.on_ready(self.node.address)

    def begin(self) -> None:
        """Wait for the swarm and adopt its anchor (second half of entering)."""
        numbers: list[float] = [0] * 6
        state = None
        if self.node is not None:
            state, alone = self._inner_state(self.node)
            position = self.node.begin(cold=alone)
            if position is not None:
                protocol = self.node.protocol
                numbers = [1, position, min(protocol.versions), protocol.applied_tokens, alone, state is not None]
        begun, position, version, applied, cold, fetched = (int(number) for number in self.island.agree(numbers))
        self.interrupted, self._cold = not begun, bool(cold)
        self.island.share_(self.parameters.values())
        if fetched:
            self._take_over(state)
        self.version, self.applied_tokens = version, applied
        self._round_began, self._round_version = self.phases.seconds(), version
        self._schedule.begin(position)
        self._sent = [(self.steps, self.tokens)] * self.swarm.outer.fragments
        self._paced = (self.steps, time.monotonic())

    def _inner_state(self, node: NodeRunner) -> tuple[InnerState | None, bool]:
        """What a donor has for a peer that comes late, and whether this one starts cold."""
        if not self._joins or not node.joins_late():
            return None, False
        why = "swarm.inner_state=cold"
        if self.swarm.network.inner_state == "donor":
            layout = layout_of(self._optimizer)
            if layout is not None and not layout.names:
                return None, False
            state = None if layout is None else node.fetch_inner(layout)
            if state is not None or self._asked_to_stop:
                return state, False
            why = "no donor has any" if layout else f"{type(self._optimizer).__name__} keeps what is not known here"
        self.swarm.on_event("cold_start", {"why": why})
        return None, True

    def _take_over(self, state: InnerState | None) -> None:
        """All ranks: a donor's inner state, which rank 0 has."""
        layout = layout_of(self._optimizer)
        assert layout is not None, "ranks have different optimizers"
        state = state or InnerState(layout, (1,) * layout.num_steps, torch.empty(sum(layout.numels)))
        steps = tuple(int(step) for step in self.island.agree(state.steps))
        load_moments_(self._optimizer, InnerState(layout, steps, state.values))
        self.island.share_(moments(self._optimizer))

    def _snapshot(self) -> InnerState | None:
        """This peer's inner state for a joiner, from another thread; before its first step there is none."""
        return snapshot(self._optimizer) if self.steps else None

    def close(self) -> None:
        """Drop out of the swarm without a word; for what failed."""
        if self.node is not None:
            self.node.close()

    def interrupt(self) -> None:
        """Stop waiting for the swarm; may be called from a signal handler."""
        self._asked_to_stop = True
        self.interrupted = self.island.size == 1  # several ranks agree on the step after which they stop
        if self.node is not None:
            self.node.interrupt()

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def inner_step(self) -> int:
        """Inner steps since the outer step `version`; with overlap it may be over `target_steps` for a while."""
        overdue = (
            self._schedule.fragments - 1 in self._schedule.flying
            and self._schedule.inner_step <= self.swarm.outer.overlap
        )
        return self._schedule.inner_step + (self.target_steps if overdue else 0)

    @property
    def target_steps(self) -> int:
        """Inner steps of the cycle under way."""
        return self._schedule.target_steps

    def lease_units(self, sequences_per_round: int) -> Callable[[int], Units | None]:
        """Take part in the run's common list of sequences, so many in a round; call it before entering.

        Returns what gives the next ranges of that list to train on, or None while there are not enough. Every sequence
        is in one peer's hands at a time; those of a peer that dies, or whose contribution is discarded, go to others.
        """
        assert self.node is not None
        self.node.expect_units(sequences_per_round)
        return self.node.take_units

    def check_contributions(self, loss: Loss) -> None:
        """As syncer, compute this loss before and after others' contributions (`outer.spot_check`); call it before
        entering. Without it, what this peer merges is not checked against data.
        """
        if self.node is not None:
            self.node.options = replace(self.node.options, loss=loss)

    def count(self, tokens: int) -> None:
        """Tell how many tokens the coming inner step is made of (of the whole island).

        Contributions are weighted by tokens. A loop that never calls this counts every step as one token.
        """
        self._counted_tokens += tokens

    def report(self, loss: float) -> None:
        """Tell the mean loss of the last inner steps (nats per token), for whoever watches the swarm."""
        self._loss = loss
        self._tell()

    def _tell(self, seconds: Seconds | None = None) -> None:
        """What watchers are shown beside the figures that the protocol needs; `seconds` of a round that is over."""
        if seconds is not None:
            self._rounds, self._last_round = self._rounds + 1, seconds
        if self.node is not None:
            last = self._last_round
            phases = [] if last is None else [last.compute, last.wait, last.comm, last.outer]
            spent = [max(0.0, phase) for phase in phases]
            self.node.measured(self._loss, self._rounds, spent, self.discarded_tokens)

    def _round_over(self) -> None:
        """Where the time went since the last round was over."""
        now, began = self.phases.seconds(), self._round_began
        self._round_began, self._round_version = now, self.version
        self._tell(now - began)

    def _after_step(self) -> None:
        tokens, self._counted_tokens = self._counted_tokens or 1, 0
        due = Due((), ()) if self._cold else self._schedule.advance()
        self.steps += 1
        self.tokens += tokens
        self.exchanged = False
        if self.node is not None:
            self._measure_pace()
            self.node.progress(self._schedule.inner_step, self.target_steps, self._steps_per_s, self.tokens)
        self._follow_clock()
        # Rank 0 decides: a signal may have reached only some of the ranks, and at different steps.
        (interrupted,) = self.island.agree([self._asked_to_stop])
        self.interrupted = bool(interrupted)
        if self._cold and not self.interrupted:
            self._warm_up()
        if (due.send or due.receive) and not self.interrupted:
            self._optimizer.zero_grad(set_to_none=True)  # their memory is what the exchange needs at its peak
            with self.phases.during("comm"):
                if self.swarm.outer.overlap == self.swarm.outer.sync_every:
                    self._adopt(lambda node: node.turn(self._counts(due.send)))
                    self._mark_sent(due.send)
                    return
                if due.send:
                    if self.node is not None:
                        self.node.send(self._counts(due.send))
                    self._mark_sent(due.send)
                if due.receive:
                    self._adopt(lambda node: node.receive(due.receive))

    def _warm_up(self) -> None:
        """A step of a cold peer's first round; after the last one it takes part."""
        self._schedule.inner_step += 1
        if self._schedule.inner_step < self.target_steps:
            return
        self._cold = False
        self._schedule.begin()
        self._optimizer.zero_grad(set_to_none=True)
        with self.phases.during("comm"):
            self._adopt(lambda node: node.take_part(self.tokens - self._sent[0][1]))
        self._mark_sent(range(self.swarm.outer.fragments))

    def _follow_clock(self) -> None:
        """Without a barrier the run goes on, and ends, while this peer trains."""
        if self.swarm.outer.quorum is not None:
            clock = self.node.protocol.swarm_clock() if self.node is not None else (0, 0)
            version, applied_tokens = self.island.agree(clock)
            self.version, self.applied_tokens = int(version), int(applied_tokens)

    def _measure_pace(self) -> None:
        """Inner steps per second since the parameters were loaded last, without what was spent in exchanges."""
        steps, at = self._paced
        self._steps_per_s = (self.steps - steps) / max(time.monotonic() - at, 1e-9)

    def _counts(self, fragments: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Inner steps and tokens of each fragment since it was sent last."""
        return {f: (self.steps - self._sent[f][0], self.tokens - self._sent[f][1]) for f in fragments}

    def _mark_sent(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self._sent[fragment] = (self.steps, self.tokens)

    def _adopt(self, exchange: Callable[[NodeRunner], Exchanged | None]) -> None:
        """Let rank 0 exchange, and all ranks go on from what it has then."""
        numbers: list[float] = [0] * 6
        if self.node is not None:
            outcome = exchange(self.node)
            if outcome is not None:
                self.phases.move("comm", "wait", outcome.seconds.wait)
                self.phases.move("comm", "outer", outcome.seconds.outer)
                length = self._cycle_length()
                numbers = [
                    1,
                    outcome.version,
                    outcome.applied_tokens,
                    outcome.discarded_tokens,
                    outcome.position,
                    length,
                ]
        done, version, applied, discarded, position, length = (int(number) for number in self.island.agree(numbers))
        if not done:
            self.interrupted = True
            return
        self.island.share_(self.parameters.values())
        self.discarded_tokens += discarded
        self.exchanged = version > self.version or self.swarm.outer.quorum is not None
        self.version, self.applied_tokens = max(version, self.version), applied  # less when another history won
        if self.version > self._round_version:
            self._round_over()
        if position:
            self._schedule.begin(position)
        if self.swarm.outer.dylu:
            self._schedule.next_cycle(length)
        if not self.exchanged:
            self.resume()

    def _cycle_length(self) -> int:
        """H, or fewer inner steps for a slow peer (DyLU)."""
        outer = self.swarm.outer
        if self.node is None or not outer.dylu:
            return outer.sync_every
        fastest = self.node.protocol.fastest_steps_per_s(self._steps_per_s)
        return dylu_steps(self._steps_per_s, fastest, outer.sync_every, min(DYLU_FLOOR, outer.sync_every))

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """The parameters are the anchor inside; what is trained comes back afterwards. At a barrier they are equal."""
        if self.node is None or self._settled or (self.node.protocol.lockstep and not self.swarm.outer.mixing):
            yield
            return
        local = {name: parameter.clone() for name, parameter in self.parameters.items()}
        self.node.show_anchors()
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.copy_(local[name])

    def resume(self) -> None:
        """Go on training after whatever followed the exchange (evaluation, checkpoint)."""
        if self.node is not None:
            self.node.enter("training")
        self._paced = (self.steps, time.monotonic())

    # -- what can be saved --------------------------------------------------------------------------------------------

    def saved(self) -> Saved:
        """State at the last exchange, for a checkpoint; the tensors are live, so write them before going on."""
        assert self.node is not None
        return self.node.snapshot()

    def anchor_digest(self) -> str:
        """Digest of the whole anchor (hex); equal on all peers at equal version."""
        assert self.node is not None
        return anchor_digest(self.node.protocol.digests)

    def anchors(self) -> dict[str, str]:
        """`version:digest` (its first 16 digits) of each fragment's anchor now; equal on all peers at equal version."""
        node = self.node
        assert node is not None

        async def here() -> dict[str, str]:  # in the node's loop, where neither moves without the other
            pairs = zip(node.protocol.versions, node.protocol.digests, strict=True)
            return {str(fragment): f"{version}:{digest[:16]}" for fragment, (version, digest) in enumerate(pairs)}

        return node.call(here())
