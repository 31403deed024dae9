"""Robust merging: honest contributions merge as before, bit for bit, and one that lies does not get its way."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK
from diloco.outer.merging import SKETCH, Staged
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.outer.robust import ABSURD, MIN_JUDGED, Norms, clip
from diloco.testing.fuzz.lying import Lying
from tests.support import outer as steps
from tests.support.outer import merge, outer

NUMEL = 5000
INT8 = codec("int8")


def pseudo_gradients(count: int, seed: int, agreement: float = 0.6) -> list[Tensor]:
    """Honest ones of a round: a common direction, and noise of its own for each."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator)
    return [
        agreement * common + (1 - agreement**2) ** 0.5 * torch.randn(NUMEL, generator=generator) for _ in range(count)
    ]


def encoded(x: Tensor, lie: float = 1.0) -> Tensor:
    return steps.encoded(Lying(INT8, lie), x)


def sent(deltas: list[Tensor], lies: dict[int, float] | None = None) -> dict[str, Tensor]:
    """The payloads of peers, of whom these multiply theirs."""
    return {f"p{i}": encoded(x, (lies or {}).get(i, 1.0)) for i, x in enumerate(deltas)}


def syncer(**settings: object) -> Replica:
    fixed = {"codec_up": "int8", "codec_down": "fp32"}
    return steps.syncer({"w": torch.zeros(NUMEL)}, outer(**{**fixed, **settings}))


def step(replica: Replica, contributions: dict[str, Tensor]) -> list[str]:
    """One version of these contributions; who is left out."""
    held = replica.held[0]
    for peer, payload in contributions.items():
        held.put(0, peer, payload, 1.0)
    _, _, judged = merge(held, OuterStep(0, len(contributions)))
    return [] if judged is None else [judged[0][i] for i in judged[1].left_out]


def unit(values: Tensor) -> Tensor:
    """The cosines of rows."""
    rows = values / values.norm(dim=1, keepdim=True)
    return (rows @ rows.T).double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


# -- honest contributions ---------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9), merge=st.sampled_from(["mean", "rda"]))
def test_a_version_of_honest_contributions_stays_as_it_is(seed: int, count: int, merge: str) -> None:
    plain, robust = syncer(robust="none", merge=merge), syncer(merge=merge)
    assert robust.settings.judged_together and not plain.settings.judged_together
    for round_ in range(3):
        found = sent(pseudo_gradients(count, seed + round_))
        assert step(robust, found) == []
        step(plain, found)
        assert torch.equal(robust.anchors[0], plain.anchors[0])
        assert torch.equal(robust.held[0].state.momentum, plain.held[0].state.momentum)


# -- contributions that lie -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [-10.0, -1.0, 1e12])
def test_one_of_eight_that_lies_hardly_turns_the_step(factor: float) -> None:
    deltas = pseudo_gradients(8, 5)
    honest = torch.stack(deltas[:3] + deltas[4:]).mean(0)
    robust, plain, found = syncer(), syncer(robust="none"), sent(deltas, {3: factor})
    assert step(robust, found) == (["p3"] if factor < 0 else [])
    assert cosine(-robust.anchors[0], honest) > 0.9
    assert 0.4 < float(robust.anchors[0].norm() / (0.7 * 1.9 * honest.norm())) < 1.4
    if factor == -10:
        step(plain, found)
        assert cosine(-plain.anchors[0], honest) < 0


def test_three_reversed_of_eight_are_left_out_and_four_are_not() -> None:
    deltas = pseudo_gradients(8, 5)
    assert step(syncer(), sent(deltas, dict.fromkeys(range(3), -10.0))) == ["p0", "p1", "p2"]
    assert step(syncer(), sent(deltas, dict.fromkeys(range(4), -10.0))) == [], "no majority to go by"


def few(count: int, lie: float, replica: Replica, me: str, seed: int = 5) -> tuple[list[str], list[str]]:
    """A version of so many contributions, of which p0's is multiplied; whose is scaled down, and whose left out."""
    held, found = replica.held[0], sent(pseudo_gradients(count, seed), {0: lie})
    for peer, payload in found.items():
        held.put(0, peer, payload, 1.0)
    _, _, judged = merge(held, held.state.step(count, 1), me=me)
    assert judged is not None
    return [judged[0][i] for i in judged[1].clipped], [judged[0][i] for i in judged[1].left_out]


@pytest.mark.parametrize("count", [2, 3])
def test_of_few_one_is_left_out_that_opposes_the_syncers_own(count: int) -> None:
    assert few(count, -10.0, syncer(), "p1") == ([], ["p0"])
    assert few(count, -10.0, syncer(), "p0") == ([], [f"p{i}" for i in range(1, count)])


