"""Attacks on what the swarm believes: versions, claims, anchors, records, hand-overs, shares, the clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diloco.outer.digest import digest_of
from diloco.protocol.actions import Merge
from diloco.protocol.messages.bulk import Contribution, StateRequest, Verdict
from diloco.protocol.messages.control import Published
from diloco.protocol.shares import Share
from diloco.swarm.conversations import framing
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.wire.streams import Stream
from diloco.testing.attacks.arena import attack
from diloco.testing.attacks.attacker import Attacker, bend
from diloco.testing.attacks.floods import ASYNC, HUGE, MOST

__all__ = ["FAR", "MUCH"]

FAR = 2**61
MUCH = 10**15
EVERY_PART = {"audit": 1.0}  # of each version; with less, a proof takes longer than these runs (see `versions_until`)


def _poison(x: Attacker, value: float) -> Tensor:
    return torch.full_like(x.anchor, value)


@attack("higher-version", "F1", "host", "says in a heartbeat that it has the next version, and serves 777 everywhere")
async def says_a_version(x: Attacker) -> None:
    version = x.lease.version + 1
    x.serves(_poison(x, 777.0), version=version)
    x.says_version(lambda: version)


@attack("far-version", "F1", "host", "the same with version and clock 2^61")
async def says_a_far_version(x: Attacker) -> None:
    x.serves(_poison(x, 777.0), version=FAR, shares=x.shares(FAR, FAR))
    x.says_version(lambda: FAR)


@attack("false-clock", "F1", "host", "the same with the right values and 10^15 tokens")
async def moves_the_clock(x: Attacker) -> None:
    """The anchor is nearly right; who contributed how much to it is not."""
    version = x.lease.version + 1
    x.serves(x.anchor.clone(), version=version, shares=x.shares(MUCH, version))
    x.says_version(lambda: version)


@attack("disputes-alone", "F1", "member", "says that its history has more work, and serves 777 with shares it invents")
async def disputes_alone(x: Attacker) -> None:
    """The syncer asks whoever disputes its history; the certificate is right, and the contributors signed nothing."""
    version = x.lease.version + 1
    shares = {peer: Share(9, MUCH // 100, 1, version) for peer in [*x.honest(), x.me]}
    x.serves(_poison(x, 777.0), version=version, shares=shares)
    x.status(lambda _: {"disputed": [x.index]})


@attack(
    "disputes-by-its-own-work", "F1", "member", "the same with shares that are right, but for its own, which it signs"
)
async def disputes_by_its_own_work(x: Attacker) -> None:
    version = x.lease.version + 1
    x.serves(_poison(x, 777.0), version=version, shares=x.shares(MUCH, version))
    x.status(lambda _: {"disputed": [x.index]})


@attack("takes-a-fragment", "F2", "member", "claims the next term over a living syncer, and publishes +100", proof=True)
async def takes_a_fragment(x: Attacker) -> None:
    await x.until(lambda: x.fragment.agrees())
    x.takes()
    x.publishes(lambda master: master.add_(100.0))


@attack("claims-an-anchor", "F2", "host", "claims with an anchor of its own, of the same version", proof=True)
async def claims_an_anchor(x: Attacker) -> None:
    poison = _poison(x, -5.0)
    claim = x.claim(digest=digest_of(poison))
    x.serves(poison, version=claim.version)
    x.say(claim)


@attack("forged-record", "F3", "host", "answers with a record of +33 that no syncer made", proof=True)
async def forges_a_record(x: Attacker) -> None:
    """Whoever asks for the newest version gets a record of the attacker's own."""
    replica, fragment = x.node.replica, x.fragment
    await x.until(lambda: fragment.agrees())

    async def forge(stream: Stream, request: StateRequest) -> None:
        before = x.anchor
        update, after = torch.empty(replica.update_nbytes(x.index), dtype=torch.uint8), before.clone()
        x.encode(before + 33.0, before, update)
        x.apply(after, update)
        version, shares = fragment.version + 1, x.shares(MUCH, fragment.version + 1)
        header = x.certificate(version, digest_of(after), fragment.digest, shares, MUCH)
        await framing.send_records(stream, [UpdateRecord(header, update)], replica)

    x.answers(StateRequest, forge)
    x.says_version(lambda: fragment.version + 1)


