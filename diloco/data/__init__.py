"""From text to batches of packed token sequences.

1. A source yields rows, UTF-8 bytes in a fixed order (`sources`, `formats`): the standard library,
   files, or a hub stream.
2. A row is one document, or several if it is long. The hash of a document decides whether it is
   held out, equally on every peer, and a tokenizer makes integers of it (`encode_rows`); for files
   of this machine once (`tokens`).
3. A `Packer` concatenates documents, each with its end token, and cuts them into sequences of T =
   `data.sequence_length` tokens. No token is repeated, and only a last piece shorter than T is
   dropped. A sequence may hold the end of one document and the start of the next; attention is not
   masked between them, as usual in pretraining.
4. A stream yields endless batches (B, T) of this peer's part, in a seeded order, from one source or
   several (`numbered`, `streaming`). Its `state()` is small JSON; `restore()` continues with the
   very next sequence.
5. A thread makes batches before their turn (`prefetch`).
"""

from __future__ import annotations

from diloco.config import DataConfig
from diloco.data.local import LocalDataset
from diloco.data.numbered import Leases
from diloco.data.prefetch import AHEAD, BatchStream, Prefetched
from diloco.data.streaming import HubDataset
from diloco.data.tokenizers import Tokenizer, is_bytes, load_tokenizer
from diloco.data.tokens import OnProgress

__all__ = [
    "AHEAD",
    "BatchStream",
    "Dataset",
    "Leases",
    "Prefetched",
    "Tokenizer",
    "is_bytes",
    "load",
    "load_tokenizer",
]

Dataset = LocalDataset | HubDataset
"""Text of one source or several, tokenised and split; `LocalDataset` says what the methods do."""


def load(
    settings: DataConfig, seed: int, on_progress: OnProgress = lambda done, total: None
) -> Dataset:
    """Open the data of a run: read and tokenise local text, or connect to the hub.

    Raises DataError: the data is missing, unreadable or empty, or there is no such field, tokenizer
    or hub dataset.
    """
    tokenizer = load_tokenizer(*settings.tokenizer_place)
    if settings.source == "hub" and not settings.has_conversations:
        return HubDataset(settings, tokenizer, seed)
    return LocalDataset(settings, tokenizer, seed, on_progress)
