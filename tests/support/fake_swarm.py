"""A swarm that is not there, for the dashboard: `python tests/support/fake_swarm.py PORT PEERS`
serves its page."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable

from diloco.errors import SwarmError
from diloco.messages import snapshot as rows
from diloco.messages.snapshot import PhaseSeconds, Snapshot

FRAGMENTS, ROUND_S = 24, 12.0
STATES = ("training",) * 6 + ("exchanging", "starting")
CODE = ("def read(path):\n", "    with open(path) as file:\n        return file.read()<script>")


def peer_id(index: int) -> str:
    return f"12D3KooW{index * 7919:036d}{index:02d}"


def phases(index: int, version: int) -> PhaseSeconds:
    wait = 0.4 + 2.5 * ((index * 37 + version * 11) % 10) / 10
    return PhaseSeconds(compute=ROUND_S - wait - 0.6, wait=wait, comm=0.4, outer=0.1)


def snapshot(peers: int, elapsed_s: float = 600.0, at: float = 1_800_000_000.0) -> Snapshot:
    """`peers` peers, that long after the run began."""
    version, began = int(elapsed_s / ROUND_S), at - elapsed_s
    tokens = [int(elapsed_s * (900 + 13 * index)) for index in range(peers)]
    applied = sum(int(count * version * ROUND_S / elapsed_s) for count in tokens)

    def loss(when: float) -> float:
        return 2.0 + 3.2 * math.exp(-when / 180) + 0.03 * math.sin(when)

    def peer(index: int, count: int) -> rows.PeerRow:
        return rows.PeerRow(
            peer_id=peer_id(index),
            name=f"worker-{index:02d}",
            state=STATES[(index + int(elapsed_s)) % len(STATES)],
            trains=index % 16 != 15,
            authors=True,
            device="cpu" if index % 3 else "NVIDIA H200",
            version=version,
            version_lag=int(index % 21 == 20),
            inner_step=int(elapsed_s * 2) % 24,
            target_steps=24,
            steps_per_s=1.8 + index / 100,
            tokens=count,
            loss=loss(elapsed_s) + index / 500,
            bytes_sent=count * 40,
            bytes_received=count * 41,
            last_seen_s=(index % 9) / 8,
            seconds=phases(index, version),
            addresses=[],
        )

    def fragment(one: int) -> rows.FragmentRow:
        author = peer_id(one * 5 % peers)
        state = "following" if one * 5 % peers else "collecting"
        name = f"{one * 7919:016x}"
        return rows.FragmentRow(one, version, applied, name, author, author, one % 3, state)

    def closed(one: int) -> rows.Round:
        merged, ended = max(1, peers - one % 3), began + one * ROUND_S
        return rows.Round(0, one, peers, peers, merged, 0, phases(3, one), ended)

    def point(when: float) -> rows.LossPoint:
        count, mean = int(applied * when / elapsed_s), loss(when)
        return rows.LossPoint(began + when, count, mean, mean - 0.1, mean + 0.15)

    given = [
        rows.Contributor(peer_id(at), f"worker-{at:02d}", version, count, count * 40, 1, version)
        for at, count in enumerate(tokens)
    ]
    joins = [(index, f"peer={peer_id(index % peers)} live={index}") for index in range(40, 0, -1)]
    return Snapshot(
        rows.RunInfo(
            "fake", "synchronous", "150m", 500, None, version, applied, at, answered_by=peer_id(0)
        ),
        [peer(index, count) for index, count in enumerate(tokens)],
        [fragment(one) for one in range(FRAGMENTS)],
        [closed(one) for one in range(max(1, version - 40), version + 1)],
        rows.LedgerTotals(sum(tokens), applied, 0, sum(tokens) - applied, given),
        [point(elapsed_s * step / 300) for step in range(1, 301)],
        [rows.LoggedEvent(at - 3.0 * index, "join", text) for index, text in joins],
        samples=[(version, *CODE)],
    )


class FakeSwarm:
    """A `Source` whose peers go on with the clock; it answers nothing from `dies_after_s` on."""

    def __init__(
        self, peers: int, dies_after_s: float = math.inf, clock: Callable[[], float] = time.time
    ) -> None:
        self._peers, self._clock, self._began = peers, clock, clock()
        self._dies_after_s = dies_after_s

    async def ask(self) -> Snapshot:
        elapsed_s = self._clock() - self._began
        if elapsed_s > self._dies_after_s:
            address = "/ip4/203.0.113.7/tcp/4100/p2p/12D3KooW"
            raise SwarmError(f"{address}: peer 000000 does not answer; check the address")
        return snapshot(self._peers, 300.0 + elapsed_s, self._clock())


if __name__ == "__main__":
    from diloco.dashboard.server import Dashboard

    port, peers = map(int, sys.argv[1:3])
    asyncio.run(Dashboard("127.0.0.1", port).watch(FakeSwarm(peers)))
