"""Whatever is computed from numbers of the network stays within bounds, and a bug beside training ends nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.digest import digest_of
from diloco.protocol.actions import Broadcast
from diloco.protocol.fragment import Lease
from diloco.protocol.ledger import Ledger, count
from diloco.protocol.messages import decode, encode
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.messages.control import Claim, Figures, Hello, Published, Status
from diloco.protocol.numbers import (
    LEAP,
    MAX_BYTES,
    MAX_COUNT,
    MAX_LOSS,
    MAX_RATE,
    MAX_SECONDS,
    MAX_TOKENS,
    MIN_RATE,
    leaps_too_far,
    within_bounds,
)
from diloco.protocol.peer import Peer
from diloco.protocol.shares import MAX_SHARES, OTHERS, Share, credited
from diloco.protocol.snapshot import pack, unpack
from diloco.protocol.view import FASTEST
from diloco.swarm.conversations.framing import FragmentState
from diloco.swarm.conversations.recorder import Recorder
from tests.support.certificates import MANIFEST, record_of
from tests.support.stub_host import ME, OTHER, StubHost, run

DIGEST = "1" * 64


def peer_of(**options: Any) -> Peer:
    settings = OuterConfig(method="diloco", sync_every=100)
    return Peer(ME, ME, "run", MANIFEST, [DIGEST], outer=settings, **options)


def status(**fields: Any) -> Status:
    return Status(**{"state": "training", "versions": [0], **fields})


def join(peer: Peer, name: str, said: Status, *claims: Claim) -> None:
    hello = Hello(
        wire_version=1, run_id="run", manifest_hash=MANIFEST, name=name, trains=True, holds=True, peers=[],
        status=said, claims=list(claims),
    )  # fmt: skip
    peer.connected(name, hello, 0.0)


EXTREME = status(
    inner_step=MAX_COUNT, target_steps=MAX_COUNT, steps_per_s=MAX_RATE, tokens=MAX_TOKENS,
    figures=Figures(
        discarded=MAX_TOKENS, loss=MAX_LOSS, bytes_sent=MAX_BYTES, bytes_received=MAX_BYTES, rounds=MAX_COUNT,
        seconds=[MAX_SECONDS] * 4,
    ),
)  # fmt: skip


# -- what others say --------------------------------------------------------------------------------------------------


def test_what_watchers_need_copes_with_the_largest_numbers_of_several_peers() -> None:
    """Sums of them were infinite, or over the bounds of a snapshot: the heartbeat of each honest peer failed."""
    peer = peer_of()
    failed: list[str] = []
    recorder = Recorder(peer, '{"budget": {"tokens": 1e30}}'.replace("1e30", str(10**30)))
    recorder.on_failure = failed.append
    for name in ("x", "y", "z"):
        join(peer, name, EXTREME)
        for now in (1.0, 2.0, 3.0):
            recorder.heard(name, EXTREME, now)
    peer.state = "training"
    peer.measured(math.inf, 2**70, [1e308, math.nan, -1.0, 1.0], 2**70)
    recorder.heard(ME, peer.status(figures=True), 5.0)
    snapshot = recorder.snapshot(1e12)
    assert not failed and snapshot is not None
    assert snapshot.ledger.processed == MAX_TOKENS == snapshot.run.tokens
    assert snapshot.loss[-1].loss == MAX_LOSS
    assert unpack(b"".join(pack(snapshot))) == snapshot


def test_a_bug_in_what_watchers_need_is_an_event_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        host = StubHost(OTHER)

        def bug(*_: Any) -> None:
            raise ZeroDivisionError("float division by zero")

        for name in ("_heard_status", "_heard_published", "_snapshot"):
            monkeypatch.setattr(host.context.recorder, name, bug)
        for message in (status(), published(1)):
            host.context.recorder.heard(OTHER, message, 1.0)
        assert host.context.recorder.snapshot(1.0) is None
        with pytest.raises(PayloadError, match="no snapshot can be made here"):
            host.context.recorder.packed(1.0)
        assert host.notes == ["recorder_failed"] * 4

    run(scene)


def test_a_peer_that_claims_any_pace_does_not_make_the_others_take_hardly_any_steps() -> None:
    peer = peer_of()
    assert peer.fastest_steps_per_s(0.0) == 0.0
    for name, pace in (("slow", 1.0), ("quick", 2.0), ("liar", MAX_RATE)):
        join(peer, name, status(steps_per_s=pace))
    assert peer.fastest_steps_per_s(1.5) == FASTEST * 1.5, "the median of 1, 1.5, 2 and a million"
    assert peer_of().fastest_steps_per_s(3.0) == 3.0
    two = peer_of()
    join(two, "liar", status(steps_per_s=MAX_RATE))
    assert two.fastest_steps_per_s(1.5) == FASTEST * 1.5


def test_a_newcomer_begins_within_the_cycle_whatever_pace_others_claim() -> None:
    peer = peer_of()
    join(peer, "liar", EXTREME)
    assert peer.first_position(1e9) == 99


# -- what this peer says ----------------------------------------------------------------------------------------------


def published(version: int, **fields: Any) -> Published:
    known = {"fragment": 0, "term": 1, "digest": DIGEST, "contributors": [], "applied_tokens": 0}
    return Published(version=version, **{**known, **fields})


@given(number=st.floats() | st.sampled_from([MAX_RATE, MIN_RATE, 5e-324, 1e308]), large=st.integers(-(2**70), 2**70))
def test_a_status_fits_its_schema_whatever_was_measured(number: float, large: int) -> None:
    peer = peer_of()
    peer.progress(large, large, number, large)
    peer.measured(number, large, [number] * 4, large)
    for action in peer.heartbeat(1.0, (large, large)):
        if isinstance(action, Broadcast):
            assert decode(encode(action.message)) == action.message
    assert within_bounds(number, MAX_SECONDS) <= MAX_SECONDS


def test_the_swarm_clock_and_the_public_record_stop_at_their_bounds() -> None:
    """A syncer whose next sum was over the bound ended with an error, and so did each of its successors."""
    peer = peer_of(applied_tokens=MAX_TOKENS)
    peer.tick(0.0)
    for version in (1, 2):
        [said] = [one.message for one in peer.published(0, DIGEST, {ME: MAX_TOKENS}, version) if _publishes(one)]
        assert decode(encode(said)) == said and said.applied_tokens == MAX_TOKENS
    assert peer.accounts.contributions()[0].tokens == MAX_TOKENS
    peers = {f"p{number}": Share(MAX_COUNT, MAX_TOKENS, 1, 1) for number in range(MAX_SHARES + 2)}
    assert credited(peers, 2, {}, {})[OTHERS] == Share(MAX_COUNT, MAX_TOKENS, 1, 1)


def _publishes(action: object) -> bool:
    return isinstance(action, Broadcast) and isinstance(action.message, Published)


def test_the_list_of_sequences_has_an_end() -> None:
    ledger = Ledger(MAX_TOKENS - 3)
    assert count(ledger.grant("a", 5, [])) == 3 and ledger.grant("a", 5, [(MAX_TOKENS - 3, MAX_TOKENS)]) == []


def test_a_fragment_without_a_next_term_is_not_claimed() -> None:
    peer = peer_of()
    peer.fragments[0].term = MAX_COUNT
    assert not any(isinstance(action, Broadcast) for action in peer.tick(1.0)) and not peer.syncers


# -- leaps ------------------------------------------------------------------------------------------------------------


def test_no_version_that_leaves_none_behind_it_is_adopted() -> None:
    assert not leaps_too_far(0, MAX_COUNT // 2) and not leaps_too_far(MAX_COUNT - LEAP - 1, MAX_COUNT - 1)
    assert leaps_too_far(0, MAX_COUNT) and leaps_too_far(MAX_COUNT // 2, MAX_COUNT // 2 + LEAP + 1)
    peer = peer_of()
    claim = Claim(fragment=0, term=1, version=0, digest=DIGEST)
    join(peer, OTHER, status(versions=[MAX_COUNT]), claim)
    assert peer.members.donors(0, 1) == []
    peer.heard(OTHER, published(MAX_COUNT), 1.0)
    peer.heard(OTHER, claim.model_copy(update={"term": 2, "version": MAX_COUNT}), 2.0)
    assert peer.leases.get(0) == Lease(0, OTHER, 1, 0, DIGEST)


def test_a_state_that_leaps_is_refused() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        anchor = host.replica.anchors[0] + 1
        record = record_of(MAX_COUNT, "f" * 64, digest_of(anchor), {}, author=OTHER)
        header = StateHeader(fragment=0, digest=digest_of(anchor), record=record, outer=False)
        with pytest.raises(PayloadError, match="no run gets from version 0 to version"):
            await host.anchors.adopt_state(FragmentState(header, anchor, donor=OTHER))
        assert host.protocol.versions == [0]

    run(scene)
