"""Syncer: a version closes when everybody has arrived who can be expected, and each chunk of each peer counts once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import OuterConfig
from diloco.protocol.membership import STALL_FLOOR_S, STALL_UNMEASURED_S, Member
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Status
from diloco.protocol.offers import Close
from diloco.protocol.patience import FLOOR_S, PAUSE_LIMIT_S, PAUSE_RATE
from diloco.protocol.states import State
from diloco.protocol.syncer import Syncer
from tests.support.certificates import CHUNKS, MANIFEST

TERM, VERSION = 3, 7


def wants(syncer: Syncer, peer: str, chunk: int) -> bool:
    """Asked by the stream of the contribution that was offered last."""
    offer = syncer._offers.get(peer)
    return syncer.wants(peer, chunk, -1 if offer is None else offer.base_version)


def contribution(base_version: int = VERSION, term: int = TERM, tokens: int = 100) -> Contribution:
    return Contribution(
        base_digest="0" * 64,
        manifest_hash=MANIFEST,
        fragment=0,
        term=term,
        base_version=base_version,
        steps=1,
        tokens=tokens,
    )


def member(
    peer: str, state: State = "training", version: int = VERSION, trains: bool = True, steps_per_s: float = 1.0
) -> Member:
    return Member(peer, peer, trains, True, Status(state=state, versions=[version], steps_per_s=steps_per_s), 0.0, 0.0)


def members(*those: Member) -> dict[str, Member]:
    return {each.peer: each for each in those}


def send(syncer: Syncer, peer: str, tokens: int = 100, chunks: int = CHUNKS, now: float = 0.0) -> None:
    """Send the payload from where the syncer wants it, or a part of it."""
    verdict = syncer.offer(peer, contribution(syncer.version, tokens=tokens), now=now)
    assert verdict.accepted
    for chunk in range(verdict.first_chunk, chunks):
        assert wants(syncer, peer, chunk)
        syncer.folded(peer)
    if chunks == CHUNKS:
        syncer.arrived(peer, now)


@pytest.fixture
def syncer() -> Syncer:
    return Syncer(0, TERM, VERSION)


ALL = members(member("a"), member("b"), member("c"))


@given(st.permutations("abc"))
def test_a_version_closes_when_everybody_has_arrived_and_not_before(order: list[str]) -> None:
    syncer = Syncer(0, TERM, VERSION)
    for peer in order:
        assert syncer.poll(ALL, 0.0) is None
        send(syncer, peer)
    assert syncer.poll(ALL, 0.0) == Close(0, VERSION, {"a": 100, "b": 100, "c": 100}, ())
    assert syncer.poll(ALL, 0.0) is None  # once


def test_a_version_without_contributions_never_closes(syncer: Syncer) -> None:
    assert syncer.poll({}, 1e9) is None
    assert syncer.poll(members(member("a", "done")), 1e9) is None
    send(syncer, "a", chunks=1)
    assert syncer.poll({}, 1e9) is None


@pytest.mark.parametrize(
    "other",
    [
        member("b", "starting"),
        member("b", "leaving"),
        member("b", "done"),
        member("b", trains=False),
        member("b", version=VERSION - 1),
        member("b", version=VERSION + 1),
    ],
    ids=["starting", "leaving", "done", "host", "behind", "ahead"],
)
def test_nobody_waits_for_one_who_will_not_come(syncer: Syncer, other: Member) -> None:
    send(syncer, "a")
    close = syncer.poll(members(member("a"), other), 0.0)
    assert close is not None and tuple(close.contributors) == ("a",)


@pytest.mark.parametrize("state", ["ready", "training", "exchanging"])
def test_whoever_trains_from_this_version_is_waited_for(syncer: Syncer, state: State) -> None:
    send(syncer, "a")
    assert syncer.poll(members(member("a"), member("b", state)), 0.0) is None


def test_the_dead_are_not_waited_for(syncer: Syncer) -> None:
    send(syncer, "a")
    assert syncer.poll(members(member("a"), member("b")), 0.0) is None
    assert syncer.poll(members(member("a")), 0.0) is not None


def test_one_who_stalls_is_waited_for_as_long_as_its_own_pace_allows(syncer: Syncer) -> None:
    for peer in "ab":
        send(syncer, peer, now=100.0)  # patience is longer
    fast, slow = member("c", steps_per_s=10.0), member("c", steps_per_s=0.0)
    assert syncer.poll(members(member("a"), member("b"), fast), STALL_FLOOR_S) is None
    assert syncer.poll(members(member("a"), member("b"), slow), STALL_FLOOR_S + 1) is None
    assert syncer.poll(members(member("a"), member("b"), slow), STALL_UNMEASURED_S) is None
    close = syncer.poll(members(member("a"), member("b"), fast), STALL_FLOOR_S + 1)
    assert close is not None and tuple(close.contributors) == ("a", "b")


def test_one_whose_chunks_arrive_is_getting_on(syncer: Syncer) -> None:
    """A slow uplink takes longer than the stall deadline, and the sender's status says nothing new meanwhile."""
    send(syncer, "a", now=2 * CHUNKS * STALL_FLOOR_S)  # patience is longer
    both = members(member("a"), member("b", "exchanging"))
    for chunk in range(CHUNKS - 1):
        send(syncer, "b", chunks=chunk + 1)
        assert syncer.poll(both, (chunk + 0.9) * STALL_FLOOR_S) is None
        assert syncer.poll(both, (chunk + 1.8) * STALL_FLOOR_S) is None
    assert syncer.poll(both, CHUNKS * STALL_FLOOR_S) == Close(0, VERSION, {"a": 100}, ("b",))


