"""Peers that lie in what they contribute, and are honest in everything else."""

from __future__ import annotations

from torch import Tensor

from diloco.outer.payloads import Codec

__all__ = ["Lying"]


class Lying(Codec):
    """A codec whose contributions are multiplied with a factor; what it reads of others is what they sent."""

    def __init__(self, honest: Codec, factor: float) -> None:
        self.name = honest.name  # type: ignore[misc]
        self.carries_values = honest.carries_values  # type: ignore[misc]
        self._honest, self._factor = honest, factor

    def widths(self, numel: int) -> list[int]:
        return self._honest.widths(numel)

    def encode(self, x: Tensor, out: Tensor) -> None:
        self._honest.encode(x * self._factor, out)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._honest.decode(payload, out)

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        self._honest.accumulate_(acc, payload, weight)

    def encode_update(self, master: Tensor, anchor: Tensor, out: Tensor) -> None:
        self._honest.encode_update(master, anchor, out)

    def apply_update_(self, anchor: Tensor, payload: Tensor) -> None:
        self._honest.apply_update_(anchor, payload)
