"""How tensors travel on a bulk stream: a header, then payload whose length both sides know from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import Codec, codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import CHUNK
from diloco.outer.replica import Replica
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.messages.heads import Record
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.streams import Stream

__all__ = [
    "FragmentState",
    "UpdateRecord",
    "WrongDigestError",
    "anchor_codec",
    "receive_records",
    "receive_state",
    "receive_vector",
    "send_records",
    "send_state",
    "send_vector",
]

STATE_CODEC = codec("fp32")


def anchor_codec(replica: Replica, version: int) -> Codec:
    """How the anchor of that version travels without loss: as its update did, if that carried the values themselves."""
    return replica.down if replica.down.carries_values and version > 0 else STATE_CODEC


class WrongDigestError(PayloadError):
    """A donor sent an anchor that does not have the digest of its header."""


@dataclass(frozen=True)
class UpdateRecord:
    """The step of a fragment from one version to the next; `update` is the encoded displacement (uint8)."""

    header: Record
    update: Tensor


@dataclass(frozen=True, eq=False)
class FragmentState:
    """A fragment's anchor (numel,) fp32, which has the digest of its header.

    On the way an anchor takes 4 bytes per element; with `outer.codec_down=fp16` it takes 2, because all its values are
    exact in fp16.
    """

    header: StateHeader
    anchor: Tensor
    donor: str = ""


async def send_records(stream: Stream, records: Sequence[UpdateRecord], replica: Replica) -> None:
    """Write the update records of versions in a row: each one's header, then its payload in the fragment's chunks."""
    for more, record in zip(reversed(range(len(records))), records, strict=True):
        await stream.send(record.header.model_copy(update={"more": more}))
        for payload in replica.update_chunks(record.header.fragment, record.update):
            await stream.send_payload(payload)


async def receive_records(
    stream: Stream, replica: Replica, fragment: int, header: Record, check: Callable[[Record], None]
) -> list[UpdateRecord]:
    """Read the payload that follows the header of a record, and the records after it.

    Raises `PayloadError` when one is of another fragment, or does not follow the one before it, and what `check` raises
    of a header.
    """
    records = [await _receive_record(stream, replica, fragment, header, check)]
    while header.more:
        last, header = header, expect(await stream.receive(), Record)
        if (header.version, header.more, header.digest_before) != (last.version + 1, last.more - 1, last.digest):
            raise PayloadError(f"a record to version {header.version} does not follow one to version {last.version}")
        records.append(await _receive_record(stream, replica, fragment, header, check))
    return records


async def _receive_record(
    stream: Stream, replica: Replica, fragment: int, header: Record, check: Callable[[Record], None]
) -> UpdateRecord:
    if header.fragment != fragment:
        raise PayloadError(f"asked for fragment {fragment}, got a record of fragment {header.fragment}")
    check(header)
    update = short_lived(replica.update_nbytes(fragment))
    for payload in replica.update_chunks(fragment, update):
        await stream.receive_payload(payload)
    return UpdateRecord(header, update)


async def send_state(stream: Stream, state: FragmentState, replica: Replica) -> None:
    """Write a fragment's state: its header, then the anchor, which nobody changes meanwhile."""
    await stream.send(state.header)
    await send_vector(stream, state.anchor, codec=anchor_codec(replica, state.header.version))


async def receive_state(
    stream: Stream, replica: Replica, fragment: int, header: StateHeader, check: Callable[[StateHeader], None]
) -> FragmentState:
    """Read the anchor that follows the header of a state.

    Raises `PayloadError` when it is of another fragment, or holds values that are not finite, `WrongDigestError` when
    the anchor is not the one that the header names, and what `check` raises of the header.
    """
    if header.fragment != fragment:
        raise PayloadError(f"asked for fragment {fragment}, got fragment {header.fragment}")
    check(header)
    anchor = torch.empty(replica.fragments[fragment].numel, dtype=torch.float32)
    await receive_vector(stream, anchor, codec=anchor_codec(replica, header.version))
    if await in_thread(digest_of, anchor) != header.digest:
        raise WrongDigestError(f"the state of fragment {fragment} has another digest than its header")
    return FragmentState(header, anchor, stream.peer)


async def send_vector(stream: Stream, vector: Tensor, size: int = CHUNK, codec: Codec = STATE_CODEC) -> None:
    """Write the values of an fp32 vector, `size` elements at a time."""
    for values in torch.split(vector, size):
        payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
        codec.encode(values, payload)
        await stream.send_payload(payload)


async def receive_vector(stream: Stream, out: Tensor, size: int = CHUNK, codec: Codec = STATE_CODEC) -> None:
    """Fill an fp32 vector, `size` elements at a time; `PayloadError` for values that are not finite."""
    for values in torch.split(out, size):
        payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
        await stream.receive_payload(payload)
        codec.decode(payload, values)
