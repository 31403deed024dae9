"""The part of a node that survives its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from diloco.outer.replica import Replica
from diloco.outer.state import OuterState
from diloco.protocol.messages.heads import Record
from diloco.protocol.shares import Share

DataCursor = tuple[int, Sequence[Sequence[int]]]

__all__ = ["DataCursor", "Saved"]


@dataclass(frozen=True)
class Saved:
    """What a peer needs to go on where it stopped: anchors (flat fp32) and their versions, and outer states it held.

    An outer state is the master, with momentum and window.

    `residuals` are what error feedback still has to send, by fragment. `units` is the data cursor: the first sequence
    that nobody was given, and the ranges before it that are not in the anchors. `shares` are, by fragment, who
    contributed how much to the anchor, and `records` its certificate; `applied` are this peer's own tokens in the
    control fragment's, by base version. `addresses` are those of other peers, one each.
    """

    anchors: Sequence[Tensor]
    versions: Sequence[int]
    terms: Sequence[int]
    applied_tokens: int
    outer: Mapping[int, tuple[Tensor, OuterState]] = field(default_factory=dict)  # by fragment
    residuals: Mapping[int, Tensor] = field(default_factory=dict)
    units: DataCursor = (0, ())
    shares: Sequence[Mapping[str, Share]] = ()
    applied: Mapping[int, int] = field(default_factory=dict)
    records: Sequence[Record | None] = ()
    addresses: Sequence[str] = ()

    @property
    def steps(self) -> int:
        """Outer steps of the control fragment."""
        record = self.records[0] if self.records else None
        return self.versions[0] - (0 if record is None else record.head.skipped)

    def load_(self, replica: Replica) -> None:
        """Copy the anchors, the outer states and the residuals into a new replica; it shares no memory with them."""
        for fragment, anchor in enumerate(self.anchors):
            replica.anchors[fragment].copy_(anchor)
        for fragment, (master, state) in self.outer.items():
            replica.hold(fragment, master.clone(), state.clone())
        replica.residuals.update({fragment: residual.clone() for fragment, residual in self.residuals.items()})
