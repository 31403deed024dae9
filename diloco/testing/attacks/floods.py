"""Attacks by words that cost the others time, memory, calls or their lives, and change no value of the model."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import msgpack
import torch

from diloco.errors import PayloadError
from diloco.protocol.messages.base import MAX_FRAME_BYTES
from diloco.protocol.messages.bulk import InnerRequest, StateRequest
from diloco.protocol.messages.control import Figures, Status
from diloco.sim import network as simulated
from diloco.swarm.conversations.inner_state import InnerState, send_inner
from diloco.swarm.wire.streams import BROKEN, CONTROL, Stream
from diloco.testing.attacks.arena import attack
from diloco.testing.attacks.attacker import Attacker, bend

__all__ = ["ASYNC", "HUGE", "MOST"]

HUGE = 1.7e308
MOST = 2**62 - 1
ASYNC = {"quorum": 1, "staleness_limit": 10, "optimizer": "delayed_nesterov"}


# -- words that others wait for ---------------------------------------------------------------------------------------


@attack("slow-word", "F6", "member", "says that it makes 1e-6 steps a second, and contributes nothing")
async def calls_itself_slow(x: Attacker) -> None:
    x.arena.idle.add(x.me)
    x.status(lambda true: {"state": "training", "steps_per_s": 1e-6, "inner_step": 0, "target_steps": 4})


@attack("seems-to-get-on", "F6", "member", "counts steps in its heartbeats, and contributes nothing")
async def seems_to_get_on(x: Attacker) -> None:
    x.arena.idle.add(x.me)
    steps = iter(range(1, 10**9))
    x.status(lambda true: {"state": "training", "steps_per_s": 1.0, "inner_step": next(steps)})


# -- numbers at their bounds ------------------------------------------------------------------------------------------


@attack("huge-loss", "C3a", "member", "two say a loss of 1.7e308", attackers=2)
async def huge_loss(x: Attacker) -> None:
    """Two of them, so that a sum is not finite."""
    for each in (x, x.accomplice(0)):
        each.status(lambda true: {"figures": Figures(loss=HUGE)})


@attack("huge-pace", "C3c", "member", "says 1.7e308 steps a second while somebody joins")
async def huge_pace(x: Attacker) -> None:
    """It says so once, and is silent while somebody joins."""
    x.status(lambda true: {"steps_per_s": HUGE})
    await asyncio.sleep(1.0)
    bend(x.node._mesh, "broadcast", lambda _: lambda message: None)
    x.arena.joins("j")


@attack("huge-seconds", "C3b", "member", "says rounds of 1.7e308 s")
async def huge_seconds(x: Attacker) -> None:
    rounds = iter(range(1, 10**9))
    x.status(lambda true: {"figures": Figures(rounds=next(rounds), seconds=[HUGE] * 4)})


@attack("every-number", "F8", "member", "says each number of a status at its bound")
async def every_number(x: Attacker) -> None:
    """Each field of a status in turn at its bound, and a newcomer meanwhile."""
    bounds: list[dict[str, Any]] = [
        {"inner_step": MOST},
        {"target_steps": MOST},
        {"steps_per_s": HUGE},
        {"steps_per_s": 5e-324},
        {"tokens": MOST},
        {"units": [[0, MOST]]},
        {"figures": Figures(discarded=MOST)},
        {"figures": Figures(bytes_sent=MOST, bytes_received=MOST)},
        {"figures": Figures(rounds=MOST, seconds=[HUGE] * 4)},
        {"figures": Figures(loss=HUGE)},
    ]
    now: dict[str, Any] = {}
    x.status(lambda true: dict(now))
    for number, fields in enumerate(bounds):
        now.clear()
        now |= fields
        x.say(x.node.protocol.status(figures=True))
        await asyncio.sleep(3.0)
        if number == 3:
            x.arena.joins("j")
    now.clear()


# -- calls, events, memory, processor time ----------------------------------------------------------------------------


@attack("many-names", "F14", "host", "one hello names 2600 peers", limits={"calls_for_one_frame": 200})
async def names_many_peers(x: Attacker) -> None:
    """One hello names 2600 peers, which every honest peer calls."""
    names = [f"nobody-{number:04d}" for number in range(2600)]
    addresses = {name: [f"/ip4/10.0.0.1/tcp/{1 + port}/p2p/{name}" for port in range(4)] for name in names}
    hello = x.node.protocol.hello().model_copy(update={"peers": names, "addresses": addresses})
    victim = x.honest()[0]
    async with x.stream(victim, CONTROL) as stream:
        await stream.send(hello)
        await asyncio.sleep(30.0)
        calls = sum(n for (one, other), n in x.arena.opened.items() if one == victim and other.startswith("nobody-"))
        x.measure(calls_for_one_frame=calls)


@attack("flood-of-claims", "F20", "host", "claims 1000 times")
async def floods_with_claims(x: Attacker) -> None:
    for number in range(1000):
        lease = x.lease
        x.say(x.claim(term=lease.term + 1 + number))
        if number % 50 == 0:
            await asyncio.sleep(0.5)


@attack("flood-of-requests", "F20", "host", "begins 300 streams with what begins no stream")
async def floods_with_requests(x: Attacker) -> None:
    """Bulk streams that begin with what no bulk stream begins with."""
    victim = x.honest()[0]
    for number in range(300):
        try:
            async with x.stream(victim) as stream:
                await stream.send(Status(state="training", versions=[number]))
                await stream.receive()
        except BROKEN:
            await asyncio.sleep(0.1)


@attack(
    "state-copies",
    "F9",
    "host",
    "asks 40 times for the outer state, and reads nothing",
    limits={"copies_of_the_model": 4},
    elements=3001,
    pieces=(4096, 4096),
)
async def copies_states(x: Attacker) -> None:
    """Forty requests for the outer state, whose answers nobody reads."""
    victim, numel = x.arena.holder(), x.node.replica.anchors[0].numel()

    def alive() -> int:
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return sum(1 for each in found if each.dtype == torch.float32 and each.numel() == numel)

    before, kept = alive(), simulated.BACKLOG_BYTES
    uplink = x.arena.network.uplinks[victim]
    free = uplink.held
    simulated.BACKLOG_BYTES = 0
    uplink.held = lambda pipe: pipe.target == x.me or free(pipe)
    try:
        asked = [asyncio.ensure_future(_asks(x, victim)) for _ in range(40)]
        await asyncio.sleep(2.0)
        x.measure(copies_of_the_model=alive() - before)
        for task in asked:
            task.cancel()
    finally:
        simulated.BACKLOG_BYTES = kept
        uplink.held = free


async def _asks(x: Attacker, victim: str) -> None:
    async with x.stream(victim) as stream:
        await stream.send(StateRequest(manifest_hash=x.node.protocol.manifest_hash, fragment=0, outer=True))
        await asyncio.sleep(10.0)


@attack(
    "heavy-frames",
    "F16",
    "host",
    "frames of 1 MiB that take long to be found wrong",
    limits={"frame_over_unpacking": 5},
)
async def sends_heavy_frames(x: Attacker) -> None:
    """Frames of 1 MiB that take long to be found wrong, sent on and on."""
    contributors = {f"{number:05x}": -1 for number in range(115_000)}
    frame = msgpack.packb({"kind": "record", "fragment": 0, "term": 1, "version": 1, "contributors": contributors})
    assert len(frame) <= MAX_FRAME_BYTES
    begun = time.process_time()
    for _ in range(5):
        msgpack.unpackb(frame)
    unpacked_s = (time.process_time() - begun) / 5
    victim, spent_s = x.honest()[0], 0.0
    for _ in range(4):
        begun = time.process_time()
        try:
            async with x.stream(victim) as stream:
                stream._writer.write(len(frame).to_bytes(4, "big") + frame)
                await stream.receive()
        except BROKEN:
            pass
        spent_s += time.process_time() - begun
    x.measure(frame_over_unpacking=spent_s / 4 / unpacked_s)


# -- data and the inner optimizer -------------------------------------------------------------------------------------


@attack(
    "all-data", "F17", "member", "says that all data is its own", units=True, limits={"data_skipped_over_used": 100}
)
async def takes_all_data(x: Attacker) -> None:
    """Its contributions name all data there is as theirs, and its statuses move the cursor."""
    bend(x.node._units.data, "send", lambda _: lambda: [(0, MOST)])
    holder = x.arena.lives[x.arena.holder()]

    def cursor() -> int:
        ledger = None if holder.node is None else holder.node.protocol.accounts.dealer.ledger
        return 0 if ledger is None else ledger.cursor

    begun, asked = cursor(), x.loop.seconds
    x.status(lambda true: {"units": [[cursor() + 2**24 - 1, cursor() + 2**24]]})
    while True:
        await asyncio.sleep(5.0)
        used = sum(life.sync.steps for life in x.arena.lives.values() if life.sync is not None)
        x.measure(data_skipped_over_used=(cursor() - begun) / max(1, used), after_s=x.loop.seconds - asked)


@attack(
    "false-moments", "F10", "member", "gives a newcomer moments of 1e6", adamw=True, limits={"newcomer_moves_by": 2.0}
)
async def gives_false_moments(x: Attacker) -> None:
    """A newcomer asks the fastest peer for the state of AdamW."""

    async def poisoned(stream: Stream, request: InnerRequest) -> None:
        state = await x.node._server._inner.get()
        values = [
            torch.full_like(part, 0.0 if name.endswith("_sq") else 1e6)
            for name, part in zip(state.layout.names, torch.split(state.values, list(state.layout.numels)), strict=True)
        ]
        await send_inner(stream, InnerState(state.layout, (1000,) * state.layout.num_steps, torch.cat(values)))

    x.answers(InnerRequest, poisoned)
    x.status(lambda true: {"steps_per_s": 100.0})
    await asyncio.sleep(3.0)
    life = x.arena.joins("j")
    await x.until(lambda: life.began, 60.0)
    await asyncio.sleep(1.5)
    node = life.node
    moved = (
        float("inf")
        if node is None
        else float((node.replica.parameters["w"].detach() - node.replica.anchors[0]).abs().max())
    )
    x.measure(newcomer_moves_by=moved)


# -- versions for nothing ---------------------------------------------------------------------------------------------


@attack(
    "free-versions",
    "F7",
    "member",
    "contributes zeros to each version at once, without a barrier",
    outer=ASYNC,
    limits={"part_of_contributions": 0.5},
)
async def makes_versions(x: Attacker) -> None:
    """Contributes to each version as soon as the one before it is there."""
    x.arena.idle.add(x.me)
    x.sends(lambda honest, *_: 0.0 * honest)
    failures = 0
    while failures < 200:
        try:
            answered = await x.contribute()
            refused = not answered.verdict.accepted
        except (*BROKEN, PayloadError):
            refused, failures = True, failures + 1
        await asyncio.sleep(0.3 * refused)
        _measure_versions(x)


def _measure_versions(x: Attacker) -> None:
    life = next(life for life in x.arena.honest() if life.node is not None)
    assert life.node is not None
    shares = life.node.protocol.accounts.shares(0)
    made = sum(share.contributions for share in shares.values())
    mine = shares[x.me].contributions if x.me in shares else 0
    x.measure(part_of_contributions=mine / max(1, made))
