"""A contribution, from the peer that learned it to the syncer that merges it.

1. Contributor: header. Syncer: verdict, which says from which chunk on it wants the payload.
2. Contributor: payload chunk by chunk, each encoded just before it is sent. At a barrier the syncer validates each
   chunk on arrival and folds it in. With a quorum it collects the whole payload first, because the version may close
   at any moment; so it does at a barrier with what comes late.
3. Contributor: its signed line. Syncer: receipt. Both wait for the version to close.
4. Syncer: the update record, or several in a row if other versions were published meanwhile, or the state if that is
   smaller. The contributor adopts what comes once it is whole.

The syncer's own contribution takes the same way through `fold_chunk` or `fold_whole`, without a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.protocol.fragment import Lease
from diloco.protocol.heads import sign_line, wrong_line
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import Contribution, Receipt, Signed, StateHeader, Verdict
from diloco.protocol.messages.heads import Line, Record
from diloco.protocol.numbers import MAX_SECONDS, within_bounds
from diloco.protocol.penalties import Offence, offences
from diloco.protocol.syncer import Syncer
from diloco.protocol.work import impossible
from diloco.swarm.conversations import framing
from diloco.swarm.conversations.certificates import check_anchor, check_record
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import Stream, only_stream

__all__ = ["Answered", "answer", "contribute", "fold_chunk", "fold_whole", "line_of", "until_open"]

Freeze = Callable[[int], Awaitable[framing.FragmentState]]


@dataclass(frozen=True)
class Answered:
    """What a syncer answered to a contribution, and how long it took.

    `update` are the records, or the state, that lead to the contribution's version or past it; None when the syncer
    refused it and has none.
    """

    verdict: Verdict
    update: Sequence[framing.UpdateRecord] | framing.FragmentState | None
    comm_s: float = 0.0  # on the link, both ways
    wait_s: float = 0.0  # for the others


async def contribute(context: Context, lease: Lease, header: Contribution) -> Answered:
    """Send one contribution to the syncer and wait for what it becomes part of.

    The wait has no limit: the caller ends it when the syncer is lost or loses its lease. Everything in `BROKEN`, and
    `PayloadError`, goes to the caller.
    """
    replica, fragment = context.replica, lease.fragment
    called_at = context.now()

    def check(record: Record) -> None:
        check_record(context.protocol, record, lease.holder)

    async with context.open(lease.holder) as stream:
        begun_at = context.now()
        age_s = within_bounds(header.age_s + context.now() - called_at, MAX_SECONDS)
        await stream.send(header.model_copy(update={"age_s": age_s}))
        verdict = expect(await stream.receive(), Verdict)
        if not verdict.accepted:
            if not verdict.record_follows:
                return Answered(verdict, None)
            missed = expect(await stream.receive(), Record)
            return Answered(verdict, await framing.receive_records(stream, replica, fragment, missed, check))
        for chunk in range(verdict.first_chunk, len(replica.chunks[fragment])):
            await stream.send_payload(replica.encode(fragment, chunk))
        await stream.send(Signed(line=line_of(context, header)))
        expect(await stream.receive(None), Receipt)
        sent_at = context.now()
        message = await stream.receive(None)
        closed_at = context.now()
        update: Sequence[framing.UpdateRecord] | framing.FragmentState
        if isinstance(message, Record):
            update = await framing.receive_records(stream, replica, fragment, message, check)
        else:
            update = await framing.receive_state(
                stream, replica, fragment, expect(message, StateHeader),
                lambda header: check_anchor(context.protocol, header, lease.holder),
            )  # fmt: skip
        return Answered(verdict, update, sent_at - begun_at + context.now() - closed_at, closed_at - sent_at)


async def answer(context: Context, stream: Stream, header: Contribution, freeze: Freeze) -> None:
    """Take a contribution in and send what it becomes part of; `freeze` gives an anchor that all its readers share.

    Raises `Offence` when the header claims what cannot be, or the payload is invalid, and `PayloadError` when the
    version closed without this contribution, or the fragment got another syncer.
    """
    protocol, fragment = context.protocol, header.fragment
    claim = impossible(header, protocol.tokens_per_step, protocol.outer.sync_every)
    if claim is not None:
        raise Offence(claim)
    verdict = protocol.offer(stream.peer, header, context.now())
    if not verdict.accepted:  # one that is a few versions late gets the updates that it missed
        missed = context.records_since(fragment, header.base_version) if verdict.version else []
        await stream.send(verdict.model_copy(update={"record_follows": bool(missed)}))
        await framing.send_records(stream, missed, context.replica)
        return
    syncer, before = protocol.fragments[fragment].syncer, protocol.fragments[fragment].version
    assert syncer is not None  # it has accepted the offer in this turn of the loop, and may be gone in the next
    await stream.send(verdict)
    collects = syncer.collects(stream.peer)
    with only_stream(context.contributing, fragment, stream):  # an older one holds payload, and its peer is gone
        before = await _take(context, stream, header, verdict, syncer, before)
    await stream.send(Receipt())
    await context.tasks.until(
        lambda: (
            protocol.fragments[fragment].version > before
            or not context.holds(syncer)
            or not syncer.keeps(stream.peer, header.base_version)
        )
    )
    closed_at = protocol.fragments[fragment].closed_at
    if records := context.records_since(fragment, header.base_version):
        await framing.send_records(stream, records, context.replica)
    elif collects and context.holds(syncer):
        await framing.send_state(stream, await freeze(fragment), context.replica)
    else:
        raise _another_syncer(fragment)
    await stream.drained()
    if closed_at is not None:
        protocol.delivered(context.now() - closed_at)


async def _take(
    context: Context, stream: Stream, header: Contribution, verdict: Verdict, syncer: Syncer, before: int
) -> int:
    """Take in what a verdict asks for; returns the version that it was not in yet, `before` unless others closed."""
    if syncer.line(stream.peer) is not None:
        await _receive_line(context, stream, header)  # the payload is here, from a stream that broke later
        return before
    if syncer.collects(stream.peer):
        return await _collect(context, stream, syncer, header)
    await _fold_on_arrival(context, stream, syncer, header, verdict.first_chunk)
    return before


async def _fold_on_arrival(
    context: Context, stream: Stream, syncer: Syncer, header: Contribution, first_chunk: int
) -> None:
    """At a barrier: receive a contribution and fold it in chunk by chunk."""
    replica, fragment, peer = context.replica, syncer.fragment, stream.peer
    chunks, base_version = len(replica.chunks[fragment]), header.base_version
    for chunk in range(first_chunk, chunks):
        payload = await _receive_chunk(context, stream, fragment, chunk)
        if not context.holds(syncer) or not syncer.wants(peer, chunk, base_version):
            raise _closed_meanwhile(header)
        with offences():
            fold_chunk(context, syncer, peer, chunk, payload)
    line = await _receive_line(context, stream, header)
    if not context.holds(syncer) or not syncer.wants(peer, chunks, base_version):
        raise _closed_meanwhile(header)
    context.do(context.protocol.arrived(peer, fragment, context.now(), line))


async def _collect(context: Context, stream: Stream, syncer: Syncer, header: Contribution) -> int:
    """Receive a contribution whole and fold it in; returns the version that it was not in yet.

    What comes while a version is closing is folded into the next one.
    """
    fragment = syncer.fragment
    chunks = range(len(context.replica.chunks[fragment]))
    payloads = [await _receive_chunk(context, stream, fragment, chunk) for chunk in chunks]
    if not context.holds(syncer):
        raise _another_syncer(fragment)
    line = await _receive_line(context, stream, header)
    await asyncio.sleep(0)  # what came whole in this turn of the loop is folded in first
    lock = context.locks[fragment]
    async with lock.turn:
        while True:
            await until_open(context, syncer)
            async with lock.writing():
                with offences():
                    before = await fold_whole(context, syncer, stream.peer, header, payloads, line)
            if not context.holds(syncer):
                raise _another_syncer(fragment)
            if before is not None:
                return before
            if not syncer.closing:
                raise PayloadError(f"too many versions of fragment {fragment} were published meanwhile")


async def until_open(context: Context, syncer: Syncer) -> None:
    """Wait while a version is closing, or until the lease is lost; the caller has the `turn` of the lock."""
    await context.tasks.until(lambda: not syncer.closing or not context.holds(syncer))


async def _receive_chunk(context: Context, stream: Stream, fragment: int, chunk: int) -> Tensor:
    payload = torch.empty(context.replica.payload_nbytes(fragment, chunk), dtype=torch.uint8)
    await stream.receive_payload(payload)
    return payload


async def _receive_line(context: Context, stream: Stream, header: Contribution) -> Line:
    """The line behind a payload, which is signed and says what its header said."""
    line = expect(await stream.receive(), Signed).line
    said = (stream.peer, header.base_version, header.base_digest, header.steps, header.tokens, header.total)
    if (line.peer, line.base_version, line.base.hex(), line.steps, line.tokens, line.total) != said:
        raise Offence("a contribution says another thing in its header than in its line")
    why = wrong_line(context.protocol.signer, context.protocol.run_id, header.fragment, line)
    if why is not None:
        raise Offence(why)
    return line


def line_of(context: Context, header: Contribution) -> Line:
    """This peer's line for a contribution, signed."""
    line = Line(
        context.protocol.me, header.base_version, bytes.fromhex(header.base_digest), header.steps, header.tokens,
        header.total,
    )  # fmt: skip
    return sign_line(context.protocol.signer, context.protocol.run_id, header.fragment, line)


