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
    """What a peer needs to go on where it stopped: anchors (flat fp32) with their tips, and masters
    and outer states.

    `processed` are this peer's tokens, `stamp` is the newest of its contributions. `residuals` are
    what error feedback still has to send, by fragment. `addresses` are those of other peers, one
    each.
    """

    anchors: Sequence[Tensor]
    tips: Sequence[Tip]
    processed: int = 0
    stamp: int = 0
    outer: Mapping[int, tuple[Tensor, OuterState]] = field(default_factory=dict)  # by fragment
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    addresses: Sequence[str] = ()

    @property
    def steps(self) -> int:
        """Outer steps, of the fragment with the fewest."""
        return min(tip.head.number for tip in self.tips)

    @property
    def applied_tokens(self) -> int:
        """The swarm clock."""
        return self.tips[0].head.work

    def load_(self, replica: Replica) -> None:
        """Copy the anchors, the outer states and the residuals into a new replica; it shares no
        memory with them."""
        for fragment, anchor in enumerate(self.anchors):
            replica.anchors[fragment].copy_(anchor)
        for fragment, (master, state) in self.outer.items():
            replica.hold(fragment, master.clone(), deepcopy(state))
        replica.residuals.update(
            {fragment: residual.clone() for fragment, residual in self.residuals.items()}
        )
