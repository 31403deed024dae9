"""A liar whose numbers are at their bounds, among production nodes: no exception, no stuck node.

`scripts/fuzz_protocol --kind numbers` plays all fields with all of their extreme values; here are a
few.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.messages.codec import decode, encode
from diloco.testing.fuzz.extremes import NUM_VALUES, Target, changed, targets
from diloco.testing.fuzz.liar import lie_of, play_lie
from tests.unit.messages.test_codec import EXAMPLES


@pytest.mark.parametrize("seed", range(3))
def test_no_number_within_its_bounds_ends_or_stops_a_peer(seed: int) -> None:
    assert play_lie(lie_of(seed)).violation is None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_every_number_of_every_message_fits_at_its_bounds(example: Any) -> None:
    for kind, path in targets():
        if kind != example.kind or path[-1] == "wire_version":
            continue
        lies = [
            changed(example, Target(kind, path, value), random.Random(0))
            for value in range(NUM_VALUES)
        ]
        assert sum(lie != example for lie in lies) >= 2, path
        assert all(decode(encode(lie)) == lie for lie in lies)
