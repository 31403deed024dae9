"""A liar whose numbers are at their bounds, among production nodes: no exception, no stuck node.

`scripts/fuzz_protocol --kind numbers` plays all fields with all of their extreme values.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.messages.codec import decode, encode
from diloco.messages.control import Hello, Status
from diloco.testing.fuzz.extremes import NUM_VALUES, Target, changed, targets
from diloco.testing.fuzz.liar import lie_of, play_lie
from tests.unit.messages.test_codec import EXAMPLES


@pytest.mark.parametrize("seed", range(3))
def test_no_number_within_its_bounds_ends_or_stops_a_peer(seed: int) -> None:
    assert play_lie(lie_of(seed)).violation is None


def with_plan(example: Any) -> Any:
    """A plan that is all zeros is not sent."""
    if isinstance(example, Hello):
        return replace(example, status=with_plan(example.status))
    return replace(example, planned=(1, 2, 3)) if isinstance(example, Status) else example


@pytest.mark.parametrize("example", [*map(with_plan, EXAMPLES)], ids=lambda example: example.kind)
def test_every_number_of_every_message_fits_at_its_bounds(example: Any) -> None:
    paths = [path for kind, path in targets() if kind == example.kind]
    for path in [path for path in paths if path[-1] != "wire_version"]:
        values = (Target(example.kind, path, value) for value in range(NUM_VALUES))
        lies = [changed(example, target, random.Random(0)) for target in values]
        assert sum(lie != example for lie in lies) >= 2, path
        assert all(decode(encode(lie)) == lie for lie in lies)
