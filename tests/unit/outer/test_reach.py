"""No honest update is longer than `reach` allows, and what makes a longer one is told by its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.digest import fragment_digest
from diloco.outer.fragments import BLOCK, CHUNK
from diloco.outer.optimizer import OPTIMIZERS, OuterOptimizer, OuterStep, Transition
from tests.support.outer import author, gaussian, make, named, outer, payload_of

CODECS = ["fp32", "fp16", "int8", "e3m0"]
FEW = 3 * BLOCK + 500


@pytest.mark.parametrize("outlier", [1.0, 64.0])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_is_no_longer_than_its_contributions_allow(optimizer: str, codec: str, outlier: float) -> None:
    """Of contributions that agree, then turn, then hardly move, while there is still something lost to publish."""
    quorum = {"quorum": 1} if OPTIMIZERS[optimizer].windowed else {}
    settings = outer(optimizer=optimizer, codec_up="fp32", codec_down=codec, momentum_warmup=0, robust="none", **quorum)
    peer, reach, drift = author({"w": torch.zeros(FEW)}, settings), (0.0, 0.0, 0.0), gaussian(FEW, 1)
    own, state = peer.aggregates[0], peer.states[0]
    for version in range(24):
        scale = (1e-3, 1e-3, -1e-3, 1e-6)[version // 3 % 4]
        deltas = [scale * (drift + gaussian(FEW, 100 * version + one)) for one in range(3)]
        for delta in deltas:
            delta[::BLOCK] *= outlier
        before = peer.anchors[0].clone()
        merged, _ = make(peer, named(delta.view(torch.uint8) for delta in deltas), delay=4)
        limit, reach = peer.optimizer.reach(merged.step, max(float(delta.norm()) for delta in deltas), reach)
        moved = float((peer.anchors[0] - before).norm())
        behind = author({"w": before}, settings)
        norm, parts = behind.foresee(0, merged.update)
        assert norm == pytest.approx(moved, rel=1e-3, abs=1e-5) and moved <= limit
        assert fragment_digest(parts) == peer.digest(0) and torch.equal(behind.anchors[0], before)
        lengths = [*(float(vector.norm()) for vector in state.vectors), float((own.master - own.anchor).norm())]
        for length, longest in zip((lengths[0], lengths[-1]), (reach[0], reach[2]), strict=True):
            assert length <= 2 * longest


def test_the_reach_of_a_step_that_is_not_linear_is_infinite() -> None:
    class Sign(OuterOptimizer):
        name = "sign"

        def transition(self, step: OuterStep) -> Transition:
            return Signs()

    class Signs(Transition):
        def move_(self, master: torch.Tensor, mean: torch.Tensor, vectors: Sequence[torch.Tensor]) -> None:
            master.sub_(mean.sign())

        def follow_(self, vectors: Sequence[torch.Tensor], moved: torch.Tensor) -> None:
            pass

    reach = Sign(OuterConfig(method="diloco", sync_every=1)).reach(OuterStep(0, 1), 1.0)
    assert reach == (math.inf, (math.inf,) * 3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
@pytest.mark.parametrize("codec", ["fp32", "int8", "e3m0", "stat2", "topk"])
def test_the_norm_of_a_payload_is_that_of_its_values(codec: str, scale: float) -> None:
    feedback = {"error_feedback": 0.9, "momentum": 0.0} if codec in ("stat2", "topk") else {}
    peer = author({"w": torch.zeros(CHUNK + 5000)}, outer(codec_up=codec, **feedback))
    whole = payload_of(peer.up, scale * gaussian(CHUNK + 5000))
    parts = zip(peer.payloads[0].split(whole), (CHUNK, 5000), strict=True)
    values = [peer.up.values(part, numel).double() for part, numel in parts]
    assert peer.payload_norm(0, whole) == pytest.approx(float(torch.cat(values).norm()), rel=1e-3)
    with pytest.raises(PayloadError):
        peer.payload_norm(0, whole[:-1])
    with pytest.raises(PayloadError):
        peer.payload_norm(0, torch.full_like(whole, 0x7F))
