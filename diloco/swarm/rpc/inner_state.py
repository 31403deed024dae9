"""InnerRequest: the inner optimizer's state, from a peer that trains to one that joins: moments and
step counters.

1. Joiner: request. Donor: names, sizes and step counters of a snapshot that it makes while it
   trains.
2. Joiner: compares them with its own parameters, and only then allocates memory. Donor: fp32
   values.
3. The joiner refuses values that no optimizer has, and asks the next donor.

No digest says that the moments are right, as those of no two peers are equal. So donors are drawn
at random, and who takes a state over bounds its first moments by its second ones
(`attach.inner_optimizer`).
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.bulk import InnerHeader, InnerRequest
from diloco.messages.codec import expect
from diloco.outer.codecs import LIMIT
from diloco.outer.fragments import CHUNK
from diloco.swarm.context import Context
from diloco.swarm.wire.streams import BROKEN, Stream
from diloco.swarm.wire.tasks import in_thread

DONORS = 3  # asked at most; a joiner should train rather than ask everybody
SQUARES = "_sq"  # the end of the names of second moments in all of torch's optimizers


@dataclass(frozen=True)
class Layout:
    """Tensors of an inner optimizer's state in a fixed order, by name and numel; and how many step
    counters it has."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    num_steps: int


@dataclass(frozen=True, eq=False)
class InnerState:
    """Moments (fp32, one after another) and step counters. It takes as much memory as the
    optimizer's own state."""

    layout: Layout
    steps: tuple[int, ...]
    values: torch.Tensor  # (sum of layout.numels,)


TakeSnapshot = Callable[[], InnerState | None]


async def fetch_inner(context: Context, layout: Layout, rng: random.Random) -> InnerState | None:
    """The inner state of the first donor that has one, of a few drawn at random; None when none of
    them has."""
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
    able = [
        member
        for member in core.facts.members.all()
        if member.status.trains and not member.status.leaves
    ]
    # A peer that was resumed from a checkpoint has moments, but no pace yet, and begins together
    # with this one.
    return [
        m.peer for m in sorted(rng.sample(able, len(able)), key=lambda m: not m.status.steps_per_s)
    ][:DONORS]


async def receive_inner(stream: Stream, layout: Layout) -> InnerState:
    """Read a snapshot; `PayloadError` when it is not of this layout, or has values that no
    optimizer has."""
    header = expect(await stream.receive(), InnerHeader)
    there = Layout(tuple(header.names), tuple(header.numels), len(header.steps))
    if there != layout:
        elements = sum(there.numels)
        raise PayloadError(
            f"the inner state there has {elements} elements, in another order or number than here"
        )
    state = InnerState(
        layout, tuple(header.steps), torch.empty(sum(layout.numels), dtype=torch.float32)
    )
    for piece in torch.split(state.values, CHUNK):
        await stream.receive_payload(piece.view(torch.uint8))
    await in_thread(_check_values, state)
    return state


class InnerStateServer:
    """Gives a snapshot of this peer to joiners, one to all that read at the same time.

    It is copied while training goes on: values may be of two neighbouring steps. A moment is a mean
    over many steps, so this does no harm.
    """

    def __init__(self, snapshot: TakeSnapshot) -> None:
        self._snapshot, self._making = snapshot, asyncio.Lock()
        self._kept: weakref.ref[InnerState] | None = None

    async def answer(self, stream: Stream, request: InnerRequest) -> None:
        """Send it. `PayloadError` when no inner steps were taken here, or the moments diverged."""
        async with self._making:
            state = self._kept() if self._kept else None
            if state is None:
                state = await in_thread(self._snapshot)
                if state is None:
                    raise PayloadError("no inner optimizer state is here")
                await in_thread(_check_values, state)
                self._kept = weakref.ref(state)
        await stream.send(
            InnerHeader(list(state.layout.names), list(state.layout.numels), list(state.steps))
        )
        for piece in torch.split(state.values, CHUNK):
            await stream.send_payload(piece.view(torch.uint8))


def _check_values(state: InnerState) -> None:
    for name, values in zip(
        state.layout.names, torch.split(state.values, list(state.layout.numels)), strict=True
    ):
        # NaN, if there is one
        lowest, highest = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)
        if not ((0.0 if name.endswith(SQUARES) else -LIMIT) <= lowest and highest <= LIMIT):
            raise PayloadError(f"the inner state's {name} holds {lowest:g} to {highest:g}")
