"""What a node needs of the network: streams to peers by id, and where the other members of its run
are.

`libp2p.Libp2p` is the real one. The simulator has another one, in virtual time, for the same node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class Refused(ConnectionError):
    """A peer answers, but does not admit this one; the text says why."""


class Untrusted(ConnectionError):
    """A peer answers, but has not shown that it is in the run; the text says how."""


class ByteReader(Protocol):
    """The incoming half; `ConnectionError` when it breaks."""

    async def read(self, n: int) -> bytes: ...


class ByteWriter(Protocol):
    """The outgoing half of a stream. What is written must not be changed afterwards."""

    def write(self, data: bytes | memoryview) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


Handler = Callable[[str, ByteReader, ByteWriter], Awaitable[None]]


class Transport(Protocol):
    """One peer's network. `ConnectionError` or `TimeoutError` when a peer is not there."""

    me: str  # this peer's id; the other side of every stream knows it for certain
    seeds: list[str]  # ids of the peers through which it joined
    addresses: list[str]  # where others reach it, best first; empty for a peer that listens nowhere
    # whether others can connect; if not, they open streams over connections that it has opened
    reachable: bool
    advice: str  # what would make it reachable, if it is not
    # addresses of a peer by its id, which the owner may know better
    addresses_of: Callable[[str], Sequence[str]]

    async def handle(self, protocol: str, handler: Handler) -> None:
        """Call `handler(peer, reader, writer)` for each stream that a peer opens."""

    async def open(self, peer: str, protocol: str) -> tuple[ByteReader, ByteWriter]:
        """Open a stream to a peer; `Refused` or `Untrusted` when one does not admit the other."""

    async def announce(self, life_s: float, met: Sequence[str]) -> None:
        """Put this peer's addresses where the peers of the run, and `met`, find them."""

    async def announced(self) -> dict[str, list[str]]:
        """Addresses by peer, as announced; they may be any text, and the peer may be gone."""

    def way(self, peer: str) -> str:
        """How the last bulk stream to a peer went: "direct", or through the "daemon"; else ""."""

    def sign(self, content: bytes) -> bytes:
        """This peer's signature, which everybody can check. Takes a millisecond at most."""

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        """Whether that peer has signed the content; untrusted bytes never raise."""

    async def observed(self, peer: str) -> str:
        """Multiaddr, without id, at the other end of a connection; empty when there is none."""

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        """Try to connect to a peer as if it were new; the error by address, "" for none."""

    def may_call(self, address: str) -> bool:
        """Whether to call an address on hearsay. One of a LAN or of this machine is called only
        where this session has connections of its own: nobody may turn a volunteer against its own
        network.
        """

    async def failed(self) -> None:
        """Wait until this transport has failed, and raise `SwarmError`."""

    async def close(self) -> None:
        """End everything."""
