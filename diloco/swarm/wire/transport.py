"""Network interface of a node: streams to peers by id, and addresses of its run's members.

`libp2p.Libp2p` is the real one. The simulator runs the same node with one in virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol


class Refused(ConnectionError):
    """Error: a peer answers, but does not admit this one; the text has the reason."""


class Untrusted(ConnectionError):
    """Error: a peer answers, but has not proved that it is in the run; the text has the reason."""


class ByteReader(Protocol):
    """The incoming half of a stream; `ConnectionError` when it breaks."""

    async def read(self, n: int) -> bytes: ...


class ByteWriter(Protocol):
    """The outgoing half of a stream. Written buffers must not change afterwards."""

    def write(self, data: bytes | memoryview) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


Handler = Callable[[str, ByteReader, ByteWriter], Awaitable[None]]


class Transport(Protocol):
    """One peer's network. `ConnectionError` or `TimeoutError` if a peer cannot be reached."""

    me: str  # this peer's id, authenticated to the other side of every stream
    seeds: list[str]  # ids of the peers through which it joined
    addresses: list[str]  # where others reach it, best first; empty for a peer that listens nowhere
    # True if others can connect; if not, they open streams over connections made by this peer
    reachable: bool
    advice: str  # for the user, how to make this peer reachable; empty if it is
    store: Any  # `mailbox.store.Store` for a peer with a mailbox, else None
    # returns addresses of a peer, by its id, beyond those that the network knows; set by the node
    addresses_of: Callable[[str], Sequence[str]]

    async def handle(self, protocol: str, handler: Handler) -> None:
        """Call `handler(peer, reader, writer)` for each stream that a peer opens."""

    async def open(self, peer: str, protocol: str) -> tuple[ByteReader, ByteWriter]:
        """Open a stream to a peer; `Refused` or `Untrusted` if one does not admit the other."""

    async def announce(self, life_s: float, met: Sequence[str]) -> None:
        """Publish this peer's addresses for the peers of the run, `met` included, for `life_s`."""

    async def announced(self) -> dict[str, list[str]]:
        """Return published addresses by peer: untrusted text of peers that may be gone."""

    def way(self, peer: str) -> str:
        """Route of the last bulk stream to a peer: "direct" or "daemon"; "" before the first."""

    def sign(self, content: bytes) -> bytes:
        """Sign content, in a millisecond at most; every peer can check the signature."""

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        """Return True if that peer has signed the content; never raises."""

    async def observed(self, peer: str) -> str:
        """Return the other end's multiaddr of a connection, without id; empty without one."""

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        """Make new connections to a peer; return the error by address, "" if there was none."""

    async def hang_up(self, peer: str) -> None:
        """End all connections with a peer, and with them their streams; it may call again."""

    def may_call(self, address: str) -> bool:
        """Return True if an address may be called that only other peers have named.

        A LAN or loopback address may be called only where this session has connections already, so
        that nobody can make a volunteer attack its own network.
        """

    async def failed(self) -> None:
        """Wait until this transport has failed, and raise `SwarmError`."""

    async def close(self) -> None:
        """End all streams and the network itself."""
