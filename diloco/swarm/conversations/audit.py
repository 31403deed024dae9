"""Audits: a syncer shows what it merged, and a proof that it merged something else goes round.

1. An auditor asks the author of a version for parts of the contributions to it. The author keeps those of its newest
   two versions, and shows each part with the paths to the root that its contributor signed.
2. `Evidence` is what the auditor has then: the part in each update of a row of versions, and the contributions to the
   last one. `outer.audit` says whether an honest syncer can have made it. Everything in it is signed, so whoever gets
   it comes to the same result.
3. An auditor that finds a deviation offers the evidence to everybody it knows, and so does each peer that checked it.

A request for what is not kept any more is refused; that is no offence. An answer that does not fit its root is one, and
so is evidence that is not what it says. Evidence that is sound and shows no deviation is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from diloco.errors import PayloadError
from diloco.outer.audit import FORGOTTEN, Deviation, audit, memory
from diloco.outer.codecs import Codec
from diloco.outer.optimizer import OuterStep
from diloco.outer.recompute import Counted, Part, Seen
from diloco.outer.replica import Replica
from diloco.outer.shown import Shown, opens, part_at, part_count
from diloco.protocol.audits import wrong_counts
from diloco.protocol.heads import signed_head, wrong_record
from diloco.protocol.limits import audited_parts
from diloco.protocol.messages import expect
from diloco.protocol.messages.audits import Accusation, AuditRequest, Opening, ProofStep, Wanted
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.penalties import Offence
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import Stream

__all__ = ["Evidence", "answer", "ask", "deviation", "offer", "receive", "step_of", "unsound"]


@dataclass(frozen=True)
class Evidence:
    """What an audit of one part goes by.

    Attributes:
        number, part: which part, as `part_at` numbers them.
        steps: versions in a row, with the part in the update to each.
        record: the certificate of the last one. shown: the part in each contribution to it, in the order of its lines.
    """

    number: int
    part: Part
    steps: Sequence[tuple[Head, Shown]]
    record: Record
    shown: Sequence[Shown]


def step_of(head: Head) -> OuterStep:
    """The outer step that leads to the version of a head."""
    return OuterStep(head.version - 1, len(head.weights), head.pushes, head.delay)


# -- judging ----------------------------------------------------------------------------------------------------------


def deviation(replica: Replica, evidence: Evidence) -> Deviation | None:
    """What the evidence proves; None if an honest syncer may have made these updates."""
    part, head = evidence.part, evidence.record.head
    counted = [
        Counted(shown.payload, weight, scale=coefficient / weight if weight else 0.0)
        for shown, weight, coefficient in zip(evidence.shown, head.weights, head.coefficients, strict=True)
    ]
    *before, (_, update) = evidence.steps
    log = [Seen(step_of(one), shown.payload) for one, shown in before]
    log.append(Seen(step_of(head), update.payload, counted))
    # An anchor moves while this looks on, and who checks this later has a later one: only its sizes count.
    largest = 2 * replica.anchors[head.fragment][part.start : part.stop].abs().max()
    return audit(part, replica.settings, largest.expand(part.numel), log)


def unsound(context: Context, evidence: Evidence) -> str | None:
    """Why nobody can conclude anything from evidence, in one line."""
    protocol, replica = context.protocol, context.replica
    steps, record = evidence.steps, evidence.record
    heads = [head for head, _ in steps]
    if heads[-1] != record.head:
        return "the last step of a proof is not that of its certificate"
    for one, other in pairwise(heads):
        after = (one.fragment, one.author, one.term, one.version + 1, one.digest)
        if after != (other.fragment, other.author, other.term, other.version, other.digest_before):
            return "the versions of a proof are not in a row, of one syncer under one term"
    if not all(signed_head(protocol.signer, protocol.run_id, head) for head in heads):
        return f"a head in a proof is not signed by {heads[0].author}"
    for head, shown in steps:
        if not head.weights or not opens(replica.down, head.update, evidence.part, shown):
            return f"a proof shows another update to version {head.version} than the one that was signed"
    why = wrong_record(protocol.signer, protocol.run_id, record) or wrong_counts(protocol.outer, record)
    if why is not None:
        return why
    if len(evidence.shown) != len(record.lines):
        return "a proof shows other contributions than its certificate has lines"
    for line, shown in zip(record.lines, evidence.shown, strict=True):
        if not opens(replica.up, line.root, evidence.part, shown):
            return f"a proof shows another contribution of {line.peer} than the one that was signed"
    enough = memory(protocol.outer, [step_of(head) for head in heads]) <= FORGOTTEN
    return None if enough else f"a proof with {len(heads)} versions does not say what the momentum is"


# -- asking the author ------------------------------------------------------------------------------------------------


async def ask(
    context: Context, stream: Stream, record: Record, parts: Sequence[tuple[int, Part]],
    see: Callable[[int, Sequence[Shown]], None],
) -> None:  # fmt: skip
    """Ask the author of a version for parts of what it merged; `see` gets each when it is there.

    Raises `Offence` for an answer that is not what the contributors signed, and what a refusal or a broken stream
    raises.
    """
    head, codec = record.head, context.replica.up
    numbers = [number for number, _ in parts]
    await stream.send(
        AuditRequest(
            manifest_hash=context.protocol.manifest_hash, fragment=head.fragment, version=head.version, numbers=numbers
        )
    )
    for number, part in parts:
        found = []
        for _ in record.lines:
            paths = expect(await stream.receive(), Opening).paths
            found.append(await _receive(stream, paths, codec, part))
        wrong = await in_thread(_wrong, codec, record, part, found)
        if wrong is not None:
            why = f"what {wrong} contributed to version {head.version} of fragment {head.fragment}"
            raise Offence(f"{stream.peer} shows another thing as {why}")
        see(number, found)


def _wrong(codec: Codec, record: Record, part: Part, found: Sequence[Shown]) -> str | None:
    """The first contributor of whom something else is shown than it signed."""
    try:
        for line, shown in zip(record.lines, found, strict=True):
            if not opens(codec, line.root, part, shown):
                return line.peer
    except PayloadError:
        return line.peer
    return None


async def answer(context: Context, stream: Stream, request: AuditRequest) -> None:
    """Show parts of the contributions to a version that this peer made."""
    replica = context.replica
    context.check_run(request.manifest_hash)
    if request.fragment >= len(replica.fragments):
        raise Offence(f"an audit of fragment {request.fragment}, and the run has {len(replica.fragments)}")
    fragment, held = replica.fragments[request.fragment], replica.held.get(request.fragment)
    parts = [part_at(fragment, replica.settings, number) for number in request.numbers]
    kept = next((one for one in held.kept if one.version == request.version), None) if held is not None else None
    if kept is None:
        await stream.refuse(f"version {request.version} of fragment {request.fragment} is not kept here any more")
        return
    most = audited_parts(part_count(fragment, replica.settings), replica.settings.audit)
    kept.asked[stream.peer] += len(parts)
    if kept.asked[stream.peer] > most:
        raise PayloadError(f"over {most} parts of version {request.version} are asked for by this peer")
    for part in parts:
        if part is None:
            raise Offence(f"an audit of a part that fragment {request.fragment} does not have")
        for shown in await in_thread(kept.show, part):
            await stream.send(Opening(paths=_joined(shown)))
            await stream.send_payload(shown.payload)


# -- proofs -----------------------------------------------------------------------------------------------------------


async def offer(context: Context, stream: Stream, evidence: Evidence) -> None:
    """Give evidence to a peer; a refusal raises `PayloadError`."""
    head = evidence.record.head
    await stream.send(
        Accusation(
            manifest_hash=context.protocol.manifest_hash, fragment=head.fragment, author=head.author,
            part=evidence.number, steps=len(evidence.steps),
        )
    )  # fmt: skip
    expect(await stream.receive(), Wanted)
    for one, shown in evidence.steps:
        await stream.send(ProofStep(head=one, paths=_joined(shown)))
        await stream.send_payload(shown.payload)
    await stream.send(evidence.record)
    for shown in evidence.shown:
        await stream.send(Opening(paths=_joined(shown)))
        await stream.send_payload(shown.payload)
    await stream.drained()


async def receive(context: Context, stream: Stream, offered: Accusation) -> Evidence:
    """Read the evidence that a peer offers. Raises `Offence` for what is no evidence."""
    replica = context.replica
    context.check_run(offered.manifest_hash)
    known = offered.fragment < len(replica.fragments)
    part = part_at(replica.fragments[offered.fragment], replica.settings, offered.part) if known else None
    if part is None or not replica.settings.audited:
        raise Offence("a proof is about a part that this run does not have")
    await stream.send(Wanted())
    steps = []
    for _ in range(offered.steps):
        step = expect(await stream.receive(), ProofStep)
        steps.append((step.head, await _receive(stream, step.paths, replica.down, part)))
    record = expect(await stream.receive(), Record)
    if (record.head.author, record.fragment) != (offered.author, offered.fragment):
        raise Offence("a proof is about another peer or fragment than it says")
    openings = []
    for _ in record.lines:
        opening = expect(await stream.receive(), Opening)
        openings.append(await _receive(stream, opening.paths, replica.up, part))
    evidence = Evidence(offered.part, part, steps, record, openings)
    try:
        why = await in_thread(unsound, context, evidence)
    except PayloadError as error:
        why = str(error)
    if why is not None:
        raise Offence(why)
    return evidence


def _joined(shown: Shown) -> list[bytes]:
    return [b"".join(path) for path in shown.paths]


async def _receive(stream: Stream, paths: Sequence[bytes], codec: Codec, part: Part) -> Shown:
    payload = torch.empty(codec.nbytes(part.numel), dtype=torch.uint8)
    await stream.receive_payload(payload)
    return Shown(payload, [[path[at : at + 32] for at in range(0, len(path), 32)] for path in paths])
