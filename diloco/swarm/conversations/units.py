"""The work units that this peer has: taken by the training loop, fetched and accounted by the node beside it."""

from __future__ import annotations

import threading

from diloco.protocol.ledger import Units, count, difference, union
from diloco.protocol.messages.base import MAX_UNIT_RANGES

__all__ = ["Reserve"]

ROUNDS_AHEAD = 2  # a syncer's death must not run the reserve dry before its successor answers


class Reserve:
    """Leased sequences on their way: ahead of training, trained on, sent.

    Called from two threads. When the reserve is empty, `take` gives None and the training loop helps itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: Units = []
        self._used: Units = []
        self._sent: Units = []
        self._wanted = 0

    @property
    def all(self) -> Units:
        """Everything that this peer has and that is not in the model yet."""
        with self._lock:
            return union(self._ahead, self._used, self._sent)

    @property
    def trained_on(self) -> Units:
        """What this peer learned from and that is not in the model, as far as it knows."""
        with self._lock:
            return union(self._used, self._sent)

    @property
    def missing(self) -> int:
        """Sequences to ask for; 0 where nobody takes units, or enough are there."""
        with self._lock:
            ahead = count(self._ahead)
            return self._wanted - ahead if 2 * ahead <= self._wanted else 0

    def expect(self, sequences_per_round: int) -> None:
        """The training loop is going to take so many in a round."""
        with self._lock:
            self._wanted = ROUNDS_AHEAD * sequences_per_round

    def add(self, granted: Units) -> None:
        """The syncer leased these. What is in too many pieces to tell the others is left to them."""
        with self._lock:
            has = union(self._ahead, self._used, self._sent)
            for unit in granted:
                has = union(has, [unit])
                if len(has) > MAX_UNIT_RANGES:
                    return
                self._ahead = union(self._ahead, [unit])

    def take(self, number: int) -> Units | None:
        """The next sequences to train on; None when there are not enough."""
        with self._lock:
            taken: Units = []
            for start, stop in self._ahead:
                if count(taken) < number:
                    taken.append((start, min(stop, start + number - count(taken))))
            if count(taken) < number:
                return None
            self._ahead = difference(self._ahead, taken)
            self._used = union(self._used, taken)
            return taken

    def send(self) -> Units:
        """What was trained on since the last time, which goes into a contribution now."""
        with self._lock:
            self._sent, self._used = union(self._sent, self._used), []
            return list(self._sent)

    def settle(self, units: Units) -> None:
        """The contribution from these is in the model, or discarded: either way they are this peer's no more."""
        with self._lock:
            self._sent = difference(self._sent, units)
