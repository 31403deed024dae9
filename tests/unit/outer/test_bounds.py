"""Bounds: no honest version is beyond them, whatever the settings; one that is made up is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import ConfigError, PayloadError
from diloco.outer.bounds import DOUBT, FACTOR, SLACK, Bound, Moved, distance, measure
from diloco.outer.codecs import CODECS, codec
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from tests.support import outer as steps
from tests.support.audits import Lie, Syncer
from tests.support.outer import encoded, gaussian, payloads_of, take


def outer(**changes: object) -> OuterConfig:
    return steps.outer(**{"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0, "codec_up": "int8", **changes})


class Swarm:
    """A syncer with random contributions, and a peer that checks each of its versions.

    `seldom`: each window is this many times as large as the contributions to a version.
    """

    def __init__(self, settings: OuterConfig, seed: int, scale: float = 1e-3, seldom: int = 1) -> None:
        self.syncer = Syncer(settings, {"weight": 900, "bias": 77}, seed, scale)
        self.settings, self.seldom, self.bound = settings, seldom, Bound(settings)
        self.said: list[str | None] = []

    def version(self, peers: int, lie: Lie | None = None, checks: bool = True) -> None:
        held = self.syncer.held
        step, update, lengths, before = self.syncer.version(peers, delay=peers * self.seldom, lie=lie)
        kept = update.clone(), before.clone()
        moved = measure(self.settings, update, before)
        assert torch.equal(update, kept[0]) and torch.equal(before, kept[1]), "to measure changes nothing"
        assert moved == pytest.approx(held.moved)
        if checks:
            self.said.append(self.bound.wrong(step, lengths, moved, 1))
            far = distance(self.settings, before, held.anchor)
            assert self.said[-1] is not None or self.bound.wrong(step, lengths, far, 1) is None
            self.bound.follow(step, lengths, moved, 1)


EVERY = {
    "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
    "codec_down": st.sampled_from(sorted(CODECS)),
    "codec_up": st.sampled_from(sorted(CODECS)),
    "robust": st.sampled_from(["none", "auto", "clip"]),
    "merge": st.sampled_from(["mean", "rda"]),
    "momentum": st.sampled_from([0.0, 0.5, 0.9]),
}


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 3), st.integers(0, 4), st.sampled_from([1e-7, 1e-3, 1.0]),
    st.fixed_dictionaries(EVERY),
)  # fmt: skip
def test_no_honest_version_is_beyond_the_bound(
    seed: int, peers: int, seldom: int, unseen: int, scale: float, changes: dict[str, object]
) -> None:
    """Also for a peer that comes later; and where updates carry values, whose rounding may be all of the movement."""
    try:
        made = outer(**changes)
    except ConfigError:  # it goes with another merge rule
        made = outer(**{**changes, "merge": "mean"})
    swarm = Swarm(made, seed, scale, seldom if made.windowed else 1)
    for _ in range(unseen):
        swarm.version(peers, checks=False)
    swarm.bound.restart(unseen)
    for _ in range(8):
        swarm.version(peers)
    assert swarm.said == [None] * 8


@pytest.mark.parametrize("down", sorted(CODECS))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_version_that_moves_too_far_is_beyond_the_bound(down: str, optimizer: str) -> None:
    def lie(master: Tensor) -> Tensor:
        return master + 0.5 * torch.sign(torch.sin(torch.arange(len(master))))

    swarm = Swarm(outer(codec_down=down, optimizer=optimizer), 0)
    for _ in range(7):
        swarm.version(4)
    swarm.version(4, lie)
    assert swarm.said[:-1] == [None] * 7
    assert swarm.said[-1] is not None and "what was contributed allows" in swarm.said[-1]


STEP = OuterStep(0, 4)


def four(length: float) -> dict[str, float]:
    """Four contributions of one length."""
    return dict.fromkeys("abcd", length)


def followed(bound: Bound, count: int, length: float = 1.0, moved: float = 0.7) -> Bound:
    """Versions of four contributions of one length; the encoding loses nothing."""
    for _ in range(count):
        bound.follow(STEP, four(length), Moved(moved, 0.0), 1)
    return bound


def most(bound: Bound, lengths: dict[str, float], term: int = 1) -> float:
    """The longest movement that is allowed, to a tenth of a percent, without the slack."""
    low, high = 0.0, 1e9
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        wrong = bound.wrong(STEP, lengths, Moved(middle * SLACK, 0.0), term)
        low, high = (low, middle) if wrong else (middle, high)
    return low


def test_the_bound_is_a_nesterov_step_whose_means_are_all_one() -> None:
    settings = outer(lr=0.5, momentum=0.8)
    bound, momentum = Bound(settings), 0.0
    for _ in range(5):
        momentum = 0.8 * momentum + 1.0
        assert most(bound, four(1.0)) == pytest.approx(0.5 * (1.0 + 0.8 * momentum), rel=2e-3)
        followed(bound, 1)


def test_what_an_encoding_lost_may_come_later() -> None:
    bound = Bound(outer(lr=1.0, momentum=0.0))
    bound.follow(STEP, {"a": 1.0}, Moved(0.6, 0.4), 1)
    assert most(bound, {"a": 1.0}) == pytest.approx(1.4, rel=2e-3)
    bound.follow(STEP, {"a": 1.0}, Moved(1.4, 0.0), 1)
    assert most(bound, {"a": 1.0}) == pytest.approx(1.0, rel=2e-3)


def test_nobody_may_sign_any_length_for_its_own_contribution() -> None:
    bound = followed(Bound(outer(lr=1.0, momentum=0.0)), 4)
    assert bound.scales({"a": 2 * FACTOR, "b": 1.0}) == {"a": 0.5, "b": 1.0}
    lies = {"a": 1e6, "b": 1.0, "c": 1.0, "d": 1.0}
    assert most(bound, lies) == pytest.approx(DOUBT * FACTOR, rel=2e-3)
    for _ in range(30):  # and to sign it again and again changes nothing
        bound.follow(STEP, lies, Moved(1.0, 0.0), 1)
    assert most(bound, lies) == pytest.approx(DOUBT * FACTOR, rel=2e-3)


def test_where_all_lengths_leap_nobody_is_held_back() -> None:
    """As when the learning rate begins at zero, or when parameters begin to get gradients."""
    bound = followed(Bound(outer(lr=1.0, momentum=0.0)), 1, 0.0, 0.0)
    assert most(bound, four(1.0)) == pytest.approx(1.0, rel=2e-3)
    followed(bound, 4, 1e-6, 0.0)
    assert most(bound, four(1.0)) == pytest.approx(1.0, rel=2e-3)
    assert set(bound.scales(four(1.0)).values()) == {1.0}


def test_one_by_one_all_lengths_may_leap_within_a_round() -> None:
    bound = Bound(outer(lr=1.0, momentum=0.0, quorum=1))
    bound.follow(STEP, dict.fromkeys("abcdef", 1e-6), Moved(0.0, 0.0), 1)
    scaled = []
    for name in "abcdef":
        scaled.append(bound.scales({name: 1.0})[name] < 1.0)
        bound.follow(OuterStep(0, 1), {name: 1.0}, Moved(0.0, 0.0), 1)
    assert scaled == [True, True, False, False, False, False]


def test_nothing_and_no_defence_hold_nobody_back() -> None:
    """Many contributions of nothing."""
    bound = followed(Bound(outer()), 1)
    for _ in range(100):
        bound.follow(OuterStep(0, 1), {"liar": 0.0}, Moved(0.0, 0.0), 1)
    assert bound.scales({"a": 1.0}) == {"a": 1.0}
    assert followed(Bound(outer(robust="none")), 4).scales({"a": 1e9}) == {"a": 1.0}


def test_a_late_peer_believes_one_version_and_knows_the_momentum() -> None:
    settings = outer(lr=1.0, momentum=0.5)
    there, joined = followed(Bound(settings), 8, moved=2.0), Bound(settings)
    joined.restart(8, four(1.0), 1)
    assert joined.wrong(STEP, four(1.0), Moved(1e6, 0.0), 1) is None
    followed(joined, 1, moved=2.0)
    assert most(there, four(1.0)) <= most(joined, four(1.0)) <= 2 * most(there, four(1.0))
    assert most(followed(joined, 20, moved=2.0), four(1.0)) == pytest.approx(most(there, four(1.0)), rel=1e-2)


def test_a_new_syncer_may_go_on_with_an_older_momentum() -> None:
    bound = followed(Bound(outer(lr=1.0, momentum=0.9)), 20)
    followed(bound, 60, length=1e-3, moved=1e-3)
    assert most(bound, four(1e-3)) < 0.1
    assert most(bound, four(1e-3), term=2) > 8.0


def test_a_version_of_no_contributions_moves_nothing() -> None:
    bound = Bound(outer(lr=1.0, momentum=0.0))
    assert bound.wrong(STEP, {}, Moved(0.0, 0.0)) is None and bound.wrong(STEP, {}, Moved(1e-3, 0.0)) is not None


def test_what_is_folded_in_counts_no_more_than_the_limit() -> None:
    """Chunk by chunk, because its length is signed at the end."""
    swarm = Swarm(outer(codec_up="fp32", robust="none"), 0)
    held = swarm.syncer.held
    held.bound = followed(Bound(outer(codec_up="fp32")), 1)
    numel = len(held.anchor)
    take(held, "liar", payloads_of(held.up, torch.full((numel,), 1e3)))
    counted = float(torch.cat([one.total for one in held.sums]).norm())
    assert counted == pytest.approx(FACTOR, rel=1e-4)
    assert held.tallies["liar"].norm == pytest.approx(1e3 * numel**0.5, rel=1e-4)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CODECS)), st.integers(1, 3000), st.integers(0, 10_000),
    st.sampled_from([1e-30, 1e-4, 1.0, 1e3]),
)  # fmt: skip
def test_an_encoding_loses_no_more_than_it_says(name: str, numel: int, seed: int, scale: float) -> None:
    one, skewed = codec(name), torch.rand(numel, generator=torch.Generator().manual_seed(seed + 1)) ** 8
    x = gaussian(numel, seed, scale) * skewed
    payload = encoded(one, x)
    values = one.values(payload, numel).double()
    assert float((x.double() - values).norm()) <= one.most_lost(payload, numel, float(values.norm())) * (1 + 1e-6)


def test_an_update_that_its_codec_refuses_has_no_length() -> None:
    update = torch.full((codec("int8").nbytes(8),), 255, dtype=torch.uint8)
    with pytest.raises(PayloadError):
        measure(outer(), update[:-1], torch.zeros(8))
