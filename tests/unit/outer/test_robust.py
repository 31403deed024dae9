"""Robust merging: honest contributions merge as before, bit for bit, and one that lies does not get its way."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.config.compose import compose
from diloco.errors import ConfigError, PayloadError
from diloco.outer.bounds import FACTOR
from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.merging import SKETCH, Staged
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.outer.robust import (
    ABSURD,
    MIN_JUDGED,
    Norms,
    centered_clip,
    clip,
    opposed,
    trim_count,
    trimmed_mean,
)
from diloco.sim.adversary import Lying, parse
from diloco.sim.run import simulate

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
    payload = torch.empty(INT8.nbytes(x.numel()), dtype=torch.uint8)
    Lying(INT8, lie).encode(x, payload)
    return payload


def syncer(**outer: object) -> Replica:
    settings = OuterConfig(method="diloco", sync_every=1, **{"codec_up": "int8", "codec_down": "fp32", **outer})
    replica = Replica({"w": torch.zeros(NUMEL)}, partition({"w": NUMEL}, 1), settings)
    replica.hold(0)
    return replica


def step(replica: Replica, contributions: dict[str, Tensor], weights: dict[str, float] | None = None) -> list[str]:
    """One version of these contributions, in this order of arrival; who is left out."""
    held, weights = replica.held[0], weights or dict.fromkeys(contributions, 1.0)
    for peer, payload in contributions.items():
        held.take(0, peer, payload, weights[peer])
    judged = held.judge(weights) if held.staged is not None else None
    held.merge_(OuterStep(0, len(contributions)), torch.empty(replica.update_nbytes(0), dtype=torch.uint8), judged)
    return [] if judged is None else [judged[0][i] for i in judged[1].left_out]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


# -- honest contributions ---------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9), merge=st.sampled_from(["mean", "rda"]))
def test_robust_merging_leaves_a_version_of_honest_contributions_as_it_is_bit_for_bit(
    seed: int, count: int, merge: str
) -> None:
    plain, robust = syncer(robust="none", merge=merge), syncer(merge=merge)
    assert robust.settings.judged_together and not plain.settings.judged_together
    for round_ in range(3):
        found = {f"p{i}": encoded(x) for i, x in enumerate(pseudo_gradients(count, seed + round_))}
        assert step(robust, found) == []
        step(plain, found)
        assert torch.equal(robust.anchors[0], plain.anchors[0])
        assert torch.equal(robust.held[0].state.momentum, plain.held[0].state.momentum)


def test_norms_that_rise_in_a_warm_up_of_the_learning_rate_are_not_clipped() -> None:
    plain = syncer(robust="none", codec_up="fp32")
    robust = syncer(codec_up="fp32")
    assert robust.settings.judging == "recent"
    for scale in (0.1, 0.3, 0.5, 0.7, 0.2):  # the mean learning rate of rounds in a linear warm-up
        found = {f"p{i}": (scale * x).view(torch.uint8) for i, x in enumerate(pseudo_gradients(4, 3))}
        step(plain, found)
        step(robust, found)
        assert torch.equal(robust.anchors[0], plain.anchors[0])


@pytest.mark.parametrize("method", ["clip", "trimmed_mean", "centered_clip"])
def test_the_order_of_arrival_changes_no_bit(method: str) -> None:
    found = {f"p{i}": encoded(x) for i, x in enumerate(pseudo_gradients(7, 1))}
    found["p3"] = encoded(pseudo_gradients(8, 1)[7], -10)
    weights = {f"p{i}": 1.0 + i / 7 for i in range(7)}
    anchors = []
    for seed in range(3):
        replica, order = syncer(robust=method), list(found)
        random.Random(seed).shuffle(order)
        step(replica, {peer: found[peer] for peer in order}, weights)
        anchors.append(replica.anchors[0].clone())
    assert torch.equal(anchors[0], anchors[1]) and torch.equal(anchors[0], anchors[2])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(MIN_JUDGED, 9), agreement=st.floats(0.2, 0.95))
def test_an_honest_contribution_is_not_left_out(seed: int, count: int, agreement: float) -> None:
    values = torch.stack(pseudo_gradients(count, seed, agreement))
    unit = values / values.norm(dim=1, keepdim=True)
    assert opposed((unit @ unit.T).double(), NUMEL) == ()


def test_contributions_of_pure_noise_are_not_left_out() -> None:
    noise = torch.randn(8, 15, generator=torch.Generator().manual_seed(0))
    unit = noise / noise.norm(dim=1, keepdim=True)
    assert opposed((unit @ unit.T).double(), 15) == ()


@pytest.mark.parametrize("robust", ["auto", "none"])
def test_a_version_in_the_making_is_finished_when_the_lease_is_lost(robust: str) -> None:
    undisturbed, disturbed = syncer(robust=robust, merge="rda"), syncer(robust=robust, merge="rda")
    found = {f"p{i}": encoded(x) for i, x in enumerate(pseudo_gradients(4, 0))}
    step(undisturbed, found)
    held = disturbed.held[0]
    for peer, payload in found.items():
        held.take(0, peer, payload, 1.0)
    disturbed.release(0)
    disturbed.hold(0)  # and another lease won, whose contributions are others
    judged = held.judge(dict.fromkeys(found, 1.0)) if held.staged is not None else None
    held.merge_(OuterStep(0, 4), torch.empty(disturbed.update_nbytes(0), dtype=torch.uint8), judged)
    assert torch.equal(disturbed.anchors[0], undisturbed.anchors[0])


# -- contributions that lie -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "trimmed_mean", "centered_clip"])
@pytest.mark.parametrize("factor", [-10.0, -1.0, 10.0, 1e12])
def test_one_of_eight_that_lies_hardly_turns_the_step(method: str, factor: float) -> None:
    deltas = pseudo_gradients(8, 5)
    honest = torch.stack(deltas[:3] + deltas[4:]).mean(0)
    robust, plain = syncer(robust=method), syncer(robust="none")
    found = {f"p{i}": encoded(x, factor if i == 3 else 1.0) for i, x in enumerate(deltas)}
    left_out = step(robust, found)
    assert cosine(-robust.anchors[0], honest) > 0.9
    assert 0.4 < float(robust.anchors[0].norm() / (0.7 * 1.9 * honest.norm())) < 1.4
    assert left_out == (["p3"] if method == "auto" and factor < 0 else [])
    if factor == -10:
        step(plain, found)
        assert cosine(-plain.anchors[0], honest) < 0


def test_three_reversed_contributions_of_eight_are_left_out_and_four_are_not() -> None:
    deltas = pseudo_gradients(8, 5)
    three = {f"p{i}": encoded(x, -10.0 if i < 3 else 1.0) for i, x in enumerate(deltas)}
    assert step(syncer(), three) == ["p0", "p1", "p2"]
    half = {f"p{i}": encoded(x, -10.0 if i < 4 else 1.0) for i, x in enumerate(deltas)}
    assert step(syncer(), half) == [], "no majority to go by"


def test_three_contributions_are_merged_as_they_are() -> None:
    deltas = pseudo_gradients(3, 5)
    plain, robust = syncer(robust="none"), syncer()
    found = {f"p{i}": encoded(x, -10.0 if i == 0 else 1.0) for i, x in enumerate(deltas)}
    step(plain, found)
    assert step(robust, found) == []
    assert torch.equal(plain.anchors[0], robust.anchors[0])


def few(count: int, lie: float, replica: Replica, me: str, seed: int) -> tuple[list[str], list[str]]:
    """A version of so many contributions, of which p0's is multiplied; whose is scaled down, and whose left out."""
    held = replica.held[0]
    found = {f"p{i}": encoded(x, lie if i == 0 else 1.0) for i, x in enumerate(pseudo_gradients(count, seed))}
    for peer, payload in found.items():
        held.take(0, peer, payload, 1.0)
    peers, judged = held.judge(dict.fromkeys(found, 1.0), me=me)
    held.merge_(held.state.step(count, 1), torch.empty(replica.update_nbytes(0), dtype=torch.uint8), (peers, judged))
    return [peers[i] for i in judged.clipped], [peers[i] for i in judged.left_out]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("method", ["auto", "trimmed_mean", "centered_clip"])
