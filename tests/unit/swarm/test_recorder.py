"""What a node remembers of the swarm, and what a snapshot makes of it."""

import pytest

from diloco.core.events import Delivered, Leave, Lost
from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.control import Figures
from diloco.messages.heads import Line
from diloco.messages.snapshot import MAX_HISTORY, MAX_PEERS, Snapshot, unpack_snapshot
from diloco.swarm.node.recorder import Recorder
from tests.support.core import GENESIS, ME, OTHER, D, advance, core, join

TEXT = '{"model": {"name": "tiny"}}'


def seen(recorder: Recorder, now: float) -> Snapshot:
    found = recorder.snapshot(now)
    assert found is not None
    assert unpack_snapshot(b"".join(recorder.packed(now))).peers == found.peers
    return found


def watched(figures: Figures | None = None) -> tuple[Peer, Recorder]:
    """A core with one other peer, and what is remembered of them."""
    peer = core()
    join(peer, figures=figures)
    recorder = Recorder(peer, TEXT)
    recorder.on_failure = pytest.fail
    return peer, recorder


def test_a_snapshot_has_the_run_and_the_peers() -> None:
    figures = Figures(tokens=70, loss=2.5, bytes_sent=4, rounds=1, seconds=[1.0, 2.0, 3.0, 4.0])
    peer, recorder = watched(figures)
    found = seen(recorder, 3.0)
    run = found.run
    assert (run.run_id, run.mode, run.model, run.outer_steps) == ("run", "synchronous", "tiny", 9)
    mine, other = found.peers
    assert (mine.peer_id, mine.name, mine.device) == (ME, "me", "cpu")
    assert (mine.state, mine.last_seen_s) == ("starting", 0.0)
    assert (other.name, other.device, other.loss, other.last_seen_s) == ("other", "gpu", 2.5, 3.0)
    assert other.seconds is not None and other.seconds.outer == 4.0
    peer.receive(Leave(), 3.0)
    assert seen(recorder, 4.0).peers[0].state == "leaving"


def test_a_peer_has_the_way_that_bulk_bytes_take_to_it() -> None:
    _, recorder = watched()
    recorder.way = {ME: "", OTHER: "direct"}.__getitem__
    assert [row.bulk for row in seen(recorder, 3.0).peers] == ["", "direct"]


def test_a_peer_has_the_state_that_its_status_says() -> None:
    peer = core()
    join(peer, "training", name="training")
    join(peer, "exchanging", name="exchanging", waits=True)
    join(peer, "evaluating", name="evaluating", pauses=True, waits=True)
    join(peer, "leaving", name="leaving", leaves=True)
    join(peer, "starting", name="starting", trains=False)
    rows = seen(Recorder(peer, TEXT), 0.0).peers
    shown = {row.name: row.state for row in rows if row.peer_id != ME}
    assert shown == {name: name for name in shown} and len(shown) == 5


def test_a_fragment_says_who_is_author_and_what_this_peer_does() -> None:
    peer, recorder = watched()
    facts = peer.facts
    assert {row.state for row in seen(recorder, 0.0).fragments} == {"settling"}
    facts.life.ready = True
    for row in seen(recorder, 1.0).fragments:
        assert (row.author, row.state) in ((ME, "collecting"), (OTHER, "following"))
    advance(facts, facts.control, OTHER)
    line = Line(0, OTHER, 99, facts.control.tip.head.id, 1, 10, (), 1.0, D)
    peer.receive(Delivered(OTHER, line, b""), 1.0)
    facts.fragments[1].inbox.ahead[OTHER] = (5, D)
    one, two = seen(recorder, 2.0).fragments
    head = facts.control.tip.head
    assert (one.version, one.work, one.id, one.next, one.here) == (1, 10, head.id[:16], ME, 1)
    assert two.state == "fetching"
    facts.identity = core().facts.identity
    peer.receive(Lost(OTHER), 2.0)
    facts.shunned[ME] = 99.0
    assert {(row.author, row.state) for row in seen(recorder, 3.0).fragments} == {(None, "alone")}
    join(peer, "third", authors=False, hears=[OTHER])
    assert {(row.author, row.state) for row in seen(recorder, 4.0).fragments} == {
        (OTHER, "indirect")
    }


def test_a_peer_is_behind_by_so_many_versions() -> None:
    peer, recorder = watched()
    for _ in range(3):
        for f in peer.facts.fragments:
            advance(peer.facts, f, ME)
    one, two = peer.facts.fragments
    join(peer, tips={0: one.tip.key, 1: (0, two.tip.book.recent[-1])})
    join(peer, "ahead", tips={0: (99, D), 1: (99, D)})
    join(peer, "long gone", tips={0: (0, D), 1: (0, D)})
    lags = {row.peer_id: (row.version, row.version_lag) for row in seen(recorder, 0.0).peers}
    assert lags == {ME: (3, 0), OTHER: (2, 1), "ahead": (3, 0), "long gone": (0, 3)}


def test_a_tip_is_a_round_with_its_peers_and_their_seconds() -> None:
    peer, recorder = watched()
    advance(peer.facts, peer.facts.control, OTHER)
    recorder.note("tip", {"fragment": 0}, 1.0)
    join(peer, figures=Figures(seconds=[4.0] * 4))
    join(peer, "c", figures=Figures(seconds=[2.0] * 4))
    advance(peer.facts, peer.facts.control, OTHER, base=GENESIS[0].head.id)
    recorder.note("tip", {"fragment": 0}, 2.0)
    found = seen(recorder, 5.0)
    one, two = found.rounds
    assert (one.version, one.live, one.merged, one.staleness, one.seconds) == (1, 2, 1, 0, None)
    assert (two.version, two.live, two.merged, two.staleness) == (2, 3, 1, 1)
    assert two.seconds is not None and two.seconds.wait == 3.0
    assert found.run.at - one.closed_at == pytest.approx(4.0)
    assert found.events == []


