"""The codecs that lose most of a contribution, and the residual that sends it later.

What they have in common with all codecs is in test_codecs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.outer.fragments import BLOCK, partition
from diloco.outer.lossy import LOSSY
from diloco.outer.replica import Replica
from tests.support.outer import decoded, gaussian, outer, round_trip

SIZES = (1, 2, 3, 5, 63, 65, 129, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 131)


def blocks(numel: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK)]


@settings(max_examples=40)
@given(st.sampled_from(SIZES), st.integers(0, 1000), st.floats(-5, 5))
def test_stat2_gives_each_element_the_mean_of_its_bin(numel: int, seed: int, shift: float) -> None:
    x = gaussian(numel, seed) + shift
    got = round_trip("stat2", x).double().numpy()
    for start, stop in blocks(numel):
        block = x[start:stop].double().numpy()
        mean, sigma = block.mean(), block.std()
        edges = np.array([mean - 1.5 * sigma, mean, mean + 1.5 * sigma])
        if np.abs(block[:, None] - edges).min() < 1e-5:
            continue  # rounding may decide the bin
        bins = np.searchsorted(edges, block)
        for one in set(bins):
            np.testing.assert_allclose(got[start:stop][bins == one], block[bins == one].mean(), rtol=2**-8, atol=1e-4)


@settings(max_examples=40)
@given(st.sampled_from(SIZES), st.integers(0, 1000))
def test_topk_sends_the_largest_64th_of_each_block(numel: int, seed: int) -> None:
    """With their signs."""
    x = gaussian(numel, seed)
    got = round_trip("topk", x)
    for start, stop in blocks(numel):
        block, values = x[start:stop], got[start:stop]
        sent = values != 0
        kept = -(-(stop - start) // 64)
        assert int(sent.sum()) == kept
        assert kept == stop - start or block[sent].abs().min() >= block[~sent].abs().max()
        assert torch.equal(values[sent].sign(), block[sent].sign())
        assert values.abs().sum() == pytest.approx(float(block[sent].abs().sum()), rel=2**-8)


@settings(max_examples=60)
@given(
    st.sampled_from(["fp16", "int8", "e3m0", *LOSSY]), st.sampled_from(SIZES), st.integers(0, 1000),
    st.sampled_from([0.9, 0.95, 1.0]),
)  # fmt: skip
def test_what_is_sent_and_kept_adds_up_to_what_there_was(name: str, numel: int, seed: int, beta: float) -> None:
    """The contribution and the new residual, to the pseudo-gradient and the old residual."""
    settings = outer(codec_up=name, error_feedback=beta, momentum=0)
    residual, delta = gaussian(numel, seed), gaussian(numel, seed + 1)
    peer = Replica({"w": -delta}, partition({"w": numel}, 1), settings)
    peer.anchors[0].zero_()
    peer.residuals[0] = residual.clone()
    together = decoded(name, peer.capture(0), numel).double() + peer.residuals[0].double()
    torch.testing.assert_close(together, beta * residual.double() + delta.double(), rtol=1e-5, atol=1e-6)
