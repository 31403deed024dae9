"""Syncer: a version closes when everybody has arrived who can be expected, and each contribution counts once."""

from __future__ import annotations

import pytest

from diloco.config import OuterConfig
from diloco.protocol.membership import STALL_FLOOR_S, STALL_UNMEASURED_S, Member
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Status
from diloco.protocol.offers import Close
from diloco.protocol.patience import FLOOR_S, PAUSE_LIMIT_S, PAUSE_RATE
from diloco.protocol.states import STATES, State
from diloco.protocol.syncer import Syncer
from tests.support.certificates import CHUNKS
from tests.support.core import contribution_of

TERM, VERSION = 3, 7


def contribution(base_version: int = VERSION, term: int = TERM, tokens: int = 100, **fields: object) -> Contribution:
    return contribution_of(base_version, term=term, tokens=tokens, **fields)


def member(
    peer: str, state: State = "training", version: int = VERSION, trains: bool = True, steps_per_s: float = 1.0,
    now: float = 0.0, **fields: object,
) -> Member:  # fmt: skip
    """One that made progress last at that time."""
    status = Status(state=state, versions=[version] * 2, steps_per_s=steps_per_s, **fields)  # type: ignore[arg-type]
    return Member(peer, peer, trains, True, status, now, now)


def members(*those: Member) -> dict[str, Member]:
    return {each.peer: each for each in those}


def crawling(peers: str, now: float, version: int = VERSION) -> dict[str, Member]:
    """Members that have just made progress, at a pace that they say is slow."""
    return members(*(member(peer, version=version, steps_per_s=1e-6, now=now) for peer in peers))


def send(syncer: Syncer, peers: str, tokens: int = 100, chunks: int = CHUNKS, now: float = 0.0) -> None:
    """Each sends its payload, or a part of it."""
    for peer in peers:
        assert syncer.offer(peer, contribution(syncer.version, tokens=tokens), now=now).accepted
        for _ in range(chunks):
            syncer.progressed(peer)
        if chunks == CHUNKS:
            assert syncer.wants(peer, syncer.version)
            syncer.arrived(peer, now)


def late(syncer: Syncer, peer: str, now: float) -> None:
    """A payload that missed its version."""
    assert syncer.offer(peer, contribution(), 2, now=now).accepted and syncer.wants(peer, VERSION)
    syncer.arrived(peer, now=now)


def publish(syncer: Syncer, live: dict[str, Member], now: float = 0.0) -> tuple[str, ...]:
    """The version closes and is published; returns its contributors."""
    close = syncer.poll(live, now)
    assert close is not None
    syncer.advance(close.base_version + 1, now=now)
    return tuple(close.contributors)


@pytest.fixture
def syncer() -> Syncer:
    return Syncer(0, TERM, VERSION)


A, B, C = map(member, "abc")
ALL = members(A, B, C)


@pytest.mark.parametrize(
    ("other", "waited_for"),
    [
        *((member("b", state), state in ("ready", "training", "exchanging")) for state in STATES),
        (member("b", trains=False), False),
        (member("b", version=VERSION - 1), False),
        (member("b", version=VERSION + 1), False),
        (A, False),
    ],
    ids=[*STATES, "host", "behind", "ahead", "dead"],
)
def test_whoever_trains_from_this_version_is_waited_for(syncer: Syncer, other: Member, waited_for: bool) -> None:
    send(syncer, "a")
    assert syncer.poll(members(A, other), 0.0) == (None if waited_for else Close(0, VERSION, {"a": 100}, ()))


def test_one_who_stalls_is_waited_for_as_its_own_pace_allows(syncer: Syncer) -> None:
    send(syncer, "ab", now=100.0)  # patience is longer
    fast, slow = members(A, B, member("c", steps_per_s=10.0)), members(A, B, member("c", steps_per_s=0.0))
    assert syncer.poll(fast, STALL_FLOOR_S) is None
    assert syncer.poll(slow, STALL_FLOOR_S + 1) is None and syncer.poll(slow, STALL_UNMEASURED_S) is None
    assert publish(syncer, fast, STALL_FLOOR_S + 1) == ("a", "b")


