"""Where peers can be called: what hellos say of it, and that it is enough where libp2p knows nothing."""

from __future__ import annotations

from diloco.protocol.membership import AddressBook
from diloco.protocol.peer import Peer
from diloco.swarm.client.watch import _places
from tests.support.certificates import Nobody
from tests.support.fake_swarm import snapshot

A, B, C = (f"Qm{letter * 44}" for letter in "ABC")


def at(peer: str, host: str = "192.0.2.7") -> str:
    return f"/ip4/{host}/tcp/4100/p2p/{peer}"


def test_a_newcomer_learns_from_one_peer_where_the_others_are() -> None:
    first, second, third = (Peer(me, me[-1], "run", "0" * 64, ["1" * 64], Nobody()) for me in (A, B, C))
    for one in (first, second, third):
        one.address_book.hear(one.me, {one.me: [at(one.me)]})
    first.connected(B, second.hello(), 0.0)
    second.connected(A, first.hello(), 0.0)
    assert first.hello().addresses == {A: [at(A)], B: [at(B)]}
    third.connected(A, first.hello(), 1.0)
    assert third.address_book.of(B) == (at(B),)


def test_what_a_peer_says_of_itself_counts_more_than_hearsay() -> None:
    places, hearsay = AddressBook(), at(B, "198.51.100.1")
    for teller, place, believed in ((A, hearsay, hearsay), (B, at(B), at(B)), (A, hearsay, at(B))):
        places.hear(teller, {B: [place]})
        assert places.of(B) == (believed,)


def test_a_watcher_calls_no_file_that_a_peer_names() -> None:
    seen = snapshot(2)
    rows = [row.model_copy(update={"addresses": ["@secret", f"@secret/p2p/{row.peer_id}"]}) for row in seen.peers]
    places = _places(seen.model_copy(update={"peers": rows}))
    assert len(places) == 2 and not any(places.values())