# -- slow peers -------------------------------------------------------------------------------------------------------


def trains(peer: str, now: float, version: int = VERSION) -> Member:
    """A member that has just made progress, at a pace that it says is slow."""
    status = Status(state="training", versions=[version], steps_per_s=1e-6)
    return Member(peer, peer, True, True, status, now, now)


def round_of(syncer: Syncer, peers: str, seconds: float, began: float) -> None:
    """These contribute after so many seconds, and the version closes and is published."""
    for peer in peers:
        send(syncer, peer, now=began + seconds)
    assert syncer.poll(members(*(trains(peer, began + seconds, syncer.version) for peer in peers)), 1e9) is not None
    syncer.advance(syncer.version + 1, now=began + seconds)


@pytest.mark.parametrize("seconds", [1.0, 50.0])
def test_a_version_waits_for_one_that_says_it_is_slow_for_two_rounds_of_the_others(seconds: float) -> None:
    syncer = Syncer(0, TERM, VERSION)
    for peer in "ab":
        send(syncer, peer, now=seconds)
    ends = seconds + max(FLOOR_S, 2 * seconds)
    assert syncer.poll(members(*(trains(peer, ends - 0.1) for peer in "abl")), ends - 0.1) is None
    assert syncer.poll(members(*(trains(peer, ends) for peer in "abl")), ends) == Close(
        0, VERSION, {"a": 100, "b": 100}, ()
    )


def test_a_version_waits_while_fewer_than_half_are_there() -> None:
    syncer = Syncer(0, TERM, VERSION)
    send(syncer, "a", now=1.0)
    assert syncer.poll(members(*(trains(peer, 1e6) for peer in "abc")), 1e6) is None


