"""How much one peer may ask of another, and for how long one that misbehaves is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from diloco.core.events import Connected
from diloco.messages.base import MAX_FRAME_BYTES
from diloco.messages.codec import encode
from diloco.messages.control import Status
from diloco.messages.fields import MAX_COUNT, MAX_NAMED, MAX_RANGES, MAX_TOKENS
from diloco.swarm import limits
from diloco.swarm.limits import FIRST_S, FORGET_S, LONGEST_S
from tests.support.core import D, core, hello_of

NOW = 1000.0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=12))
def test_no_more_is_taken_out_of_a_bucket_than_flowed_in(steps: list[tuple[float, float]]) -> None:
    buckets, now, taken = limits.Buckets[str](per_s=2.0, burst=5.0), NOW, 0.0
    for gap_s, amount in steps:
        now += gap_s
        taken += amount if buckets.take("a", now, amount) else 0.0
        assert taken <= 5.0 + 2.0 * (now - NOW) + 1e-6


def test_buckets_take_bounded_memory_and_full_ones_go_first() -> None:
    buckets: limits.Buckets[str] = limits.Buckets(per_s=0.001, burst=1.0)
    for number in range(2 * limits.MAX_PEERS - 1):
        buckets.take(str(number), NOW - 2000.0)
    assert buckets.take("greedy", NOW) and buckets.take("late", NOW)
    assert len(buckets._filled) <= limits.MAX_PEERS and not buckets.take("greedy", NOW)


def test_an_older_stream_of_a_stranger_makes_room() -> None:
    newest: limits.Newest[int] = limits.Newest()
    over = [one for number in range(limits.STRANGERS_OF_ONE + 2) for one in newest.add("a", number)]
    assert over == [0, 1]
    crowd = range(100, 100 + limits.STRANGERS)
    over = [one for number in crowd for one in newest.add(f"p{number}", number)]
    assert over == [2, 3, 4, 5], "of the same peer, and no more than it takes"
    newest.remove(100)
    assert newest.add("z", 999) == []


def test_peers_that_others_name_are_called_so_many_at_a_time() -> None:
    dials = limits.Dials()
    dials.hear(f"p{number}" for number in range(10_000))
    assert len(dials) == limits.MAX_WAITING_DIALS
    assert len(dials.due(NOW)) == limits.DIALS_AT_ONCE and dials.due(NOW) == []
    assert dials.due(NOW + 1)[0] == f"p{limits.DIALS_AT_ONCE:.0f}"
    assert len(dials.due(NOW + 2)) == limits.DIALS_PER_S


def test_lines_of_one_peer_hide_none_of_another() -> None:
    lines, most = limits.EventLines(), int(limits.LINES)
    written = [lines.suppressed("stuck", "liar", NOW) for _ in range(2000)]
    assert written == [0] * most + [None] * (2000 - most)
    assert lines.suppressed("stuck", "honest", NOW) == 2000 - most
    assert lines.suppressed("lost", "liar", NOW) == 0, "another kind"
    many = [lines.suppressed("join", f"p{number}", NOW) for number in range(500)]
    assert sum(one is not None for one in many) == 400, "identities cost nothing"


def test_too_many_streams_at_a_time_or_in_a_second_are_refused() -> None:
    limiter, greedy = limits.bulk_streams(fragments=2), limits.bulk_streams(fragments=2)
    for _ in range(limiter.most):
        assert limiter.opened("a", 0.0) is None
    assert "20 streams of this peer are open; at most 20 may be" in str(limiter.opened("a", 0.0))
    assert limiter.opened("b", 0.0) is None
    limiter.closed("a")
    assert limiter.opened("a", 0.0) is None
    refused = 0
    for _ in range(1000):
        if greedy.opened("a", 0.0) is None:
            greedy.closed("a")
        else:
            refused += 1
    assert refused == 780 and greedy.opened("a", 1.0) is None


@pytest.mark.parametrize(("fragments", "closed"), [(1, False), (1024, True)])
def test_honest_messages_of_large_swarms_fit_their_frames(fragments: int, closed: bool) -> None:
    hello_bytes, control_bytes = limits.frame_bytes(fragments, closed)
    peers = [f"12D3KooW{number:044d}" for number in range(MAX_NAMED)]
    units = tuple((MAX_TOKENS - 2 * at - 1, MAX_TOKENS - 2 * at) for at in range(64))
    tips, planned = {index: (MAX_TOKENS, D) for index in range(fragments)}, (MAX_TOKENS,) * 3
    said = Status(True, tips, MAX_COUNT, hears=peers, units=units, planned=planned)
    places = {peer: [f"/dns4/{'x' * 60}/tcp/4100/p2p/{peer}"] * 4 for peer in peers}
    message = replace(hello_of(), name="n" * 128, peers=peers, addresses=places, status=said)
    assert len(encode(message)) < hello_bytes <= MAX_FRAME_BYTES
    changed = replace(said, tips=dict(list(said.tips.items())[:64]), units=((0, 1),) * MAX_RANGES)
    assert len(encode(changed)) < control_bytes


def test_each_offence_doubles_the_time_and_a_day_forgets_it() -> None:
    penalties, now = limits.Penalties(), 100.0
    for expected in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        assert penalties.offence("a", "sent nonsense", now) == expected
        assert penalties.refusal("a", now + expected - 1) == "refused for 1 s more: sent nonsense"
        assert penalties.refusal("b", now) is None
        now += expected
        assert penalties.refusal("a", now) is None
    for _ in range(30):
        now += penalties.offence("a", "sent nonsense", now)
    assert penalties.offence("a", "sent nonsense", now) == LONGEST_S
    later = now + LONGEST_S + FORGET_S
    assert penalties.offence("a", "sent nonsense", later) == FIRST_S


def test_offences_on_streams_that_were_open_already_count_once() -> None:
    penalties = limits.Penalties()
    refused_s = [penalties.offence("a", "x", now) for now in (0.0, 4.0, FIRST_S)]
    assert refused_s == [FIRST_S, FIRST_S - 4, 2 * FIRST_S]


def test_peers_of_a_large_swarm_name_different_others() -> None:
    named = set()
    for me in "abcd":
        peer = core(me)
        for number in range(MAX_NAMED + 200):
            peer.receive(Connected(f"p{number}", hello_of()), 0.0)
        assert len(peer.hello().peers) == MAX_NAMED
        named |= set(peer.hello().peers)
    assert len(named) > MAX_NAMED + 180
