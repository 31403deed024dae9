"""Whatever is computed from numbers of the network stays within bounds, and a bug beside training ends nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.protocol import numbers
from diloco.protocol.actions import Broadcast
from diloco.protocol.fragment import Lease
from diloco.protocol.messages import decode, encode
from diloco.protocol.messages.control import Claim, Figures, Published, Status
from diloco.protocol.numbers import LEAP, MAX_BYTES, MAX_COUNT, MAX_LOSS, MAX_RATE, MAX_SECONDS, MAX_TOKENS, MIN_RATE
from diloco.protocol.peer import Peer
from diloco.protocol.snapshot import pack, unpack
from diloco.protocol.view import FASTEST
from diloco.swarm.conversations.recorder import Recorder
from tests.support.certificates import MANIFEST, Nobody
from tests.support.core import hello_of
from tests.support.stub_host import ME, OTHER, StubHost, run

DIGEST = "1" * 64


def peer_of(**options: Any) -> Peer:
    settings = OuterConfig(method="diloco", sync_every=100)
    return Peer(ME, ME, "run", MANIFEST, [DIGEST], Nobody(), outer=settings, **options)


def status(**fields: Any) -> Status:
    return Status(**{"state": "training", "versions": [0], **fields})


def join(peer: Peer, name: str, said: Status, *claims: Claim) -> None:
    peer.connected(name, hello_of(said, list(claims), name=name), 0.0)


EXTREME = status(
    inner_step=MAX_COUNT, target_steps=MAX_COUNT, steps_per_s=MAX_RATE, tokens=MAX_TOKENS,
    figures=Figures(
        discarded=MAX_TOKENS, loss=MAX_LOSS, bytes_sent=MAX_BYTES, bytes_received=MAX_BYTES, rounds=MAX_COUNT,
        seconds=[MAX_SECONDS] * 4,
    ),
)  # fmt: skip


# -- what others say --------------------------------------------------------------------------------------------------


def test_what_watchers_need_copes_with_the_largest_numbers() -> None:
    """Sums of them, of several peers, were infinite or over the bounds of a snapshot: each heartbeat failed."""
    peer = peer_of(planned=[10**30] * 3)
    failed: list[str] = []
    recorder = Recorder(peer, "{}")
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


@given(prompt=st.text(max_size=5000), text=st.text(max_size=5000))
def test_what_a_model_writes_reaches_watchers_as_lines_of_printable_text(prompt: str, text: str) -> None:
    """As much of it as has room."""
    recorder = Recorder(peer_of(), "{}")
    recorder.wrote(3, [(prompt, text)] * 16)
    snapshot = recorder.snapshot(0.0)
    assert snapshot is not None and unpack(b"".join(pack(snapshot))) == snapshot and len(snapshot.samples) == 16
    version, *said = snapshot.samples[0]
    assert version == 3 and all(character.isprintable() or character == "\n" for one in said for character in one)
    assert [len(one) for one in said] == [min(len(prompt), 4096), min(len(text), 4096)]


def test_a_bug_in_what_watchers_need_is_just_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_pace_that_a_peer_claims_costs_the_others_their_steps() -> None:
    peer, two = peer_of(), peer_of()
    assert peer.fastest_steps_per_s(0.0) == 0.0 and peer.fastest_steps_per_s(3.0) == 3.0
    for name, pace in (("slow", 1.0), ("quick", 2.0), ("liar", MAX_RATE)):
        join(peer, name, status(steps_per_s=pace))
    assert peer.fastest_steps_per_s(1.5) == FASTEST * 1.5, "the median of 1, 1.5, 2 and a million"
    join(two, "liar", EXTREME)
    assert two.fastest_steps_per_s(1.5) == FASTEST * 1.5
    assert two.first_position(1e9) == 99, "a newcomer begins within the cycle"


# -- what this peer says ----------------------------------------------------------------------------------------------


def published(version: int, **fields: Any) -> Published:
    known = {"fragment": 0, "term": 1, "digest": DIGEST, "contributors": [], "applied_tokens": 0}
    return Published(version=version, **{**known, **fields})


@given(
    number=st.floats() | st.sampled_from([MAX_RATE, MIN_RATE, 5e-324, 1e308]),
    large=st.integers(-(2**70), 2**70),
)
def test_a_status_fits_its_schema_whatever_was_measured(number: float, large: int) -> None:
    peer = peer_of()
    peer.progress(large, large, number, large)
    peer.measured(number, large, [number] * 4, large)
    for action in peer.heartbeat(1.0, (large, large)):
        if isinstance(action, Broadcast):
            assert decode(encode(action.message)) == action.message
    assert numbers.within_bounds(number, MAX_SECONDS) <= MAX_SECONDS


# -- leaps ------------------------------------------------------------------------------------------------------------


def test_no_version_that_leaves_none_behind_it_is_adopted() -> None:
    assert not numbers.leaps_too_far(0, MAX_COUNT // 2) and not numbers.leaps_too_far(
        MAX_COUNT - LEAP - 1, MAX_COUNT - 1
    )
    assert numbers.leaps_too_far(0, MAX_COUNT) and numbers.leaps_too_far(MAX_COUNT // 2, MAX_COUNT // 2 + LEAP + 1)
    peer = peer_of()
    claim = Claim(fragment=0, term=1, version=0, digest=DIGEST)
    join(peer, OTHER, status(versions=[MAX_COUNT]), claim)
    assert peer.members.donors(0, 1) == []
    peer.heard(OTHER, published(MAX_COUNT), 1.0)
    peer.heard(OTHER, claim.model_copy(update={"term": 2, "version": MAX_COUNT}), 2.0)
    assert peer.leases.get(0) == Lease(0, OTHER, 1, 0, DIGEST)
