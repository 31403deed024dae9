"""Exchange: one contribution's way to the next version, which ends in DONE whatever happens to it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.fragment import Lease
from diloco.protocol.messages.bulk import Verdict
from tests.support.certificates import MANIFEST, digest_of

BASE = 5


def lease_of(version: int = BASE, term: int = 1, holder: str = "syncer") -> Lease:
    return Lease(0, holder, term, version, digest_of(version))


def refusal(version: int = BASE, record_follows: bool = False) -> Verdict:
    late = version > BASE
    return Verdict(accepted=False, reason="no", version=version, term=1, late=late, record_follows=record_follows)


def begun(**settings: object) -> Exchange:
    return Exchange(0, BASE, "0" * 64, 4, 32, MANIFEST, **settings)  # type: ignore[arg-type]


@pytest.fixture
def exchange() -> Exchange:
    """It has said its header to the syncer."""
    exchange = begun()
    exchange.header(lease_of())
    return exchange


def test_the_syncer_says_whether_what_may_be_late_is_too_late() -> None:
    """The anchor here moves on, as that of a syncer does while it trains."""
    exchange = begun(may_be_late=True)
    assert exchange.next_step(lease_of(BASE + 9), BASE + 9, -1, 0.0) is Step.CONTRIBUTE
    exchange.header(lease_of())
    exchange.refused(refusal(BASE + 9), lease_of())
    assert exchange.next_step(lease_of(BASE + 9), BASE + 9, -1, 0.0) is Step.DONE and exchange.discarded


# What happened to a contribution, and what it does next: by the versions of the syncer (-1: there is none) and here.
@pytest.mark.parametrize(
    ("refused", "contributors", "broke", "steps", "discarded"),
    [
        (None, ["me", "other"], False, [(1, 1, Step.DONE)], False),
        (None, [], False, [(2, 2, Step.DONE)], True),
        (refusal(BASE + 1, True), ["me"], False, [(0, 1, Step.DONE)], False),
        (refusal(BASE + 1, True), ["other"], False, [(0, 1, Step.DONE)], True),
        # Who adopts just the update that it missed is one version late with its next contribution, and ever after.
        (refusal(BASE + 1, True), ["other"], False, [(2, 1, Step.CATCH_UP), (2, 2, Step.DONE)], True),
        (refusal(BASE + 3), [], False, [(3, 0, Step.CATCH_UP), (-1, 0, Step.CATCH_UP), (3, 3, Step.DONE)], True),
        # It would be the same record again and again, for the syncer still has it.
        (None, ["me"], True, [(1, 0, Step.CATCH_UP), (1, 1, Step.DONE)], False),
    ],
    ids=["merged", "anchor jumped", "late and merged", "late", "syncer went on", "later", "record does not fit"],
)
def test_every_outcome_leads_to_the_version_of_the_syncer(
    exchange: Exchange, refused: Verdict | None, contributors: list[str], broke: bool, steps: Any, discarded: bool
) -> None:
    if refused is not None:
        exchange.refused(refused, lease_of())
    if contributors:
        exchange.recorded(contributors, "me")
    if broke:
        exchange.broke(lease_of())
    merged = BASE if "me" in contributors else -1
    for there, here, step in steps:
        assert exchange.next_step(lease_of(BASE + there) if there >= 0 else None, BASE + here, merged, 1e9) is step
    assert exchange.discarded == discarded


def test_a_new_term_is_tried_at_once_and_the_same_one_later() -> None:
    """After a broken stream."""
    exchange = begun()
    exchange.header(lease_of(term=3))
    exchange.broke(lease_of(term=3))
    for lease, now, step in (
        (None, 0.0, Step.WAIT),
        (lease_of(term=3), 9.9, Step.WAIT),
        (lease_of(term=3), 10.0, Step.CONTRIBUTE),
        (lease_of(term=4), 0.0, Step.CONTRIBUTE),
    ):
        assert exchange.next_step(lease, BASE, -1, now, retry_at=10.0) is step
    assert not exchange.discarded


@pytest.mark.parametrize("version", [BASE - 1, BASE])
def test_a_refusal_for_any_other_reason_is_tried_again(exchange: Exchange, version: int) -> None:
    """The syncer is closing, stands at another term, or is still catching up itself."""
    exchange.refused(refusal(version), lease_of())
    assert exchange.next_step(lease_of(), BASE, -1, 0.5, retry_at=1.0) is Step.WAIT
    assert exchange.next_step(lease_of(), BASE, -1, 1.0, retry_at=1.0) is Step.CONTRIBUTE and not exchange.discarded


@given(st.randoms(), st.lists(st.integers(0, 9), max_size=30))
def test_every_path_ends_once_the_network_behaves(r: random.Random, trouble: list[int]) -> None:
    """Any sequence of what can go wrong, and then a syncer that answers, and donors that have what they say."""
    exchange, version, swarm, term = begun(), BASE, BASE, 1
    for turn, what in enumerate([*trouble, *[0] * 4]):
        if what == 9:  # all who had a later version die, and somebody at ours takes over
            swarm, term = version, term + 1
        elif what == 8:
            swarm += r.randint(1, 3)
        lease = None if what == 7 else lease_of(swarm, term)
        retry_at = turn + r.choice([-1.0, 1.0]) if what else 0.0
        match exchange.next_step(lease, version, -1, float(turn), retry_at):
            case Step.DONE:
                assert version > BASE and (lease is None or version >= lease.version)
                return
            case Step.CATCH_UP if what == 0:
                assert swarm > version
                version = swarm
            case Step.CONTRIBUTE:
                assert lease is not None
                exchange.header(lease)
                if what in (1, 2, 7):
                    exchange.broke(lease)
                elif what == 3:
                    exchange.refused(refusal(r.randint(0, BASE)), lease)
                elif swarm > BASE + 1 or (swarm > BASE and what == 4):
                    exchange.refused(refusal(swarm), lease)
                elif swarm > BASE:
                    exchange.refused(refusal(swarm, record_follows=True), lease)
                    exchange.recorded(["other"], "me")
                    version = BASE + 1 if what != 5 else version  # 5: it does not fit
                elif what != 6:
                    swarm, version = BASE + 1, BASE + 1
                    exchange.recorded(["me", "other"], "me")
            case step:
                assert what != 0 or turn < len(trouble), step
    pytest.fail("the exchange never ended")
