"""Wall seconds of a training loop by phase: the one shape for this in logs, summaries and snapshots."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal, get_args

from diloco.messages.fields import Seconds

__all__ = ["PHASES", "Phase", "PhaseSeconds"]

Phase = Literal["compute", "wait", "comm", "outer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall seconds in each phase of the training loop; the fields stand in the order of `PHASES`.

    compute: inner steps and evaluation. wait: waiting for other peers. comm: encoding, sending, receiving and adopting.
    outer: outer steps of the fragments that this peer is author of, as far as they delay its training.
    """

    compute: Seconds = 0.0
    wait: Seconds = 0.0
    comm: Seconds = 0.0
    outer: Seconds = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.wait + self.comm + self.outer

    @property
    def utilization(self) -> float:
        """The share of compute (T_inner / (T_inner + T_sync) of INTELLECT-1); 0 before anything was timed."""
        return self.compute / self.total if self.total > 0 else 0.0

    def __sub__(self, earlier: PhaseSeconds) -> PhaseSeconds:
        return PhaseSeconds(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))
