"""Contributions that are kept encoded until a version closes, and are judged together then (see `robust`).

    put        payload, chunk by chunk -> kept, its norm noted             as it arrives
    judge      norms, and every two contributions' inner product -> what each of them counts
    merge      decoded again, chunk by chunk -> their combination

Memory: one encoded fragment per contributor, a quarter of a fp32 copy with int8, in place of the sum of one fp32 copy
that contributions are folded into otherwise; and while a version closes, one decoded chunk per contributor. Time: each
payload is decoded three times, once to check it, once to judge it and once to merge it.

A contribution that never became whole leaves nothing behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.outer.payloads import Codec, buffer
from diloco.outer.robust import Judgement, Norms, Rule, centered_clip, clip

__all__ = ["Staged"]


class Staged:
    """Contributions to the next version of one fragment.

    Args:
        fragment: its number. sizes: elements of its chunks.
        codec: of the payloads. norms: of recent contributions; one that is absurd beside them is refused.
    """

    def __init__(self, fragment: int, sizes: Sequence[int], codec: Codec, norms: Norms) -> None:
        self._fragment, self._sizes, self._codec, self._norms = fragment, tuple(sizes), codec, norms
        self._payloads: dict[str, dict[int, Tensor]] = {}
        self._chunk_norms: dict[str, dict[int, float]] = {}

    def put(self, peer: str, chunk: int, payload: Tensor) -> None:
        """Keep a chunk (uint8), in place of what this peer sent before; PayloadError when it is invalid."""
        values = buffer("staged", torch.float32, self._sizes[chunk])
        self._codec.decode(payload, values)
        norm = _norm(values)
        self._norms.see(self._fragment, chunk, norm, math.inf)
        self._payloads.setdefault(peer, {})[chunk] = payload
        self._chunk_norms.setdefault(peer, {})[chunk] = norm

    def judge(self, weights: Mapping[str, float], rule: Rule, factor: float) -> tuple[list[str], Judgement]:
        """The whole contributions of these peers, by name, and what each of them counts."""
        peers = sorted(weights)
        by_peer = [weights[peer] for peer in peers]
        if rule == "trimmed_mean" or len(peers) < 2:
            return peers, Judgement(tuple(by_peer), tuple(by_peer))
        norms = [math.hypot(*self._chunk_norms[peer].values()) for peer in peers]
        gram = self._cosines(peers, norms)
        if rule == "centered_clip":
            return peers, centered_clip(norms, gram, by_peer)
        return peers, clip(norms, gram, by_peer, factor, sum(self._sizes))

    def _cosines(self, peers: Sequence[str], norms: Sequence[float]) -> Tensor:
        """(n, n) float64; unit vectors are multiplied, because squares of what a peer may send exceed fp32."""
        gram = torch.zeros(len(peers), len(peers), dtype=torch.float64)
        scales = torch.tensor([1 / norm if norm > 1e-30 else 0.0 for norm in norms], dtype=torch.float64)
        for chunk in range(len(self._sizes)):
            values = self.decoded(peers, chunk).mul_(scales.float().unsqueeze(1))
            gram += (values @ values.T).double()
        return gram

    def decoded(self, peers: Sequence[str], chunk: int) -> Tensor:
        """(n, elements) fp32, a chunk of each of these peers."""
        values = torch.empty(len(peers), self._sizes[chunk])
        for row, peer in zip(values, peers, strict=True):
            self._codec.decode(self._payloads[peer][chunk], row)
        return values

    def payload(self, peer: str, chunk: int) -> Tensor:
        """What a peer sent (uint8)."""
        return self._payloads[peer][chunk]

    def clear(self) -> None:
        """The version is made, or given up."""
        self._payloads.clear()
        self._chunk_norms.clear()


def _norm(x: Tensor) -> float:
    """L2 norm in float64: squares of magnitudes up to LIMIT exceed fp32."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
