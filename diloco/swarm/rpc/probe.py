"""Probe of a peer: its clock and addresses, and a call back that shows if others reach the asker.

Any stranger may ask, so the answering side has limits. It calls back one asker at a time, while
others queue, and calls only the asker's own id at the IP of its connection: nobody can have it call
a third party.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, field

from diloco.config.address import address_error, host_of
from diloco.errors import PayloadError
from diloco.messages.base import EVERYBODY, Message, Place
from diloco.messages.codec import expect
from diloco.messages.fields import MAX_COUNT, Addresses, Count, Name, printable
from diloco.protocol import WIRE_VERSION
from diloco.swarm import limits
from diloco.swarm.context import Context
from diloco.swarm.rpc.registry import answers
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 4  # addresses to call for one request
ASKED_PEERS = 3
ANSWER_S = 30.0
MOST_WAITING = 8  # askers in the queue while one is called back
ROUNDS, PAUSE_S = 3, 2.0  # rounds of requests to the seeds, and the pause between two rounds
UNKNOWN = (
    "no peer could tell whether others can call this one, so it makes no versions; if they can,"
    " add swarm.reachable=yes"
)
KNOWN_PEERS = 16


class Probe(Message, frozen=True, tag="probe"):
    """Request for a peer's clock and addresses, and to call the asker at the addresses in `call`
    over a new connection.
    """

    place, roles = Place.REQUEST, EVERYBODY
    call: Addresses = field(default_factory=list)


class ProbeReply(Message, frozen=True, tag="probe_reply"):
    """Reply of a peer. About itself: its clock (`unix_s`), its addresses, ids of some peers that it
    is connected to (`known`). About the asker: the multiaddr of its connection (`observed`; empty
    if unknown), the addresses at which it answered a call (`reached`), and why the others failed.
    """

    wire_version: Count
    run_id: Name
    name: Name
    unix_s: Annotated[float, Meta(ge=0, le=MAX_COUNT)]
    addresses: Addresses
    known: Annotated[list[Name], Meta(max_length=64)]
    observed: Annotated[str, Meta(max_length=256)] = ""
    reached: Addresses = field(default_factory=list)
    why: Annotated[str, Meta(max_length=512)] = ""

    def __post_init__(self) -> None:
        printable(self, "run_id", "name", "observed", "why")


# -- asking ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeResult:
    """The answer to a probe, with times."""

    peer: str
    reply: ProbeReply
    round_trip_s: float
    ahead_s: float  # our clock minus its clock, within half of the round trip


async def probe(transport: Transport, peer: str) -> ProbeResult:
    """Ask a peer for its clock and addresses.

    Raises `BROKEN` when it does not answer, and `PayloadError` when it refuses.
    """
    sent_at, unix_s = time.monotonic(), time.time()
    reply = await _ask(transport, peer, Probe())
    trip_s = time.monotonic() - sent_at
    return ProbeResult(peer, reply, trip_s, unix_s + trip_s / 2 - reply.unix_s)


async def _ask(transport: Transport, peer: str, request: Probe) -> ProbeReply:
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(request)
        return expect(await stream.receive(ANSWER_S), ProbeReply)


async def ask_to_be_called(transport: Transport) -> tuple[bool, str]:
    """Return True if others can connect to this peer; else False, and advice for the user.

    The first seed that answers decides. One that refuses, or does not answer, is asked again. If
    none answers, the result is False: a peer that wrongly counts as reachable would make versions,
    which others might have to fetch through a third peer in each round.
    """
    own = [address.rpartition("/p2p/")[0] for address in transport.addresses]
    places = own[:CALLS_AT_ONCE]
    for turn in range(ROUNDS):
        await asyncio.sleep(PAUSE_S if turn else 0.0)
        for peer in transport.seeds[:ASKED_PEERS]:
            try:
                reply = await _ask(transport, peer, Probe(call=places))
            except (*BROKEN, PayloadError) as error:
                logger.debug("%s does not say whether it can call back: %r", peer, error)
                continue
            reached = bool(set(reply.reached) & set(own))
            return reached, "" if reached else _advice(places, reply)
    return False, UNKNOWN


def _advice(places: list[str], reply: ProbeReply) -> str:
    """Advise settings that would make this peer reachable, by the result of a call back."""
    if reply.reached and _is_place(reply.reached[0]):
        announce = f"'swarm.announce=[{reply.reached[0]}]'"
        return f"others reach this peer at another address than it says; add {announce}"
    ports = (address.split("/tcp/")[1].split("/")[0] for address in places if "/tcp/" in address)
    port, observed = next(ports, "4100"), reply.observed
    family, host = observed.split("/")[1:3] if host_of(observed) else ("ip4", "PUBLIC_IP")
    return (
        f"others cannot call this peer ({reply.why or 'nobody tried'}); open TCP port {port} of"
        f" this machine, forward it on the router, and add 'swarm.listen=[/ip4/0.0.0.0/tcp/{port}]'"
        f" 'swarm.announce=[/{family}/{host}/tcp/{port}]'"
    )


# -- answering -------------------------------------------------------------------------------------


@answers(Probe)
class ProbeServer:
    """Answers probes, and calls the asker back. Over a limit it refuses."""

    def __init__(self, context: Context) -> None:
        self._context = context
        calls = 60.0 / limits.CALL_EVERY_S
        self._called = limits.Allowance(calls, limits.CALLS_PER_MINUTE, 60.0)
        self._calling, self._waiting = asyncio.Lock(), 0

    async def answer(self, stream: PeerStream, request: Probe) -> None:
        """Answer a probe; `PayloadError` over a limit."""
        transport, facts = self._context.transport, self._context.core.facts
        observed = await transport.observed(stream.peer)
        outcome = await self._call(stream.peer, request.call, observed) if request.call else {}
        failures = [f"{address}: {failure}" for address, failure in outcome.items() if failure]
        reply = ProbeReply(
            *(WIRE_VERSION, facts.identity.run_id, facts.identity.name, time.time()),
            addresses=[address for address in transport.addresses if len(address) <= 256][:16],
            known=[member.peer for member in facts.members.all()][:KNOWN_PEERS],
            observed=observed[:256],
            reached=[address for address, failure in outcome.items() if not failure],
            why="; ".join(failures)[:512],
        )
        await stream.send(reply)

    async def _call(self, peer: str, addresses: list[str], observed: str) -> dict[str, str]:
        """Call the asker; return errors by address, "" where there was none."""
        is_full = self._waiting >= MOST_WAITING
        if is_full or not self._called.take(peer, 1, self._context.now()):
            raise PayloadError("too many calls back for a while; ask another peer")
        wanted = _callable(addresses, observed)
        self._waiting += 1
        try:
            async with self._calling:
                return await self._context.transport.call_anew(peer, wanted) if wanted else {}
        finally:
            self._waiting -= 1


def _callable(addresses: list[str], observed: str) -> list[str]:
    """Return the addresses that an asker names, with their IP replaced by its observed one."""
    _, family, host, *_ = [*observed.split("/"), "", "", ""]
    if family not in ("ip4", "ip6"):
        return []
    named = [address.split("/") for address in addresses if address.startswith(("/ip4/", "/ip6/"))]
    own = ["/".join(["", family, host, *parts[3:]]) for parts in named if len(parts) >= 5]
    return [address for address in dict.fromkeys(own) if _is_place(address)][:CALLS_AT_ONCE]


def _is_place(address: str) -> bool:
    """Return True if a multiaddr is valid except that it names no peer id."""
    return (address_error(address) or "").startswith("/p2p/PEER_ID is missing")
