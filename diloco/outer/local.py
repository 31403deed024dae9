"""The local parameters of a peer, as a replica reads and writes them: by ranges of fragments.

`Local` has whole tensors of this process. An island whose processes have rows each gives a replica another one with
the same methods (`train.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment, as_loaded, gather_, gathered, scatter_

__all__ = ["Local"]


class Local:
    """Parameters by name, of any dtype, device and layout; they may get another one between two calls.

    Attributes:
        tensors: the tensors themselves. shapes: that of each whole parameter.
        is_whole: whether nobody else is needed to read them.
    """

    is_whole = True

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def gather_(self, out: Tensor, fragment: Fragment, start: int, stop: int) -> None:
        """As `fragments.gather_`."""
        gather_(out, fragment, start, stop, self.tensors)

    def gathered(self, buffer: Tensor, fragment: Fragment, start: int, stop: int) -> Tensor:
        """As `fragments.gathered`."""
        return gathered(buffer, fragment, start, stop, self.tensors)

    def scatter_(self, fragment: Fragment, start: int, stop: int, values: Tensor) -> None:
        """As `fragments.scatter_`."""
        scatter_(self.tensors, fragment, start, stop, values)

    def as_loaded(self, buffer: Tensor, values: Tensor, fragment: Fragment, start: int) -> Tensor:
        """As `fragments.as_loaded`."""
        return as_loaded(buffer, values, fragment, start, self.tensors)
