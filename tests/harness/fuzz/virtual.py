"""Where fuzzed swarms live: virtual time in a quiet process, and payloads in small pieces."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch

from diloco.outer import digest, fragments
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.rpc import contribution, state, updates


@contextmanager
def virtual_swarm(chunk: int = 8, part: int = 16) -> Iterator[VirtualLoop]:
    """A loop in virtual time; inside: no logs, one thread for torch, and small pieces."""
    _exempt_modules_from_collection(len(sys.modules))
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with virtual_time() as loop, small_pieces(chunk, part):
            yield loop
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)


@contextmanager
def small_pieces(chunk: int = 8, part: int = 16) -> Iterator[None]:
    """Inside, chunks and parts are so small that tiny models have several."""
    with (
        patch.object(fragments, "CHUNK", chunk),
        patch.object(digest, "PART", part),
        patch.object(contribution, "PIECE", chunk),
        patch.object(state, "PIECE", chunk),
        patch.object(state, "BYTES", chunk),
        patch.object(updates, "LEAST_PART", chunk),
    ):
        yield


@cache
def _exempt_modules_from_collection(_num_modules: int) -> None:
    """The last check collects garbage, which takes .25 s over all that torch has imported."""
    # the first optimizer imports as much again
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    gc.collect()
    gc.freeze()
