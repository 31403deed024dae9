"""Documents to tokens in the order of the documents, in several processes where that is faster.

The threads of a tokenizer stand still while one group of documents is packed and the next is read, so several processes
with a tokenizer each are faster. Beginning one takes seconds, because it imports `transformers`: little text is not
worth it.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.packing import Packer, is_held_out
from diloco.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from diloco.errors import DataError

__all__ = ["Part", "processes_for", "tokenised"]

# One call of the tokenizer: enough to occupy its threads, few enough to be held in memory several times.
_DOCUMENTS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 20
WORTH_PROCESSES = 32 << 20  # bytes of text
MOST_PROCESSES = 32


class Part(NamedTuple):
    """Tokens of some documents, each document followed by the end token."""

    training: NDArray[Any]  # (N,)
    held_out: NDArray[Any]  # (n,)
    documents: int
    num_bytes: int


def processes_for(num_bytes: int, tokenizer: Tokenizer) -> int:
    """How many processes are to tokenise so much text; 1 is this process."""
    if isinstance(tokenizer, ByteTokenizer) or num_bytes < WORTH_PROCESSES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def tokenised(
    documents: Iterable[bytes], settings: DataConfig, tokenizer: Tokenizer, processes: int = 1
) -> Iterator[Part]:
    """Yields the tokens of documents, group by group, in their order. Raises DataError if a process dies."""
    groups = _groups(documents)
    held = partial(is_held_out, fraction=settings.holdout, source=settings.source)
    if processes == 1:
        yield from (_encode(group, tokenizer, held) for group in groups)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, settings.tokenizer_place)
    coming: deque[Future[Part]] = deque()
    try:
        for group in groups:
            coming.append(pool.submit(_work, group, held))
            if len(coming) > 2 * processes:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "data.path: a process that tokenises was killed, perhaps for want of memory; free some, and start again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if len(group) == _DOCUMENTS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: Sequence[bytes], tokenizer: Tokenizer, held: Callable[[bytes], bool]) -> Part:
    packers = [Packer(1, tokenizer), Packer(1, tokenizer)]
    for document, tokens in zip(group, tokenizer.encode(group), strict=True):
        packers[held(document)].add(tokens)
    training, held_out = (packer.take(len(packer)).reshape(-1) for packer in packers)
    return Part(training, held_out, len(group), sum(map(len, group)))


_tokenizer: Tokenizer | None = None  # of a worker process


def _begin(name: str, revision: str | None) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the process that waits for this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(name, revision)


def _work(group: Sequence[bytes], held: Callable[[bytes], bool]) -> Part:
    assert _tokenizer is not None
    return _encode(group, _tokenizer, held)