def test_one_whose_chunks_arrive_is_getting_on(syncer: Syncer) -> None:
    """A slow uplink takes longer than the stall deadline, and the sender's status says nothing new meanwhile."""
    send(syncer, "a", now=2 * CHUNKS * STALL_FLOOR_S)  # patience is longer
    both = members(A, member("b", "exchanging"))
    for chunk in range(CHUNKS - 1):
        send(syncer, "b", chunks=chunk + 1)
        assert syncer.poll(both, (chunk + 0.9) * STALL_FLOOR_S) is None
        assert syncer.poll(both, (chunk + 1.8) * STALL_FLOOR_S) is None
    assert syncer.poll(both, CHUNKS * STALL_FLOOR_S) == Close(0, VERSION, {"a": 100}, ("b",))


# -- slow peers -------------------------------------------------------------------------------------------------------


def round_of(syncer: Syncer, peers: str, seconds: float, began: float) -> None:
    """These contribute after so many seconds, and the version closes and is published."""
    send(syncer, peers, now=began + seconds)
    assert syncer.poll(crawling(peers, began + seconds, syncer.version), 1e9) is not None
    syncer.advance(syncer.version + 1, now=began + seconds)


@pytest.mark.parametrize("seconds", [1.0, 50.0])
def test_one_that_says_it_is_slow_has_two_rounds_of_the_others(syncer: Syncer, seconds: float) -> None:
    send(syncer, "a", now=seconds)
    assert syncer.poll(crawling("abl", 1e6), 1e6) is None, "fewer than half are there"
    send(syncer, "b", now=seconds)
    ends = seconds + max(FLOOR_S, 2 * seconds)
    assert syncer.poll(crawling("abl", ends - 0.1), ends - 0.1) is None
    assert syncer.poll(crawling("abl", ends), ends) == Close(0, VERSION, {"a": 100, "b": 100}, ())


def test_who_was_missing_is_expected_again_once_it_is_quick(syncer: Syncer) -> None:
    """After a contribution that took no longer than patience."""

    def goes_on(now: float) -> bool:
        """Whether the version closes without waiting for `s`."""
        if syncer.poll(crawling("abs", now, syncer.version), now) is None:
            return False
        syncer.advance(syncer.version + 1, now=now)
        return True

    round_of(syncer, "abs", 10.0, 0.0)
    send(syncer, "ab", now=20.0)
    assert goes_on(40.0)
    for now in (50.0, 60.0):
        send(syncer, "ab", now=now)
        assert goes_on(now), "nobody waits for it"
    assert syncer.offer("s", contribution(VERSION + 1), now=60.5).accepted
    syncer.arrived("s", now=60.5)  # 50 s after version 8 was there; the others take 10
    assert not goes_on(61.0), "the others are still training"
    round_of(syncer, "ab", 10.0, 60.0)
    assert syncer.last_contributors == {"a", "b", "s"} and syncer.last_staleness > 0
    send(syncer, "ab", now=80.0)
    assert goes_on(80.0), "too slow"
    send(syncer, "s", now=95.0)
    send(syncer, "ab", now=96.0)
    assert goes_on(96.0)
    send(syncer, "ab", now=106.0)
    assert not goes_on(106.0), "it is quick"


# -- pauses -----------------------------------------------------------------------------------------------------------


class Pausing:
    """A swarm of rounds of ten seconds, in virtual time; `l` says in every round that it evaluates."""

    def __init__(self) -> None:
        self.syncer, self.now = Syncer(0, TERM, VERSION), 0.0
        self.liar = crawling("l", 0.0)["l"]

    def version(self, comes_after_s: float | None) -> float:
        """How long the next version takes, if `l` pauses for so long and then contributes; None: it never does."""
        syncer, opened, version = self.syncer, self.now, self.syncer.version
        for at, pace in ((opened, 1.0), (opened + 10.0, 1e-6)):
            said = member("l", version=version, inner_step=version, steps_per_s=pace, tokens=version)
            self.liar.hear(said.status, at)
        self.now += 10.0
        send(syncer, "ab", now=self.now)
        while True:
            if comes_after_s is not None and self.now - opened >= comes_after_s:
                send(syncer, "l", now=self.now)
                comes_after_s = None
            if syncer.poll({**crawling("ab", self.now, version), "l": self.liar}, self.now) is not None:
                syncer.advance(version + 1, now=self.now)
                return self.now - opened
            self.now += 1.0


