"""Which device a process takes, by what is there; the accelerators are stubs."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor

from diloco.attach import devices
from diloco.attach.devices import choose, pick_device
from diloco.config import compose
from diloco.errors import ConfigError
from diloco.swarm.node.node import Node
from diloco.swarm.node.runtime import EventLoopThread


def there(monkeypatch: MonkeyPatch, kind: str, count: int) -> None:
    """This machine has so many accelerators of that kind."""
    monkeypatch.setattr(devices, "count_devices", lambda: (kind if count else "cpu", count))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)


@pytest.mark.parametrize(
    ("kind", "count", "setting", "chosen"),
    [
        ("cpu", 0, "auto", "cpu"),
        ("cuda", 3, "auto", "cuda:0"),
        ("cuda", 3, "cuda", "cuda:0"),
        ("cuda", 3, "cuda:2", "cuda:2"),
        ("cuda", 3, "cpu", "cpu"),
        ("xpu", 2, "auto", "xpu:0"),
        ("mps", 1, "auto", "mps"),
        ("mps", 1, "mps", "mps"),
    ],
)
def test_a_process_alone_takes_what_is_named_or_the_first(
    kind: str, count: int, setting: str, chosen: str, monkeypatch: MonkeyPatch
) -> None:
    there(monkeypatch, kind, count)
    assert str(choose(setting)) == chosen
    assert compose([f"train.device={setting}"]).train.device == setting


def test_ranks_and_peers_take_the_devices_in_turn(monkeypatch: MonkeyPatch) -> None:
    there(monkeypatch, "cuda", 3)
    three = [f"cuda:{rank}" for rank in range(3)]
    for setting, chosen in (("auto", three), ("cuda", three), ("cuda:1", ["cuda:1"] * 3)):
        assert [str(choose(setting, rank, 3)) for rank in range(3)] == chosen
    assert [str(choose("cpu", rank, 8)) for rank in range(8)] == ["cpu"] * 8
    assert str(choose("auto", 0, 1)) == "cuda:0", "a rank of its own on each machine"
    there(monkeypatch, "cuda", 2)
    taken = []
    for number in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        taken.append(str(pick_device("auto")))
    assert taken == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert str(pick_device("cuda:1")) == "cuda:1" and str(pick_device("cpu")) == "cpu"
    there(monkeypatch, "cpu", 0)
    assert str(pick_device("auto")) == "cpu"


@pytest.mark.parametrize(
    ("kind", "count", "setting", "ranks", "why"),
    [
        ("cpu", 0, "cuda", 1, " is not there: this machine has no accelerator that torch can use"),
        ("cuda", 4, "cuda:4", 1, " is not there: .* has cuda:0 to cuda:3; use auto or cpu"),
        ("mps", 1, "cuda", 1, " is not there: this machine has mps; use auto or cpu"),
        ("cuda", 2, "auto", 3, ": 3 processes on this .* has cuda:0 to cuda:1; start 2, or"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    kind: str, count: int, setting: str, ranks: int, why: str, monkeypatch: MonkeyPatch
) -> None:
    there(monkeypatch, kind, count)
    with pytest.raises(ConfigError, match=f"^train.device={setting}{why}"):
        choose(setting, 0, ranks)


def test_one_rank_says_what_is_not_there_and_others_wait(monkeypatch: MonkeyPatch) -> None:
    there(monkeypatch, "cuda", 2)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, ending in enumerate([ConfigError, SystemExit, SystemExit]):
        for name, value in {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ending):
            pick_device("auto")
    assert waited == [devices.REFUSED_S] * 2


def test_collectives_use_the_backend_of_the_device(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for there, backend in ((False, "gloo"), (True, "xccl")):
        monkeypatch.setattr(dist, "is_xccl_available", lambda there=there: there)
        expected = {"cpu": "gloo", "cuda": "nccl", "xpu": backend, "mps": "gloo"}
        assert {kind: devices.backend_of(torch.device(kind)) for kind in expected} == expected
    for ranks, found in (("2", ["nccl", "nccl", "gloo"]), ("1", ["nccl"] * 3)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        settings = ("auto", "cuda", "cuda:0")
        assert [devices.backend_of(torch.device("cuda"), one) for one in settings] == found


def test_a_nodes_thread_flushes_nothing_where_the_loop_does(monkeypatch: MonkeyPatch) -> None:
    """Denormal numbers are in the updates that all peers apply; a new thread has its maker's
    mode."""
    tiny = torch.full((1 << 17,), 2**20, dtype=torch.int32).view(torch.float32)  # 1.5e-39

    async def halved(*_: object) -> Tensor:
        return tiny * 0.5

    def work() -> tuple[bool, Tensor, Tensor]:
        supported, thread = torch.set_flush_denormal(True), EventLoopThread()
        there: Any = thread.open(*3 * [Any])  # type: ignore[arg-type]
        thread.close()
        return supported, tiny * 0.5, there

    monkeypatch.setattr(Node, "open", halved)
    supported, here, there = ThreadPoolExecutor(1).submit(work).result()
    assert there.all() and here.any() != supported