def test_who_was_missing_is_expected_again_after_a_contribution_that_took_no_longer_than_patience() -> None:
    syncer = Syncer(0, TERM, VERSION)
    round_of(syncer, "abs", 10.0, 0.0)
    for peer in "ab":
        send(syncer, peer, now=20.0)
    assert syncer.poll(members(*(trains(peer, 40.0, VERSION + 1) for peer in "abs")), 40.0) is not None
    syncer.advance(VERSION + 2, now=40.0)
    for number in range(2):  # nobody waits for it
        for peer in "ab":
            send(syncer, peer, now=50.0 + 10 * number)
        now = 50.0 + 10 * number
        assert syncer.poll(members(*(trains(peer, now, syncer.version) for peer in "abs")), now) is not None
        syncer.advance(syncer.version + 1, now=now)
    late = contribution(VERSION + 1)
    assert syncer.offer("s", late, now=60.5).accepted and syncer.collects("s")
    syncer.folded("s")
    syncer.arrived("s", now=60.5)  # 50 s after version 8 was there; the others take 10
    everybody = members(*(trains(peer, 61.0, syncer.version) for peer in "abs"))
    assert syncer.poll(everybody, 61.0) is None, "the others are still training"
    round_of(syncer, "ab", 10.0, 60.0)
    assert syncer.last_contributors == {"a", "b", "s"} and syncer.last_staleness > 0
    for peer in "ab":
        send(syncer, peer, now=80.0)
    assert syncer.poll(members(*(trains(peer, 80.0, syncer.version) for peer in "abs")), 80.0) is not None, "too slow"
    syncer.advance(syncer.version + 1, now=80.0)
    send(syncer, "s", now=95.0)
    for peer in "ab":
        send(syncer, peer, now=96.0)
    assert syncer.poll(members(*(trains(peer, 96.0, syncer.version) for peer in "abs")), 96.0) is not None
    syncer.advance(syncer.version + 1, now=96.0)
    for peer in "ab":
        send(syncer, peer, now=106.0)
    assert syncer.poll(members(*(trains(peer, 106.0, syncer.version) for peer in "abs")), 106.0) is None, "it is quick"


# -- pauses -----------------------------------------------------------------------------------------------------------


class Pausing:
    """A swarm of rounds of ten seconds, in virtual time; `l` says in every round that it evaluates."""

    def __init__(self) -> None:
        self.syncer, self.now = Syncer(0, TERM, VERSION), 0.0
        self.liar = trains("l", 0.0)

    def hear(self, steps: int, pace: float) -> None:
        status = Status(
            state="training", versions=[self.syncer.version], inner_step=steps, steps_per_s=pace, tokens=steps
        )
        self.liar.hear(status, self.now)

    def version(self, comes_after_s: float | None) -> float:
        """How long the next version takes, if `l` pauses for so long and then contributes; None: it never does."""
        syncer, opened, version = self.syncer, self.now, self.syncer.version
        self.hear(version, 1.0)
        self.now += 10.0
        self.hear(version, 1e-6)
        for peer in "ab":
            send(syncer, peer, now=self.now)
        while True:
            honest = [trains(peer, self.now, version) for peer in "ab"]
            if comes_after_s is not None and self.now - opened >= comes_after_s:
                send(syncer, "l", now=self.now)
                comes_after_s = None
            if syncer.poll(members(*honest, self.liar), self.now) is not None:
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


def test_a_peer_that_pauses_in_every_round_costs_a_twentieth_of_the_time_at_most() -> None:
    swarm = Pausing()
    versions = 0
    while swarm.now < 50_000.0:
        swarm.version(5.0)
        swarm.version(None)  # it takes all that there is
        versions += 2
    waited_s = swarm.now - versions * (10.0 + FLOOR_S)  # and its patience, as without a word
    assert waited_s < PAUSE_LIMIT_S + PAUSE_RATE * swarm.now


def test_a_pause_that_all_make_together_costs_nobody_anything(syncer: Syncer) -> None:
    everybody = [trains(peer, 0.0) for peer in "abc"]
    round_of(syncer, "abc", 1.0, 0.0)
    for number, peer in enumerate("abc"):
        send(syncer, peer, now=100.0 + number)
    assert syncer.poll(members(*everybody), 110.0) is not None
    assert not syncer._patience.slow and not len(syncer._patience._pauses)


# -- what is late -----------------------------------------------------------------------------------------------------


def test_what_is_late_is_merged_at_a_discount_once_and_only_if_it_is_carried(syncer: Syncer) -> None:
    for number in range(3):
        round_of(syncer, "ab", 10.0, 10.0 * number)
    assert not syncer.offer("s", contribution(VERSION), 2, carried=False).accepted
    assert syncer.offer("s", contribution(VERSION), 2).accepted
    assert syncer.staleness(VERSION) == 3.0 and syncer.discount("s") == 0.5
    assert syncer.keeps("s", VERSION) and wants(syncer, "s", 0)
    syncer.folded("s")
    syncer.arrived("s", now=31.0)
    round_of(syncer, "ab", 10.0, 30.0)
    assert syncer.offer("s", contribution(VERSION), 2).merged


