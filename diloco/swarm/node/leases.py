"""Queue of leased sequences between the core and the training loop."""

from __future__ import annotations

import threading

from diloco.messages.fields import Units
from diloco.ranges import NONE, count, difference, first, union

ROUNDS_AHEAD = 2  # enough until the heir of an author that died grants leases


class LeasedData:
    """Leased sequences without a finished step; used by the threads of training loop and node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # the queue of the core, in which sequences stay until the step on them is done
        self._queue: Units = NONE
        self._taken: Units = NONE
        self.wanted = 0  # sequences that the core should have leased ahead

    def plan_round(self, sequences_per_round: int) -> None:
        """Set how many sequences the training loop takes in a round."""
        self.wanted = ROUNDS_AHEAD * sequences_per_round

    def set_queue(self, queue: Units) -> None:
        """Replace the queue by the sequences leased now."""
        with self._lock:
            self._queue = queue
            self._taken = difference(self._taken, difference(self._taken, queue))

    def take(self, number: int) -> Units | None:
        """Take the next sequences to train on; None if fewer are leased."""
        with self._lock:
            taken = first(difference(self._queue, self._taken), number)
            if count(taken) < number:
                return None
            self._taken = union(self._taken, taken)
            return taken

    def ahead(self, number: int) -> Units:
        """Return up to `number` sequences that `take` would return next."""
        with self._lock:
            return first(difference(self._queue, self._taken), number)

    def trained(self) -> Units:
        """Remove and return the sequences taken since the last call: a step has trained on them."""
        with self._lock:
            taken, self._taken = self._taken, NONE
            self._queue = difference(self._queue, taken)
            return taken
