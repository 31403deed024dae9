"""The inner optimizer's state, from a peer that trains to one that joins: moments and step counters.

1. Joiner: request. Donor: header (names and sizes, step counters) of a snapshot that it makes while it trains.
2. Joiner: compares the header with what its own parameters need, and only then allocates memory. Donor: fp32 values.
3. The joiner refuses values that are not finite and negative second moments, and asks the next donor.

No digest says that the moments are right, as it does for anchors: the moments of no two peers are equal. So donors are
drawn at random, and whoever takes a state over bounds its first moments by its second ones (`train.inner`).
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import LIMIT
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import InnerHeader, InnerRequest
from diloco.protocol.peer import Peer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import receive_vector, send_vector
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["InnerDonor", "InnerState", "Layout", "Snapshot", "fetch_inner", "receive_inner", "send_inner"]

DONORS = 3  # asked at most; a joiner should train rather than ask everybody
SQUARES = "_sq"  # the end of the names of second moments in all of torch's optimizers


@dataclass(frozen=True)
class Layout:
    """Tensors of an inner optimizer's state in a fixed order, by name and numel; the number of its step counters."""

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


async def fetch_inner(context: Context, layout: Layout) -> InnerState | None:
    """The inner state of the first donor that has one, of a few drawn at random; None when none of them has.

    A donor that vanishes, refuses or lies is the event `inner_state_failed`.
    """
    for donor in _donors(context.protocol, context.replica.rng):
        begun_at = context.now()
        try:
            async with context.open(donor) as stream:
                await stream.send(InnerRequest(manifest_hash=context.protocol.manifest_hash))
                state = await receive_inner(stream, layout)
        except (*BROKEN, PayloadError) as error:
            context.note("inner_state_failed", donor=donor, why=str(error) or type(error).__name__)
            continue
        seconds = round(context.now() - begun_at, 3)
        context.note("inner_state", **{"from": donor, "seconds": seconds, "bytes": 4 * state.values.numel()})
        return state
    return None


async def receive_inner(stream: Stream, layout: Layout) -> InnerState:
    """Read a snapshot; `PayloadError` when it is not of this layout, or has values that no optimizer has."""
    header = expect(await stream.receive(), InnerHeader)
    if (tuple(header.names), tuple(header.numels)) != (layout.names, layout.numels):
        raise PayloadError(
            f"the inner state there has {len(header.names)} tensors of {sum(header.numels)} elements; expected "
            f"{len(layout.names)} of {sum(layout.numels)}, in the order of the parameters here"
        )
    if len(header.steps) != layout.num_steps:
        raise PayloadError(f"the inner state there has {len(header.steps)} step counters; expected {layout.num_steps}")
    state = InnerState(layout, tuple(header.steps), torch.empty(sum(layout.numels), dtype=torch.float32))
    await receive_vector(stream, state.values)
    await in_thread(_check_values, state)
    return state


def _donors(protocol: Peer, rng: random.Random) -> list[str]:
    able = [m for m in protocol.members.all() if m.trains and m.status.counted_in]
    # A peer that was resumed from a checkpoint has moments, but no pace yet, and begins together with this one.
    return [m.peer for m in sorted(rng.sample(able, len(able)), key=lambda m: not m.status.steps_per_s)][:DONORS]


class InnerDonor:
    """Gives this peer's snapshot to joiners, one to all that read at the same time: many cost the memory of one.

    `snapshot` makes it, in another thread; None where there is none yet.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._making = asyncio.Lock()
        self._kept: weakref.ref[InnerState] | None = None

    async def get(self) -> InnerState:
        """The snapshot that somebody still reads, or a new one.

        It is copied while the training loop goes on: the values may be of two neighbouring steps, or a second moment
        may be caught between its decay and its increment. Each moment is an average over many steps, so this does no
        harm.

        Raises `PayloadError` when no inner steps were taken here, or the moments diverged.
        """
        async with self._making:
            state = None if self._kept is None else self._kept()
            if state is None:
                state = await in_thread(self._snapshot)
                if state is None:
                    raise PayloadError("no inner optimizer state is here")
                await in_thread(_check_values, state)
                self._kept = weakref.ref(state)
            return state


async def send_inner(stream: Stream, state: InnerState) -> None:
    """Write a snapshot: header, then its values."""
    layout = state.layout
    await stream.send(InnerHeader(names=list(layout.names), numels=list(layout.numels), steps=list(state.steps)))
    await send_vector(stream, state.values)


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
