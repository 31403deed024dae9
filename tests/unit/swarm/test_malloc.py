"""Memory of an exchange: usable like any other, and gone when it is not used any more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from diloco.swarm.wire.malloc import give_back, short_lived

MIB = 2**20


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_short_lived_buffer_takes_its_memory_with_it() -> None:
    """Even if a later allocation stays."""
    torch.ones(7 * MIB)  # freed at once: from now on malloc keeps blocks of up to 28 MiB for later
    before = resident()
    buffer = short_lived(20 * MIB).fill_(1)
    stays = torch.ones(MIB)
    assert resident() - before > 16 * MIB
    del buffer
    assert resident() - before < 8 * MIB, stays


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps small pieces")
def test_what_was_freed_in_small_pieces_goes_back_to_the_system() -> None:
    pieces = [torch.ones(8192) for _ in range(4096)]  # 128 MiB, too small to be mapped one by one
    kept = pieces[::512]
    full = resident()
    del pieces
    give_back()
    assert full - resident() > 64 * MIB, kept
