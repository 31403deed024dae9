"""Fault schedules: the fast part of `scripts/fuzz_protocol`, and scenarios of what it found."""

from __future__ import annotations

import pytest

from diloco.config import OuterConfig
from diloco.protocol.actions import Merge
from diloco.protocol.messages.bulk import Contribution
from diloco.testing.fuzz.faults import scenario
from diloco.testing.fuzz.splits import split_scenario
from diloco.testing.fuzz.stage import play
from tests.support.certificates import MANIFEST, digest_of
from tests.support.core import hello_of, make, of_type, status_of

# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_no_fault_schedule_breaks_an_invariant(first: int) -> None:
    failed = {seed: why for seed in range(first, first + 4) if (why := play(scenario(seed)).violation) is not None}
    assert failed == {}


def test_the_same_seed_is_the_same_run_line_by_line() -> None:
    """With a trace, which changes nothing, and without."""
    traced: list[str] = []
    outcome = play(scenario(3), traced.append)
    assert outcome.violation is None and len(traced) > 30
    assert play(scenario(3)) == outcome and tuple(traced) == outcome.story != play(scenario(4)).story


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 22])
def test_no_split_breaks_an_invariant(seed: int) -> None:
    """In 22 a peer contributed in vain, because others overtook it whenever a version closed."""
    assert play(split_scenario(seed)).violation is None


# -- what was found ---------------------------------------------------------------------------------------------------


def test_waiting_for_different_fragments_is_not_for_ever() -> None:
    """1. Of a, b and c two make the quorum. In fragment 0 c comes too late, in fragment 1 b does.
    2. c waits for the next version of fragment 0, b for that of fragment 1: neither trains, so neither gets a second.
    """
    outer = OuterConfig(method="diloco", sync_every=2, fragments=2, quorum=2, staleness_limit=1)
    a = make("a", trains=False, outer=outer)
    a.tick(0.0)
    for name in "bc":
        a.connected(name, hello_of(status_of("training")), 0.0)
    a.adopted(0, 1, digest_of("first"), 0.0)
    described = {"fragment": 0, "term": a.syncers[0].term, "base_version": 0, "steps": 1, "tokens": 1}
    contribution = Contribution(base_digest=a.digests[0], manifest_hash=MANIFEST, **described)
    a.heard("b", status_of("exchanging", [1, 0]), 0.5)
    a.heard("c", status_of("exchanging", [0, 1]), 0.6)
    assert a.offer("c", contribution).accepted

    assert a.arrived("c", 0, 1.0) == []
    assert [len(of_type(Merge, a.tick(now))) for now in (2.0, 6.0)] == [0, 1]