def test_what_was_left_out_is_not_merged_later(syncer: Syncer) -> None:
    for peer in "abs":
        send(syncer, peer)
    close = syncer.poll({}, 0.0)
    assert close is not None and syncer.leave_out(close, ["s"]).contributors == {"a": 100, "b": 100}
    syncer.advance(VERSION + 1)
    verdict = syncer.offer("s", contribution(VERSION))
    assert not verdict.accepted and verdict.late


def test_of_what_is_half_in_the_sum_the_rest_is_not_merged_later() -> None:
    syncer = Syncer(0, TERM, VERSION, OuterConfig(method="diloco", sync_every=1, robust="none"))
    send(syncer, "a")
    send(syncer, "s", chunks=1)
    assert syncer.poll({}, 0.0) is not None
    syncer.advance(VERSION + 1)
    verdict = syncer.offer("s", contribution(VERSION))
    assert not verdict.accepted and verdict.late


def test_what_is_late_makes_no_version_when_the_others_are_done(syncer: Syncer) -> None:
    round_of(syncer, "ab", 10.0, 0.0)
    assert syncer.offer("s", contribution(VERSION)).accepted
    syncer.folded("s")
    syncer.arrived("s", now=11.0)
    syncer.drop_late()
    assert not syncer.keeps("s", VERSION) and syncer.poll({}, 12.0) is None
    assert syncer.offer("s", contribution(VERSION)).late


def test_a_claim_that_is_not_paid_for_is_collected_beside_the_version(syncer: Syncer) -> None:
    for _ in range(4):
        assert syncer.offer("l", contribution(VERSION), 2, 0.0, rate=0.5).accepted, "a retry costs nothing"
    assert not syncer.collects("l") and syncer.counts_at("l") == 0.0
    syncer.advance(VERSION + 1)
    assert syncer.offer("l", contribution(VERSION + 1), 2, 0.0, rate=0.5).accepted
    assert syncer.collects("l") and syncer.counts_at("l") == 2.0, "a step is claimed again at once"


def test_contributors_to_the_version_before_are_expected_though_their_status_is_one_behind(syncer: Syncer) -> None:
    send(syncer, "a")
    send(syncer, "b")
    assert syncer.poll(members(member("a"), member("b")), 0.0) is not None
    syncer.advance(VERSION + 1)
    send(syncer, "a")
    late = members(member("a", version=VERSION + 1), member("b"), member("d"))
    assert syncer.poll(late, 0.0) is None
    close = syncer.poll(members(member("a"), member("d")), 0.0)  # d did not contribute: it is behind
    assert close == Close(0, VERSION + 1, {"a": 100}, ("b",))


def test_a_newcomer_whose_contribution_is_on_its_way_is_expected_with_staggered_fragments() -> None:
    outer = OuterConfig(method="diloco", sync_every=6, fragments=2, staggered=True, overlap=1)
    syncer = Syncer(1, TERM, VERSION, outer, contributors="a")
    status = Status(state="exchanging", versions=[VERSION, VERSION], inner_step=0, target_steps=6, steps_per_s=2.0)
    both = members(Member("a", "a", True, True, status, 0.0, 0.0), Member("x", "x", True, True, status, 0.0, 0.0))
    send(syncer, "x", chunks=1)
    send(syncer, "a")
    assert syncer.poll(both, 0.0) is None
    send(syncer, "x")
    close = syncer.poll(both, 0.0)
    assert close is not None and set(close.contributors) == {"a", "x"}


