"""Peer: one peer's answers to single events; whole swarms of them are in `tests/sim`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import WIRE_VERSION, OuterConfig
from diloco.protocol.actions import CatchUp, Disconnect, Hold, Merge, Note, Wake
from diloco.protocol.limits import MAX_PEERS
from diloco.protocol.membership import SILENCE_FLOOR_S, STALL_FLOOR_S
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import Contribution, Receipt, Verdict
from diloco.protocol.messages.control import Claim, Published, Status, Vote
from diloco.protocol.pace import TICK_S
from diloco.protocol.peer import OTHER_DATA, Peer
from diloco.protocol.rendezvous import assign, order
from diloco.protocol.shares import Share
from diloco.protocol.states import STATES
from diloco.protocol.succession import CLAIM_PATIENCE_S
from tests.support import core
from tests.support.certificates import MANIFEST, digest_of
from tests.support.core import DIGESTS, FRAGMENTS, ME, OTHER, claim_of, hello_of, make, notes, of_type, said, status_of

ONE = digest_of("one")


def contribution(peer: Peer, fragment: int, **fields: object) -> Contribution:
    known = {"base_digest": peer.digests[fragment], "fragment": fragment, "tokens": 9}
    return core.contribution_of(peer.versions[fragment], **(known | fields))


def news_of(fragment: int = 1, term: int = 1, version: int = 1, digest: str = ONE) -> Published:
    told = {"fragment": fragment, "term": term, "version": version, "digest": digest}
    return Published(**told, contributors=[], applied_tokens=0)  # type: ignore[arg-type]


def alone(**settings: object) -> Peer:
    """A peer that holds everything, being the only one."""
    peer = make(**settings)
    peer.tick(0.0)
    return peer


def pair(**settings: object) -> Peer:
    """A peer that holds fragment 0; fragment 1 is held by the other peer."""
    peer = make(min_peers=2, **settings)
    peer.connected(OTHER, hello_of(claims=[claim_of(1)]), 0.0)
    assert [lease.fragment for lease in peer.leases.held_by(ME)] == [0]
    return peer


def quick(sync_every: int = 1, **settings: object) -> OuterConfig:
    return OuterConfig.parse({"method": "diloco", "sync_every": sync_every, "quorum": 1, **settings})


# -- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "objection"),
    [
        (
            {"wire_version": 1},
            f"wire version 1 there does not fit {WIRE_VERSION} here; install the same diloco version on both sides",
        ),
        ({"run_id": "other"}, "run.id=other is not the run here, which is run.id=run"),
        ({"manifest_hash": "0" * 64}, f"the manifest 000000000000 differs from {MANIFEST[:12]} here"),
        ({"status": status_of(versions=[0, 0, 0])}, "3 fragments there, 2 here"),
        ({}, None),
    ],
    ids=["wire version", "run", "manifest", "fragments", "none"],
)
def test_a_hello_that_does_not_fit_is_objected_to(fields: dict[str, object], objection: str | None) -> None:
    assert make().objection(hello_of(**fields)) == objection  # type: ignore[arg-type]


def test_a_peer_with_other_data_is_named_once_whatever_it_says_later() -> None:
    """Not one that has none of its own to be leased, or the same; and those that were named are forgotten some day."""
    data = [f"{number:016x}-{number}x16" for number in (1234, 1240, 0)]
    peer = make(data=data[0])
    for other, said_, told in (("a", [data[0]], 0), ("b", [""], 0), ("c", data[1:], 1), ("d", [data[0], data[1]], 1)):
        found = [note for one in said_ for note in of_type(Note, peer.connected(other, hello_of(sequences=one), 1.0))]
        assert [note.kind for note in found].count("other_data") == told
    assert [note.fields for note in found if note.kind == "other_data"] == [
        {"peer": "d", "name": "other", "there": "1,240 sequences, 00000000", "here": "1,234 sequences, 00000000"}
        | {"so": OTHER_DATA}
    ]
    hub = of_type(Note, peer.connected("e", hello_of(sequences=data[2]), 1.0))
    assert [note.fields["there"] for note in hub if note.kind == "other_data"] == ["00000000"], "nobody has counted"
    assert "other_data" not in notes(make().connected("c", hello_of(sequences=data[1]), 1.0)), "nothing is leased here"
    for number in range(2 * MAX_PEERS):
        peer._compare_data(str(number), hello_of(sequences=data[1]))
    assert len(peer.other_data) == MAX_PEERS


def test_the_greatest_budget_holds_that_an_author_tells_within_reason() -> None:
    peer, heard = make(planned=[10, 0, 10]), []
    peer.may_author, peer.on_planned = lambda other: other == OTHER, heard.append

    def hears(other: str, *numbers: int) -> list[int]:
        told = Status(state="ready", versions=[0, 0], planned=list(numbers))
        assert all(status.planned == peer.planned for status in said(Status, peer.connected(other, hello_of(told), 1)))
        return peer.planned

    assert hears(OTHER, 20, 7, 15) == [20, 0, 15], "a limit that the run does not have stays away"
    assert hears(OTHER, 5, 0, 5) == hears("x", 30, 0, 30) == [20, 0, 15]
    assert hears(OTHER, 10**9, 0, 15) == [20, 0, 15] and heard == [[20, 0, 15]]
    assert "plan_ignored" in notes(peer.heard(OTHER, Status(state="ready", versions=[0, 0], planned=[10**9, 0, 0]), 2))
    peer.heard(OTHER, Status(state="ready", versions=[0, 0], planned=[40, 0, 15]), 3)
    assert peer.hello().status.planned == [40, 0, 15] == heard[-1]


# -- claims -----------------------------------------------------------------------------------------------------------


def test_the_first_peer_of_a_run_holds_everything_and_may_train() -> None:
    peer = make()
    actions = peer.tick(0.0)
    assert of_type(Hold, actions) == [Hold(0, 1), Hold(1, 1)] and said(Claim, actions) == [claim_of(0), claim_of(1)]
    assert peer.state == "ready" and peer.may_train() and peer.takeovers == 0

    peer = make()
    peer.leases.see_term(1, 41)
    assert of_type(Hold, peer.tick(0.0)) == [Hold(0, 1), Hold(1, 42)], "a term that is known from elsewhere is passed"


def test_nothing_is_claimed_before_enough_peers_are_connected() -> None:
    peer = make(min_peers=3)
    assert peer.tick(0.0) == [] and peer.connected("x", hello_of(), 1.0)[1:] == []
    assert not peer.may_train()
    actions = peer.connected("y", hello_of(), 2.0)
    mine = [f for f, holder in assign(range(FRAGMENTS), [ME, "x", "y"], {}).items() if holder == ME]
    assert [hold.fragment for hold in of_type(Hold, actions)] == mine

    assert of_type(Hold, make(holds=False).tick(0.0)) == []
    assert of_type(Hold, [*make().enter("leaving", 0.0), *make().enter("done", 0.0)]) == [], "nor by who leaves"


def test_a_newcomer_hears_everybody_and_takes_what_nobody_holds() -> None:
    peer = make(newcomer=True)
    assert of_type(Hold, peer.tick(0.0)) == []
    assert of_type(Hold, peer.connected(OTHER, hello_of(claims=[claim_of(0)]), 50.0)) == []
    assert of_type(Hold, peer.connected("x", hello_of(claims=[claim_of(1)]), 99.0)) == []
    assert of_type(Hold, peer.discovered(100.0)) == [] and peer.state == "ready"

    peer = make(newcomer=True)
    assert of_type(Hold, peer.connected(OTHER, hello_of(claims=[claim_of(1)]), 0.0)) == []
    assert of_type(Hold, peer.discovered(1.0)) == [Hold(0, 1)]


def test_the_next_peer_in_order_waits_for_the_one_before_it() -> None:
    """So a peer that hears of a death first does not take everything."""
    peer = make(OTHER, min_peers=2)
    assert [hold.fragment for hold in of_type(Hold, peer.connected(ME, hello_of(), 5.0))] == [1]
    turn_s = CLAIM_PATIENCE_S * order("ab", 0).index(OTHER)
    assert of_type(Hold, peer.heard(ME, status_of(), 5.0 + CLAIM_PATIENCE_S + turn_s)) == []
    assert of_type(Hold, peer.heard(ME, status_of(), 5.1 + CLAIM_PATIENCE_S + turn_s)) == [Hold(0, 1)]


def test_a_fragment_is_claimed_at_the_highest_version_anyone_has() -> None:
    peer = make(min_peers=2)
    peer.connected("x", hello_of(status_of(versions=[3, 0]), holds=False), 0.0)
    actions = peer.connected(OTHER, hello_of(status_of(versions=[4, 0]), holds=False), 0.0)
    assert of_type(CatchUp, actions) == [] and of_type(CatchUp, peer.tick(1.0)) == []  # asked for at the first hello
    assert [lease.fragment for lease in peer.leases.held_by(ME)] == [1]
    actions = peer.adopted(0, 4, digest_of("four"), 1.0, shares={"x": Share(4, 100, 1, 4)})
    assert said(Claim, actions) == [claim_of(0, version=4, digest=digest_of("four"), applied_tokens=100)]
    assert of_type(Hold, actions) == [Hold(0, 1)] and peer.applied_tokens == 100


def test_a_syncer_that_caught_up_says_where_it_stands_now() -> None:
    """Others take what the syncer said last for the version to agree with, and would wait for it for ever."""
    peer = pair()
    assert of_type(CatchUp, peer.heard(OTHER, status_of(versions=[7, 0]), 1.0)) == [CatchUp(0, (OTHER,))]
    actions = peer.adopted(0, 7, digest_of("seven"), 2.0)
    assert said(Claim, actions) == [claim_of(0, version=7, digest=digest_of("seven"))]
    assert peer.syncers[0].version == 7 and peer.fragments[0].agrees()


def test_contributions_to_a_healed_anchor_are_forgotten() -> None:
    """The owner clears the sum with it; a merge of what the syncer believed to be in there would divide by zero."""
    peer = pair()
    peer.connected("x", hello_of(status_of("training"), holds=False), 1.0)
    assert peer.offer(OTHER, contribution(peer, 0)).accepted
    peer.arrived(OTHER, 0, 1.0)
    peer.adopted(0, 0, digest_of("healed"), 2.0)
    assert peer.leases.get(0).digest == digest_of("healed")
    assert of_type(Merge, peer.lost("x", 3.0, "reset")) == []
    assert peer.offer(OTHER, contribution(peer, 0)).first_chunk == 0


def test_a_successor_takes_nothing_that_is_in_its_anchor() -> None:
    peer = pair(outer=quick(staleness_limit=2))
    peer.connected("x", hello_of(status_of("training"), holds=False), 1.0)
    again = contribution(peer, 1, term=2)
    peer.adopted(1, 1, ONE, 2.0, contributors={"x": 10, OTHER: 10})
    peer.heard("x", status_of("training", versions=[0, 1]), 2.5)
    assert of_type(Hold, peer.lost(OTHER, 3.0, "reset")) == [Hold(1, 2)]
    verdict = peer.offer("x", again)
    assert not verdict.accepted and verdict.merged


def test_an_heir_claims_from_the_last_version_of_a_leaver() -> None:
    peer = pair()
    actions = peer.heard(OTHER, status_of("leaving", versions=[0, 1]), 1.0)
    assert of_type(CatchUp, actions) == [CatchUp(1, (OTHER,))] and of_type(Hold, actions) == []
    assert of_type(Hold, peer.adopted(1, 1, ONE, 2.0, contributors={OTHER: 10})) == [Hold(1, 2)]
    peer = pair()
    assert of_type(Hold, peer.heard(OTHER, status_of("leaving"), 1.0)) == [Hold(1, 2)]


def test_a_peer_that_is_about_to_leave_makes_no_version() -> None:
    """Its heirs would miss it."""
    peer = pair()
    peer.retired = True
    assert peer.offer(OTHER, contribution(peer, 0)).accepted
    assert of_type(Merge, peer.arrived(OTHER, 0, 2.0)) == []


def test_who_restarted_does_not_hold_what_its_hello_leaves_out() -> None:
    """Its new process knows nothing of the lease; everybody would send contributions to a syncer that refuses them."""
    peer = pair()
    assert of_type(Hold, peer.connected(OTHER, hello_of(claims=[claim_of(1)]), 1.0)) == []
    assert peer.leases.get(1).holder == OTHER
    peer.connected(OTHER, hello_of(status_of("starting")), 2.0)
    assert peer.leases.get(1) is None and peer.leases.term(1) == 1
    peer.heard(OTHER, claim_of(1), 3.0)
    assert peer.leases.get(1).holder == OTHER
    peer.connected(OTHER, hello_of(status_of("starting")), 4.0)
    patience_s = CLAIM_PATIENCE_S * len("ab") + 0.1
    assert of_type(Hold, peer.heard(OTHER, status_of("starting"), 4.0 + patience_s)) == [Hold(1, 2)]


# -- members ----------------------------------------------------------------------------------------------------------


def test_a_silent_peer_is_lost_and_its_streams_are_ended() -> None:
    """Else neither side would ever say hello again, and a peer that was frozen would stay deaf."""
    peer, now = pair(), 0.0
    while now <= SILENCE_FLOOR_S:
        assert of_type(Disconnect, peer.tick(now)) == []
        now += 1.0
    actions = peer.tick(now)
    assert of_type(Disconnect, actions) == [Disconnect(OTHER)]
    assert "lost" in notes(actions) and of_type(Hold, actions) == [Hold(1, 2)]

    peer = pair()
    peer.tick(1.0)
    assert peer.tick(1000.0) == [] and OTHER in peer.members, "this peer was asleep"


def test_messages_that_do_not_fit_change_nothing() -> None:
    peer = pair()
    assert peer.heard("stranger", status_of(), 0.0) == [Disconnect("stranger")], "it has to say hello"
    before = (peer.hello(), [peer.leases.get(f) for f in range(FRAGMENTS)])
    for message in [
        status_of(versions=[9]),
        Claim(fragment=FRAGMENTS, term=9, version=0, digest=ONE),
        Vote(fragment=FRAGMENTS, term=9, holder=OTHER),
        news_of(0),  # not the syncer
        news_of(1, term=9),
        news_of(1, version=0),
        news_of(FRAGMENTS),
        Receipt(),
        Verdict(accepted=True),
    ]:
        assert peer.heard(OTHER, message, 1.0) in ([], [Wake(1.0 + TICK_S)]), message
    assert (peer.hello(), [peer.leases.get(f) for f in range(FRAGMENTS)]) == before


states, some_versions = st.sampled_from(list(STATES)), st.lists(core.versions, min_size=1, max_size=3)
statuses = st.builds(status_of, states, some_versions, core.small)
publications = st.builds(news_of, core.small, core.terms, core.versions, core.digests)


@given(st.lists(st.tuples(st.sampled_from("xyz"), statuses | core.claims | publications | st.none()), max_size=25))
def test_nothing_from_the_network_makes_a_peer_raise(events: list[tuple[str, Message | None]]) -> None:
    peer = make(min_peers=2)
    for now, (sender, message) in enumerate(events):
        if message is not None and sender in peer.members:
            actions = peer.heard(sender, message, float(now))
        elif sender in peer.members:
            actions = peer.lost(sender, float(now), "reset")
        else:
            actions = peer.connected(sender, hello_of(), float(now))
        for fetch in of_type(CatchUp, actions):
            assert fetch.donors and ME not in fetch.donors
            peer.catch_up_failed(fetch.fragment)
        assert sorted(peer.syncers) == [lease.fragment for lease in peer.leases.held_by(ME)]
        assert peer.heirs() == peer._find_heirs(), "what is remembered is what would be found"


# -- from starting to training ----------------------------------------------------------------------------------------


def test_a_peer_is_ready_when_it_agrees_with_every_syncer() -> None:
    peer = make(min_peers=2, digests=[DIGESTS[0], digest_of("mine")])
    actions = peer.connected(OTHER, hello_of(claims=[claim_of(1)]), 0.0)
    assert peer.state == "starting" and of_type(CatchUp, actions) == [CatchUp(1, (OTHER,))]
    actions = peer.adopted(1, 0, DIGESTS[1], 1.0)
    assert peer.state == "ready" and peer.heals == 0
    assert [status.state for status in said(Status, actions)] == ["starting", "ready"]


def test_a_ready_peer_follows_publications_until_it_trains() -> None:
    peer = pair()
    peer.heard(OTHER, status_of(versions=[0, 1]), 1.0)
    assert of_type(CatchUp, peer.heard(OTHER, news_of(), 1.1)) == [CatchUp(1, (OTHER,))]
    assert peer.state == "starting"
    peer.adopted(1, 1, ONE, 2.0)
    assert peer.state == "ready"

    peer = pair()
    peer.enter("training", 0.5)
    assert of_type(CatchUp, peer.heard(OTHER, news_of(), 1.0)) == [] and peer.state == "training"

    host = pair(trains=False)
    assert of_type(CatchUp, host.heard(OTHER, news_of(digest=DIGESTS[0]), 1.0)) == [CatchUp(1, (OTHER,))]
    assert host.state == "ready", "it follows every publication"


def test_training_begins_when_nobody_starts_or_others_train() -> None:
    peer = pair()
    assert peer.may_train()
    peer.connected("x", hello_of(status_of("starting")), 1.0)
    assert not peer.may_train()
    peer.heard(OTHER, status_of("training"), 2.0)
    assert peer.may_train()
    peer.heard(OTHER, status_of("done"), 3.0)
    peer.connected("x", hello_of(status_of("starting"), trains=False), 3.0)
    assert peer.may_train()


def test_nobody_begins_in_the_middle_of_a_publication() -> None:
    """It would be early for one fragment and late for the other, and so in every round that follows."""
    peer = pair(versions=[1, 0])
    assert peer.state == "ready"
    peer.heard(OTHER, status_of("training", [0, 0]), 1.0)
    assert peer.state == "starting" and not peer.may_train()
    peer.heard(OTHER, status_of("exchanging", [1, 0]), 2.0)
    assert not peer.may_train()
    peer.heard(OTHER, status_of("training", [1, 0]), 3.0)
    assert peer.state == "ready" and peer.may_train()


def test_the_first_round_is_as_short_as_the_others_are_ahead() -> None:
    peer = make(min_peers=2, outer=OuterConfig(method="diloco", sync_every=10))
    peer.connected(OTHER, hello_of(status_of("training", inner_step=3), [claim_of(1)]), 0.0)
    assert peer.state == "ready" and peer.first_position() == 3
    peer.heard(OTHER, status_of("training", inner_step=4), 1.0)
    assert peer.first_position() == 4
    peer.connected("x", hello_of(status_of("training", [1, 1], inner_step=9)), 2.0)  # in another round
    peer.connected("y", hello_of(status_of("training", inner_step=9), trains=False), 2.0)
    assert peer.first_position() == 4
    peer.heard(OTHER, status_of("exchanging", inner_step=10), 3.0)
    assert peer.first_position() == 9


def test_a_peer_that_was_waited_for_makes_a_whole_round() -> None:
    """However late it hears that the others began."""
    peer = pair(outer=OuterConfig(method="diloco", sync_every=10))
    peer.connected("x", hello_of(status_of("starting")), 1.0)
    assert peer.state == "ready" and not peer.may_train()
    peer.heard("x", status_of("ready"), 2.0)
    for other in (OTHER, "x"):
        peer.heard(other, status_of("training"), 3.0)
        peer.heard(other, status_of("training", inner_step=4), 4.0)
    assert peer.may_train() and peer.first_position(4.0) == 0
    peer.heard(OTHER, status_of("exchanging", inner_step=10), 5.0)
    assert peer.first_position(5.0) == 0
    peer.enter("starting", 6.0)  # it fetches the inner optimizer's state, say: now the others do not wait
    assert peer.state == "ready" and peer.first_position(6.0) == 9

    peer = pair(outer=OuterConfig(method="diloco", sync_every=10, overlap=1))
    peer.heard(OTHER, status_of("training"), 1.0)
    peer.heard(OTHER, status_of("training", inner_step=4), 2.0)
    assert peer.first_position() == 4, "there is no barrier at which it would be waited for"


# -- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["arrival", "loss"])
def test_what_ends_a_wait_is_acted_upon_at_once(ends: str) -> None:
    """However short the time since the last tick."""
    peer = pair()
    peer.heard(OTHER, status_of("exchanging"), 0.5)
    peer.enter("exchanging", 1.0)
    for name in (OTHER, ME):
        assert (ends == "loss" and name == OTHER) or peer.offer(name, contribution(peer, 0)).accepted
    assert of_type(Merge, peer.arrived(ME, 0, 1.0)) == []
    actions = peer.arrived(OTHER, 0, 1.0) if ends == "arrival" else peer.lost(OTHER, 1.0, "connection reset")
    assert len(of_type(Merge, actions)) == 1


# -- the syncer's side ------------------------------------------------------------------------------------------------


def test_a_contribution_is_refused_with_the_reason() -> None:
    peer = pair()
    for header, reason in (
        (contribution(peer, 0, manifest_hash="0" * 64), "the manifest 000000000000 is not the one here"),
        (contribution(peer, 0, base_digest=ONE), "version 0 of fragment 0 is another anchor here"),
        (contribution(peer, 1), "not the syncer of fragment 1"),
        (core.contribution_of(fragment=7), "not the syncer of fragment 7"),
    ):
        verdict = peer.offer(OTHER, header)
        assert not verdict.accepted and reason in verdict.reason
        assert header.fragment != 1 or verdict.term == 1
    assert peer.offer(OTHER, contribution(peer, 0)).accepted


def test_a_round_is_merged_published_and_announced() -> None:
    peer = pair()
    for state in ("training", "exchanging"):
        peer.heard(OTHER, status_of(state), 0.0)  # type: ignore[arg-type]
        peer.enter(state, 0.0)  # type: ignore[arg-type]
    assert peer.offer(OTHER, contribution(peer, 0)).accepted and peer.offer(ME, contribution(peer, 0)).accepted
    assert of_type(Merge, peer.arrived(OTHER, 0, 1.0)) == []
    (merge,) = of_type(Merge, peer.arrived(ME, 0, 2.0))
    assert list(merge.close.contributors) == sorted((ME, OTHER)) and merge.close.tokens == 18
    assert peer.merging(0) and of_type(Merge, peer.tick(3.0)) == []
    (message,) = said(Published, peer.published(0, ONE, merge.close.contributors, 4.0))
    assert message == news_of(0).model_copy(update={"contributors": ["a", "b"], "applied_tokens": 18})
    assert (peer.versions, peer.digests[0], peer.applied_tokens) == ([1, 0], ONE, 18)
    assert not peer.merging(0) and peer.fragments[0].agrees()


def test_a_syncer_does_not_wait_for_its_own_hanging_training() -> None:
    """Its node lives on and sends heartbeats; without this nobody would ever get its fragments' next version."""
    peer = pair()
    peer.enter("training", 0.0)
    peer.progress(1, 10, 1.0, 0)
    peer.heard(OTHER, status_of("exchanging"), 1.0)
    peer.offer(OTHER, contribution(peer, 0))
    assert of_type(Merge, peer.arrived(OTHER, 0, 1.0)) == []
    for now in range(2, int(STALL_FLOOR_S) + 1):
        assert of_type(Merge, peer.heard(OTHER, status_of("exchanging"), float(now))) == []
    (merge,) = of_type(Merge, peer.heard(OTHER, status_of("exchanging"), STALL_FLOOR_S + 2))
    assert list(merge.close.contributors) == [OTHER]


def test_a_fragment_lost_during_its_merge_is_not_published() -> None:
    peer = alone(trains=False)
    peer.connected(OTHER, hello_of(), 0.0)
    peer.offer("x", contribution(peer, 0))
    peer.heard(OTHER, status_of("done"), 0.0)
    assert len(of_type(Merge, peer.arrived("x", 0, 1.0))) == 1
    peer.connected(OTHER, hello_of(claims=[claim_of(0, term=2), claim_of(1)]), 1.5)
    assert peer.published(0, digest_of(), {"x": 9}, 2.0) == [] and peer.versions[0] == 0
    assert not peer.merging(0)