def test_a_host_leaves_out_what_opposes_the_momentum() -> None:
    replica = syncer()
    assert few(3, 1.0, replica, "") == ([], [])
    assert few(3, -10.0, replica, "") == ([], ["p0"])
    assert few(2, -10.0, replica, "") == (["p0"], []), "the momentum may have to turn"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_contributions_are_as_long_as_is_usual(count: int) -> None:
    replica = syncer()
    for _ in range(4):
        assert few(count, 1.0, replica, "") == ([], []), "honest ones are merged as they are"
    before = replica.anchors[0].clone()
    assert few(count, 100.0, replica, "") == (["p0"], [])
    longest = max(replica.held[0].norms.whole)
    assert longest == pytest.approx(4 * float(pseudo_gradients(1, 5)[0].norm()), rel=0.05)
    assert float((replica.anchors[0] - before).norm()) < 10 * longest
    assert few(count, 10.0, replica, "p0") == ([], []), "it is the syncer's own"


def test_a_chunk_against_the_momentum_is_as_long_as_is_usual() -> None:
    norms = Norms()
    assert norms.see(0, 100.0, 3.0, momentum=5.0) == 0.2, "nothing is known but the momentum: 20 is allowed"
    norms = Norms()
    for _ in range(MIN_JUDGED):
        norms.see(0, 1.0, 3.0)
    assert norms.see(0, 4.0, 3.0, opposes=True) == 0.25
    assert norms.see(0, 4.0, 3.0, opposes=False) == 1.0


def test_recent_norms_clip_long_ones_and_refuse_absurd_ones() -> None:
    norms = Norms()
    assert [norms.see(0, norm, 3.0) for norm in (1.0, 100.0, 1.0, 1.0)] == [1.0] * 4, "nothing is known yet"
    assert norms.see(0, 10.0, 3.0) == 0.4, "1 is usual, and 4 is allowed"
    assert norms.see(0, 3.0, 3.0) == 1.0
    with pytest.raises(PayloadError, match="absurd where 3 is usual"):
        norms.see(0, 3.01 * ABSURD, 2.0)
    assert norms.see(1, 1e6, 2.0) == 1.0, "another chunk"


def test_an_invalid_or_absurd_chunk_leaves_staged_ones_alone() -> None:
    norms = Norms()
    staged = Staged([NUMEL], INT8, norms)
    for peer, payload in sent(pseudo_gradients(4, 0)).items():
        staged.put(peer, 0, payload)
    before = staged.cosines(["p0", "p1"])[0].clone()
    with pytest.raises(PayloadError, match="exponent"):
        staged.put("p0", 0, torch.full((INT8.nbytes(NUMEL),), 0x7F, dtype=torch.uint8))
    with pytest.raises(PayloadError, match="absurd"):
        staged.put("p0", 0, encoded(pseudo_gradients(1, 0)[0], 1e5))
    assert torch.equal(staged.cosines(["p0", "p1"])[0], before)


def test_sketches_of_long_contributions_show_a_reversed_one() -> None:
    numel = CHUNK + 3 * SKETCH  # a chunk of which a part is compared, and another
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(numel, generator=generator)
    deltas = [common + 2 * torch.randn(numel, generator=generator) for _ in range(5)]
    deltas[1] *= -1
    staged = Staged([CHUNK, 3 * SKETCH], INT8, Norms(), random.Random(1))
    for i, delta in enumerate(deltas):
        for chunk, part in enumerate(delta.split(CHUNK)):
            staged.put(f"p{i}", chunk, encoded(part))
    peers = [f"p{i}" for i in range(5)]
    gram, compared = staged.cosines(peers)
    assert 2 * SKETCH <= compared < 2.2 * SKETCH
    torch.testing.assert_close(gram, unit(torch.stack(deltas)), rtol=0, atol=5 * compared**-0.5)
    assert clip(staged.norms(peers), gram, [1.0] * 5, 3.0, compared).left_out == (1,)


def test_sketches_begin_elsewhere_in_each_version() -> None:
    staged = Staged([CHUNK], INT8, Norms())
    payload, begun = encoded(torch.randn(CHUNK)), set()
    for _ in range(20):
        staged.put("p", 0, payload)
        begun.add(staged._begin[0])
        staged.clear()
    assert len(begun) > 5


# -- the rules --------------------------------------------------------------------------------------------------------


def test_clip_scales_to_the_median_norm_times_the_factor() -> None:
    same = torch.ones(4, 4, dtype=torch.float64)
    judged = clip([1.0, 1.0, 1.0, 8.0], same, [1.0, 2.0, 3.0, 4.0], 2.0, NUMEL)
    assert judged.coefficients == (1.0, 2.0, 3.0, 1.0)
    assert judged.weights == (1.0, 2.0, 3.0, 4.0) and judged.clipped == (3,)
