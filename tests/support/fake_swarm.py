"""A swarm that is not there, for the dashboard: `python tests/support/fake_swarm.py PORT PEERS`
serves its page."""

import asyncio
import math
import sys
import time
from collections.abc import Callable

from diloco.errors import SwarmError
from diloco.messages import snapshot as rows
from diloco.messages.snapshot import PhaseSeconds, Snapshot

FRAGMENTS, ROUND_S = 24, 12.0
CODE = ("def read(path):\n", "    with open(path) as file:\n        return file.read()<script>")
SECONDS = PhaseSeconds(compute=9.5, wait=2.0, comm=0.4, outer=0.1)


def peer_id(index: int) -> str:
    return f"12D3KooW{index * 7919:036d}{index:02d}"


def snapshot(peers: int, elapsed_s: float = 600.0, at: float = 1_800_000_000.0) -> Snapshot:
    """`peers` peers, that long after the run began."""
    version, began = int(elapsed_s / ROUND_S), at - elapsed_s
    tokens = {index: int(elapsed_s * (900 + 13 * index)) for index in range(peers)}
    processed = sum(tokens.values())
    applied = int(processed * version * ROUND_S / elapsed_s)

    def peer(index: int, count: int) -> rows.PeerRow:
        state = "training" if index % 8 < 6 else "exchanging"
        device = "cpu" if index % 3 else "NVIDIA H200"
        return rows.PeerRow(
            peer_id=peer_id(index),
            name=f"worker-{index:02d}",
            state=state,
            trains=index % 16 != 15,
            authors=True,
            device=device,
            version=version,
            version_lag=int(index % 21 == 20),
            inner_step=int(elapsed_s * 2) % 24,
            target_steps=24,
            steps_per_s=1.8 + index / 100,
            last_seen_s=(index % 9) / 8,
            seconds=SECONDS,
            addresses=[],
            loss=loss(elapsed_s) + index / 500,
            eval_loss=loss(elapsed_s) + 0.05,
            tokens_per_s=900.0 + 13 * index,
            bytes_sent=count * 40,
            bytes_received=count * 41,
            tokens=count,
            trained_s=elapsed_s,
        )

    def loss(when: float) -> float:
        return 2.0 + 3.2 * math.exp(-when / 180) + 0.03 * math.sin(when)

    def fragment(index: int) -> rows.FragmentRow:
        author = index * 5 % peers
        tip = index, version, applied, f"{index * 7919:016x}"
        state = "following" if author else "collecting"
        return rows.FragmentRow(*tip, peer_id(author), peer_id(author), index % 3, state)

    def closed(number: int) -> rows.Round:
        merged = max(1, peers - number % 3)
        return rows.Round(0, number, peers, peers, merged, 0, SECONDS, began + number * ROUND_S)

    def point(when: float) -> rows.LossPoint:
        count, mean = int(applied * when / elapsed_s), loss(when)
        return rows.LossPoint(began + when, count, mean, mean - 0.1, mean + 0.15)

    def given(index: int, count: int) -> rows.Standing:
        said = f"worker-{index:02d}", version, count, count * 40, 1, version
        return rows.Standing(peer_id(index), *said, "cpu", count // 2, 90_000.0 * (1 + index % 5))

    contributors = [given(*one) for one in tokens.items()]
    run = "fake", "synchronous", "150m", 500, None, version, applied, at
    joins = [(index, f"peer={peer_id(index % peers)} live={index}") for index in range(40, 0, -1)]
    return Snapshot(
        rows.RunInfo(*run, answered_by=peer_id(0)),
        [peer(*one) for one in tokens.items()],
        [fragment(index) for index in range(FRAGMENTS)],
        [closed(number) for number in range(max(1, version - 40), version + 1)],
        rows.LedgerTotals(processed, applied, 0, processed - applied, contributors, 7200.0),
        [point(elapsed_s * step / 300) for step in range(1, 301)],
        [rows.LoggedEvent(at - 3.0 * index, "join", text) for index, text in joins],
        samples=[(version, *CODE)],
        held_out=[point(elapsed_s * step / 40) for step in range(1, 41)],
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

    port, peers = map(int, sys.argv[1:])
    asyncio.run(Dashboard("127.0.0.1", port).watch(FakeSwarm(peers)))