def test_only_those_of_the_version_just_before_are_expected_so(syncer: Syncer) -> None:
    for version, peers in enumerate(["ab", "a"], start=VERSION):
        for peer in peers:
            send(syncer, peer)
        assert syncer.poll(members(*(member(peer, version=version) for peer in peers)), 0.0) is not None
        syncer.advance(version + 1)
    send(syncer, "a")
    assert syncer.poll(members(member("a", version=VERSION + 2), member("b", version=VERSION + 1)), 0.0) is not None


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (contribution(VERSION + 1), "is at version 7, 8 is in the future"),
        (contribution(term=TERM - 1), "is under term 3, not 2"),
        (contribution(term=TERM + 1), "is under term 3, not 4"),
    ],
    ids=["future", "old term", "new term"],
)
@pytest.mark.parametrize("moment", ["collecting", "begun", "whole", "closing"])
def test_a_contribution_that_does_not_fit_is_refused_at_any_moment(
    syncer: Syncer, header: Contribution, reason: str, moment: str
) -> None:
    if moment != "collecting":
        send(syncer, "a", chunks=1 if moment == "begun" else CHUNKS)
    if moment == "closing":
        assert syncer.poll({}, 0.0) is not None
    verdict = syncer.offer("a", header)
    assert not verdict.accepted and reason in verdict.reason
    assert (verdict.version, verdict.term) == (VERSION, TERM)


def test_a_broken_stream_goes_on_with_the_next_chunk(syncer: Syncer) -> None:
    send(syncer, "a", chunks=2)
    assert not wants(syncer, "a", 1) and wants(syncer, "a", 2) and not wants(syncer, "a", 3)
    assert not wants(syncer, "b", 0)
    verdict = syncer.offer("a", contribution())
    assert verdict.accepted and verdict.first_chunk == 2


def test_a_contribution_that_is_here_is_not_sent_again(syncer: Syncer) -> None:
    send(syncer, "a")
    assert syncer.offer("a", contribution()).first_chunk == CHUNKS
    assert syncer.poll({}, 0.0) is not None
    verdict = syncer.offer("a", contribution())  # its stream broke while it waited for the record
    assert verdict.accepted and verdict.first_chunk == CHUNKS


def test_nothing_is_folded_into_a_version_that_closes(syncer: Syncer) -> None:
    send(syncer, "a")
    send(syncer, "b", chunks=1)
    close = syncer.poll(members(member("a")), 0.0)
    assert close == Close(0, VERSION, {"a": 100}, ("b",))
    assert not wants(syncer, "b", 1)
    syncer.arrived("b")  # too late
    for peer in "bc":
        verdict = syncer.offer(peer, contribution())
        assert not verdict.accepted and "closing" in verdict.reason and verdict.version == VERSION
    syncer.advance(VERSION + 1)
    assert syncer.offer("b", contribution(VERSION + 1)).first_chunk == 0
    assert not wants(syncer, "a", 0)


def test_the_next_version_collects_anew(syncer: Syncer) -> None:
    send(syncer, "a")
    assert syncer.poll({}, 0.0) is not None
    syncer.advance(VERSION + 1)
    assert syncer.poll({}, 0.0) is None
    send(syncer, "a", tokens=7)
    assert syncer.poll({}, 0.0) == Close(0, VERSION + 1, {"a": 7}, ())


def test_catching_up_forgets_what_was_collected(syncer: Syncer) -> None:
    send(syncer, "a")
    syncer.advance(VERSION + 5)
    assert syncer.poll({}, 0.0) is None
    assert not syncer.offer("a", contribution(), carried=False).accepted
    assert syncer.offer("a", contribution(VERSION + 5)).accepted


def test_weights_are_tokens_over_those_of_the_first_contribution(syncer: Syncer) -> None:
    send(syncer, "a", tokens=200)
    send(syncer, "b", tokens=50)
    send(syncer, "c", tokens=200)
    assert [syncer.weight(peer) for peer in "abc"] == [1.0, 0.25, 1.0]
    assert syncer.poll({}, 0.0) is not None
    syncer.advance(VERSION + 1)
    send(syncer, "b", tokens=50)
    assert syncer.weight("b") == 1.0


def test_a_peer_that_restarted_may_go_on_with_other_tokens(syncer: Syncer) -> None:
    """Refusing it would be a deadlock: the peer is alive and expected, and could never become whole."""
    send(syncer, "a", tokens=100, chunks=1)
    send(syncer, "b", tokens=100)
    verdict = syncer.offer("a", contribution(tokens=40))
    assert verdict.accepted and verdict.first_chunk == 1
    assert (syncer.weight("a"), syncer.weight("b")) == (0.4, 1.0)  # the unit does not change midway
    send(syncer, "a", tokens=40)
    close = syncer.poll(ALL | members(member("c", "done")), 0.0)
    assert close is not None and close.tokens == 140


