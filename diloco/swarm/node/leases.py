"""The sequences that this peer trains on, on their way from the core to the training loop."""

from __future__ import annotations

import threading

from diloco.messages.fields import Units
from diloco.ranges import NONE, count, difference, first, union

ROUNDS_AHEAD = 2  # the data must last until an heir answers when an author dies


class LeasedData:
    """What is leased and not trained on yet; used by the threads of training loop and node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # as in the core: sequences stay in it until the step on them is done
        self._queue: Units = NONE
        self._taken: Units = NONE
        self.wanted = 0  # sequences that the core should have ahead

    def plan_round(self, sequences_per_round: int) -> None:
        """The training loop is going to take that many in a round."""
        self.wanted = ROUNDS_AHEAD * sequences_per_round

    def set_queue(self, queue: Units) -> None:
        """That is leased to this peer now."""
        with self._lock:
            self._queue = queue
            self._taken = difference(self._taken, difference(self._taken, queue))

    def take(self, number: int) -> Units | None:
        """The next sequences to train on; None when there are not enough."""
        with self._lock:
            taken = first(difference(self._queue, self._taken), number)
            if count(taken) < number:
                return None
            self._taken = union(self._taken, taken)
            return taken

    def ahead(self, number: int) -> Units:
        """Up to `number` sequences that would be taken next, as it looks now."""
        with self._lock:
            return first(difference(self._queue, self._taken), number)

    def trained(self) -> Units:
        """What was taken since this was called last: a step has trained on it."""
        with self._lock:
            taken, self._taken = self._taken, NONE
            self._queue = difference(self._queue, taken)
            return taken
