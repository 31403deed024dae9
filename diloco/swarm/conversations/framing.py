"""How tensors travel on a bulk stream: a header, then payload whose length both sides know from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import CHUNK
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState
from diloco.protocol.messages.bulk import Record, StateHeader
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.streams import Stream

__all__ = [
    "FragmentState",
    "UpdateRecord",
    "WrongDigestError",
    "receive_record",
    "receive_state",
    "receive_vector",
    "send_record",
    "send_state",
    "send_vector",
]

STATE_CODEC = codec("fp32")


class WrongDigestError(PayloadError):
    """A donor sent an anchor that does not have the digest of its header."""


@dataclass(frozen=True)
class UpdateRecord:
    """The step of a fragment from one version to the next; `update` is the encoded displacement (uint8)."""

    header: Record
    update: Tensor


@dataclass(frozen=True, eq=False)
class FragmentState:
    """A fragment's anchor (numel,) fp32, which has the digest of its header; and from a syncer its outer state: the
    master, with momentum and window.
    """

    header: StateHeader
    anchor: Tensor
    outer: tuple[Tensor, OuterState] | None = None


async def send_record(stream: Stream, record: UpdateRecord, replica: Replica) -> None:
    """Write an update record: its header, then its payload in the chunks of the fragment."""
    await stream.send(record.header)
    for payload in _payloads(record.update, replica, record.header.fragment):
        await stream.send_payload(payload)


async def receive_record(stream: Stream, replica: Replica, fragment: int, header: Record) -> UpdateRecord:
    """Read the payload that follows the header of a record; `PayloadError` when it is of another fragment."""
    if header.fragment != fragment:
        raise PayloadError(f"asked for fragment {fragment}, got a record of fragment {header.fragment}")
    update = short_lived(replica.update_nbytes(fragment))
    for payload in _payloads(update, replica, fragment):
        await stream.receive_payload(payload)
    return UpdateRecord(header, update)


def _payloads(update: Tensor, replica: Replica, fragment: int) -> Sequence[Tensor]:
    return torch.split(update, [replica.down.nbytes(stop - start) for start, stop in replica.chunks[fragment]])


async def send_state(stream: Stream, state: FragmentState) -> None:
    """Write a fragment's state: its header, then fp32 vectors that nobody changes meanwhile."""
    await stream.send(state.header)
    await send_vector(stream, state.anchor)
    if state.outer is not None:
        master, kept = state.outer
        for vector in (master, *kept.vectors):
            await send_vector(stream, vector)


async def receive_state(stream: Stream, replica: Replica, fragment: int, header: StateHeader) -> FragmentState:
    """Read the vectors that follow the header of a state.

    Raises `PayloadError` when it is of another fragment, or holds values that are not finite, and `WrongDigestError`
    when the anchor is not the one that the header names.
    """
    if header.fragment != fragment:
        raise PayloadError(f"asked for fragment {fragment}, got fragment {header.fragment}")
    vectors = []
    for _ in range(3 + replica.optimizer.num_buffers if header.outer else 1):
        vectors.append(torch.empty(replica.fragments[fragment].numel))
        await receive_vector(stream, vectors[-1])
    if await in_thread(digest_of, vectors[0]) != header.digest:
        raise WrongDigestError(f"the state of fragment {fragment} has another digest than its header")
    if not header.outer:
        return FragmentState(header, vectors[0])
    kept = OuterState(header.version, tuple(vectors[2:]), header.pushes, header.delay)
    return FragmentState(header, vectors[0], (vectors[1], kept))


async def send_vector(stream: Stream, vector: Tensor, size: int = CHUNK) -> None:
    """Write fp32 values, `size` elements at a time."""
    for values in torch.split(vector, size):
        payload = torch.empty(STATE_CODEC.nbytes(values.numel()), dtype=torch.uint8)
        STATE_CODEC.encode(values, payload)
        await stream.send_payload(payload)


async def receive_vector(stream: Stream, out: Tensor, size: int = CHUNK) -> None:
    """Fill a tensor with fp32 values, `size` elements at a time; `PayloadError` for values that are not finite."""
    for values in torch.split(out, size):
        payload = torch.empty(STATE_CODEC.nbytes(values.numel()), dtype=torch.uint8)
        await stream.receive_payload(payload)
        STATE_CODEC.decode(payload, values)
