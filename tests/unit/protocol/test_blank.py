"""A peer that begins without the values that the run starts from: it waits for them, and nobody waits for it."""

from __future__ import annotations

import pytest

from diloco.config import OuterConfig
from diloco.protocol.actions import CatchUp, Hold
from diloco.protocol.peer import Peer
from tests.support.certificates import digest_of
from tests.support.core import DIGESTS, FRAGMENTS, OTHER, claim_of, hello_of, make, of_type, status_of

THEIRS = [digest_of("theirs", fragment) for fragment in range(FRAGMENTS)]
LATE = OuterConfig(method="diloco", sync_every=5, fragments=FRAGMENTS, quorum=1, staleness_limit=4)


def blank(version: int = 0, theirs: list[str] = THEIRS, **settings: object) -> Peer:
    """A blank peer that has met the one that holds everything, at that version."""
    peer = make(newcomer=True, **settings)
    peer.blank, peer.holds = True, False
    claims = [claim_of(fragment, version=version, digest=digest) for fragment, digest in enumerate(theirs)]
    actions = peer.connected(OTHER, hello_of(status_of(versions=[version] * FRAGMENTS), claims=claims), 0.0)
    actions += peer.discovered(0.0)
    missing = {fragment for fragment in range(FRAGMENTS) if theirs[fragment] != DIGESTS[fragment]}
    assert {action.fragment for action in of_type(CatchUp, actions)} == missing and not of_type(Hold, actions)
    return peer


@pytest.mark.parametrize(("version", "settings"), [(0, {}), (1, {}), (1, {"outer": LATE})], ids=["0", "1", "late"])
def test_a_blank_peer_is_ready_with_the_last_anchor(version: int, settings: dict[str, object]) -> None:
    peer = blank(version, **settings)
    assert peer.state == "starting" and peer.status().blank and peer.hello().holds and not peer.votes()
    assert peer.able() == [OTHER]
    peer.adopted(0, version, THEIRS[0], 1.0)
    assert peer.state == "starting" and peer.status().blank
    peer.adopted(1, version, THEIRS[1], 1.0)
    assert peer.state == "ready" and not peer.status().blank and set(peer.able()) == {OTHER, peer.me}


def test_a_blank_peer_stays_filled_when_the_others_go_on() -> None:
    peer = blank()
    for fragment in range(FRAGMENTS):
        peer.adopted(fragment, 0, THEIRS[fragment], 1.0)
    peer.heard(OTHER, claim_of(0, version=1, digest=digest_of("next")), 2.0)
    assert not peer.status().blank

    peer = blank(1, outer=LATE)
    for fragment in range(FRAGMENTS):
        peer.heard(OTHER, claim_of(fragment, version=2, digest=digest_of("next", fragment)), 0.5)
        peer.adopted(fragment, 1, THEIRS[fragment], 1.0)
    assert not peer.status().blank and peer.status().versions == [1, 1], "they went on while this came"


def test_anchors_that_are_alike_anyway_need_not_come() -> None:
    peer = blank(theirs=DIGESTS)
    assert peer.state == "ready" and not peer.blank


def test_alone_a_blank_peer_claims_nothing() -> None:
    peer = make()
    peer.blank, peer.holds = True, False
    assert not of_type(Hold, [*peer.tick(0.0), *peer.tick(1e6)]) and not peer.may_train()


def test_others_hold_for_a_blank_peer_until_it_is_filled() -> None:
    peer = make(min_peers=2)
    nothing = status_of(state="starting").model_copy(update={"blank": True})
    actions = peer.connected(OTHER, hello_of(nothing), 0.0)
    assert {hold.fragment for hold in of_type(Hold, actions)} == {0, 1} and peer.able() == [peer.me]
    generation = peer.members.generation
    peer.heard(OTHER, status_of(), 1.0)
    assert set(peer.able()) == {peer.me, OTHER} and peer.members.generation > generation
