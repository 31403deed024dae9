"""Small questions to a peer: what time is it there, how fast is the link, can it call me back?

The answering side limits them (`limits`), because any stranger may ask. Calls back are made one at a time, only to the
asker's own id (libp2p checks that it answers), and only to the IP that its connection comes from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco.config import WIRE_VERSION
from diloco.config.address import host_of, problem
from diloco.errors import PayloadError
from diloco.protocol.limits import (
    CALL_EVERY_S,
    CALLS_PER_MINUTE,
    PROBE_BYTES,
    PROBE_BYTES_IN_ALL,
    Bucket,
    Buckets,
)
from diloco.protocol.messages import Refusal, expect
from diloco.protocol.messages.watching import DialBack, DialBackReply, Probe, ProbeReply
from diloco.protocol.peer import Peer
from diloco.swarm.wire.streams import BROKEN, Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["ProbeServer", "Probed", "ask_to_be_called", "probe"]

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 4  # addresses of one request
ASKED_PEERS = 3
ANSWER_S = 30.0
KNOWN_PEERS = 16


@dataclass(frozen=True)
class Probed:
    """What a probe found."""

    peer: str
    reply: ProbeReply
    round_trip_s: float
    ahead_s: float  # our clock minus its, give or take half of the round trip
    up_bytes_per_s: float | None = None  # where payload was sent
    down_bytes_per_s: float | None = None


async def probe(transport: Transport, peer: str, nbytes: int = 0) -> Probed:
    """Ask a peer for its clock and its addresses; with `nbytes`, also measure the link each way with that many.

    Raises what is in `BROKEN` when it does not answer, and `PayloadError` when it refuses or answers something else.
    """
    async with open_bulk(transport, peer, Traffic()) as stream:
        sent_at, unix_s = time.monotonic(), time.time()
        await stream.send(Probe())
        reply = expect(await stream.receive(), ProbeReply)
        trip_s = time.monotonic() - sent_at
    up = down = None
    if nbytes:
        up, down = await _bandwidth(transport, peer, nbytes, trip_s)
    return Probed(peer, reply, trip_s, unix_s + trip_s / 2 - reply.unix_s, up, down)


async def _bandwidth(transport: Transport, peer: str, nbytes: int, trip_s: float) -> tuple[float, float]:
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    async with open_bulk(transport, peer, Traffic()) as stream:
        begun_at = time.monotonic()
        await stream.send(Probe(sends=nbytes, wants=nbytes))
        await stream.send_payload(payload)
        expect(await stream.receive(ANSWER_S), ProbeReply)  # sent once the whole payload is there
        turned_at = time.monotonic()
        await stream.receive_payload(payload)
        ended_at = time.monotonic()
    return nbytes / max(turned_at - begun_at - trip_s, 1e-6), nbytes / max(ended_at - turned_at, 1e-6)


async def ask_to_be_called(transport: Transport) -> tuple[bool, str]:
    """Whether others can connect to this peer, as the first seed that can tell says; and if not, what would help.

    When no seed can tell, the answer is yes. If that is wrong, others only need longer to reach this peer.
    """
    for peer in transport.seeds[:ASKED_PEERS]:
        try:
            async with open_bulk(transport, peer, Traffic()) as stream:
                places = [address.rpartition("/p2p/")[0] for address in transport.addresses[:CALLS_AT_ONCE]]
                await stream.send(DialBack(addresses=places))
                reply = expect(await stream.receive(ANSWER_S), DialBackReply)
        except (*BROKEN, PayloadError) as error:
            logger.debug("%s does not say whether it can call back: %r", peer, error)
            continue
        if set(reply.reached) & set(places):
            return True, ""
        return False, _advice(places, list(reply.reached), reply.observed, reply.why)
    return True, ""


def _advice(places: list[str], reached: list[str], observed: str, why: str) -> str:
    """The settings that would make a peer reachable, from what a call back found."""
    if reached and _is_place(reached[0]):
        return f"others reach this peer at another address than it says; add 'swarm.announce=[{reached[0]}]'"
    port = next((place.split("/tcp/")[1].split("/")[0] for place in places if "/tcp/" in place), "4100")
    family, host = observed.split("/")[1:3] if host_of(observed) else ("ip4", "PUBLIC_IP")
    return (
        f"others cannot call this peer ({why or 'nobody tried'}); open TCP port {port} of this machine, forward it on "
        f"the router, and add 'swarm.listen=[/ip4/0.0.0.0/tcp/{port}]' 'swarm.announce=[/{family}/{host}/tcp/{port}]'"
    )


class ProbeServer:
    """The answering side of probes and calls back. A request over a limit is refused with the reason."""

    def __init__(self, transport: Transport, protocol: Peer, now: Callable[[], float]) -> None:
        self._transport = transport
        self._protocol = protocol
        self._now = now
        self._measured: Buckets[str] = Buckets(PROBE_BYTES / 60, PROBE_BYTES)  # bytes, by asker
        self._measured_in_all = Bucket(PROBE_BYTES_IN_ALL / 60, PROBE_BYTES_IN_ALL)
        self._called: dict[str, float] = {}  # when each asker was called last
        self._calls: deque[float] = deque(maxlen=CALLS_PER_MINUTE)
        self._calling = asyncio.Lock()

    async def measure(self, stream: Stream, request: Probe) -> None:
        """Say what this peer is, and take and send the payload that is asked for."""
        nbytes = request.sends + request.wants
        if nbytes and not self._may_measure(stream.peer, nbytes):
            await stream.refuse("enough has been measured for a while; ask another peer")
            return
        if request.sends:
            await stream.receive_payload(torch.empty(request.sends, dtype=torch.uint8))
        protocol, observed = self._protocol, await self._transport.observed(stream.peer)
        await stream.send(
            ProbeReply(
                wire_version=WIRE_VERSION,
                run_id=protocol.run_id,
                name=protocol.name,
                unix_s=time.time(),
                addresses=[address for address in self._transport.addresses if len(address) <= 256][:16],
                known=[member.peer for member in protocol.members.all()][:KNOWN_PEERS],
                observed=observed[:256],
            )
        )
        if request.wants:
            await stream.send_payload(torch.zeros(request.wants, dtype=torch.uint8))

    def _may_measure(self, peer: str, nbytes: int) -> bool:
        now = self._now()
        enough = self._measured_in_all.left(now) >= nbytes  # identities cost a stranger nothing
        return enough and self._measured.take(peer, now, nbytes) and self._measured_in_all.take(now, nbytes)

    async def call_back(self, stream: Stream, request: DialBack) -> None:
        """Call the asker, and say at which addresses it answered."""
        observed = await self._transport.observed(stream.peer)
        if not self._may_call(stream.peer):
            await stream.send(Refusal(reason="too many calls back for a while; ask another peer"))
            return
        wanted = _callable(request.addresses, observed)
        async with self._calling:
            outcome = await self._transport.call_anew(stream.peer, wanted) if wanted else {}
        why = "; ".join(f"{address}: {why}" for address, why in outcome.items() if why)
        reached = [address for address, failure in outcome.items() if not failure]
        await stream.send(DialBackReply(reached=reached, why=why[:512], observed=observed[:256]))

    def _may_call(self, peer: str) -> bool:
        now = self._now()
        self._called = {asker: at for asker, at in self._called.items() if now - at < CALL_EVERY_S}
        busy = len(self._calls) == CALLS_PER_MINUTE and now - self._calls[0] < 60.0
        if busy or peer in self._called or self._calling.locked():
            return False
        self._called[peer] = now
        self._calls.append(now)
        return True


def _callable(addresses: list[str], observed: str) -> list[str]:
    """The addresses that an asker names, each with the asker's own IP in the place of the one it names."""
    _, family, host, *_ = [*observed.split("/"), "", "", ""]
    if family not in ("ip4", "ip6"):
        return []
    named = [address.split("/") for address in addresses if address.startswith(("/ip4/", "/ip6/"))]
    own = ["/".join(["", family, host, *parts[3:]]) for parts in named if len(parts) >= 5]
    return [address for address in dict.fromkeys(own) if _is_place(address)][:CALLS_AT_ONCE]


def _is_place(address: str) -> bool:
    """Whether a multiaddr is valid except that it names no peer id."""
    return (problem(address) or "").startswith("/p2p/PEER_ID is missing")
