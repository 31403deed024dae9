"""Whose claims one peer believes, and what it believes of versions."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.actions import Action, Broadcast, CatchUp, Note, Renumber
from diloco.protocol.belief import donors, doubt, number_to_pass, unbelieved
from diloco.protocol.elections import believes
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.messages.control import Claim, Hello, Published, Status, Vote, mark
from diloco.protocol.messages.heads import Record
from diloco.protocol.numbers import LEAP
from diloco.protocol.peer import Peer
from diloco.protocol.states import State
from diloco.protocol.succession import CLAIM_PATIENCE_S, missed, unseat, watch
from diloco.swarm.conversations.certificates import check_anchor
from tests.support.certificates import MANIFEST, Keys, digest_of, record_of

ZERO, ONE, TWO = (digest_of(version) for version in range(3))
LATER = 1000.0


def claim_of(term: int, version: int = 0, digest: str = ZERO) -> Claim:
    return Claim(fragment=0, term=term, version=version, digest=digest)


def status_of(version: int = 0, digest: str = ZERO) -> Status:
    return Status(state="ready", versions=[version], marks=mark(digest))


def hello_of(*claims: Claim, holds: bool = True, votes: tuple[Vote, ...] = (), status: Status | None = None) -> Hello:
    return Hello(
        wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name="x", trains=True, holds=holds, peers=[],
        status=status or status_of(), claims=list(claims), votes=list(votes),
    )  # fmt: skip


def follower(*others: str, holder: str = "h", term: int = 3) -> Peer:
    """A peer that believes in a living holder, long since."""
    peer = Peer("me", "me", "run", MANIFEST, [ZERO], newcomer=True, signer=Keys("me"))
    peer.connected(holder, hello_of(claim_of(term)), 0.0)
    for other in others:
        peer.connected(other, hello_of(), 0.0)
    peer.discovered(0.0)
    assert holder_of(peer) == (holder, term)
    return peer


def holder_of(peer: Peer) -> tuple[str, int] | None:
    lease = peer.leases.get(0)
    return None if lease is None else (lease.holder, lease.term)


def said(kind: type[Any], actions: list[Action]) -> list[Any]:
    return [each.message for each in actions if isinstance(each, Broadcast) and isinstance(each.message, kind)]


def notes(actions: list[Action]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, Note)]


# -- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_against_a_living_holder_has_no_effect() -> None:
    peer = follower("e", "x")
    actions = peer.heard("e", claim_of(4, version=2**40, digest=TWO), LATER)
    assert holder_of(peer) == ("h", 3) and "claim_ignored" in notes(actions) and peer.swarm_clock() == (0, 0)
    assert "claim_ignored" not in notes(peer.heard("e", claim_of(4), LATER)), "it is said once"
    peer.heard("e", claim_of(3), LATER)
    assert holder_of(peer) == ("h", 3), "nor one of the same term, long after"


def test_a_peer_that_holds_nothing_is_elected_by_nobody() -> None:
    peer = follower()
    peer.connected("e", hello_of(claim_of(9), holds=False), 1.0)
    peer.lost("h", LATER, "reset")
    assert holder_of(peer) != ("e", 9)


def test_of_two_that_claim_one_term_the_one_of_most_stays() -> None:
    """Whoever ranks first."""
    for ours, rival in [("h", "e"), ("e", "h")]:
        others = [name for name in "eh" if name != ours]
        peer = follower("a", "b", "c", *others, holder=ours)
        for voter in ("a", "b", "c"):
            peer.heard(voter, Vote(fragment=0, term=3, holder=ours), 1.0)
        peer.heard(rival, claim_of(3), 1.0)
        for turn in range(5):
            peer.tick(1.0 + turn)
            assert holder_of(peer) == (ours, 3)


def test_an_early_claim_is_believed_when_the_holder_goes() -> None:
    """The claimant has noticed before this peer that the holder is dead."""
    peer = follower("x")
    peer.holds = False  # so that "x" is next in order
    peer.heard("x", claim_of(4), LATER)
    assert holder_of(peer) == ("h", 3)
    actions = peer.lost("h", LATER + 1, "silent")
    assert holder_of(peer) == ("x", 4) and "claim" in notes(actions)


def test_most_holders_together_move_a_lease_and_fewer_do_not() -> None:
    peer = follower("a", "b", "c", "e")
    peer.heard("e", claim_of(4), LATER)
    vote = Vote(fragment=0, term=4, holder="e")
    for voter in ("a", "a", "stranger"):
        peer.heard(voter, vote, LATER + 1)
        peer.tick(LATER + 1)
    assert holder_of(peer) == ("h", 3), "two of six, each counted once"
    peer.heard("b", vote, LATER + 2)
    peer.tick(LATER + 2)
    assert holder_of(peer) == ("h", 3), "three of six are not most"
    peer.heard("c", vote, LATER + 3)
    assert said(Vote, peer.tick(LATER + 4)) or holder_of(peer) == ("e", 4)
    assert holder_of(peer) == ("e", 4)


def test_votes_of_peers_that_are_gone_or_changed_do_not_count() -> None:
    peer = follower("a", "b", "c", "e")
    for voter in "abc":
        peer.heard(voter, Vote(fragment=0, term=4, holder="e"), LATER)
    peer.heard("a", Vote(fragment=0, term=3, holder="h"), LATER)
    peer.lost("b", LATER, "reset")
    peer.heard("e", claim_of(4), LATER + 1)
    peer.tick(LATER + 2)
    assert holder_of(peer) == ("h", 3)


def holder_with(*followers: str) -> Peer:
    """A peer that holds the fragment, and whom these believe."""
    holder = Peer("h", "h", "run", MANIFEST, [ZERO], signer=Keys("h"))
    holder.tick(0.0)
    for name in followers:
        holder.connected(name, hello_of(votes=(Vote(fragment=0, term=1, holder="h"),)), 1.0)
    assert holder_of(holder) == ("h", 1)
    return holder


def test_who_connects_again_takes_nothing_from_a_believed_holder() -> None:
    holder = holder_with("a", "e")
    holder.lost("e", 2.0, "reset")
    actions = holder.connected("e", hello_of(claim_of(2)), 3.0)
    holder.tick(4.0)
    assert holder_of(holder) == ("h", 1) and not said(Vote, actions)
    newcomer = holder_with("a", "e")
    newcomer.heard("a", Vote(fragment=0, term=7, holder="gone"), 2.0)  # it believes nobody who lives
    newcomer.connected("e", hello_of(claim_of(2)), 2.0)
    assert holder_of(newcomer) == ("h", 1)


def test_of_two_holders_that_meet_the_more_believed_one_stays() -> None:
    holder = holder_with("a")
    other = (Vote(fragment=0, term=2, holder="o"),)
    holder.connected("o", hello_of(claim_of(2)), 2.0)
    assert holder_of(holder) == ("h", 1), "one believes this peer, and nobody the other one"
    holder.connected("b", hello_of(votes=other), 3.0)
    assert holder_of(holder) == ("o", 2), "of two equal ones the one with the higher term stays"
    holder = holder_with("a", "b")
    holder.connected("c", hello_of(votes=other), 2.0)
    holder.connected("o", hello_of(claim_of(2)), 2.0)
    assert holder_of(holder) == ("h", 1), "two against one, whatever the term"


def test_a_holder_gives_way_to_a_lower_term_that_more_believe() -> None:
    """And its followers go with it."""
    follow = (Vote(fragment=0, term=1, holder="h"),)
    other = Peer("o", "o", "run", MANIFEST, [ZERO], signer=Keys("o"))
    other.leases.see_term(0, 4)
    other.tick(0.0)
    assert holder_of(other) == ("o", 5)
    other.connected("a", hello_of(votes=follow), LATER)
    actions = other.connected("h", hello_of(claim_of(1)), LATER)
    assert holder_of(other) == ("h", 1)
    peer = follower("h", holder="o", term=5)
    peer.heard("h", claim_of(1), LATER)
    assert holder_of(peer) == ("o", 5)
    peer.heard("o", said(Vote, actions)[0], LATER)
    peer.tick(LATER + 1)
    assert holder_of(peer) == ("h", 1)


def test_three_parts_of_a_swarm_end_with_one_holder() -> None:
    """Each of three holders has a follower, and hears all claims and votes, in any order."""
    names = ("h", "o", "x")
    for turned in range(3):
        gave_way = []
        for me in names:
            peer = Peer(me, me, "run", MANIFEST, [ZERO], signer=Keys(me))
            peer.leases.see_term(0, 1)
            peer.tick(0.0)
            others = [(name, claim_of(2), ()) for name in names if name != me]
            others += [(name + name, None, (Vote(fragment=0, term=2, holder=name),)) for name in names]
            peer.connected(me + me, hello_of(votes=(Vote(fragment=0, term=2, holder=me),)), 1.0)
            for name, claim, votes in others[turned:] + others[:turned]:
                peer.connected(name, hello_of(*([claim] if claim else []), votes=votes), 2.0)
            gave_way.append(holder_of(peer) != (me, 2))
        assert sorted(gave_way) == [False, True, True]


def test_who_is_not_next_in_order_waits_for_its_turn() -> None:
    peer = follower("a", "b", "c")
    peer.holds = False
    peer.lost("h", LATER, "reset")
    names = [name for name in "abc" if believed_at_once(peer, name)]
    assert len(names) == 1
    last = next(name for name in "abc" if name not in names)
    peer.heard(last, claim_of(4), LATER)
    assert peer.live_lease(0) is None
    for second in range(int(10 * CLAIM_PATIENCE_S)):
        for name in "abc":
            peer.heard(name, status_of(), LATER + second)
    assert holder_of(peer) == (last, 4)


def believed_at_once(peer: Peer, name: str) -> bool:
    return believes(peer, name, claim_of(4), LATER)


def test_nobody_waits_for_who_contributes_to_another_syncer() -> None:
    peer = Peer("me", "me", "run", MANIFEST, [ZERO], signer=Keys("me"))
    peer.tick(0.0)
    for name in ("x", "y", "z", "w"):
        peer.connected(name, hello_of(), 1.0)
    mine = peer.fragments[0]
    assert holder_of(peer) == ("me", 1) and not peer.contributes_elsewhere(mine, "x"), "it has not voted"
    peer.heard("x", claim_of(2), 2.0)
    peer.heard("y", Vote(fragment=0, term=2, holder="x"), 2.0)
    peer.tick(LATER)
    assert holder_of(peer) == ("me", 1), "one of three others"
    assert [name for name in "xyzw" if peer.contributes_elsewhere(mine, name)] == ["x", "y"]
    peer.lost("x", LATER, "connection reset")
    assert not peer.contributes_elsewhere(mine, "y"), "it will come back"


# -- versions ---------------------------------------------------------------------------------------------------------


def record(author: str, term: int, version: int = 1, digest: str = ONE) -> Record:
    return record_of(version, ZERO, digest, {"a": 10}, author=author, term=term)


def test_a_version_is_believed_of_who_held_the_term_only() -> None:
    peer = follower("e", "x")
    assert unbelieved(peer, record("h", 3), "x") is None, "whoever brings it"
    assert "which it did not hold" in str(unbelieved(peer, record("e", 4), "e"))
    assert "which it did not hold" in str(unbelieved(peer, record("e", 3), "e"))
    assert "which it did not hold" in str(unbelieved(peer, record("e", 4, 2**39, TWO), "e")), "no leap"


def test_a_word_in_a_heartbeat_moves_nothing() -> None:
    syncer = Peer("h", "h", "run", MANIFEST, [ZERO], signer=Keys("h"))
    syncer.tick(0.0)
    for name in ("e", "x", "y"):
        syncer.connected(name, hello_of(), 1.0)
    syncer.heard("e", status_of(2**40, TWO), 2.0)
    assert "few have it" in str(unbelieved(syncer, record("e", 9, 2**40, TWO), "e"))
    doubt(syncer, 0, "e", 1)
    syncer.catch_up_failed(0)
    assert donors(syncer, 0, 1) == [] and syncer.versions == [0], "nor is it asked again"


def test_a_peer_that_was_away_believes_what_most_have() -> None:
    peer = Peer("me", "me", "run", MANIFEST, [ZERO], newcomer=True, signer=Keys("me"))
    for name, digest in (("a", ONE), ("b", ONE), ("e", TWO)):
        peer.connected(name, hello_of(status=status_of(1, digest)), 0.0)
    assert unbelieved(peer, record("gone", 7), "a") is None
    assert unbelieved(peer, record("gone", 7, digest=TWO), "e") is not None


def test_the_dead_do_not_say_what_version_0_is() -> None:
    peer = follower("x")
    theirs = StateHeader(fragment=0, digest=TWO)
    with pytest.raises(PayloadError, match="not as its syncer published it"):
        check_anchor(peer, theirs, "x")
    peer.lost("h", 1.0, "connection reset")
    check_anchor(peer, theirs, "x")


def test_a_syncer_passes_the_number_of_a_history_that_ended() -> None:
    syncer = Peer("h", "h", "run", MANIFEST, [ZERO], signer=Keys("h"))
    syncer.tick(0.0)
    for name in ("e", "x", "y"):
        syncer.connected(name, hello_of(), 1.0)
    syncer.heard("e", status_of(7, TWO), 2.0)
    assert [each.donors for each in syncer.tick(LATER) if isinstance(each, CatchUp)] in ([("e",)], [])
    doubt(syncer, 0, "e", 7)
    syncer.catch_up_failed(0)
    assert [each for each in syncer.tick(2 * LATER) if isinstance(each, Renumber)] == [Renumber(0, 7)]
    syncer.catch_up_failed(0)
    doubt(syncer, 0, "e", LEAP + 1)
    assert number_to_pass(syncer, 0) == 0, "nobody makes so many versions; one member does not use up the numbers"
    syncer.lost("e", 3 * LATER, "connection reset")
    assert number_to_pass(syncer, 0) == 0


def test_of_another_history_the_most_backed_author_is_believed() -> None:
    syncer = Peer("h", "h", "run", MANIFEST, [ZERO], signer=Keys("h"))
    syncer.tick(0.0)
    syncer.adopted(0, 1, ONE, 1.0, contributors={"h": 10}, record=record("h", 1))
    parted = record_of(3, TWO, TWO, {"a": 10}, author="e", term=5)
    for name in ("e", "x"):
        syncer.connected(name, hello_of(votes=(Vote(fragment=0, term=5, holder="e"),)), LATER)
    syncer.connected("y", hello_of(), LATER)
    assert unbelieved(syncer, parted, "x") is None, "two of three others"
    syncer.connected("z", hello_of(), LATER)
    assert "few have it" in str(unbelieved(syncer, parted, "x")), "two of four"


# -- syncers that count as gone ---------------------------------------------------------------------------------------


def believer(*others: str) -> Peer:
    """A peer that believes in the syncer `h`, which has announced version 1."""
    peer = follower(*others)
    news = Published(fragment=0, term=3, version=1, digest=ONE, contributors=[], applied_tokens=0)
    peer.heard("h", news, 1.0)
    return peer


def misses(peer: Peer, *others: str) -> None:
    """It has failed for long to get the version, and others say the same of themselves."""
    for now in (1.0, LATER):
        missed(peer, 0, now)
    for other in others:
        peer.heard(other, status_of().model_copy(update={"missed": [0]}), LATER)


def test_a_syncer_of_what_nobody_can_have_is_unseated_for_good() -> None:
    peer = believer("a", "b")
    missed(peer, 0, 1.0)
    peer.heard("a", status_of().model_copy(update={"missed": [0]}), 2.0)
    assert not peer.status().missed and not unseat(peer, 2.0), "it may be busy"
    misses(peer)
    assert peer.status().missed == [0]
    (unseated,) = unseat(peer, LATER)
    assert isinstance(unseated, Note) and "version 1, which nobody can have" in str(unseated.fields)
    assert holder_of(peer) is None and "h" not in peer.able()
    peer.heard("h", claim_of(9), LATER)
    assert holder_of(peer) is None


@pytest.mark.parametrize("follows", ["h", "me"])
def test_who_unseats_a_syncer_alone_comes_back_to_it(follows: str) -> None:
    """The others said that they miss its version, and then got it, or unseat it as well."""
    peer = believer("a", "b")
    for other in "ab":
        peer.heard(other, Vote(fragment=0, term=3, holder="h"), 1.0)
    misses(peer, "a", "b")
    peer.catch_up_failed(0)
    held = []
    for second in range(80):
        now = LATER + second
        for other in "hab":
            peer.heard(other, status_of(), now)
        peer.tick(now)
        held.append(holder_of(peer))
        if follows == "me" and held[-1] == ("me", 4):
            for other in "ab":
                peer.heard(other, Vote(fragment=0, term=4, holder="me"), now)
    mine = ("me", 4)
    assert held[0] is None and mine in held and held[-1] == (("h", 3) if follows == "h" else mine)


def test_a_version_that_few_miss_unseats_nobody() -> None:
    peer = believer("a", "b", "c")
    misses(peer, "a")
    assert not unseat(peer, LATER), "two of four"
    busy = believer("a", "b", "c")
    misses(busy, "a", "b")
    busy.heard("c", status_of(1, ONE), LATER)
    assert not unseat(busy, LATER), "c got it"
    unmoved = believer("a", "b", "c")
    misses(unmoved)
    unmoved.fragments[0].misses = False
    for other in "abc":
        unmoved.heard(other, status_of().model_copy(update={"missed": [0]}), LATER)
    assert not unseat(unmoved, LATER), "this peer does not"


def stuck(round_s: float, waiting: str = "ab") -> Peer:
    """A peer whose syncer `h` has made one version after so many seconds, and no other one, for which some wait."""
    peer = follower("a", "b", "c")
    for version, at in ((1, 10.0), (2, 10.0 + round_s)):
        peer.adopted(0, version, digest_of(version), at, contributors={"a": 10})
        for other in "habc":
            state: State = "exchanging" if other in waiting else "training"
            peer.heard(other, Status(state=state, versions=[version], marks=mark(digest_of(version))), at)
    peer.enter("exchanging", 11.0 + round_s)
    watch(peer, 12.0 + round_s)
    return peer


def test_a_syncer_that_waits_for_too_long_is_unseated_for_good() -> None:
    peer = stuck(round_s=100.0)
    assert not unseat(peer, 112.0 + 600.0 + 299.0), "a peer may pause, and another one may be slow"
    (unseated,) = unseat(peer, 112.0 + 600.0 + 301.0)
    assert isinstance(unseated, Note) and "not made version 3" in str(unseated.fields) and "h" in peer.deposed


def test_a_syncer_for_which_few_wait_or_that_is_new_stays() -> None:
    assert not unseat(stuck(100.0, waiting="a"), 10.0 * LATER), "two of four"
    peer = stuck(100.0)
    peer.adopted(0, 3, digest_of(3), 113.0, contributors={"a": 10})
    assert not unseat(peer, 10.0 * LATER), "it made one"
    newcomer = stuck(100.0)
    newcomer.fragments[0].round_s = None
    assert not unseat(newcomer, 10.0 * LATER)