def test_the_loss_is_a_mean_whose_history_spans_the_run() -> None:
    peer, recorder = watched(Figures(loss=2.0))
    join(peer, "c", figures=Figures(loss=3.0))
    join(peer, "host", trains=False, figures=Figures(loss=9.0))
    recorder.sample(1.0)
    recorder.sample(1.5)  # too soon
    [point] = seen(recorder, 2.0).loss
    assert (point.loss, point.low, point.high) == (2.5, 2.0, 3.0)
    for second in range(2, 5000):
        recorder.sample(float(second))
    loss = seen(recorder, 5000.0).loss
    assert MAX_HISTORY // 4 < len(loss) <= MAX_HISTORY and loss[-1].at - loss[0].at > 4900


def test_what_a_peer_gave_stays_on_the_books() -> None:
    peer, recorder = watched(Figures(tokens=170, discarded=30))
    recorder.sample(1.0)
    for f in peer.facts.fragments:
        advance(peer.facts, f, OTHER, tokens=100)
    peer.receive(Lost(OTHER), 3.0)
    ledger = seen(recorder, 4.0).ledger
    [row] = ledger.contributions
    assert (row.peer_id, row.name, row.tokens) == (OTHER, "b", 100)
    assert (row.outer_steps, row.bytes, row.first_version, row.last_version) == (1, 20, 1, 1)
    totals = (ledger.processed, ledger.applied, ledger.discarded, ledger.in_flight)
    assert totals == (170, 100, 30, 40)


def test_the_board_has_device_time_and_the_tokens_of_the_last_day() -> None:
    """What was given before this peer came, or longer ago, is not of the last day."""
    peer, recorder = watched(Figures(tokens=170, trained_s=7200.0))
    advance(peer.facts, peer.facts.control, OTHER, tokens=100)
    recorder.sample(0.0)
    assert seen(recorder, 9.0).ledger.recent_s == 0.0, "it listens still"
    peer.facts.life.ready = True
    recorder.sample(10.0)
    advance(peer.facts, peer.facts.control, OTHER, tokens=30)
    ledger = seen(recorder, 3610.0).ledger
    [row] = ledger.contributions
    assert (row.tokens, row.recent_tokens, ledger.recent_s) == (130, 30, 3600.0)
    assert (row.device, row.trained_s) == ("gpu", 7200.0)
    peer.receive(Lost(OTHER), 3620.0)
    peer.facts.life.ready = True
    for hour in range(1, 60):
        recorder.sample(3600.0 * hour)
    ledger = seen(recorder, 3600.0 * 59).ledger
    [row] = ledger.contributions
    assert (row.recent_tokens, row.device) == (0, "gpu"), "of a peer that is gone, too"
    assert 23 * 3600 <= ledger.recent_s <= 24 * 3600


def test_a_peer_of_which_nothing_was_heard_has_neither_device_nor_time() -> None:
    peer, recorder = watched()
    advance(peer.facts, peer.facts.control, "gone")
    [row] = seen(recorder, 1.0).ledger.contributions
    assert (row.device, row.trained_s) == ("", None)


def test_the_held_out_loss_has_a_point_for_each_measurement() -> None:
    peer, recorder = watched(Figures(eval_loss=3.0))
    for second in range(1, 9):
        join(peer, figures=Figures(eval_loss=3.0 if second < 5 else 2.5))
        recorder.sample(float(second))
    assert [point.loss for point in seen(recorder, 9.0).held_out] == [3.0, 2.5]


def test_hundreds_of_peers_are_cut_to_what_a_reply_holds() -> None:
    peer = core()
    recorder = Recorder(peer, TEXT)
    for index in range(MAX_PEERS + 7):
        join(peer, f"{index:046d}", name="x" * 128)
    packed = recorder.packed(1.0)
    found = unpack_snapshot(b"".join(packed))
    assert (len(found.peers), found.left_out, found.peers[0].peer_id) == (MAX_PEERS, 8, ME)
    assert recorder.packed(1.4) is packed, "one answers all who ask at the same time"
    assert recorder.packed(1.5) is not packed


def test_no_bug_of_a_history_ends_the_training() -> None:
    told: list[str] = []
    recorder = Recorder(core(), "no JSON")
    recorder.on_failure = told.append
    recorder.note("tip", {"fragment": 7}, 1.0)
    assert recorder.snapshot(1.0) is None
    with pytest.raises(PayloadError, match="ask another peer"):
        recorder.packed(1.0)
    assert len(told) == 3 and told[0].startswith("IndexError: ")


def test_events_and_samples_are_kept() -> None:
    _, recorder = watched()
    for at in range(MAX_HISTORY + 1):
        recorder.note("join", {"peer": OTHER, "live": at}, float(at))
    recorder.add_samples(3, [("Once", "upon\na time")])
    found = seen(recorder, 600.0)
    assert len(found.events) == MAX_HISTORY
    assert found.events[-1].text == f"peer={OTHER} live={MAX_HISTORY}"
    assert found.samples == [(3, "Once", "upon\na time")]
