"""What a peer does while it takes no inner steps: it evaluates, or it writes a checkpoint, and the others wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from diloco.config import OuterConfig
from diloco.swarm.node.saved import Saved
from diloco.train.parameters import Trained
from diloco.train.rows import kept
from diloco.train.swarm_link import SwarmLink

__all__ = ["Pauses"]


class Pauses(ABC):
    """The half of an `Attachment` that pauses it; see there for what is public."""

    parameters: Trained
    outer: OuterConfig
    _link: SwarmLink
    _is_paused = False
    _left_behind = False  # the swarm went on meanwhile
    _settled = False  # the parameters are the last anchor, for good

    @abstractmethod
    def _resume(self) -> None:
        """Train on from the anchors that are loaded."""

    @property
    @abstractmethod
    def _entered(self) -> bool:
        """Whether the parameters have been the swarm's."""

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """All ranks: the parameters are the anchor inside; what is trained comes back afterwards."""
        if not self._entered or self._settled:
            yield
            return
        with self._paused():
            if self.outer.lockstep and not self.outer.mixing:
                yield
                return
            with kept(self.parameters):
                self._link.show_anchors()
                yield

    @contextmanager
    def checkpointing(self) -> Iterator[Saved]:
        """Rank 0: as `saved`, to be written in this context: live tensors stay as they are, and other peers wait."""
        with self._paused():
            yield self.saved()

    def saved(self) -> Saved:
        """The state at the last exchange. At a barrier the tensors are the live ones: copy them before going on."""
        assert self._link.node is not None
        return self._link.runtime.call(self._link.node.snapshot())

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
            self._resume()
            self._left_behind = self._link.node is not None and self._link.node.left_behind
