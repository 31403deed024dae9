"""Robust merging: honest contributions merge as before, bit for bit, and one that lies does not get
its way."""

import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.aggregate import MergeResult
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import CHUNK
from diloco.outer.payloads import Codec, Layout
from diloco.outer.replica import Replica
from diloco.outer.robust import SKETCH, Sketches, clip, clip_few
from tests.harness.fuzz.crowd import lying
from tests.support import outer as steps
from tests.support.outer import gaussian, make, named, outer, payload_of, weighted

NUMEL = 5000
INT8 = CODECS["int8"]


def pseudo_gradients(count: int, seed: int, agreement: float = 0.6) -> list[Tensor]:
    """Honest ones of a round: a common direction, and noise of its own for each."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator)
    noise = [torch.randn(NUMEL, generator=generator) for _ in range(count)]
    return [agreement * common + (1 - agreement**2) ** 0.5 * own for own in noise]


def encoded(x: Tensor, lie: float = 1.0) -> Tensor:
    return steps.encoded(lying(INT8, lie), x)


def sent(deltas: list[Tensor], lies: dict[int, float] | None = None) -> dict[str, Tensor]:
    """The payloads of peers, of whom these multiply theirs."""
    return {f"p{i}": encoded(x, (lies or {}).get(i, 1.0)) for i, x in enumerate(deltas)}


def author(**settings: object) -> Replica:
    fixed = {"codec_up": "int8", "codec_down": "fp32"}
    return steps.author({"w": torch.zeros(NUMEL)}, outer(**{**fixed, **settings}))


def step(replica: Replica, found: Mapping[str, Tensor], me: str = "") -> MergeResult:
    """One version of these contributions, of equal weight."""
    return make(replica, [weighted(peer, payload) for peer, payload in found.items()], me=me)[0]


def unit(values: Tensor) -> Tensor:
    """The cosines of rows."""
    rows = values / values.norm(dim=1, keepdim=True)
    return (rows @ rows.T).double()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


# -- honest contributions --------------------------------------------------------------------------


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9), merge=st.sampled_from(["mean", "rda"]))
def test_a_version_of_honest_contributions_stays(seed: int, count: int, merge: str) -> None:
    plain, robust = author(robust="none", merge=merge), author(merge=merge)
    for round_ in range(3):
        found = sent(pseudo_gradients(count, seed + round_))
        assert step(robust, found).left_out == ()
        step(plain, found)
        assert torch.equal(robust.anchors[0], plain.anchors[0])
        assert torch.equal(robust.states[0].momentum, plain.states[0].momentum)


# -- contributions that lie ------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [-10.0, -1.0, 1e12])
def test_one_of_eight_that_lies_hardly_turns_the_step(factor: float) -> None:
    deltas = pseudo_gradients(8, 5)
    honest = torch.stack(deltas[:3] + deltas[4:]).mean(0)
    robust, plain, found = author(), author(robust="none"), sent(deltas, {3: factor})
    assert step(robust, found).left_out == (("p3",) if factor < 0 else ())
    assert cosine(-robust.anchors[0], honest) > 0.9
    assert 0.4 < float(robust.anchors[0].norm() / (0.7 * 1.9 * honest.norm())) < 1.4
    if factor == -10:
        step(plain, found)
        assert cosine(-plain.anchors[0], honest) < 0


def test_three_reversed_of_eight_are_left_out_and_four_are_not() -> None:
    deltas = pseudo_gradients(8, 5)
    three, four = (sent(deltas, dict.fromkeys(range(count), -10.0)) for count in (3, 4))
    assert step(author(), three).left_out == ("p0", "p1", "p2")
    assert step(author(), four).left_out == (), "no majority to go by"


def few(
    count: int, lie: float, replica: Replica, me: str, seed: int = 5
) -> tuple[list[str], list[str]]:
    """A version of so many contributions, of which p0's is multiplied; whose is scaled down, and
    whose left out."""
    merged = step(replica, sent(pseudo_gradients(count, seed), {0: lie}), me)
    return list(merged.clipped), list(merged.left_out)


@pytest.mark.parametrize("count", [2, 3])
def test_of_few_one_is_left_out_that_opposes_the_syncers_own(count: int) -> None:
    assert few(count, -10.0, author(), "p1") == ([], ["p0"])
    assert few(count, -10.0, author(), "p0") == ([], [f"p{i}" for i in range(1, count)])


def test_a_host_leaves_out_what_opposes_the_momentum() -> None:
    replica = author()
    assert few(3, 1.0, replica, "") == ([], [])
    assert few(3, -10.0, replica, "") == ([], ["p0"])
    assert few(2, -10.0, replica, "") == (["p0"], []), "the momentum may have to turn"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_contributions_are_as_long_as_is_usual(count: int) -> None:
    replica = author()
    for _ in range(4):
        assert few(count, 1.0, replica, "") == ([], []), "honest ones are merged as they are"
    before = replica.anchors[0].clone()
    assert few(count, 100.0, replica, "") == (["p0"], [])
    longest = max(replica.aggregates[0].norms)
    assert longest == pytest.approx(4 * float(pseudo_gradients(1, 5)[0].norm()), rel=0.05)
    assert float((replica.anchors[0] - before).norm()) < 10 * longest
    assert few(count, 10.0, replica, "p0") == ([], []), "it is the author's own"


def test_one_against_the_momentum_is_as_long_as_is_usual() -> None:
    def scale(norm: float, expected: float, cosine: float) -> float:
        cosines = torch.tensor([cosine])
        return clip_few([norm], [1.0], expected, [cosines], NUMEL, 3.0, None).scales[0]

    assert scale(100.0, 5.0, 0.5) == 0.2, "20 is allowed"
    assert (scale(4.0, 1.0, -0.5), scale(4.0, 1.0, 0.5)) == (0.25, 1.0)
    assert scale(4.0, 0.0, -0.5) == 1.0, "nothing is known"


def test_sketches_of_long_contributions_show_a_reversed_one() -> None:
    numel = CHUNK + 3 * SKETCH  # a chunk of which a part is compared, and another
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(numel, generator=generator)
    deltas = [common + 2 * torch.randn(numel, generator=generator) for _ in range(5)]
    deltas[1] *= -1
    payloads = [payload_of(INT8, delta) for delta in deltas]
    found = Sketches(INT8, Layout(INT8, numel), random.Random(1)).compare(payloads)
    assert 2 * SKETCH <= found.numel < 2.2 * SKETCH
    expected = unit(torch.stack(deltas))
    torch.testing.assert_close(found.cosines, expected, rtol=0, atol=5 * found.numel**-0.5)
    norms = [float(delta.norm()) for delta in deltas]
    assert clip(norms, found.cosines, [1.0] * 5, 3.0, found.numel).left_out == (1,)
    along = found.cosines_with(deltas[0])
    torch.testing.assert_close(along, found.cosines[0], rtol=0, atol=0.01)


# -- the rules -------------------------------------------------------------------------------------


def test_clip_scales_to_the_median_norm_times_the_factor() -> None:
    same = torch.ones(4, 4, dtype=torch.float64)
    judged = clip([1.0, 1.0, 1.0, 8.0], same, [1.0, 2.0, 3.0, 4.0], 2.0, NUMEL)
    assert judged.scales == (1.0, 1.0, 1.0, 0.25)
    assert judged.weights == (1.0, 2.0, 3.0, 4.0) and judged.clipped == (3,)


def test_sketches_begin_elsewhere_in_each_version() -> None:
    payloads = [encoded(torch.randn(CHUNK)) for _ in range(2)]
    source, layout = random.Random(1), Layout(INT8, CHUNK)
    found = [Sketches(INT8, layout, source).compare(payloads) for _ in range(20)]
    assert len({float(comparison.cosines[0, 1]) for comparison in found}) > 5


def test_a_contribution_is_decoded_once_and_a_late_one_when_it_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = gaussian(2 * CHUNK)
    peer = steps.author({"w": weight}, outer(codec_up="int8"))
    payloads = [payload_of(INT8, gaussian(2 * CHUNK, seed)) for seed in range(1, 5)]
    norms = [peer.payload_norm(0, payload) for payload in payloads[:3]]
    assert norms[0] == pytest.approx(float(gaussian(2 * CHUNK, 1).norm()), rel=1e-2)
    decoded: list[int] = []

    def measured(payload: Tensor, numel: int) -> tuple[Tensor, float]:
        decoded.append(numel)
        return Codec.measured(INT8, payload, numel)

    monkeypatch.setattr(INT8, "measured", measured)
    sketches = peer.aggregates[0].sketches
    found = sketches.compare(payloads)
    assert decoded == [CHUNK, CHUNK], "the chunks of the late one"
    assert found.cosines.diagonal().tolist() == pytest.approx([1.0] * 4)
    del payloads, found
    assert len(sketches._kept) == 0, "a sketch goes with its contribution"
    make(peer, named([payload_of(INT8, gaussian(2 * CHUNK, 9))]))
    assert peer.aggregates[0].sketches is not sketches, "the next version is sketched elsewhere"
