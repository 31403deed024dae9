"""The inner optimizer's moments and step counters, from a peer that trains to one that joins.

1. Joiner: request. Donor: names, sizes and step counters of a snapshot made while it trains.
2. Joiner: compares them with its own parameters, then allocates memory. Donor: fp32 values.
3. The joiner refuses values that no optimizer has, and asks the next donor.

No digest says that the moments are right, as those of no two peers are equal. So donors are drawn
at random, and whoever takes a state over bounds its first moments by its second ones
(`attach.optimizer`).
"""

from __future__ import annotations

import asyncio
import random
import weakref
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta

from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.base import WORKERS, Message, Place
from diloco.messages.codec import expect
from diloco.messages.fields import Count, SomeSteps
from diloco.outer.codecs import LIMIT
from diloco.outer.fragments import CHUNK
from diloco.swarm.context import Context
from diloco.swarm.rpc.registry import answers
from diloco.swarm.wire.streams import BROKEN, PeerStream
from diloco.swarm.wire.tasks import in_thread

DONORS = 3  # most donors to ask: a joiner should rather train than ask every peer
SQUARES = "_sq"  # suffix of the second moments in all of torch's optimizers
MAX_MOMENTS = 2**14  # tensors; their names and sizes fill a quarter of a frame


class InnerRequest(Message, frozen=True, tag="inner_request"):
    """Request for the state of the inner optimizer."""

    place, roles = Place.REQUEST, WORKERS


class InnerHeader(Message, frozen=True, tag="inner"):
    """Name and number of elements of each tensor of an inner optimizer's state, whose fp32 values
    follow, and the inner steps that it has counted for each parameter.
    """

    names: Annotated[list[Annotated[str, Meta(max_length=32)]], Meta(max_length=MAX_MOMENTS)]
    numels: Annotated[list[Count], Meta(max_length=MAX_MOMENTS)]
    steps: Annotated[list[SomeSteps], Meta(max_length=MAX_MOMENTS)]


@dataclass(frozen=True)
class InnerLayout:
    """Names and numels of the tensors of an inner optimizer, and its number of step counters."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    num_steps: int


@dataclass(frozen=True, eq=False)
class InnerState:
    """Moments (fp32, one after another) and step counters; as large as the optimizer's own."""

    layout: InnerLayout
    steps: tuple[int, ...]
    values: torch.Tensor  # (sum of layout.numels,)


# -- asking ----------------------------------------------------------------------------------------


async def fetch_inner(
    context: Context, layout: InnerLayout, rng: random.Random
) -> InnerState | None:
    """Fetch the inner state of the first of a few random donors that has one; None if none has."""
    for donor in _donors(context.core, rng):
        begun_at = context.now()
        try:
            async with context.open(donor) as stream:
                await stream.send(InnerRequest())
                state = await receive_inner(stream, layout)
        except (*BROKEN, PayloadError) as error:
            context.note("inner_state_failed", donor=donor, why=str(error) or type(error).__name__)
            continue
        seconds, nbytes = round(context.now() - begun_at, 3), 4 * state.values.numel()
        context.note("inner_state", **{"from": donor, "seconds": seconds, "bytes": nbytes})
        return state
    return None


def _donors(core: Peer, rng: random.Random) -> list[str]:
    members = core.facts.members.all()
    able = [member for member in members if member.status.trains and not member.status.leaves]
    drawn = rng.sample(able, len(able))
    # A peer that has just resumed from a checkpoint has moments, but no pace yet: prefer others.
    drawn.sort(key=lambda member: not member.status.steps_per_s)
    return [member.peer for member in drawn[:DONORS]]


async def receive_inner(stream: PeerStream, layout: InnerLayout) -> InnerState:
    """Read a snapshot; `PayloadError` for another layout, or values that no optimizer has."""
    header = expect(await stream.receive(), InnerHeader)
    there = InnerLayout(tuple(header.names), tuple(header.numels), len(header.steps))
    if there != layout:
        what = f"the inner state there has {sum(there.numels)} elements"
        raise PayloadError(f"{what}, in another order or number than here")
    values = torch.empty(sum(layout.numels), dtype=torch.float32)
    state = InnerState(layout, tuple(header.steps), values)
    for piece in torch.split(values, CHUNK):
        await stream.receive_payload(piece.view(torch.uint8))
    await in_thread(_check_values, state)
    return state


# -- answering -------------------------------------------------------------------------------------


@answers(InnerRequest)
class InnerStateServer:
    """Gives a snapshot of this peer to joiners, one to all that read at the same time.

    It is copied while training goes on: values may be of two neighbouring steps. A moment is a mean
    over many steps, so this does no harm.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._making = context, asyncio.Lock()
        self._kept: weakref.ref[InnerState] | None = None

    async def answer(self, stream: PeerStream, request: InnerRequest) -> None:
        """Send a snapshot. `PayloadError` before the first inner step, or if moments diverged."""
        async with self._making:
            state = self._kept() if self._kept else None
            if state is None:
                state = await in_thread(self._context.inner_state)
                if state is None:
                    raise PayloadError("no inner optimizer state is here")
                await in_thread(_check_values, state)
                self._kept = weakref.ref(state)
        layout = state.layout
        await stream.send(InnerHeader(list(layout.names), list(layout.numels), list(state.steps)))
        for piece in torch.split(state.values, CHUNK):
            await stream.send_payload(piece.view(torch.uint8))


def _check_values(state: InnerState) -> None:
    tensors = torch.split(state.values, list(state.layout.numels))
    for name, values in zip(state.layout.names, tensors, strict=True):
        # `aminmax` gives NaN if there is one
        lowest, highest = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)
        if not ((0.0 if name.endswith(SQUARES) else -LIMIT) <= lowest and highest <= LIMIT):
            raise PayloadError(f"the inner state's {name} holds {lowest:g} to {highest:g}")
