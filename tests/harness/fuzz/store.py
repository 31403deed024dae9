"""A store in memory and virtual time, which is slow, stale, away or full as a schedule says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.mailbox.store import Away

LATE_S = 2.0  # for which a list may lack what was written


@dataclass(frozen=True)
class StoreSpec:
    """What a store is like. `away` and `full`: from when to when it fails, or takes no object."""

    latency_s: float = 0.1
    bytes_per_s: float = 1e7
    stale: float = 0.0  # probability that a list is old, and that a read shows an older object
    away: tuple[tuple[float, float], ...] = ()
    full: tuple[tuple[float, float], ...] = ()
    retry_s: float = 0.0  # for which it asks to wait


class SimStore:
    """A `Store`. Objects are kept with all their versions, so that old ones can be shown."""

    def __init__(self, loop: VirtualLoop, spec: StoreSpec, seed: int) -> None:
        self._loop = loop
        self.url, self.requests, self.spec = "memory://sim", 0, spec
        self.objects: dict[str, list[tuple[float, bytes]]] = {}
        self.damage: Callable[[str, bytes], bytes] = lambda name, content: content
        self._links: dict[str | None, asyncio.Lock] = {}  # of peers
        self._random = random.Random(f"store {seed}")

    async def tags(self, folder: str) -> dict[str, str]:
        before = await self._request()
        if self._random.random() < self.spec.stale:
            before -= LATE_S * self._random.random()
        shown = {}
        for name, versions in sorted(self.objects.items()):
            times = [at for at, _ in versions if at <= before]
            if name.startswith(f"{folder}/") and times:
                shown[name] = str(times[-1])
        return shown

    async def read(
        self, name: str, most_bytes: int, on_bytes: Callable[[int], object] = lambda nbytes: None
    ) -> memoryview:
        await self._request()
        if name not in self.objects:
            raise FileNotFoundError(name)
        versions = self.objects[name]
        old = len(versions) > 1 and self._random.random() < self.spec.stale / 4
        content = self.damage(name, versions[-2 if old else -1][1])
        if len(content) > most_bytes:
            raise PayloadError(f"{name} has more than {most_bytes} bytes")
        await self._carry(name, len(content))
        on_bytes(len(content))
        return memoryview(bytearray(content))

    async def write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        now = await self._request()
        if any(begins <= now < ends for begins, ends in self.spec.full):
            raise Away(f"{name}: no space is left", self.spec.retry_s)
        content = b"".join(chunks)
        await self._carry(name, len(content))
        versions = self.objects.setdefault(name, [])
        versions.append((self._loop.seconds, content))
        del versions[:-3]

    async def delete(self, names: Sequence[str]) -> None:
        await self._request()
        for name in names:
            self.objects.pop(name, None)

    def seconds_of(self, name: str, nbytes: int) -> float:
        """How long the bytes of an object take on a peer's link."""
        return nbytes / self.spec.bytes_per_s

    async def _carry(self, name: str, nbytes: int) -> None:
        """Carry one object after another over the link of the peer that asks."""
        link = self._links.setdefault(self._loop.owner, asyncio.Lock())
        async with link:
            await asyncio.sleep(self.seconds_of(name, nbytes))

    async def _request(self) -> float:
        """Take the time of a request; return the time of the answer."""
        self.requests += 1
        await asyncio.sleep(self.spec.latency_s * self._random.uniform(0.5, 1.5))
        now = self._loop.seconds
        if any(begins <= now < ends for begins, ends in self.spec.away):
            raise Away("503 slow down", self.spec.retry_s)
        return now
