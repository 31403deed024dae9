"""Memory of an exchange: usable like any other, and gone when it is not used any more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from diloco.outer.payloads import empty_payload

MIB = 2**20


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_whole_payload_takes_its_memory_with_it() -> None:
    """Even if a later allocation stays."""
    torch.ones(7 * MIB)  # freed at once: from now on malloc keeps blocks of up to 28 MiB for later
    before = resident()
    buffer = empty_payload(20 * MIB).fill_(1)
    stays = torch.ones(MIB)
    assert resident() - before > 16 * MIB
    del buffer
    assert resident() - before < 8 * MIB, stays
