"""Keeps what an exchange needs for a moment from staying with the process for ever.

glibc keeps freed memory for the thread that freed it: gradients' for the trainer, buffers' for the swarm thread.
So an exchange would come on top of a training step instead of taking its place: 0.3 to 0.4 copies of the parameters.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

__all__ = ["give_back", "short_lived"]

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def short_lived(nbytes: int) -> Tensor:
    """Memory (uint8) that goes back to the system with the tensor; for whole updates, as its pages are mapped anew."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def give_back() -> None:
    """Return to the system what was freed, in about a millisecond; nothing happens where the C library cannot."""
    if _trim is not None:
        _trim(0)