@attack("publishes-anything", "F3", "syncer", "adds 100 to every value of each version", proof=True)
async def publishes_anything(x: Attacker) -> None:
    x.publishes(lambda master: master.add_(100.0))


@attack(
    "biased-chunk",
    "F3",
    "syncer",
    "adds 0.1 to one chunk of a hundred in each version",
    proof=True,
    elements=800,
    pieces=(8, 16),
    outer=EVERY_PART,
)
async def biases_a_chunk(x: Attacker) -> None:
    x.publishes(lambda master: master[:8].add_(0.1))


@attack("reversed-update", "F3", "syncer", "publishes the update with the other sign", proof=True, outer=EVERY_PART)
async def publishes_the_reverse(x: Attacker) -> None:
    """Each version is what the contributions would make, with the other sign: as long as an honest one. Its head says
    what an honest one would say.
    """

    def reverse(merge_: Any) -> Any:
        def merged(step: Any, update: Tensor, judged: Any) -> str:
            peers, judgement = judged
            reversed_ = replace(judgement, coefficients=tuple(-each for each in judgement.coefficients))
            return str(merge_(step, update, (peers, reversed_)))

        return merged

    bend(x.node.replica.held[x.index], "merge_", reverse)


@attack("equivocates", "F3", "syncer", "publishes one history to two peers and another to two", proof=True)
async def equivocates(x: Attacker) -> None:
    x.has_two_faces(x.honest()[:2], 3.0)


@attack("false-master", "F3", "syncer", "leaves, and hands over the master + 500")
async def hands_a_false_master_over(x: Attacker) -> None:
    async def poisoned(stream: Stream, request: StateRequest) -> None:
        if request.outer:
            x.node.replica.held[x.index].master.add_(500.0)
        await honest(stream, request)

    honest = x.answers(StateRequest, poisoned)
    x.arena.leave(x.me)


@attack("false-shares", "F3", "syncer", "serves a newcomer the right anchor with 10^15 tokens of its own", proof=True)
async def lies_about_shares(x: Attacker) -> None:
    """Everything about the anchor is right, but for who contributed how much to it."""
    true = x.node.protocol.accounts.shares
    bend(x.node.protocol.accounts, "shares", lambda _: lambda index: {**true(index), **_padded(x, true(index))})
    x.arena.joins("j")
    await asyncio.sleep(0)


def _padded(x: Attacker, shares: Any) -> Any:
    return {x.me: shares[x.me]._replace(tokens=MUCH)} if x.me in shares else {}


@attack("false-publication", "F11", "syncer", "announces a version that nobody has")
async def publishes_nothing(x: Attacker) -> None:
    """A version is announced that nobody has, and no contribution is taken any more."""

    async def refuse(stream: Stream, request: object) -> None:
        await stream.refuse("not now")

    async def decline(stream: Stream, request: Contribution) -> None:
        await stream.send(Verdict(accepted=False, reason="not now", version=version, term=x.lease.term))

    version = x.lease.version + 1
    x.answers(StateRequest, refuse)
    x.answers(Contribution, decline)
    x.says_version(lambda: version)
    lease = x.lease
    x.say(
        Published(
            fragment=x.index,
            term=lease.term,
            version=version,
            digest="0" * 64,
            contributors=x.honest(),
            applied_tokens=0,
        )
    )


@attack("never-merges", "F11", "syncer", "takes every contribution, and makes no version", lasts_s=660.0)
async def never_merges(x: Attacker) -> None:
    bend(
        x.node.context, "carry_out", lambda honest: lambda actions: honest([a for a in actions if type(a) is not Merge])
    )


