"""The inner optimizer's state, from a peer that trains to one that joins: moments and step counters.

1. joiner: request. donor: header (names and sizes, step counters) of a snapshot made beside its training.
2. joiner: compares the header with what its own parameters need, and only then makes room. donor: fp32 values.
3. What has no finite value, or a negative second moment, is refused, and the next donor is asked.

Nothing says that the moments are right, as a digest does for anchors: every peer has others.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import LIMIT
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import InnerHeader, InnerRequest
from diloco.protocol.peer import Peer
from diloco.swarm.conversations.bulk import BulkClient, receive_vector, send_vector
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["InnerState", "Layout", "SharedSnapshot", "Snapshot", "fetch_inner", "receive_inner", "send_inner"]

DONORS = 3  # that are asked; a joiner should train rather than ask everybody
SQUARES = "_sq"  # how the names of second moments end, in all of torch's optimizers


@dataclass(frozen=True)
class Layout:
    """What an inner optimizer's state is made of, in a fixed order: names and elements, and how many step counters."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    num_steps: int


@dataclass(frozen=True, eq=False)
class InnerState:
    """Moments (fp32, one after another) and step counters. It takes as much memory as the optimizer's own state."""

    layout: Layout
    steps: tuple[int, ...]
    values: Tensor  # (sum of layout.numels,)


Snapshot = Callable[[], InnerState | None]


class Asker(Protocol):
    """What a joiner's conversation needs of its node."""

    protocol: Peer

    def now(self) -> float: ...
    def note(self, kind: str, **fields: object) -> None: ...


class SharedSnapshot:
    """A donor's snapshot, one for all who read at the same time, so that many joiners cost the memory of one.

    `get` raises `PayloadError` when there is nothing to give: no inner steps taken here, or moments that diverged.
    """

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._kept: weakref.ref[InnerState] | None = None

    async def get(self, snapshot: Snapshot) -> InnerState:
        """The snapshot that somebody still reads, or a new one.

        It is copied beside the training loop, which does not wait: the values may be of two neighbouring steps, or a
        second moment may be caught between its decay and its increment. Moments are averages over many steps, of each
        element by itself, so that does not harm them.
        """
        async with self._making:
            state = None if self._kept is None else self._kept()
            if state is None:
                state = await asyncio.to_thread(snapshot)
                if state is None:
                    raise PayloadError("no inner optimizer state is here")
                await asyncio.to_thread(_check_values, state)
                self._kept = weakref.ref(state)
            return state


async def send_inner(stream: Stream, state: InnerState) -> None:
    """Write a snapshot: header, then its values."""
    layout = state.layout
    await stream.send(InnerHeader(names=list(layout.names), numels=list(layout.numels), steps=list(state.steps)))
    await send_vector(stream, state.values)


async def receive_inner(stream: Stream, layout: Layout) -> InnerState:
    """Read a snapshot.

    Raises:
        PayloadError: it is not of this layout, or has values that no optimizer has.
    """
    header = expect(await stream.receive(), InnerHeader)
    _check_header(header, layout)
    state = InnerState(layout, tuple(header.steps), torch.empty(sum(layout.numels)))
    await receive_vector(stream, state.values)
    await asyncio.to_thread(_check_values, state)
    return state


async def fetch_inner(asker: Asker, client: BulkClient, layout: Layout) -> InnerState | None:
    """The inner state of the first donor that has one, the fastest asked first; None when none of them has.

    A donor that vanishes, refuses or lies is the event `inner_state_failed`.
    """
    for donor in _donors(asker.protocol):
        begun_at = asker.now()
        try:
            stream = await client.open(donor)
            try:
                await stream.send(InnerRequest(manifest_hash=asker.protocol.manifest_hash))
                state = await receive_inner(stream, layout)
            finally:
                stream.close()
        except (*BROKEN, PayloadError) as error:
            asker.note("inner_state_failed", donor=donor, why=str(error) or type(error).__name__)
            continue
        seconds = round(asker.now() - begun_at, 3)
        asker.note("inner_state", **{"from": donor, "seconds": seconds, "bytes": 4 * state.values.numel()})
        return state
    return None


def _donors(protocol: Peer) -> list[str]:
    # Who was resumed from a checkpoint has its moments, but no pace yet, and begins together with us.
    able = [m for m in protocol.members.all() if m.trains and m.status.counted_in]
    return [m.peer for m in sorted(able, key=lambda m: (-m.status.steps_per_s, m.peer))][:DONORS]


def _check_header(header: InnerHeader, layout: Layout) -> None:
    if (tuple(header.names), tuple(header.numels)) != (layout.names, layout.numels):
        raise PayloadError(
            f"the inner state there has {len(header.names)} tensors of {sum(header.numels)} elements; expected "
            f"{len(layout.names)} of {sum(layout.numels)}, in the order of the parameters here"
        )
    if len(header.steps) != layout.num_steps:
        raise PayloadError(f"the inner state there has {len(header.steps)} step counters; expected {layout.num_steps}")


def _check_values(state: InnerState) -> None:
    tensors = torch.split(state.values, list(state.layout.numels))
    for name, values in zip(state.layout.names, tensors, strict=True):
        if not values.numel():
            continue
        lowest, highest = (float(value) for value in values.aminmax())  # NaN, if there is one
        if not (-LIMIT <= lowest and highest <= LIMIT):
            raise PayloadError(f"the inner state's {name} holds {lowest:g} to {highest:g}")
        if name.endswith(SQUARES) and lowest < 0:
            raise PayloadError(f"the inner state's {name}, a second moment, holds {lowest:g}")
