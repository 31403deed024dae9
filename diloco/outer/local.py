"""The local parameters of a peer, as a replica reads and writes them: by ranges of fragments.

`Local` has whole tensors of this process. A peer whose processes have rows each gives a replica
another one with the same methods (`attach.sharded`).

Where parameters lie on an accelerator, values go through staging buffers (see `staging`).
`Local.copied` lets training go on before they were read. On the CPU they are read and written where
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment, Slice, gather_, gathered, read_, scatter_
from diloco.outer.payloads import buffer
from diloco.outer.staging import Staging, staging_of

__all__ = ["Local", "Source"]

StagingOf = Callable[[torch.device], Staging | None]


class Local:
    """Parameters (`tensors`) by name, of any dtype, device and layout; they may get another one
    between two calls."""

    is_whole = True  # whether nobody else is needed to read them

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        staging_of: StagingOf = staging_of,
        ready: torch.Event | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._staging_of = staging_of
        # when values are there that are still being copied; None: as the training stream has them
        self._ready = ready

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def of_process(self, name: str) -> Tensor:
        """What this process has of a parameter."""
        return self.tensors[name]

    def gather_(self, out: Tensor, fragment: Fragment, start: int) -> None:
        gather_(out, fragment, start, self.tensors)

    def gathered(self, buffer: Tensor, fragment: Fragment, start: int) -> Tensor:
        return gathered(buffer, fragment, start, self.tensors)

    def read(self, fragment: Fragment, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield [start, stop) of the fragment for each range in turn, as (stop - start,) fp32 on
        the CPU.

        Each is to be read before the next one is asked for, and before the parameters change. It
        may be a view of a parameter, or this thread's buffer "chunk". Ranges ascend; none is longer
        than CHUNK.
        """
        staging = self._staging(fragment, ranges[0][0], ranges[-1][1]) if self.is_whole else None
        if staging is None:
            for start, stop in ranges:
                yield self.gathered(buffer("chunk", torch.float32, stop - start), fragment, start)
            return
        tensors = {piece.name: self.of_process(piece.name) for piece in fragment.slices}
        after = self._ready or staging.training.record()
        yield from staging.read(
            ranges,
            lambda out, start: gather_(out, fragment, start, tensors, staging.side.copy_),
            after,
        )

    def can_copy(self, fragment: Fragment) -> bool:
        """Whether `copied` makes a copy of the fragment: it is on an accelerator, and all of it in
        this process."""
        return self.is_whole and self._staging(fragment, 0, fragment.numel) is not None

    @torch.no_grad()
    def copied(self, fragment: Fragment) -> Source:
        """A copy of the fragment in memory of the device that has it, in its dtypes; `can_copy`
        must hold.

        The device makes it before anything else that is put into the training stream. So parameters
        may change at once.
        """
        staging = self._staging(fragment, 0, fragment.numel)
        assert staging is not None, "parameters on the CPU are read where they are"
        copies: dict[str, Tensor] = {}
        for index, piece in enumerate(fragment.slices):
            own = self.of_process(piece.name)
            copies[str(index)] = out = staging.empty(piece.numel, own.dtype)
            read_(out, own, piece.start, staging.training.copy_)
        pieces = tuple(
            Slice(str(index), 0, piece.numel) for index, piece in enumerate(fragment.slices)
        )
        local = Local(copies, self._staging_of, staging.training.record())
        return Source(local, Fragment(fragment.index, pieces, fragment.numel))

    def scatter_(self, fragment: Fragment, start: int, values: Tensor) -> None:
        """As `fragments.scatter_`. On an accelerator, what is put into the training stream later
        finds the values."""
        staging = self._staging(fragment, start, start + values.numel())
        if staging is None:
            return scatter_(self.tensors, fragment, start, values)
        with staging.staged(values) as staged:
            scatter_(self.tensors, fragment, start, staged, staging.training.copy_)

    def _staging(self, fragment: Fragment, start: int, stop: int) -> Staging | None:
        """The staging of the one device that has this range; None if it is the CPU, or there are
        several."""
        first, *others = {
            self.tensors[piece.name].device for _, piece in fragment.locate(start, stop)
        }
        return None if others else self._staging_of(first)


class Source(NamedTuple):
    """Where the values of a fragment are read: parameters, or a copy of them, and the fragment's
    place in these."""

    local: Local
    fragment: Fragment
