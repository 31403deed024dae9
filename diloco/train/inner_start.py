"""Where the inner optimizer of a peer that joins late begins: with a donor's state, or cold.

1. The peer asks others for their inner state, where its optimizer is AdamW, Adam, Muon or SGD.
2. When nobody has any, or the optimizer is another one, it starts cold: its first H inner steps warm the optimizer up.
   The swarm does not wait for them, and their tokens count as discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from diloco.swarm.conversations.inner_state import InnerState
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.runtime import Runtime
from diloco.train.island import Island
from diloco.train.moments import layout_of, load_moments_, moments, snapshot

__all__ = ["InnerStart"]


class InnerStart:
    """The inner optimizer's state, on its way in and out. A donor's state takes its memory again on both sides.

    `source` is `own` for a peer that has saved state, else the setting `swarm.inner_state`.
    """

    source: Literal["own", "donor", "cold"] = "own"

    def __init__(self, optimizer: torch.optim.Optimizer, island: Island, on_event: OnEvent) -> None:
        self._optimizer = optimizer
        self._island = island
        self._on_event = on_event

    def fetch(self, node: Node, runtime: Runtime, stopping: Callable[[], bool]) -> tuple[InnerState | None, bool]:
        """A donor's state, if this peer comes late and somebody has one, and whether the peer starts cold."""
        if self.source == "own" or not runtime.call(node.joins_late()):
            return None, False
        why = "swarm.inner_state=cold"
        if self.source == "donor":
            layout = layout_of(self._optimizer)
            if layout is not None and not layout.names:
                return None, False
            state = None if layout is None else runtime.call(node.fetch_inner(layout))
            if state is not None or stopping():
                return state, False
            why = "no donor has any" if layout else f"{type(self._optimizer).__name__} keeps what is not known here"
        self._on_event("cold_start", {"why": why})
        return None, True

    def take_over_(self, state: InnerState | None) -> None:
        """All ranks: the optimizer goes on from a donor's state, which rank 0 has."""
        layout = layout_of(self._optimizer)
        assert layout is not None, "ranks have different optimizers"
        state = state or InnerState(layout, (1,) * layout.num_steps, torch.empty(sum(layout.numels)))
        steps = tuple(int(step) for step in self._island.agree(state.steps))
        load_moments_(self._optimizer, InnerState(layout, steps, state.values))
        self._island.share_(moments(self._optimizer))

    def snapshot(self) -> InnerState | None:
        """A copy of the optimizer's state for a joiner; called in other threads while training goes on."""
        return snapshot(self._optimizer)
