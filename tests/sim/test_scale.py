"""The fast part of `scripts/fuzz_protocol --kind scale`."""

import pytest

from tests.support.scale import scale_faults


# In 134 a peer leaves, and another one carries its last contributions.
@pytest.mark.parametrize("seed", [*range(12), 134])
def test_the_same_is_merged_when_all_takes_longer(seed: int) -> None:
    assert scale_faults(seed, (0.1, 1000.0)) == []