def test_of_few_contributions_one_is_left_out_that_opposes_the_syncers_own(count: int, method: str) -> None:
    assert few(count, -10.0, syncer(robust=method), "p1", 5) == ([], ["p0"])
    its_own = few(count, -10.0, syncer(robust=method), "p0", 5)
    assert its_own == ([], [f"p{i}" for i in range(1, count)])


def test_of_three_contributions_to_a_host_one_is_left_out_that_opposes_the_momentum() -> None:
    replica, common = syncer(), 5
    assert few(3, 1.0, replica, "", common) == ([], [])
    assert few(3, -10.0, replica, "", common) == ([], ["p0"])
    assert few(2, -10.0, replica, "", common) == (["p0"], []), "the momentum may have to turn"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_contributions_are_as_long_as_is_usual(count: int) -> None:
    replica = syncer()
    for _ in range(4):
        assert few(count, 1.0, replica, "", 5) == ([], []), "honest ones are merged as they are"
    before = replica.anchors[0].clone()
    assert few(count, 100.0, replica, "", 5) == (["p0"], [])
    longest = max(replica.held[0].norms.whole)
    assert longest == pytest.approx(4 * float(pseudo_gradients(1, 5)[0].norm()), rel=0.05)
    assert float((replica.anchors[0] - before).norm()) < 10 * longest
    assert few(count, 10.0, replica, "p0", 5) == ([], []), "it is the syncer's own"