@attack("every-number-of-a-syncer", "F8", "syncer", "says each number of a publication and a claim at its bound")
async def says_numbers_as_syncer(x: Attacker) -> None:
    """Each number that a syncer says, in turn at its bound."""
    true = x.lease
    bounds: list[dict[str, Any]] = [
        {"staleness": HUGE},
        {"cursor": MOST},
        {"open": [[0, MOST]]},
        {"applied_tokens": MOST},
        {"version": MOST},
        {"term": MOST},
    ]
    for fields in bounds:
        await asyncio.sleep(3.0)
        published = Published(
            fragment=x.index, term=true.term, version=x.fragment.version + 1, digest=x.fragment.digest, contributors=[],
            applied_tokens=true.applied_tokens,
        )  # fmt: skip
        x.say(published.model_copy(update=fields))
        x.say(x.claim(term=true.term).model_copy(update={k: v for k, v in fields.items() if k != "staleness"}))

    async def decline(stream: Stream, request: Contribution) -> None:
        await stream.send(Verdict(accepted=True, first_chunk=MOST, version=MOST, term=MOST))

    x.answers(Contribution, decline)
    await asyncio.sleep(20.0)
    x.arena.crash(x.me)


@attack(
    "ends-the-run", "C3d", "host", "claims version 10^6 and 10^12 tokens, without a barrier", outer=ASYNC, proof=True
)
async def ends_the_run(x: Attacker) -> None:
    x.say(x.claim(version=10**6, applied_tokens=10**12))


@attack("numbers-of-the-dead", "C3e", "host", "leaves a state at version 2^62 - 2, and goes")
async def leaves_numbers_at_the_bound(x: Attacker) -> None:
    """Once syncer it says the largest numbers that fit, and goes."""
    most = 2**62 - 2
    anchor = x.anchor.clone()
    x.serves(anchor, version=most, shares=x.shares(most, most))
    claim = x.claim(version=most, digest=digest_of(anchor), applied_tokens=most)

    async def decline(stream: Stream, request: Contribution) -> None:
        await stream.send(Verdict(accepted=False, late=True, reason="late", version=most, term=claim.term))

    x.answers(Contribution, decline)
    x.says_version(lambda: most)
    x.say(claim)
    await asyncio.sleep(10.0)
    x.arena.crash(x.me)


@attack(
    "lone-fast-peer",
    "C1",
    "nobody",
    "a peer four times as fast is cut off for two minutes, and comes back",
    honest=7,
    lasts_s=180.0,
    steps_s={0: 0.25},
    limits={"lost_of_the_majority": 0.1},
)
async def alone_and_fast(x: Attacker) -> None:
    """Nobody lies: a fast peer is cut off, and comes back with more versions than the others."""
    arena = x.arena
    arena.goal = 10**9
    lone, others = "a", [name for name in x.honest() if name != "a"]
    before = sum(_tokens(x, name) for name in others)
    x.cut(lone, others)
    for other in others:
        arena.network.reset(lone, other)
    await asyncio.sleep(120.0)
    learned = sum(_tokens(x, name) for name in others) - before
    x.mend(lone, others)
    await asyncio.sleep(60.0)
    node = arena.lives["b"].node
    assert node is not None
    shares = node.protocol.accounts.shares(0)
    kept = sum(shares[name].tokens for name in others if name in shares) - before
    x.measure(lost_of_the_majority=max(0.0, 1 - kept / learned))
    arena.goal = max(life.node.protocol.steps for life in arena.living() if life.node is not None) + 2


def _tokens(x: Attacker, name: str) -> int:
    """What the peers on this side have of a peer's tokens in their anchor."""
    node = x.arena.lives["b"].node
    assert node is not None
    share = node.protocol.accounts.shares(0).get(name)
    return 0 if share is None else share.tokens
