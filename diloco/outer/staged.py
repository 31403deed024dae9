"""Contributions that are kept encoded until a version closes, and are judged together then (see `robust`).

    put        payload, chunk by chunk -> kept, with its norm and a sketch         as it arrives
    judge      norms, and every two sketches' inner product -> what each contribution counts
    merge      decoded again, chunk by chunk -> their combination

A *sketch* is some 8,000 values of a chunk, at equal distances; a short chunk is its own. The distance is odd, so that
it is in step with no width of a layer, and where it begins is drawn anew for each chunk of each version, so that nobody
can be honest in just these values. A cosine is so known to about 0.01 from a single chunk, and better from more.

Memory: one encoded fragment per contributor, a quarter of a fp32 copy with int8, and 1/31 of one for the sketch, in
place of the sum of one fp32 copy that contributions are folded into otherwise. Time: each payload is decoded twice, to
check and to merge it.

A contribution that never became whole leaves nothing behind.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.outer.payloads import Codec, buffer
from diloco.outer.robust import Judgement, Norms, Rule, centered_clip, clip, norm_of

__all__ = ["SKETCH", "Staged"]

SKETCH = 8192
"""Values of a chunk that are compared."""


class Staged:
    """Contributions to the next version of one fragment.

    Args:
        fragment: its number. sizes: elements of its chunks.
        codec: of the payloads. norms: of recent contributions; one that is absurd beside them is refused.
        draw: where sketches begin; nobody else can foresee it.
    """

    def __init__(
        self, fragment: int, sizes: Sequence[int], codec: Codec, norms: Norms, draw: random.Random | None = None
    ) -> None:
        self._fragment, self._sizes, self._codec, self._norms = fragment, tuple(sizes), codec, norms
        self._draw = draw or random.SystemRandom()
        self._payloads: dict[str, dict[int, Tensor]] = {}
        self._chunk_norms: dict[str, dict[int, float]] = {}
        self._sketches: dict[str, dict[int, Tensor]] = {}
        self._begin: dict[int, int] = {}

    def put(self, peer: str, chunk: int, payload: Tensor) -> None:
        """Keep a chunk (uint8), in place of what this peer sent before; PayloadError when it is invalid."""
        values = buffer("staged", torch.float32, self._sizes[chunk])
        self._codec.decode(payload, values)
        norm = norm_of(values)
        self._norms.see(self._fragment, chunk, norm, math.inf)
        stride = max(1, len(values) // SKETCH - 1 | 1)
        begin = self._begin.setdefault(chunk, self._draw.randrange(stride))
        self._sketches.setdefault(peer, {})[chunk] = values[begin::stride] * stride**0.5  # one for so many
        self._payloads.setdefault(peer, {})[chunk] = payload
        self._chunk_norms.setdefault(peer, {})[chunk] = norm

    def judge(self, weights: Mapping[str, float], rule: Rule, factor: float) -> tuple[list[str], Judgement]:
        """The whole contributions of these peers, by name, and what each of them counts."""
        peers = sorted(weights)
        by_peer = [weights[peer] for peer in peers]
        if rule == "trimmed_mean" or len(peers) < 2:
            return peers, Judgement(tuple(by_peer), tuple(by_peer))
        norms, (gram, numel) = self.norms(peers), self.cosines(peers)
        if rule == "centered_clip":
            return peers, centered_clip(norms, gram, by_peer)
        return peers, clip(norms, gram, by_peer, factor, numel)

    def norms(self, peers: Sequence[str]) -> list[float]:
        """L2 norms of whole contributions."""
        return [math.hypot(*self._chunk_norms[peer].values()) for peer in peers]

    def cosines(self, peers: Sequence[str]) -> tuple[Tensor, int]:
        """(n, n) float64 cosines of the sketches, and how many values these have."""
        chunks = range(len(self._sizes))
        sketches = torch.stack([torch.cat([self._sketches[peer][chunk] for chunk in chunks]) for peer in peers])
        largest = sketches.abs().amax(1, keepdim=True)  # so that squares are finite
        sketches /= largest.clamp_min(1e-30)
        gram = (sketches @ sketches.T).double()
        lengths = gram.diagonal().clamp_min(1e-30).sqrt()
        return gram / lengths.outer(lengths), sketches.shape[1]

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
        self._sketches.clear()
        self._begin.clear()
        self._chunk_norms.clear()