def test_nobody_merges_a_version_that_others_would_refuse() -> None:
    """The syncer's own contribution is not compared with earlier ones, but no peer believes any length."""
    replica, longest = syncer(), FACTOR * float(pseudo_gradients(3, 5)[1].norm())
    assert few(3, 100.0, replica, "p0", 5) == (["p0"], [])
    assert replica.held[0].moved.norm < 2 * longest / 3


def test_a_chunk_that_opposes_the_momentum_may_be_as_long_as_is_usual() -> None:
    norms = Norms()
    assert norms.see(0, 100.0, 3.0, momentum=5.0) == 0.2, "nothing is known but the momentum: 20 is allowed"
    norms = Norms()
    for _ in range(MIN_JUDGED):
        norms.see(0, 1.0, 3.0)
    assert norms.see(0, 4.0, 3.0, opposes=True) == 0.25
    assert norms.see(0, 4.0, 3.0, opposes=False) == 1.0


def test_a_reversed_contribution_that_is_folded_in_is_no_longer_than_an_honest_one() -> None:
    deltas = pseudo_gradients(6, 5)
    robust, honest = (syncer(codec_up="fp32", lr=1.0, momentum=0.5) for _ in range(2))
    for replica in (robust, honest):
        step(replica, {f"p{i}": x.view(torch.uint8) for i, x in enumerate(deltas[:5])})
    moved = robust.anchors[0].clone()
    liar = (-4.0 * deltas[5]).contiguous()
    robust.held[0].fold(0, liar.view(torch.uint8), 1.0)
    assert float(robust.held[0].sums[0].total.norm()) == pytest.approx(float(deltas[0].norm()), rel=0.05)
    assert torch.equal(robust.anchors[0], moved)


def test_recent_norms_clip_long_contributions_and_refuse_absurd_ones() -> None:
    norms = Norms()
    assert [norms.see(0, norm, 3.0) for norm in (1.0, 100.0, 1.0, 1.0)] == [1.0] * 4, "nothing is known yet"
    assert norms.see(0, 10.0, 3.0) == 0.4, "1 is usual, and 4 is allowed"
    assert norms.see(0, 3.0, 3.0) == 1.0
    with pytest.raises(PayloadError, match="absurd where 3 is usual"):
        norms.see(0, 3.01 * ABSURD, 2.0)
    assert norms.see(1, 1e6, 2.0) == 1.0, "another chunk"


def test_a_syncer_remembers_norms_until_it_releases_the_fragment() -> None:
    replica = syncer(codec_up="fp32")
    payload = torch.ones(NUMEL).view(torch.uint8)
    for _ in range(MIN_JUDGED):
        replica.held[0].fold(0, payload, 1.0)
    absurd = (2 * ABSURD * torch.ones(NUMEL)).view(torch.uint8)
    replica.hold(0, 0, torch.zeros(NUMEL))  # as after a split: with another history
    with pytest.raises(PayloadError, match="absurd"):
        replica.held[0].fold(0, absurd, 1.0)
    replica.release(0)
    replica.hold(0)
    replica.held[0].fold(0, absurd, 1.0)


def test_an_invalid_or_absurd_chunk_leaves_the_staged_ones_as_they_are() -> None:
    norms = Norms()
    staged = Staged([NUMEL], INT8, norms)
    for i, x in enumerate(pseudo_gradients(4, 0)):
        staged.put(f"p{i}", 0, encoded(x))
    before = staged.decoded(["p0", "p1"], 0)
    with pytest.raises(PayloadError, match="exponent"):
        staged.put("p0", 0, torch.full((INT8.nbytes(NUMEL),), 0x7F, dtype=torch.uint8))
    with pytest.raises(PayloadError, match="absurd"):
        staged.put("p0", 0, encoded(pseudo_gradients(1, 0)[0], 1e5))
    assert torch.equal(staged.decoded(["p0", "p1"], 0), before)


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
    unit = torch.nn.functional.normalize(torch.stack(deltas), dim=1)
    torch.testing.assert_close(gram, (unit @ unit.T).double(), rtol=0, atol=5 * compared**-0.5)
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


