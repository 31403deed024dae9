"""Asks the swarm for a snapshot once a second, for all open pages together, and reads run directories beside it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from diloco.errors import DilocoError
from diloco.protocol.snapshot import Snapshot
from diloco.rundir.compare import Run, read_runs

__all__ = ["Poller", "Source"]

logger = logging.getLogger(__name__)

EVERY_S = 1.0
SAMPLE_S = 5.0  # interval over which a peer's pace is measured; shorter ones would jump with single heartbeats
SAMPLES = 24
READ_S = 10.0  # how often run directories are read


class Source(Protocol):
    """A source of snapshots; in production a `Visitor` of the swarm."""

    async def ask(self) -> Snapshot:
        """A snapshot of the swarm as it is now. Raises `DilocoError` if no peer answers."""

    async def close(self) -> None: ...


class Poller:
    """The newest snapshot, and the pace of each peer over the last two minutes.

    `runs` are the runs in `directories`, for their held-out loss. A `DilocoError` of the source does not end the
    polling.
    """

    def __init__(
        self, source: Source, clock: Callable[[], float] = time.monotonic, directories: Sequence[Path] = ()
    ) -> None:
        self.snapshot: Snapshot | None = None  # the newest one; it stays when the swarm no longer answers
        self.number = 0  # of snapshots so far
        self.lost: str | None = None  # why no peer answers; None while one does
        self.tokens_per_s: float | None = None  # of the whole swarm; None before two samples
        self.runs: list[Run] = []
        self.directories = directories
        self._read_at = -math.inf
        self._source = source
        self._clock = clock
        self._seen_at = clock()
        self._sampled: tuple[float, dict[str, int], int] | None = None
        self._paces: dict[str, deque[float]] = {}

    async def run(self) -> None:
        """Polls until cancelled, then closes the source."""
        try:
            while True:
                await self.poll()
                await asyncio.sleep(EVERY_S)
        finally:
            await self._source.close()

    async def poll(self) -> None:
        """Asks once."""
        try:
            snapshot = await self._source.ask()
        except DilocoError as error:
            self.lost = str(error)
            logger.debug("nobody answers: %r", error)
            return
        self.snapshot, self.lost = snapshot, None
        self.number += 1
        self._seen_at = self._clock()
        self._sample(snapshot)
        if self.directories and self._clock() - self._read_at >= READ_S:
            self._read_at = self._clock()
            self.runs = await asyncio.to_thread(read_runs, self.directories)

    def seen_s(self) -> float:
        """Seconds since the last answer."""
        return self._clock() - self._seen_at

    def paces(self, peer: str) -> list[float]:
        """Tokens per second of a peer, from old to new."""
        return list(self._paces.get(peer, ()))

    def _sample(self, snapshot: Snapshot) -> None:
        now = self._clock()
        tokens = {row.peer_id: row.tokens for row in snapshot.peers}
        if self._sampled is not None:
            at, before, processed = self._sampled
            if now - at < SAMPLE_S:
                return
            self.tokens_per_s = max(0, snapshot.ledger.processed - processed) / (now - at)
            self._paces = {peer: self._paces.get(peer, deque(maxlen=SAMPLES)) for peer in tokens}
            for peer in tokens.keys() & before.keys():
                self._paces[peer].append(max(0, tokens[peer] - before[peer]) / (now - at))
        self._sampled = now, tokens, snapshot.ledger.processed
