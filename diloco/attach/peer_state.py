"""What of a peer survives its process, besides its model and its optimizer, which many libraries save themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.attach.attachment import Attachment
from diloco.attach.state_io import Groups, Tensors, flatten_swarm, restore_swarm
from diloco.errors import CheckpointError, PayloadError
from diloco.swarm.node.options import RunSpec
from diloco.swarm.node.saved import Saved

__all__ = ["PeerState"]


@dataclass(frozen=True)
class PeerState:
    """What a peer needs to go on as itself: its part of the swarm, its accounts, and its schedules at step 0.

    `run` is the manifest of its run, and `counters` are inner steps, tokens, and discarded tokens.
    """

    run: str
    saved: Saved
    counters: tuple[int, int, int]
    schedules: list[Any]

    @classmethod
    def of(cls, sync: Attachment, run: RunSpec, saved: Saved) -> PeerState:
        """That of an attached peer; `saved` is what `Attachment.checkpointing` gave, in whose context this is used.
        Unsent tokens count as discarded there, because who resumes goes on from the anchors.
        """
        counters = sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens
        return cls(run.manifest_text, saved, counters, sync.schedules.state())

    def flatten(self) -> tuple[Groups, dict[str, Any]]:
        """Groups of tensors, which are not copies, and JSON."""
        tensors, state = flatten_swarm(self.saved)
        return tensors, {**state, "run": self.run, "counters": self.counters, "schedules": self.schedules}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> PeerState:
        """The inverse of `flatten`."""
        steps, tokens, discarded = state["counters"]
        return cls(state["run"], restore_swarm(tensors, state), (steps, tokens, discarded), state["schedules"])

    def check_same_run(self, run: RunSpec, where: str) -> None:
        """Raise `CheckpointError` for the state of another run; `where` is where it comes from."""
        try:
            differing = run.differences(self.run)
        except PayloadError:
            raise CheckpointError(f"{where} holds no manifest; choose another checkpoint") from None
        if differing:
            raise CheckpointError(
                f"{where} holds a run with other settings ({'; '.join(differing[:4])}); use the same settings, or "
                "another checkpoint"
            )

    def apply(self, sync: Attachment) -> None:
        """Give the accounts to a peer that is attached and not entered yet."""
        sync.steps, sync.tokens, sync.discarded_tokens = self.counters
        sync.schedules.restore(self.schedules)