def test_a_pause_is_waited_for_and_comes_out_of_a_bucket() -> None:
    swarm = Pausing()
    assert swarm.version(5.0) == 10.0
    assert swarm.version(500.0) == 500.0
    assert not swarm.syncer._patience.slow, "a pause that is paid for makes nobody slow"
    left = PAUSE_LIMIT_S - (500 - 3 * 10.0)
    assert swarm.version(None) == pytest.approx((10 + FLOOR_S + left) / (1 - PAUSE_RATE), abs=2.0), "it fills meanwhile"
    assert swarm.syncer._patience.slow == {"l"}
    assert swarm.version(None) == 10.0, "nobody waits for it until it is quick"


def test_pauses_in_every_round_cost_a_twentieth_of_the_time() -> None:
    swarm, versions = Pausing(), 0
    while swarm.now < 8000.0:
        swarm.version(5.0)
        swarm.version(None)  # it takes all that there is
        versions += 2
    waited_s = swarm.now - versions * (10.0 + FLOOR_S)  # and its patience, as without a word
    assert waited_s < PAUSE_LIMIT_S + PAUSE_RATE * swarm.now


def test_a_pause_that_all_make_together_costs_nobody_anything(syncer: Syncer) -> None:
    round_of(syncer, "abc", 1.0, 0.0)
    for number, peer in enumerate("abc"):
        send(syncer, peer, now=100.0 + number)
    assert syncer.poll(crawling("abc", 0.0), 110.0) is not None
    assert not syncer._patience.slow and not syncer._patience._pauses._by_key


# -- what is late -----------------------------------------------------------------------------------------------------


def test_what_is_late_is_merged_at_a_discount_once(syncer: Syncer) -> None:
    """And only if it is carried."""
    for number in range(3):
        round_of(syncer, "ab", 10.0, 10.0 * number)
    assert not syncer.offer("s", contribution(), 2, carried=False).accepted
    late(syncer, "s", 31.0)
    assert syncer.staleness(VERSION) == 3.0 and syncer.discount("s") == 0.5 and syncer.keeps("s", VERSION)
    round_of(syncer, "ab", 10.0, 30.0)
    assert syncer.offer("s", contribution(), 2).merged


def test_what_was_left_out_is_not_merged_later(syncer: Syncer) -> None:
    send(syncer, "abs")
    close = syncer.poll({}, 0.0)
    assert close is not None and syncer.leave_out(close, ["s"]).contributors == {"a": 100, "b": 100}
    syncer.advance(VERSION + 1)
    verdict = syncer.offer("s", contribution())
    assert not verdict.accepted and verdict.late


def test_what_is_late_makes_no_version_when_others_are_done(syncer: Syncer) -> None:
    round_of(syncer, "ab", 10.0, 0.0)
    late(syncer, "s", 11.0)
    syncer.drop_late()
    assert not syncer.keeps("s", VERSION) and syncer.poll({}, 12.0) is None
    assert syncer.offer("s", contribution()).late


def test_last_contributors_are_expected_with_an_older_status(syncer: Syncer) -> None:
    """Right after a publication their statuses still name the version before, but none before that."""
    send(syncer, "ab")
    publish(syncer, members(A, B))
    send(syncer, "a")
    assert syncer.poll(members(member("a", version=VERSION + 1), B, member("d")), 0.0) is None
    close = syncer.poll(members(A, member("d")), 0.0)  # d did not contribute: it is behind
    assert close == Close(0, VERSION + 1, {"a": 100}, ("b",))
    syncer.advance(VERSION + 2)
    send(syncer, "a")
    publish(syncer, members(member("a", version=VERSION + 2), member("b", version=VERSION + 1)))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (contribution(VERSION + 1), "is at version 7, 8 is in the future"),
        (contribution(term=TERM - 1), "is under term 3, not 2"),
        (contribution(term=TERM + 1), "is under term 3, not 4"),
    ],
    ids=["future", "old term", "new term"],
)
def test_what_does_not_fit_is_refused(header: Contribution, reason: str) -> None:
    syncer = Syncer(0, TERM, VERSION)
    verdict = syncer.offer("a", header)
    assert not verdict.accepted and reason in verdict.reason
    assert (verdict.version, verdict.term) == (VERSION, TERM)


