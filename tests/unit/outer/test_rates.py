"""Rates by version, by peers and by speed: their ends, their middles, and the figures of the papers."""

from __future__ import annotations

import pytest

from diloco.attach.progress import dylu_steps
from diloco.outer.optimizer import OPTIMIZERS, YOUTH, OuterStep, lr_at
from tests.support.outer import outer

PAPER = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


def momentum_of(step: OuterStep, optimizer: str = "nesterov", **rates: object) -> float:
    return OPTIMIZERS[optimizer](outer(sync_every=10, optimizer=optimizer, **rates)).rates(step)[1]


def test_by_default_the_momentum_rises_over_the_run() -> None:
    """Over the rounds that are planned; without a plan with its age, of which a window of contributions is one step."""
    # 1 / (1 - 0.7) = 10/3, so 1, 13/6, 10/3 at the beginning, in the middle and at the end; 1 - 6/13 = 7/13.
    planned = [momentum_of(OuterStep(version, 4), rounds=16) for version in (0, 8, 16, 40)]
    assert planned == pytest.approx([0.0, 7 / 13, 0.7, 0.7])
    aged = [momentum_of(OuterStep(version, 4)) for version in (0, YOUTH, 10**9)]
    assert aged == pytest.approx([0.0, 7 / 13, 0.7])
    windowed = momentum_of(OuterStep(4 * YOUTH, 1, 0, delay=4), "delayed_nesterov")
    assert windowed == momentum_of(OuterStep(YOUTH, 4))
    assert momentum_of(OuterStep(4, 4), rounds=100, momentum_warmup=4) == 0.7, "a warm-up counts more than the plan"


def test_the_learning_rate_by_peers_is_the_papers() -> None:
    """And linear in the logarithm between, constant beyond the ends and without a table."""
    assert [lr_at(peers, 0.7, PAPER) for peers in (1, 2, 4, 8)] == pytest.approx([0.4, 0.6, 0.6, 0.8])
    assert lr_at(3, 0.7, PAPER) == pytest.approx(0.6)
    assert lr_at(4, 0.7, {2: 0.5, 8: 0.9}) == pytest.approx(0.7)  # 4 is half-way from 2 to 8 in doublings
    assert lr_at(1, 0.7, {2: 0.5, 8: 0.9}) == lr_at(7, 0.7, {4: 0.5}) == 0.5
    assert lr_at(1000, 0.7, {8: 0.9, 2: 0.5}) == 0.9 and lr_at(7, 0.7, {}) == 0.7


def test_steps_by_speed_are_those_of_the_papers_toy_experiment() -> None:
    # PAPERS.md section 8: seconds per step .58, .75, 1.51, 3.33 and H=20 give 20, 15, 7 and 3, which the floor lifts.
    speeds = [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
    assert [dylu_steps(speed, max(speeds), 20) for speed in speeds] == [20, 15, 7, 5]
    assert dylu_steps(speeds[3], speeds[0], 20, floor=1) == 3


def test_the_fastest_and_the_unmeasured_take_the_whole_interval() -> None:
    assert dylu_steps(0.0, 3.0, 50) == dylu_steps(3.0, 0.0, 50) == dylu_steps(3.0, 3.0, 50) == 50
    assert dylu_steps(4.0, 3.0, 50) == 50
