"""Where peers can be called. Sans-IO.

libp2p finds a peer by its id where its routing tables have it. They leave out networks whose addresses they take for
neither public nor private, and know nothing of those that only one peer has met; so hellos carry addresses, and a
newcomer can call everybody whom the peer that it joined through has met.

Nothing rests on them: at a wrong address another identity answers, or nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from diloco.config.address import problem

__all__ = ["AddressBook"]

MAX_ADDRESSES = 4  # of one peer, the best first
MAX_PEERS = 4096


class AddressBook:
    """Addresses by peer id. What a peer says of itself counts; what others say of it does until then."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, ...]] = {}
        self._hearsay: dict[str, tuple[str, ...]] = {}

    def hear(self, peer: str, said: Mapping[str, Sequence[str]]) -> None:
        """What a peer says of itself, and of others. An address that is none, or of another peer, is left out."""
        for other, addresses in said.items():
            known = self._said if other == peer else self._hearsay
            found = [one for one in addresses if one.endswith(f"/p2p/{other}") and problem(one) is None]
            known[other] = tuple(found[:MAX_ADDRESSES])
            while len(known) > MAX_PEERS:
                del known[next(iter(known))]

    def of(self, peer: str) -> Sequence[str]:
        """Multiaddrs, with the peer's id at the end; none when nobody has said any."""
        return self._said.get(peer) or self._hearsay.get(peer, ())

    def all(self, peers: Iterable[str]) -> dict[str, list[str]]:
        """Of these peers, as far as they are known."""
        return {peer: list(found) for peer in peers if (found := self.of(peer))}
