"""Virtual time, and connections between peers that know each other by name: latency, transfers,
breaks and splits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from diloco.core import events

Pair = frozenset[str]


class Links:
    """Messages arrive in order after `latency_s`; bulk takes `bulk_s` more, in any order, and is
    `lost` sometimes."""

    def __init__(self, latency_s: float, bulk_s: float, seed: int) -> None:
        self.latency_s, self.bulk_s, self.random = latency_s, bulk_s, Random(seed)
        self.now = self.lost = 0.0
        self.epochs: dict[Pair, int] = {}  # of the connections that are up
        self.blocked: set[Pair] = set()
        self.held: list[tuple[Pair, int, str, events.Event]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count(1)

    def arrives(self, peer: str, event: Any) -> None:
        """Overridden by who has the peers."""
        raise NotImplementedError

    def greets(self, peer: str) -> Any:
        """Overridden by who has the peers."""
        raise NotImplementedError

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Do that then."""
        heapq.heappush(self._queue, (when, next(self._order), what, args))

    def until(self, end: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= end and not stop():
            self.now, _, what, args = heapq.heappop(self._queue)
            what(*args)
        self.now = self.now if stop() else end

    def carry(
        self,
        sender: str,
        to: str,
        event: events.Event,
        back: events.Event | None = None,
        bulk: bool = False,
    ) -> None:
        """Bring an event to another peer; perhaps the stream breaks, of which the sender hears if
        it asked."""
        pair = frozenset((sender, to))
        epoch = self.epochs.get(pair)
        if epoch is None:
            return
        if (bulk or back) and self.random.random() < self.lost:
            if back:
                self.at(self.now + 3 * self.latency_s, self._arrive, pair, epoch, sender, back)
            return
        if pair in self.blocked:
            self.held.append((pair, epoch, to, event))
            return
        when = self.now + self.latency_s * self.random.uniform(0.7, 1.5)
        if bulk:
            when += self.bulk_s * self.random.uniform(0.5, 2.0)
        else:
            when = self._last[sender, to] = max(when, self._last.get((sender, to), 0.0))
        self.at(when, self._arrive, pair, epoch, to, event)

    def _arrive(self, pair: Pair, epoch: int, to: str, event: events.Event) -> None:
        if self.epochs.get(pair) == epoch:
            self.arrives(to, event)

    def drop(self, pair: Pair, who: str) -> None:
        """One side closes the connection, or dies; the other hears of it, unless the network is
        cut."""
        if self.epochs.pop(pair, None) and pair not in self.blocked:
            (other,) = pair - {who}
            self.at(self.now + self.latency_s, self._gone, pair, other, who)

    def _gone(self, pair: Pair, peer: str, other: str) -> None:
        if pair not in self.epochs:
            self.arrives(peer, events.Lost(other))

    def reconnect(self, one: str, other: str) -> None:
        """Connect two peers whenever they can be."""
        pair = frozenset((one, other))
        if pair not in self.epochs and pair not in self.blocked:
            hellos = [self.greets(other), self.greets(one)]
            if all(hellos):
                epoch = self.epochs[pair] = next(self._order)
                for peer, there, hello in zip((one, other), (other, one), hellos, strict=True):
                    self.arrives(peer, events.Lost(there))
                    connected, at = events.Connected(there, hello), self.now + self.latency_s
                    self.at(at, self._arrive, pair, epoch, peer, connected)
        self.at(self.now + self.random.uniform(0.3, 2.0), self.reconnect, one, other)

    def block(self, pairs: Iterable[Pair], seconds: float) -> None:
        """Cut the network between these; nobody hears of it."""
        pairs = list(pairs)
        self.blocked |= set(pairs)
        self.at(self.now + seconds, self.unblock, pairs)

    def unblock(self, pairs: Iterable[Pair]) -> None:
        """What was on its way arrives."""
        self.blocked -= set(pairs)
        held, self.held = self.held, []
        for pair, epoch, to, event in held:
            if pair in self.blocked:
                self.held.append((pair, epoch, to, event))
            else:
                self.at(self.now + self.latency_s, self._arrive, pair, epoch, to, event)
