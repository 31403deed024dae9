"""The part of a node that survives its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from torch import Tensor

from diloco.core.history import Tip
from diloco.outer.optimizer import OuterState
from diloco.outer.replica import Replica


@dataclass(frozen=True)
class Saved:
    """State with which a peer continues where it stopped; mappings are by fragment."""

    anchors: Sequence[Tensor]  # flat fp32
    tips: Sequence[Tip]
    processed: int = 0  # tokens that this peer has trained on
    stamp: int = 0  # of its newest contribution
    outer: Mapping[int, tuple[Tensor, OuterState]] = field(default_factory=dict)  # (master, state)
    residuals: Mapping[int, Tensor] = field(default_factory=dict)  # of error feedback
    addresses: Sequence[str] = ()  # of other peers, one each

    @property
    def steps(self) -> int:
        """Outer steps of the fragment with the fewest."""
        return min(tip.head.number for tip in self.tips)

    @property
    def applied_tokens(self) -> int:
        """The swarm clock."""
        return self.tips[0].head.work

    def load_(self, replica: Replica) -> None:
        """Copy anchors, outer states and residuals into a new replica."""
        for fragment, anchor in enumerate(self.anchors):
            replica.anchors[fragment].copy_(anchor)
        for fragment, (master, state) in self.outer.items():
            replica.hold(fragment, master.clone(), deepcopy(state))
        for fragment, residual in self.residuals.items():
            replica.residuals[fragment] = residual.clone()