def _closed_meanwhile(header: Contribution) -> PayloadError:
    return PayloadError(f"version {header.base_version + 1} of fragment {header.fragment} closed meanwhile")


def _another_syncer(fragment: int) -> PayloadError:
    return PayloadError(f"fragment {fragment} has another syncer now")


def fold_chunk(context: Context, syncer: Syncer, peer: str, chunk: int, payload: Tensor) -> None:
    """Fold in a chunk that the syncer wants, or keep it until the version closes. `PayloadError` changes nothing."""
    context.replica.held[syncer.fragment].put(chunk, peer, payload, syncer.weight(peer))
    syncer.folded(peer)


async def fold_whole(
    context: Context, syncer: Syncer, peer: str, header: Contribution, payloads: Sequence[Tensor],
    line: Line | None = None,
) -> int | None:  # fmt: skip
    """Fold in a contribution that was collected first. The caller holds the fragment's lock for writing.

    This peer's own contribution has no `line` yet. Returns the version that it was not in yet, or None when the syncer
    does not want it any more, or has lost its lease. `PayloadError` changes nothing.

    The arithmetic takes a second per 10^9 parameters, so it runs in a thread while the protocol goes on:

    1. All chunks are checked. Meanwhile the version may close without this contribution; then it is not wanted.
    2. In the turn of the loop in which it is wanted, it counts as arrived. A version that closes from now on counts
       it, and the merge of that version waits for the lock.
    3. It is added to the sum. Should the lease be lost meanwhile, the sum goes with it.
    """
    held, before = context.replica.held.get(syncer.fragment), context.protocol.fragments[syncer.fragment].version
    if held is None or not context.holds(syncer):
        return None
    seen = await in_thread(held.seen, payloads)
    if not context.holds(syncer) or not syncer.wants(peer, 0, header.base_version):
        return None
    line = line or line_of(context, header)
    weight, discount = syncer.weight(peer), syncer.discount(peer)
    if context.protocol.outer.barrier:  # the others' chunks go into the same sums in this thread
        for chunk, payload in enumerate(payloads):
            held.put(chunk, peer, payload, weight, discount)
            syncer.folded(peer)
        context.do(context.protocol.arrived(peer, syncer.fragment, context.now(), line))
        return before
    for _ in payloads:
        syncer.folded(peer)
    context.do(context.protocol.arrived(peer, syncer.fragment, context.now(), line))
    await in_thread(held.fold_whole, payloads, seen, weight, discount)
    return before
