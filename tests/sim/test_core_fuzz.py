"""The promises of the core hold in schedules of faults; `scripts/fuzz_protocol --kind cores` plays
more of them."""

from __future__ import annotations

import pytest

from tests.support.core_fuzz import World, broken


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_promises_hold_in_schedules_of_faults(first: int) -> None:
    for seed in range(first, first + 10):
        assert not (why := broken(World(seed))), f"seed {seed}: {why}"
