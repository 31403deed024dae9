"""Whatever is computed from numbers of the network stays within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.events import Broadcast, Stepped, Tick
from diloco.core.peer import FASTEST
from diloco.core.rules.learning import first_position
from diloco.messages.codec import decode, encode
from diloco.messages.control import Figures, Status
from diloco.messages.fields import MAX_BYTES, MAX_COUNT, MAX_LOSS, MAX_RATE, MAX_SECONDS, MAX_TOKENS
from diloco.messages.snapshot import pack_snapshot, unpack_snapshot
from diloco.swarm.node.recorder import Recorder
from tests.support.core import advance, core, join

EXTREME = dict.fromkeys(("steps", "position", "cycle"), MAX_COUNT) | {"steps_per_s": MAX_RATE}
LARGEST = MAX_LOSS, MAX_LOSS, MAX_TOKENS, MAX_BYTES, MAX_BYTES, MAX_TOKENS, MAX_TOKENS, MAX_COUNT
FIGURES = Figures(*LARGEST, MAX_SECONDS, [MAX_SECONDS] * 4)


def test_what_watchers_need_copes_with_the_largest_numbers() -> None:
    """Sums of them, of several peers, are infinite or over the bounds of a snapshot."""
    peer = core()
    recorder = Recorder(peer, "{}")
    recorder.on_failure = pytest.fail
    for name in ("x", "y", "z"):
        join(peer, name, name=name, figures=FIGURES, **EXTREME)
    peer.measure(FIGURES)
    for now in (1.0, 2.0, 3.0):
        recorder.sample(now)
    snapshot = recorder.snapshot(4.0)
    assert snapshot is not None
    assert snapshot.ledger.processed == MAX_TOKENS == snapshot.ledger.discarded
    assert snapshot.loss[-1].loss == MAX_LOSS
    assert unpack_snapshot(b"".join(pack_snapshot(snapshot))) == snapshot


@given(prompt=st.text(max_size=5000), text=st.text(max_size=5000))
def test_as_much_as_has_room_of_what_a_model_writes_reaches_watchers_as_printable_lines(
    prompt: str, text: str
) -> None:
    recorder = Recorder(core(), "{}")
    recorder.add_samples(3, [(prompt, text)] * 16)
    snapshot = recorder.snapshot(0.0)
    assert snapshot is not None and unpack_snapshot(b"".join(pack_snapshot(snapshot))) == snapshot
    version, *said = snapshot.samples[0]
    assert version == 3 and len(snapshot.samples) == 16
    assert "".join(said).replace("\n", "").isprintable()
    assert [len(one) for one in said] == [min(len(prompt), 4096), min(len(text), 4096)]


def test_no_pace_that_a_peer_claims_costs_the_others_their_steps() -> None:
    peer, two = core(), core()
    assert peer.fastest_steps_per_s(0.0) == 0.0 and peer.fastest_steps_per_s(3.0) == 3.0
    for name, pace in (("slow", 1.0), ("quick", 2.0), ("liar", MAX_RATE)):
        join(peer, name, name=name, steps_per_s=pace)
    assert peer.fastest_steps_per_s(1.5) == FASTEST * 1.5, "the median of 1, 1.5, 2 and a million"
    join(two, "liar", **EXTREME)
    assert two.fastest_steps_per_s(1.5) == FASTEST * 1.5
    two.facts.now = 1e9
    last = two.facts.loop.cycle - 1
    assert first_position(two.facts) == last, "a newcomer begins within the cycle"


@given(pace=st.floats() | st.sampled_from([MAX_RATE, 5e-324, 1e308]), tokens=st.integers(0, 2**70))
def test_a_status_fits_its_schema_whatever_was_measured(pace: float, tokens: int) -> None:
    peer = core()
    join(peer)
    peer.facts.life.ready = peer.facts.life.assembled = True
    for _ in range(3):
        peer.receive(Stepped(tokens, (), pace), 1.0)
    actions = peer.receive(Tick(), peer.facts.now + 2.0)
    messages = [action.message for action in actions if isinstance(action, Broadcast)]
    [status] = [message for message in messages if isinstance(message, Status)]
    assert status.steps == 3 and decode(encode(status)) == status


def test_figures_are_told_once_a_heartbeat_also_where_news_are_more_frequent() -> None:
    """In rounds shorter than a heartbeat, each tip is news, and no heartbeat is ever due."""
    peer, told = core(), list[float]()
    join(peer)
    peer.facts.life.ready = peer.facts.life.assembled = True
    peer.measure(Figures(tokens=7))
    for tenth in range(1, 101):
        advance(peer.facts, peer.facts.control, "c")
        actions = peer.receive(Tick(), tenth / 10)
        messages = [action.message for action in actions if isinstance(action, Broadcast)]
        told += [tenth / 10 for one in messages if isinstance(one, Status) and one.figures]
    beat_s = peer.facts.settings.heartbeat_s
    assert 10 / beat_s - 2 <= len(told) <= 10 / beat_s
