"""A contribution, from the peer that learned it to the syncer that merges it.

1. Contributor: header. Syncer: verdict.
2. Contributor: payload. The syncer validates it once it is whole, and keeps it until a version closes. What comes while
   one is closing waits for the next.
3. Contributor: its signed line. Syncer: receipt. Both wait for the version to close.
4. Syncer: the update record, or several in a row if other versions were published meanwhile, or the state if that is
   smaller. The contributor adopts what comes once it is whole.

The syncer's own contribution takes the same way through `keep`, without a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.streams import Stream

__all__ = ["Answered", "answer", "contribute", "keep", "line_of"]

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
        for part in replica.payload_chunks(fragment, replica.captured(fragment))[verdict.first_chunk :]:
            await stream.send_payload(part)
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
    whole = syncer.line(stream.peer) is not None  # from a stream that broke later
    await stream.send(verdict.model_copy(update={"first_chunk": len(context.replica.chunks[fragment]) if whole else 0}))
    with _only_stream(context.contributing, fragment, stream):  # an older one holds payload, and its peer is gone
        if whole:
            await _receive_line(context, stream, header)
        else:
            before = await _receive(context, stream, syncer, header)
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
    elif context.holds(syncer):
        await framing.send_state(stream, await freeze(fragment), context.replica)
    else:
        raise _another_syncer(fragment)
    await stream.drained()
    if closed_at is not None:
        protocol.delivered(context.now() - closed_at)


async def _receive(context: Context, stream: Stream, syncer: Syncer, header: Contribution) -> int:
    """Receive a contribution whole and keep it; returns the version that it was not in yet."""
    replica, fragment = context.replica, syncer.fragment
    payload = short_lived(replica.payload_nbytes(fragment))
    for part in replica.payload_chunks(fragment, payload):
        await stream.receive_payload(part)
        syncer.progressed(stream.peer)
        if not context.holds(syncer):
            raise _another_syncer(fragment)
    with offences():
        await in_thread(replica.payload_norm, fragment, payload)
    line = await _receive_line(context, stream, header)
    return await keep(context, syncer, header, payload, line)


async def keep(context: Context, syncer: Syncer, header: Contribution, payload: Tensor, line: Line) -> int:
    """Keep a whole contribution for the version that the syncer makes next, once it is not closing one.

    Returns the version that it was not in yet. Raises `PayloadError` when the syncer does not want it any more, or has
    lost its lease.
    """
    fragment = syncer.fragment
    await asyncio.sleep(0)  # what came whole in this turn of the loop is kept first
    await context.tasks.until(lambda: not syncer.closing or not context.holds(syncer))
    if not context.holds(syncer):
        raise _another_syncer(fragment)
    if not syncer.wants(line.peer, header.base_version):
        raise PayloadError(f"version {header.base_version + 1} of fragment {fragment} closed meanwhile")
    before = context.protocol.fragments[fragment].version
    syncer.keep(line.peer, payload)
    context.do(context.protocol.arrived(line.peer, fragment, context.now(), line))
    return before


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


def _another_syncer(fragment: int) -> PayloadError:
    return PayloadError(f"fragment {fragment} has another syncer now")


@contextmanager
def _only_stream(streams: dict[tuple[str, int], Stream], fragment: int, stream: Stream) -> Iterator[None]:
    """One stream of a peer about a fragment at a time, kept in `streams`: a newer one ends the older one."""
    key = (stream.peer, fragment)
    older = streams.pop(key, None)
    if older is not None:
        older.close()
    streams[key] = stream
    try:
        yield
    finally:
        if streams.get(key) is stream:
            del streams[key]
