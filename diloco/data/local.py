"""Data of this machine: one source or a mixture, tokenised once, packed into sequences that have numbers.

Little text is tokenised at every start, and its tokens are in memory. More has files of tokens (`token_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.config import MIXTURE_BLOCK, DataConfig
from diloco.data.mixture import Mixture, counts_of, places
from diloco.data.numbered import Leases, NumberedStream, Rows
from diloco.data.packing import permuted
from diloco.data.sources import documents, files_of
from diloco.data.token_files import OnProgress, TokenList, in_memory, mapped
from diloco.data.tokenise import Part, processes_for, tokenised
from diloco.data.tokenizers import ByteTokenizer, Tokenizer
from diloco.errors import DataError

__all__ = ["LocalDataset"]

# Bytes of text from which on its tokens are kept in files: reading less again takes a second or less.
FILES_FROM_BYTES = 1 << 20
FILES_FROM_BYTES_OF_BYTES = 64 << 20  # with the byte tokenizer, which has nothing to do


class LocalDataset:
    """All sequences of local sources, which have numbers.

    Attributes:
        description: one line for the log, with the sources and their sizes.
        training: the endless list of training sequences.
        held_out: sequences of each source for evaluation, (n, T) each, in the smallest integer type.
        digest: names the training sequences, as DIGEST-NxT; equal where their numbers stand for the same text.
    """

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer, seed: int, on_progress: OnProgress) -> None:
        self.tokenizer = tokenizer
        self.sequence_length = settings.sequence_length
        self.training: Rows | Mixture
        self._seed = seed
        sources = [_Source(one, name, tokenizer, on_progress) for name, one in _parts(settings)]
        self.held_out = [source.held_out for source in sources]
        self._counts = counts_of([one.weight for one in settings.mixture] or [1.0])
        if settings.mixture:
            names, weights = zip(*((one.name, one.weight) for one in settings.mixture), strict=True)
            self.training = Mixture(names, [source.training for source in sources], weights)
            parts = (f"{count / 100:g} % {one.description}" for count, one in zip(self._counts, sources, strict=True))
            self.description = f"mixture of {'; '.join(parts)}"
        else:
            self.training, self.description = sources[0].training, sources[0].description
        sequences = sum(len(source.training) for source in sources)
        self.digest = f"{self.training.digest[:16]}-{sequences}x{self.sequence_length}"

    def batches(
        self, size: int, shard: int = 0, shards: int = 1, rows: tuple[int, int] = (0, 1), leases: Leases | None = None
    ) -> NumberedStream:
        """Training batches of shard `shard` of `shards`; the shards of one seed are disjoint and cover the data.

        Or else of the units that are `leases`d, from the numbered list that all peers of the run share.

        `rows` is (rank, size) of a process in an island: its batches are the rows rank, rank + size, ... of the peer's,
        (B / size, T), and its state is the peer's. Other rows of numbered sequences are not read.
        """
        return NumberedStream(self.training, size, self._seed, shard, shards, rows, leases)

    def units(self, sequences: int) -> int:
        """How many of the units that the swarm leases hold about so many sequences: here they are sequences."""
        return sequences

    def holdout(self, sequences: int) -> Tensor:
        """The first `sequences` held-out sequences, or all, if there are fewer: (N, T) int64, equal on every peer."""
        # In file order they would come from one or two documents. The order does not depend on the seed.
        sequences = min(sequences, MIXTURE_BLOCK * max(map(len, self.held_out)))
        found: list[NDArray[Any]] = []
        for source, rank in zip(*places(np.arange(sequences), "holdout", self._counts), strict=True):
            rows = self.held_out[source]
            if rank < len(rows):
                found.append(rows[permuted(np.array([rank]), len(rows), "holdout")])
        return torch.from_numpy(np.array(found, np.int64).reshape(-1, self.sequence_length))


def _parts(settings: DataConfig) -> Iterator[tuple[str | None, DataConfig]]:
    """Yields each source as settings of its own, with its name in a mixture."""
    if not settings.mixture:
        yield None, settings
    for one in settings.mixture:
        own = {"source": one.source, "field": one.field, "path": settings.paths.get(one.name)}
        yield one.name, settings.model_copy(update={**own, "mixture": (), "paths": {}})


class _Source:
    """One source, cut into sequences (N, T)."""

    def __init__(self, settings: DataConfig, name: str | None, tokenizer: Tokenizer, on_progress: OnProgress) -> None:
        length = settings.sequence_length
        tokens = _tokens(settings, name, tokenizer, on_progress)
        training, self.held_out = (_cut(part, length) for part in (tokens.training, tokens.held_out))
        self.training = Rows(training, tokens.digest[:16])
        where = settings.source if settings.path is None else f"{settings.source} in {', '.join(settings.path)}"
        what = f"data.source={where}" if name is None else f"{name} of data.mixture ({where})"
        self.description = (
            f"{where}: {tokens.documents:,} documents, {tokens.num_bytes / 1e6:.1f} MB, {len(training):,} training and "
            f"{len(self.held_out):,} held-out sequences of {length} tokens"
        )
        if not tokens.documents:
            raise DataError(f"{what} has no text; give files that are not empty")
        if not len(training) or (settings.holdout and not len(self.held_out)):
            missing, other = ("held-out", "larger") if len(training) else ("training", "smaller")
            total = len(tokens.training) + len(tokens.held_out)
            shorter = f"data.sequence_length={total} " if total < length else ""
            raise DataError(
                f"data.holdout: {settings.holdout} of {tokens.documents} documents leaves no {missing} sequence of "
                f"{length} tokens; start the run with {shorter}data.holdout=0 (no held-out loss) or a {other} one, "
                f"or add text to {what}"
            )


def _cut(tokens: NDArray[Any], length: int) -> NDArray[Any]:
    rows = len(tokens) // length
    return tokens[: rows * length].reshape(rows, length)


def _tokens(settings: DataConfig, name: str | None, tokenizer: Tokenizer, on_progress: OnProgress) -> TokenList:
    """The tokens of a source. Errors name `data.path` and `data.field`, or what they are called in a mixture."""
    try:
        files = files_of(settings)

        def parts(processes: int = 1) -> Iterator[Part]:
            return tokenised(documents(settings, files), settings, tokenizer, processes)

        if settings.source == "stdlib":
            return in_memory(parts(), tokenizer)
        num_bytes = sum(file.stat().st_size for file in files)
        least = FILES_FROM_BYTES_OF_BYTES if isinstance(tokenizer, ByteTokenizer) else FILES_FROM_BYTES
        processes = processes_for(num_bytes, tokenizer)
        if settings.cache is None or num_bytes < least:
            return in_memory(parts(processes), tokenizer)
        return mapped(settings, files, tokenizer, lambda: parts(processes), on_progress)
    except DataError as error:
        key, _, rest = str(error).partition(":")
        own = {"data.path": f"data.paths.{name}", "data.field": f"data.mixture, field of {name}"}.get(key)
        if name is None or own is None:
            raise
        raise DataError(f"{own}:{rest}") from error