def test_what_is_here_whole_is_not_replaced_by_another_contribution(syncer: Syncer) -> None:
    send(syncer, "a")
    verdict = syncer.offer("a", contribution(tokens=99))
    assert not verdict.accepted and "100 tokens is here already" in verdict.reason


@given(st.integers(0, 10**9))
def test_however_streams_break_each_chunk_of_each_contributor_counts_once(seed: int) -> None:
    r, syncer, peers = random.Random(seed), Syncer(0, TERM, VERSION), "abcd"
    for version in range(VERSION, VERSION + 3):
        folded: Counter[tuple[str, int]] = Counter()
        streams: dict[str, int] = {}  # the chunk that is under way on each open stream
        everybody = members(*(member(peer, version=version) for peer in peers))
        while (close := syncer.poll(everybody, 0.0)) is None:
            peer = r.choice(peers)
            if peer not in streams or r.random() < 0.2:
                verdict = syncer.offer(peer, contribution(version, tokens=r.randint(1, 5)))
                if verdict.accepted:
                    streams[peer] = verdict.first_chunk
            elif streams[peer] == CHUNKS:
                syncer.arrived(peer)
            elif wants(syncer, peer, streams[peer]):
                folded[peer, streams[peer]] += 1
                syncer.folded(peer)
                streams[peer] += 1
            else:
                del streams[peer]
        assert tuple(close.contributors) == tuple(peers) and close.base_version == version
        assert folded == Counter({(peer, chunk): 1 for peer in peers for chunk in range(CHUNKS)})
        syncer.advance(version + 1)


# -- with a quorum ----------------------------------------------------------------------------------------------------


def quick(**settings: object) -> Syncer:
    return Syncer(0, TERM, VERSION, OuterConfig.parse({"method": "diloco", "sync_every": 1, "quorum": 1, **settings}))


def contribute(syncer: Syncer, peer: str, base_version: int, tokens: int = 100) -> None:
    """A payload that was collected first, folded in at once."""
    assert syncer.offer(peer, contribution(base_version, tokens=tokens)).accepted
    for chunk in range(CHUNKS):
        assert wants(syncer, peer, chunk)
        syncer.folded(peer)
    syncer.arrived(peer)


def closed(syncer: Syncer, now: float = 0.0) -> Close:
    close = syncer.poll(ALL, now)
    assert close is not None
    syncer.advance(close.base_version + 1)
    return close


def test_a_quorum_of_one_closes_at_once_and_takes_whoever_is_late_within_the_limit() -> None:
    syncer = quick(staleness_limit=2)
    for version, peer in enumerate("abc", VERSION):
        contribute(syncer, peer, VERSION)
        close = closed(syncer)
        assert (tuple(close.contributors), close.base_version, close.missing) == ((peer,), version, ())
    verdict = syncer.offer("d", contribution(VERSION))
    assert not verdict.accepted and "past base version" in verdict.reason and verdict.version == VERSION + 3
    assert verdict.late and not syncer.offer("d", contribution(VERSION + 4)).late, "the future"


@given(st.integers(2, 32), st.integers(0, 10**6))
def test_peers_of_one_pace_are_less_than_a_round_late_however_far_out_of_phase(active: int, seed: int) -> None:
    syncer, order = quick(staleness_limit=1), random.Random(seed).sample(range(active), active)
    bases = dict.fromkeys(order, VERSION)
    for peer in order * 3:
        assert syncer.staleness(bases[peer]) < 1
        assert syncer.offer(f"p{peer}", contribution(bases[peer]), active).accepted
        assert wants(syncer, f"p{peer}", 0)
        syncer.arrived(f"p{peer}")
        closed(syncer)
        bases[peer] = syncer.version


