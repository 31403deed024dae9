"""`Swarm` as its callers type it: arguments, presets, what it says, and different data for each peer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from diloco.errors import JoinError
from diloco.swarm.wire.early import Early
from diloco.train.api import Swarm
from tests.support.loops import attached, made


def test_who_calls_a_peer_that_has_no_model_yet_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    greeted, put_off = Early._greeted, threading.Event()

    async def seen(self: Early, *stream: Any) -> None:
        await greeted(self, *stream)
        put_off.set()

    monkeypatch.setattr(Early, "_greeted", seen)

    def train(swarm: Swarm) -> str:
        with swarm, attached(swarm) as sync:
            while swarm.steps < 8:
                for parameter in sync.parameters.values():
                    parameter.grad = torch.ones_like(parameter)
                sync._optimizer.step()
            assert swarm.figures()["diloco/peers"] == 2 and swarm.index in (0, 1)
        return str(sync.anchor_digest())

    first = made(min_peers=2, quiet=True)
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(train, made(address=first.address, quiet=True))
        assert put_off.wait(60.0) and not second.done()
        assert train(first) == second.result(60.0)


def test_nobody_at_an_address_is_one_line_that_names_it_once_whether_the_peer_listens_already_or_not() -> None:
    gone = made(quiet=True)
    address = gone.address
    gone.close()
    for early in (False, True):
        with made(address=[address, address], quiet=True) as swarm:
            assert not early or swarm.address
            with pytest.raises(JoinError) as caught:
                attached(swarm).open()
        text = str(caught.value)
        assert text.startswith(f"address={address} cannot be reached; check that") and text.count(address) == 1
        assert text.endswith("start it with min_peers=2") and "\n" not in text
