"""Bounds: no honest version is beyond them, whatever the settings; one that is made up is."""

from __future__ import annotations

import pytest
import torch
from audit_helpers import Lie, Syncer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.bounds import DOUBT, FACTOR, MEMORY, Bound, Moved, measure
from diloco.outer.codecs import CODECS, codec
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from diloco.outer.robust import MIN_JUDGED

NUMELS = {"weight": 3000, "bias": 77}


def outer(**changes: object) -> OuterConfig:
    return OuterConfig.parse({"method": "diloco", "sync_every": 1, "codec_up": "int8", "codec_down": "int8"} | changes)


class Watched(Syncer):
    """A syncer, and a peer that checks each of its versions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bound = Bound(self.settings)
        self.said: list[str | None] = []
        self.used: list[float] = []

    def lengths(self, payloads: list[list[Tensor]]) -> list[float]:
        one = self.held.up
        sizes = [stop - start for start, stop in self.held.chunks]
        whole = [torch.cat([one.values(p, n) for p, n in zip(sent, sizes, strict=True)]) for sent in payloads]
        return [float(values.double().norm()) for values in whole]

    def _take(self, payloads, weights, discounts):  # type: ignore[no-untyped-def]
        self.sent = self.lengths(payloads)
        return super()._take(payloads, weights, discounts)

    def published(self, step: OuterStep, update: Tensor, before: Tensor, new_syncer: bool = False) -> None:
        moved = measure(self.settings, update, before)
        self.said.append(self.bound.wrong(step, self.sent, moved))
        self.bound.follow(step, self.sent, moved, new_syncer)


def versions(settings: OuterConfig, seed: int, peers: int = 4, count: int = 8, lie: Lie | None = None) -> Watched:
    """A swarm whose syncer lies in the last version, if at all."""
    syncer = Watched(settings, NUMELS, seed)
    merge_ = syncer.held.merge_

    def merges(step: OuterStep, update: Tensor, judged: object = None) -> str:
        before = syncer.held.anchor.clone()
        digest = merge_(step, update, judged)  # type: ignore[arg-type]
        syncer.published(step, update, before)
        return digest

    syncer.held.merge_ = merges  # type: ignore[method-assign, assignment]
    for version in range(count):
        syncer.version(peers, delay=peers, lie=lie if version == count - 1 else None)
    return syncer


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    peers=st.integers(1, 6),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    down=st.sampled_from(sorted(CODECS)),
    robust=st.sampled_from(["none", "clip", "trimmed_mean"]),
    merge=st.sampled_from(["mean", "rda"]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_no_honest_version_is_beyond_the_bound(
    seed: int, peers: int, optimizer: str, down: str, robust: str, merge: str, momentum: float
) -> None:
    changes = {"optimizer": optimizer, "codec_down": down, "momentum": momentum, "merge": merge}
    if robust != "none" and merge == "mean":
        changes["robust"] = robust
    try:
        made = versions(outer(**changes), seed, peers)
    except ValueError:
        return
    assert made.said == [None] * 8


@pytest.mark.parametrize("down", sorted(CODECS))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_version_that_moves_farther_than_its_contributions_is_beyond_the_bound(down: str, optimizer: str) -> None:
    def lie(master: Tensor) -> Tensor:
        return master + 0.5 * torch.sign(torch.sin(torch.arange(len(master))))

    made = versions(outer(codec_down=down, optimizer=optimizer), 0, lie=lie)
    assert made.said[:-1] == [None] * 7
    assert made.said[-1] is not None and "what was contributed allows" in made.said[-1]


STEP = OuterStep(0, 4)


def followed(bound: Bound, count: int, length: float = 1.0, moved: float = 0.7) -> Bound:
    """Versions of four contributions of one length; the encoding loses nothing."""
    for _ in range(count):
        bound.follow(STEP, [length] * 4, Moved(moved, 0.0))
    return bound


def most(bound: Bound, lengths: list[float]) -> float:
    """The longest movement that is allowed, to a tenth of a percent."""
    low, high = 0.0, 1e9
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if bound.wrong(STEP, lengths, Moved(middle, 0.0)) else (middle, high)
    return low


def test_the_bound_is_that_of_a_nesterov_step_whose_means_are_all_one() -> None:
    settings = outer(lr=0.5, momentum=0.8)
    bound, momentum = Bound(settings), 0.0
    for _ in range(5):
        momentum = 0.8 * momentum + 1.0
        assert most(bound, [1.0] * 4) == pytest.approx(0.5 * (1.0 + 0.8 * momentum), rel=2e-3)
        followed(bound, 1)


def test_what_an_encoding_lost_may_come_later() -> None:
    bound = Bound(outer(lr=1.0, momentum=0.0))
    bound.follow(STEP, [1.0], Moved(0.6, 0.4))
    assert most(bound, [1.0]) == pytest.approx(1.4, rel=2e-3)
    bound.follow(STEP, [1.0], Moved(1.4, 0.0))
    assert most(bound, [1.0]) == pytest.approx(1.0, rel=2e-3)


def test_nobody_may_sign_any_length_for_what_it_contributed_itself() -> None:
    bound = followed(Bound(outer(lr=1.0, momentum=0.0)), MEMORY)
    assert bound.too_long(1.01 * FACTOR) and not bound.too_long(0.99 * FACTOR)
    assert most(bound, [1.0, 1.0, 1e6]) == pytest.approx(DOUBT * FACTOR, rel=2e-3)
    for _ in range(MEMORY):  # and to sign it again and again changes little
        bound.follow(STEP, [1.0, 1.0, 1e6], Moved(1.0, 0.0))
    assert most(bound, [1e6]) == pytest.approx(DOUBT * FACTOR, rel=2e-3)


def test_the_first_contributions_may_have_any_length() -> None:
    assert not Bound(outer()).too_long(1e9)
    assert not followed(Bound(outer()), 1).too_long(FACTOR) and MIN_JUDGED <= 4


def test_a_peer_that_joins_later_allows_more_than_one_that_was_there_and_not_everything() -> None:
    settings = outer(lr=1.0, momentum=0.5)
    there, joined = followed(Bound(settings), 8), followed(Bound(settings, version=8), 1)
    assert most(there, [1.0] * 4) <= most(joined, [1.0] * 4) <= 4 * FACTOR
    assert most(followed(joined, 30), [1.0] * 4) == pytest.approx(most(there, [1.0] * 4), rel=1e-2)


def test_a_new_syncer_may_go_on_with_an_older_momentum() -> None:
    settings = outer(lr=1.0, momentum=0.9)
    bound, same = (followed(Bound(settings), 20) for _ in range(2))
    bound.follow(STEP, [1e-3] * 4, Moved(1.0, 0.0), new_syncer=True)
    same.follow(STEP, [1e-3] * 4, Moved(1.0, 0.0))
    assert most(bound, [1e-3] * 4) > most(same, [1e-3] * 4)


def test_a_version_of_no_contributions_moves_nothing_but_the_momentum() -> None:
    bound = Bound(outer(lr=1.0, momentum=0.0))
    assert bound.wrong(STEP, [], Moved(0.0, 0.0)) is None and bound.wrong(STEP, [], Moved(1e-3, 0.0)) is not None


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(CODECS)),
    numel=st.integers(1, 3000),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e3]),
)
def test_an_encoding_loses_no_more_than_it_says(name: str, numel: int, seed: int, scale: float) -> None:
    generator, one = torch.Generator().manual_seed(seed), codec(name)
    x = scale * torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 8
    payload = torch.empty(one.nbytes(numel), dtype=torch.uint8)
    one.encode(x, payload)
    values = one.values(payload, numel).double()
    assert float((x.double() - values).norm()) <= one.most_lost(payload, numel, float(values.norm())) * (1 + 1e-6)


@pytest.mark.parametrize("down", sorted(CODECS))
def test_to_measure_an_update_changes_nothing(down: str) -> None:
    update = torch.zeros(codec(down).nbytes(8), dtype=torch.uint8)
    anchor = torch.ones(8)
    measure(outer(codec_down=down), update, anchor)
    assert not update.any() and bool((anchor == 1).all())


def test_an_update_that_its_codec_refuses_has_no_length() -> None:
    settings = outer()
    update = torch.full((codec("int8").nbytes(8),), 255, dtype=torch.uint8)
    with pytest.raises(PayloadError):
        measure(settings, update[:-1], torch.zeros(8))