def test_a_round_is_as_many_contributions_as_there_are_peers_however_few_versions_they_make() -> None:
    syncer = quick(quorum=3, staleness_limit=1)
    for version in range(VERSION, VERSION + 2):
        for peer in "abc":
            contribute(syncer, peer, version)
        closed(syncer)
    assert syncer.offer("d", contribution(VERSION + 1), 4).accepted
    assert syncer.staleness(VERSION + 1) == 3 / 4 and syncer.staleness(VERSION) == 6 / 4
    assert syncer.offer("e", contribution(VERSION), 4).late
    syncer.advance(VERSION + 4, {})  # by others; each of these versions is of one contribution at least
    assert syncer.staleness(VERSION + 1) == 5 / 4 and syncer.staleness(VERSION + 2) == 2 / 4


def test_a_contribution_that_is_in_the_model_is_not_taken_again() -> None:
    syncer = quick(staleness_limit=5)
    contribute(syncer, "a", VERSION)
    closed(syncer)
    verdict = syncer.offer("a", contribution(VERSION))
    assert not verdict.accepted and verdict.merged
    assert syncer.offer("a", contribution(VERSION + 1)).accepted


def test_grace_begins_with_the_quorum_and_ends_when_all_are_here() -> None:
    syncer = quick(quorum=2, grace_s=5.0)
    contribute(syncer, "a", VERSION)
    assert syncer.poll(ALL, 1.0) is None and syncer.grace_until is None
    contribute(syncer, "b", VERSION)
    assert syncer.poll(ALL, 2.0) is None and syncer.grace_until == 7.0
    assert syncer.poll(ALL, 6.9) is None and syncer.grace_until == 7.0
    assert tuple(closed(syncer, 7.0).contributors) == ("a", "b")
    syncer = quick(quorum=1, grace_s=5.0)
    for peer in "abc":
        contribute(syncer, peer, VERSION)
    assert tuple(closed(syncer, 0.0).contributors) == ("a", "b", "c"), "nobody is left to wait for"


def test_adaptive_grace_is_a_part_of_what_the_overlap_leaves() -> None:
    syncer = quick(grace_slack=0.5, overlap=4, sync_every=10)
    contribute(syncer, "a", VERSION)
    paced = members(*(member(peer, steps_per_s=2.0) for peer in "abc"))
    assert syncer.poll(paced, 0.25, sync_s=1.0) is None
    assert syncer.grace_until == 0.25 + 0.5 * (4 / 2.0 - 0.25 - 1.0), "xi_quorum is a quarter of a second, xi_sync one"


def test_no_contributor_waits_for_a_slower_one_longer_than_its_own_overlap() -> None:
    syncer = quick(grace_slack=0.5, overlap=4, sync_every=10)
    contribute(syncer, "a", VERSION)
    paced = members(member("a", steps_per_s=0.5), member("b", steps_per_s=4.0), member("c", steps_per_s=0.1))
    assert syncer.poll(paced, 0.0) is None and syncer.grace_until == 4.0
    old = contribution(VERSION).model_copy(update={"age_s": 0.5})
    assert syncer.offer("b", old, 3, 2.0).accepted  # taken at 1.5; the update is due a second later
    syncer.arrived("b")
    assert syncer.poll(paced, 2.0) is None and syncer.grace_until == 2.25
    assert syncer.poll(paced, 2.25) is not None


def test_there_is_no_grace_when_the_quorum_took_all_that_the_overlap_hides() -> None:
    syncer = quick(quorum=2, grace_slack=0.8, overlap=2, sync_every=10)
    contribute(syncer, "a", VERSION)
    paced = members(*(member(peer, steps_per_s=1.0) for peer in "abc"))
    assert syncer.poll(paced, 1.9) is None
    assert syncer.offer("b", contribution(VERSION), 3, 1.9).accepted
    syncer.arrived("b")
    close = syncer.poll(paced, 1.9, sync_s=0.2)
    assert close is not None and tuple(close.contributors) == ("a", "b")


def test_a_quorum_is_never_more_than_the_peers_that_train() -> None:
    syncer = quick(quorum=8)
    for peer in "abc":
        assert syncer.poll(ALL, 0.0) is None
        contribute(syncer, peer, VERSION)
    assert tuple(closed(syncer).contributors) == ("a", "b", "c")


