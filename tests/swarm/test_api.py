"""`Swarm` as its callers type it: arguments, presets, what it says, and different data for each
peer."""

from __future__ import annotations

import pytest

from diloco.errors import JoinError
from tests.support.loops import attached, made


def test_nobody_at_an_address_is_one_line_that_names_it_once() -> None:
    with made(quiet=True) as gone, attached(gone).open():
        address = gone.address
    with made(address=[address, address], quiet=True) as swarm, pytest.raises(JoinError) as caught:
        attached(swarm).open()
    text = str(caught.value)
    assert text.startswith(
        f"address={address} cannot be reached: nobody listens on that port; check"
    )
    assert text.count(address) == 1
    assert text.endswith("start it with min_peers=2") and "\n" not in text
