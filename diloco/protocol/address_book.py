"""Where peers can be called. Sans-IO.

libp2p finds a peer by its id if its routing tables have the peer. These tables leave out networks whose addresses they
take for neither public nor private, and peers that only one other peer has met. Hellos therefore carry addresses: a
newcomer can call every peer that its first contact has met.

Wrong addresses do no harm: another identity answers there, or nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from diloco.config.address import problem

__all__ = ["AddressBook"]

MAX_ADDRESSES = 4  # kept of one peer, the best first
MAX_PEERS = 4096


class AddressBook:
    """Addresses by peer id. What a peer says of itself counts more than what others say of it."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, ...]] = {}
        self._hearsay: dict[str, tuple[str, ...]] = {}

    def hear(self, peer: str, said: Mapping[str, Sequence[str]]) -> None:
        """Take in what a peer says of itself and of others, without malformed addresses and those of another peer."""
        for other, addresses in said.items():
            known = self._said if other == peer else self._hearsay
            found = [one for one in addresses if one.endswith(f"/p2p/{other}") and problem(one) is None]
            known[other] = tuple(found[:MAX_ADDRESSES])
            while len(known) > MAX_PEERS:
                del known[next(iter(known))]

    def of(self, peer: str) -> Sequence[str]:
        """Multiaddrs that end with the peer's id; empty when nobody has named any."""
        return self._said.get(peer) or self._hearsay.get(peer, ())

    def all(self, peers: Iterable[str]) -> dict[str, list[str]]:
        """Known addresses of these peers."""
        return {peer: list(found) for peer in peers if (found := self.of(peer))}
