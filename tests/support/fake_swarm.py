"""A swarm that is not there, for the dashboard: `python tests/support/fake_swarm.py PORT PEERS`
serves its page."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable

from diloco.errors import SwarmError
from diloco.messages.snapshot import (
    Contributor,
    FragmentRow,
    LedgerTotals,
    LoggedEvent,
    LossPoint,
    PeerRow,
    PhaseSeconds,
    Round,
    RunInfo,
    Snapshot,
)

FRAGMENTS = 24
ROUND_S = 12.0
STATES = (
    "training",
    "training",
    "training",
    "training",
    "training",
    "training",
    "exchanging",
    "starting",
)


def peer_id(index: int) -> str:
    return f"12D3KooW{index * 7919:036d}{index:02d}"


def phases(index: int, version: int) -> PhaseSeconds:
    wait = 0.4 + 2.5 * ((index * 37 + version * 11) % 10) / 10
    return PhaseSeconds(compute=ROUND_S - wait - 0.6, wait=wait, comm=0.4, outer=0.1)


def snapshot(peers: int, elapsed_s: float = 600.0, at: float = 1_800_000_000.0) -> Snapshot:
    """`peers` peers, that long after the run began."""
    version = int(elapsed_s / ROUND_S)
    names = [f"worker-{index:02d}" for index in range(peers)]
    tokens = [int(elapsed_s * (900 + 13 * index)) for index in range(peers)]
    applied = sum(int(count * version * ROUND_S / elapsed_s) for count in tokens)
    newest = range(max(1, version - 40), version + 1)
    ended = {one: at - elapsed_s + one * ROUND_S for one in newest}

    def loss(when: float) -> float:
        return 2.0 + 3.2 * math.exp(-when / 180) + 0.03 * math.sin(when)

    return Snapshot(
        run=RunInfo(
            run_id="fake",
            mode="synchronous",
            model="150m",
            outer_steps=500,
            tokens=None,
            version=version,
            applied_tokens=applied,
            at=at,
            answered_by=peer_id(0),
        ),
        peers=[
            PeerRow(
                peer_id=peer_id(index),
                name=names[index],
                state=STATES[(index + int(elapsed_s)) % len(STATES)],
                trains=index % 16 != 15,
                authors=True,
                device="cpu" if index % 3 else "NVIDIA H200",
                version=version,
                version_lag=int(index % 21 == 20),
                inner_step=int(elapsed_s * 2) % 24,
                target_steps=24,
                steps_per_s=1.8 + index / 100,
                tokens=tokens[index],
                loss=loss(elapsed_s) + index / 500,
                bytes_sent=tokens[index] * 40,
                bytes_received=tokens[index] * 41,
                last_seen_s=(index % 9) / 8,
                seconds=phases(index, version),
                addresses=[],
            )
            for index in range(peers)
        ],
        fragments=[
            FragmentRow(
                fragment=one,
                version=version,
                work=applied,
                id=f"{one * 7919:016x}",
                next=peer_id(one * 5 % peers),
                author=peer_id(one * 5 % peers),
                here=one % 3,
                state="following" if one * 5 % peers else "collecting",
            )
            for one in range(FRAGMENTS)
        ],
        rounds=[
            Round(
                fragment=0,
                version=one,
                live=peers,
                participating=peers,
                merged=max(1, peers - one % 3),
                staleness=0,
                seconds=phases(3, one),
                closed_at=ended[one],
            )
            for one in newest
        ],
        ledger=LedgerTotals(
            processed=sum(tokens),
            applied=applied,
            discarded=0,
            in_flight=sum(tokens) - applied,
            contributions=[
                Contributor(
                    peer_id=peer_id(index),
                    name=names[index],
                    tokens=tokens[index],
                    outer_steps=version,
                    bytes=tokens[index] * 40,
                    first_version=1,
                    last_version=version,
                )
                for index in range(peers)
            ],
        ),
        loss=[
            LossPoint(
                at=at - elapsed_s + when,
                tokens=int(applied * when / elapsed_s),
                loss=loss(when),
                low=loss(when) - 0.1,
                high=loss(when) + 0.15,
            )
            for when in (elapsed_s * step / 300 for step in range(1, 301))
        ],
        events=[
            LoggedEvent(
                at=at - 3.0 * index, kind="join", text=f"peer={peer_id(index % peers)} live={index}"
            )
            for index in range(40, 0, -1)
        ],
        samples=[
            (
                version,
                "def read(path):\n",
                "    with open(path) as file:\n        return file.read()<script>",
            )
        ],
    )


class FakeSwarm:
    """A `Source` whose peers go on with the clock; it answers nothing from `dies_after_s` on."""

    def __init__(
        self, peers: int, dies_after_s: float = math.inf, clock: Callable[[], float] = time.time
    ) -> None:
        self._peers, self._clock = peers, clock
        self._began = clock()
        self._dies_after_s = dies_after_s

    async def ask(self) -> Snapshot:
        elapsed_s = self._clock() - self._began
        if elapsed_s > self._dies_after_s:
            raise SwarmError(
                "/ip4/203.0.113.7/tcp/4100/p2p/12D3KooW: peer 000000 does not answer; check the"
                " address"
            )
        return snapshot(self._peers, 300.0 + elapsed_s, self._clock())


if __name__ == "__main__":
    from diloco.dashboard.server import Dashboard

    dies_after_s = float(sys.argv[3]) if len(sys.argv) > 3 else math.inf
    asyncio.run(
        Dashboard("127.0.0.1", int(sys.argv[1])).watch(FakeSwarm(int(sys.argv[2]), dies_after_s))
    )
