"""A question that somebody adds: for how long has a peer been up? It is this file and no other."""

from diloco.messages.base import EVERYBODY, Message, Place
from diloco.messages.codec import expect
from diloco.swarm.context import Context
from diloco.swarm.rpc.registry import answers, for_doctor
from diloco.swarm.wire.streams import PeerStream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport


class Ping(Message, frozen=True, tag="ping"):
    """Asks for the uptime."""

    place, roles = Place.REQUEST, EVERYBODY


class Pong(Message, frozen=True, tag="pong"):
    """Seconds since the node began."""

    uptime_s: float


@for_doctor("uptime")
async def ping(transport: Transport, peer: str) -> str:
    """The line of `diloco doctor`."""
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(Ping())
        return f"up {expect(await stream.receive(), Pong).uptime_s:.0f} s"


@answers(Ping)
class PingServer:
    """Says the uptime."""

    def __init__(self, context: Context) -> None:
        self._context, self._begun_at = context, context.now()

    async def answer(self, stream: PeerStream, request: Ping) -> None:
        """Send it."""
        await stream.send(Pong(self._context.now() - self._begun_at))
