"""Push: the payload of a contribution that is new, or that the other side wants.

1. Sender: `Push`, and the payload whole or from the byte on that was asked for. Receiver: `Got`
   when it is whole.
2. The receiver keeps what came of a payload whose stream broke, and asks for the rest.
"""

from __future__ import annotations

from math import isclose

import torch
from torch import Tensor

from diloco.core.events import Push as PushAction
from diloco.core.limits import offences
from diloco.errors import PayloadError
from diloco.messages.bulk import Got, Push
from diloco.messages.codec import expect
from diloco.messages.heads import Line
from diloco.outer.payloads import empty_payload
from diloco.outer.replica import Replica
from diloco.swarm.rpc.state import payload_digest
from diloco.swarm.wire.streams import BROKEN, Stream
from diloco.swarm.wire.tasks import in_thread

PIECE = 1 << 20  # bytes sent at a time
NORM_ERROR = 1e-3  # relative: of a norm that the contributor measured on other hardware
MOST_PARTIAL = 64  # payloads that are kept half


async def send(stream: Stream, action: PushAction) -> None:
    """Send a payload. Raises what a stream raises, and `PayloadError` when it is not wanted."""
    await stream.send(Push(action.line, action.at))
    for piece in torch.split(action.payload[action.at :], PIECE):
        await stream.send_payload(piece)
    expect(await stream.receive(None), Got)


class Received:
    """Payloads that are on their way here, by the name of their contribution: bytes, and how many
    are filled."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, int], tuple[Tensor, int]] = {}

    def at(self, fragment: int, peer: str, stamp: int) -> int:
        """From which byte on a payload is wanted."""
        return self._kept.get((fragment, peer, stamp), (None, 0))[1]

    def take(self, line: Line, nbytes: int) -> tuple[Tensor, int]:
        """What is here of a payload."""
        known = self._kept.pop(_name(line), None)
        return known or (empty_payload(nbytes), 0)

    def keep(self, line: Line, payload: Tensor, filled: int) -> None:
        """The stream broke; the newest half payloads are kept."""
        self._kept[_name(line)] = (payload, filled)
        while len(self._kept) > MOST_PARTIAL:
            del self._kept[next(iter(self._kept))]


def _name(line: Line) -> tuple[int, str, int]:
    return line.fragment, line.peer, line.stamp


async def receive(stream: Stream, push: Push, replica: Replica, received: Received) -> Tensor:
    """The whole payload (uint8), which is what its line says. Raises `PayloadError`, and what a
    stream raises."""
    line, nbytes = push.line, replica.payloads[push.line.fragment].nbytes
    payload, at = received.take(line, nbytes)
    if push.at > at or push.at > nbytes:
        raise PayloadError(f"a payload goes on at byte {push.at}, and {at} are here")
    at = push.at
    try:
        for piece in torch.split(payload[at:], PIECE):
            await stream.receive_payload(piece)
            at += piece.numel()
    except BROKEN:
        received.keep(line, payload, at)
        raise
    if await in_thread(payload_digest, payload) != line.root:
        raise PayloadError("a payload is not what its line says")
    with offences():  # the contributor signed that, and whoever passes it on has looked
        norm = await in_thread(replica.payload_norm, line.fragment, payload)
        if not isclose(norm, line.norm, rel_tol=NORM_ERROR, abs_tol=1e-12):
            raise PayloadError(f"a payload has norm {norm:.6g}, and its line says {line.norm:.6g}")
    await stream.send(Got())
    return payload
