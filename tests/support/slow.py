"""Cases of a test that `scripts/nightly` plays, where one case of its kind is enough for every
change."""

import pytest

__all__ = ["slow"]


def slow(*values: object) -> object:
    """A parameter set of `pytest.mark.parametrize` that is marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
