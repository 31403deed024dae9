"""Peers in the loops of other libraries, with the real libraries: the code of their README, and what it promises."""

from __future__ import annotations

import re

import pytest

from tests.support.loops_of_others import block


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning"])
def test_three_lines_make_a_loop_a_peer(name: str) -> None:
    own = [line for line in block(name).splitlines() if re.search("diloco|swarm", line, re.IGNORECASE)]
    assert 2 <= len(own) <= 3, own