def test_centered_clip_in_coefficients_is_centered_clip_on_vectors() -> None:
    x = torch.stack([delta * (10.0 if i == 2 else 1.0) for i, delta in enumerate(pseudo_gradients(6, 2))]).double()
    norms = x.norm(dim=1)
    unit = x / norms.unsqueeze(1)
    judged = centered_clip(norms.tolist(), unit @ unit.T, [1.0] * 6)
    found = torch.tensor(judged.coefficients, dtype=torch.float64) @ x / sum(judged.weights)
    between = torch.cdist(x, x)
    start = int(between.median(1).values.argmin())
    center, radius = x[start].clone(), between[start].median()
    for _ in range(20):
        away = x - center
        center += (away * (radius / away.norm(dim=1).clamp_min(1e-300)).clamp_max(1.0).unsqueeze(1)).mean(0)
    torch.testing.assert_close(found, center, rtol=1e-6, atol=1e-8)


def test_clip_scales_to_the_median_norm_times_the_factor() -> None:
    same = torch.ones(4, 4, dtype=torch.float64)
    judged = clip([1.0, 1.0, 1.0, 8.0], same, [1.0, 2.0, 3.0, 4.0], 2.0, NUMEL)
    assert judged.coefficients == (1.0, 2.0, 3.0, 1.0)
    assert judged.weights == (1.0, 2.0, 3.0, 4.0) and judged.clipped == (3,)


def test_the_trimmed_mean_leaves_out_the_extremes_of_each_coordinate() -> None:
    values = torch.tensor([[1.0, 9.0], [2.0, -9.0], [3.0, 1.0], [100.0, 2.0]])
    assert trimmed_mean(values, 0.25).tolist() == [2.5, 1.5]
    assert [trim_count(count, 0.25) for count in (1, 3, 4, 8, 12)] == [0, 0, 1, 2, 3]
    assert trim_count(5, 0.49) == 2


def test_what_is_left_out_of_few_contributions_has_no_part_in_their_trimmed_mean() -> None:
    deltas = pseudo_gradients(3, 5)
    found = {"p0": encoded(deltas[0], -10.0), "p1": encoded(deltas[1]), "p2": encoded(deltas[2])}
    anchors = []
    for counted in (["p0", "p1", "p2"], ["p1", "p2"]):
        replica = syncer(robust="trimmed_mean")
        held = replica.held[0]
        for peer in counted:
            held.take(0, peer, found[peer], 1.0)
        judged = held.judge(dict.fromkeys(counted, 1.0), me="p1")
        held.merge_(OuterStep(0, 2), torch.empty(replica.update_nbytes(0), dtype=torch.uint8), judged)
        anchors.append(replica.anchors[0])
    assert torch.equal(*anchors)


def test_auto_and_clip_depend_on_codec_and_quorum() -> None:
    def rule(**outer: object) -> str:
        return OuterConfig(method="diloco", sync_every=1, **outer).judging

    assert rule() == "clip"
    assert rule(codec_up="fp32") == rule(codec_up="fp16") == rule(quorum=2) == rule(quorum=2, robust="clip") == "recent"
    assert rule(codec_up="fp32", robust="clip") == "clip"
    assert rule(robust="none") == "none"


def test_contradictions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"outer\.robust=trimmed_mean needs all contributions"):
        compose(["outer=async", "outer.robust=trimmed_mean"])
    with pytest.raises(ConfigError, match=r"outer\.robust=centered_clip goes with outer\.merge=mean only"):
        compose(["outer.merge=rda", "outer.robust=centered_clip"])
    with pytest.raises(ConfigError, match=r"sim\.attack: flip:4x10, but the peers are 0 to 3"):
        parse(["flip:4x10"], 4)
    assert parse(["flip:3x10", "scale:0x2.5"], 4) == {3: -10.0, 0: 2.5}


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_a_simulated_peer_that_lies_is_left_out_of_every_version_and_its_tokens_count_as_discarded(
    tmp_path: Path,
) -> None:
    config = compose(
        ["experiment=smoke", "local.peers=4", "sim.attack=[flip:2x10]", "outer.fragments=1", f"run.dir={tmp_path}",
         "outer.sync_every=10", "budget.outer_steps=2", "eval.every=0"]
    )  # fmt: skip
    outcome = simulate(config, lambda message: None)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    left_out = [event for event in events if event["kind"] == "left_out"]
    assert len(left_out) == 2 and all(event["peers"] == ["p2"] for event in left_out)
    tokens = outcome.summary.tokens
    assert tokens.applied == 3 * 2 * 10 * 2 * 32 and tokens.discarded == tokens.applied / 3
    assert tokens.processed == tokens.applied + tokens.discarded + tokens.in_flight