def test_nothing_is_added_to_a_version_that_closes(syncer: Syncer) -> None:
    send(syncer, "a")
    send(syncer, "b", chunks=1)
    assert syncer.poll(members(A), 0.0) == Close(0, VERSION, {"a": 100}, ("b",))
    assert not syncer.wants("b", VERSION)
    syncer.arrived("b")  # too late
    for peer in "bc":
        verdict = syncer.offer(peer, contribution())
        assert not verdict.accepted and "closing" in verdict.reason and verdict.version == VERSION
    syncer.advance(VERSION + 1)
    assert syncer.offer("b", contribution(VERSION + 1)).accepted
    assert not syncer.wants("a", VERSION) and syncer.poll({}, 0.0) is None
    send(syncer, "a", tokens=7)
    assert syncer.poll({}, 0.0) == Close(0, VERSION + 1, {"a": 7}, ("b",)), "the next version collects anew"


def test_a_peer_that_restarted_may_go_on_with_other_tokens(syncer: Syncer) -> None:
    """Refusing it would be a deadlock: the peer is alive and expected, and could never become whole."""
    send(syncer, "a", tokens=100, chunks=1)
    send(syncer, "b", tokens=100)
    send(syncer, "a", tokens=40)
    close = syncer.poll(ALL | members(member("c", "done")), 0.0)
    assert close is not None and close.tokens == 140


def test_a_payload_that_is_here_is_kept_once(syncer: Syncer) -> None:
    """However often its stream breaks."""
    for _ in range(3):
        send(syncer, "a", chunks=1)
    send(syncer, "a")
    assert not syncer.wants("a", VERSION) and syncer.offer("a", contribution()).accepted, "it did not hear that"
    assert syncer.poll({}, 0.0) == Close(0, VERSION, {"a": 100}, ())


# -- with a quorum ----------------------------------------------------------------------------------------------------


def quick(**settings: object) -> Syncer:
    return Syncer(0, TERM, VERSION, OuterConfig.parse({"method": "diloco", "sync_every": 1, "quorum": 1, **settings}))


def contribute(syncer: Syncer, peers: str, base_version: int = VERSION, **how: float) -> None:
    for peer in peers:
        assert syncer.offer(peer, contribution(base_version), **how).accepted  # type: ignore[arg-type]
        assert syncer.wants(peer, base_version)
        syncer.arrived(peer)


def test_a_quorum_of_one_closes_at_once_and_takes_the_late() -> None:
    syncer = quick(staleness_limit=2)
    for version, peer in enumerate("abc", VERSION):
        contribute(syncer, peer)
        assert syncer.version == version and publish(syncer, ALL) == (peer,)
    verdict = syncer.offer("d", contribution())
    assert not verdict.accepted and "past base version" in verdict.reason and verdict.version == VERSION + 3
    assert verdict.late and not syncer.offer("d", contribution(VERSION + 4)).late, "the future"


def test_a_round_is_as_many_contributions_as_there_are_peers() -> None:
    """However few versions they make, and what is late by a part of a round counts less."""
    syncer = quick(quorum=3, staleness_limit=1, staleness_exponent=0.5)
    for version in range(VERSION, VERSION + 2):
        contribute(syncer, "abc", version)
        publish(syncer, ALL)
    assert syncer.offer("d", contribution(VERSION + 1), 4).accepted
    assert syncer.staleness(VERSION + 1) == 3 / 4 and syncer.staleness(VERSION) == 6 / 4
    assert syncer.discount("d") == (1 + 3 / 4) ** -0.5
    assert syncer.offer("e", contribution(), 4).late
    syncer.advance(VERSION + 4, {})  # by others; each of these versions is of one contribution at least
    assert syncer.staleness(VERSION + 1) == 5 / 4 and syncer.staleness(VERSION + 2) == 2 / 4


def test_grace_begins_with_the_quorum_and_ends_with_the_last() -> None:
    syncer = quick(quorum=2, grace_s=5.0)
    contribute(syncer, "a")
    assert syncer.poll(ALL, 1.0) is None and syncer.grace_until is None
    contribute(syncer, "b")
    for now in (2.0, 6.9):
        assert syncer.poll(ALL, now) is None and syncer.grace_until == 7.0
    assert publish(syncer, ALL, 7.0) == ("a", "b")
    syncer = quick(quorum=1, grace_s=5.0)
    contribute(syncer, "abc")
    assert publish(syncer, ALL) == ("a", "b", "c"), "nobody is left to wait for"


