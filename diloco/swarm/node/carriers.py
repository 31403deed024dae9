"""Carriers: all that a node needs of other peers. To say something to all or to one, to send a
payload, to ask a donor, and to know who is here.

The mesh of streams is one carrier, and a mailbox another; a peer may have both.
"""

from __future__ import annotations

from typing import Protocol

from diloco.core import events
from diloco.messages.base import Message
from diloco.messages.bulk import Get
from diloco.swarm.context import Context
from diloco.swarm.node.mesh import ControlMesh
from diloco.swarm.node.options import RunSpec


class Carrier(Protocol):
    """Carries what the core says, sends and asks, and gives it what others say.

    On failure: none of these raises. A peer that cannot be reached is `Lost`, and what was asked
    of it is `Broke`.
    """

    refusal: str | None  # the reason for which the swarm refused this peer

    def carries(self, peer: str) -> bool:
        """Return True if that peer is reached by this carrier."""

    async def start(self) -> list[str]:
        """Begin; return the seeds that answered. `SwarmError` if the swarm refuses this peer."""

    def all_greeted(self) -> bool:
        """Return True once every peer that answers is a member."""

    def broadcast(self, message: Message) -> None:
        """Send a message to every member; never blocks."""

    def tell(self, peer: str, message: Message) -> None:
        """Send a message to one member; never blocks."""

    async def send(self, action: events.SendPayload) -> None:
        """Send a payload; `Broke` tells the core that it did not arrive."""

    async def fetch(self, peer: str, get: Get) -> None:
        """Ask a donor; `Gave` or `Broke` tells the core what came of it."""

    def disconnect(self, peer: str) -> None:
        """Take a peer for gone until it comes again."""

    def redial_later(self, peer: str) -> None:
        """Look for a member that is gone without a goodbye."""

    def expel(self) -> None:
        """Drop the peers that are no longer admitted."""

    async def close(self) -> None:
        """Send what is queued, and end. The node's tasks are closed already."""


class Carriers:
    """The carriers of one peer: what is for all goes over each, the rest over one that has it."""

    def __init__(self, context: Context, run: RunSpec) -> None:
        mesh = ControlMesh(context, run)
        self._all: list[Carrier] = [mesh]
        if context.transport.store is not None:
            from diloco.swarm.mailbox.carrier import Mailbox  # few peers have one

            self._all.append(Mailbox(context, context.transport.store, run.differences))

    def of(self, peer: str) -> Carrier:
        """The carrier that reaches a peer."""
        return next((carrier for carrier in self._all if carrier.carries(peer)), self._all[0])

    @property
    def refusal(self) -> str | None:
        """The reason for which the swarm refused this peer."""
        return next((carrier.refusal for carrier in self._all if carrier.refusal), None)

    async def start(self) -> list[str]:
        """As in `Carrier`."""
        return [peer for carrier in self._all for peer in await carrier.start()]

    def all_greeted(self) -> bool:
        """As in `Carrier`."""
        return all(carrier.all_greeted() for carrier in self._all)

    def broadcast(self, message: Message) -> None:
        """As in `Carrier`."""
        for carrier in self._all:
            carrier.broadcast(message)

    def disconnect(self, peer: str) -> None:
        """As in `Carrier`, and look for the peer later."""
        carrier = self.of(peer)
        carrier.disconnect(peer)
        carrier.redial_later(peer)

    def expel(self) -> None:
        """As in `Carrier`."""
        for carrier in self._all:
            carrier.expel()

    async def close(self) -> None:
        """As in `Carrier`."""
        for carrier in self._all:
            await carrier.close()
