"""The manifest of a run, for a peer that wants to join it or to compare its own."""

from __future__ import annotations

from diloco.protocol.messages import expect
from diloco.protocol.messages.watching import ManifestReply, ManifestRequest
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["answer", "request_manifest"]


async def request_manifest(transport: Transport, peer: str) -> str:
    """The manifest of the run that a peer is in, as untrusted JSON text; `PayloadError` when it refuses."""
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(ManifestRequest())
        return expect(await stream.receive(), ManifestReply).text


async def answer(stream: Stream, text: str) -> None:
    """Send the manifest of this peer's run."""
    await stream.send(ManifestReply(text=text))