def test_adaptive_grace_is_a_part_of_what_the_overlap_leaves() -> None:
    syncer, paced = quick(grace_slack=0.5, overlap=4, sync_every=10), [member(peer, steps_per_s=2.0) for peer in "abc"]
    contribute(syncer, "a")
    assert syncer.poll(members(*paced), 0.25, sync_s=1.0) is None
    assert syncer.grace_until == 0.25 + 0.5 * (4 / 2.0 - 0.25 - 1.0), "xi_quorum is a quarter of a second, xi_sync one"
    slow = quick(quorum=2, grace_slack=0.8, overlap=2, sync_every=10)
    contribute(slow, "a")
    assert slow.poll(ALL, 1.9) is None
    contribute(slow, "b", active=3, now=1.9)
    close = slow.poll(ALL, 1.9, sync_s=0.2)
    assert close is not None and tuple(close.contributors) == ("a", "b"), "the quorum took all that the overlap hides"


def test_a_quorum_is_never_more_than_the_peers_that_train() -> None:
    syncer = quick(quorum=8)
    for peer in "abc":
        assert syncer.poll(ALL, 0.0) is None
        contribute(syncer, peer)
    assert publish(syncer, ALL) == ("a", "b", "c")


def test_a_quorum_does_not_wait_for_one_of_another_history() -> None:
    """It is at the same version as the others, waits for other fragments, and offers nothing."""
    syncer = quick(quorum=2)
    waits = member("b", "exchanging")
    waits.round_versions = [VERSION]
    contribute(syncer, "a")
    two = members(member("a", "exchanging"), waits)
    assert syncer.poll(two, waits.stall_s()) is None, "it may be about to send"
    assert syncer.poll(two, waits.stall_s() + 0.1) is not None


def test_a_payload_on_its_way_survives_the_close_that_it_missed() -> None:
    syncer = quick(staleness_limit=1)
    assert syncer.offer("b", contribution()).accepted
    contribute(syncer, "a")
    publish(syncer, ALL)
    assert syncer.wants("b", VERSION) and syncer.staleness(VERSION) == 1.0
    again = syncer.offer("a", contribution())
    assert not again.accepted and again.merged, "it is in the model"
    contribute(syncer, "a", VERSION + 1)
    publish(syncer, ALL)
    assert not syncer.wants("b", VERSION), "too late now"


def test_a_window_has_a_contribution_for_each_active_peer() -> None:
    """The window that is open keeps its length: see `unit/outer/test_optimizer.py`."""
    syncer, delays = quick(staleness_limit=9, optimizer="delayed_nesterov"), []
    for version, live in enumerate([ALL, ALL, members(A, B)], VERSION):
        contribute(syncer, "a", version)
        delays.append(syncer.poll(live, 0.0).delay)
        syncer.advance(version + 1)
    assert delays == [3, 3, 2]


@pytest.mark.parametrize(("at", "waited_for"), [(0, False), (3, True)])
def test_staggered_newcomers_are_awaited_once_they_contribute(at: int, waited_for: bool) -> None:
    syncer = Syncer(0, TERM, VERSION, OuterConfig.parse({"method": "diloco", "sync_every": 4, "staggered": True}))
    send(syncer, "ab")
    publish(syncer, members(A, B))
    three = members(*(member(peer, version=VERSION + 1) for peer in "abc"))
    three["c"].hear(three["c"].status.model_copy(update={"inner_step": at, "target_steps": 4}), 0.0)
    send(syncer, "ab")
    close = syncer.poll(three, 0.0)
    if waited_for:  # it is about to send, and would be a step too late each time
        assert close is None
        assert syncer.poll(three, 3.0) is not None, "it did not"
    else:
        assert close is not None and tuple(close.contributors) == ("a", "b")


def test_a_slow_stream_is_not_taken_for_the_next_contribution() -> None:
    syncer = quick(staleness_limit=9)
    assert syncer.offer("a", contribution()).accepted  # sent twice, and the second stream is slow
    contribute(syncer, "a")
    publish(syncer, ALL)
    assert syncer.offer("a", contribution(VERSION + 1)).accepted
    assert not syncer.wants("a", VERSION) and syncer.wants("a", VERSION + 1)


def test_what_is_in_a_version_that_was_fetched_is_dropped() -> None:
    syncer = quick(staleness_limit=9)
    for peer in "ab":
        assert syncer.offer(peer, contribution()).accepted
    syncer.advance(VERSION + 1, {"a": VERSION})
    assert not syncer.wants("a", VERSION) and syncer.wants("b", VERSION)
    assert syncer.offer("a", contribution()).merged