def test_a_quorum_does_not_wait_for_a_peer_whose_contribution_was_of_another_history() -> None:
    """It is at the same version as the others, waits for other fragments, and offers nothing."""
    syncer = quick(quorum=2)
    waits = member("b", "exchanging")
    waits.round_versions = [VERSION]
    contribute(syncer, "a", VERSION)
    two = members(member("a", "exchanging"), waits)
    assert syncer.poll(two, waits.stall_s()) is None, "it may be about to send"
    assert syncer.poll(two, waits.stall_s() + 0.1) is not None


def test_a_payload_on_its_way_survives_the_close_that_it_missed() -> None:
    syncer = quick(staleness_limit=1)
    assert syncer.offer("b", contribution(VERSION)).accepted
    contribute(syncer, "a", VERSION)
    closed(syncer)
    assert wants(syncer, "b", 0) and syncer.weight("b") == 1.0
    assert syncer.staleness(VERSION) == 1.0
    contribute(syncer, "a", VERSION + 1)
    closed(syncer)
    assert not wants(syncer, "b", 0), "too late now"


def test_late_contributions_count_less() -> None:
    syncer = quick(staleness_limit=9, staleness_exponent=0.5)
    for peer in "abc":
        contribute(syncer, peer, VERSION + "abc".index(peer))
        closed(syncer)
    assert syncer.offer("d", contribution(VERSION), 4).accepted
    assert syncer.discount("d") == (1 + 3 / 4) ** -0.5


def test_a_window_has_as_many_contributions_as_there_are_active_peers() -> None:
    """The window that is open keeps its length: see test_the_length_of_a_window_changes_with_the_next_window_only."""
    syncer = quick(staleness_limit=9, optimizer="delayed_nesterov")
    delays = []
    for version, live in enumerate([ALL, ALL, members(member("a"), member("b"))], VERSION):
        contribute(syncer, "a", version)
        close = syncer.poll(live, 0.0)
        assert close is not None
        delays.append(close.delay)
        syncer.advance(version + 1)
    assert delays == [3, 3, 2]


@pytest.mark.parametrize(("at", "waited_for"), [(0, False), (3, True)])
def test_staggered_newcomers_are_waited_for_from_their_first_contribution_on(at: int, waited_for: bool) -> None:
    syncer = Syncer(0, TERM, VERSION, OuterConfig.parse({"method": "diloco", "sync_every": 4, "staggered": True}))
    two = members(member("a"), member("b"))
    for peer in two:
        send(syncer, peer)
    assert syncer.poll(two, 0.0) is not None
    syncer.advance(VERSION + 1)
    three = members(*(member(peer, version=VERSION + 1) for peer in "abc"))
    there = three["c"].status.model_copy(update={"inner_step": at, "target_steps": 4})
    three["c"].hear(there, 0.0)
    for peer in two:
        send(syncer, peer)
    close = syncer.poll(three, 0.0)
    if waited_for:  # it is about to send, and would be a step too late each time
        assert close is None
        assert syncer.poll(three, 3.0) is not None, "it did not"
    else:
        assert close is not None and tuple(close.contributors) == ("a", "b")


def test_a_slow_stream_is_not_taken_for_the_contribution_after_it() -> None:
    syncer = quick(staleness_limit=9)
    assert syncer.offer("a", contribution(VERSION)).accepted  # sent twice, and the second stream is slow
    contribute(syncer, "a", VERSION)
    closed(syncer)
    assert syncer.offer("a", contribution(VERSION + 1)).accepted
    assert not syncer.wants("a", 0, VERSION) and syncer.wants("a", 0, VERSION + 1)


def test_what_is_on_its_way_is_dropped_when_the_version_that_was_caught_up_with_holds_it() -> None:
    syncer = quick(staleness_limit=9)
    assert syncer.offer("a", contribution(VERSION)).accepted
    assert syncer.offer("b", contribution(VERSION)).accepted
    syncer.advance(VERSION + 1, {"a": VERSION})
    assert not syncer.wants("a", 0, VERSION) and syncer.wants("b", 0, VERSION)
    assert syncer.offer("a", contribution(VERSION)).merged
