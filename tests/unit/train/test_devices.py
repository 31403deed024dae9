"""Which device a process takes, by what is there; the accelerators are stubs."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco.config import compose
from diloco.errors import ConfigError
from diloco.train import devices
from diloco.train.devices import Accelerator, choose, claim


def there(monkeypatch: pytest.MonkeyPatch, kind: str, *free_gib: float) -> None:
    """This machine has accelerators of that kind, with so much free memory."""
    found = [Accelerator(kind, index, "stub", free * 2**30) for index, free in enumerate(free_gib)]
    monkeypatch.setattr(devices, "counted", lambda: (kind if found else "cpu", len(found)))
    monkeypatch.setattr(devices, "survey", lambda: found)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)


@pytest.mark.parametrize(
    ("kind", "free_gib", "setting", "chosen"),
    [
        ("cpu", (), "auto", "cpu"), ("cuda", (8,), "auto", "cuda:0"), ("cuda", (8, 9, 9), "auto", "cuda:1"),
        ("cuda", (8, 9, 9), "cuda", "cuda:1"), ("cuda", (8, 9, 9), "cuda:2", "cuda:2"),
        ("cuda", (8, 9, 9), "cpu", "cpu"), ("xpu", (3, 2), "auto", "xpu:0"), ("xpu", (3, 2), "xpu:1", "xpu:1"),
        ("mps", (8,), "auto", "mps"), ("mps", (8,), "mps", "mps"),
    ],
)  # fmt: skip
def test_a_process_alone_takes_what_is_named_or_most_free(
    kind: str, free_gib: tuple[float, ...], setting: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there(monkeypatch, kind, *free_gib)
    assert str(choose(setting)) == chosen
    assert compose([f"train.device={setting}"]).train.device == setting


def test_ranks_and_peers_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "cuda", 1, 2, 3)
    monkeypatch.setattr(devices, "survey", None)  # nobody asks for memory
    for setting in ("auto", "cuda"):
        assert [str(choose(setting, rank, 3)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [str(choose("cuda:1", rank, 3)) for rank in range(3)] == ["cuda:1"] * 3
    assert [str(choose("cpu", rank, 8)) for rank in range(8)] == ["cpu"] * 8
    assert str(choose("auto", 0, 1)) == "cuda:0", "a rank of its own on each machine"
    there(monkeypatch, "cuda", 8, 9)
    taken = []
    for number in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        taken.append(str(claim("auto")))
    assert taken == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert str(claim("cuda:1")) == "cuda:1" and str(claim("cpu")) == "cpu"
    there(monkeypatch, "cpu")
    assert str(claim("auto")) == "cpu"


@pytest.mark.parametrize(
    ("kind", "count", "setting", "ranks", "why"),
    [
        ("cpu", 0, "cuda", 1, " is not there: this machine has no accelerator that torch can use"),
        ("cpu", 0, "mps", 1, " is not there: this machine has no accelerator that torch can use"),
        ("cuda", 1, "cuda:1", 1, " is not there: this machine has cuda:0; use auto or cpu"),
        ("cuda", 4, "cuda:4", 1, " is not there: this machine has cuda:0 to cuda:3; use auto or cpu"),
        ("cuda", 4, "xpu", 1, " is not there: this machine has cuda:0 to cuda:3; use auto or cpu"),
        ("mps", 1, "cuda", 1, " is not there: this machine has mps; use auto or cpu"),
        ("cuda", 2, "auto", 3, ": 3 processes on this machine, which has cuda:0 to cuda:1; start 2, or"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    kind: str, count: int, setting: str, ranks: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there(monkeypatch, kind, *[8.0] * count)
    with pytest.raises(ConfigError, match=f"^train.device={setting}{why}"):
        choose(setting, None if ranks == 1 else 0, ranks)


def test_one_rank_says_what_is_not_there_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "cuda", 8, 8)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, ending in enumerate([ConfigError, SystemExit, SystemExit]):
        for name, value in {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ending):
            claim("auto")
    assert waited == [devices.REFUSED_S] * 2


def test_an_island_sees_its_own_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = [Accelerator("cuda", index, "A", 0.0) for index in (2, 0)]
    assert devices.only(cuda) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert devices.only(cuda) == {"CUDA_VISIBLE_DEVICES": "7,4"}
    assert devices.only([Accelerator("xpu", 1, "A", 0.0)]) == {"ZE_AFFINITY_MASK": "1"}
    assert devices.only([Accelerator("mps", 0, "A", 0.0)]) == {}


def test_collectives_use_the_backend_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for there, backend in ((False, "gloo"), (True, "xccl")):
        monkeypatch.setattr(dist, "is_xccl_available", lambda there=there: there)
        kinds = {kind: devices.backend_of(torch.device(kind)) for kind in ("cpu", "cuda", "xpu", "mps")}
        assert kinds == {"cpu": "gloo", "cuda": "nccl", "xpu": backend, "mps": "gloo"}
    assert devices.backend_of(torch.device("cuda"), shared=True) == "gloo"
    for ranks, shared in (("2", [False, False, True]), ("1", [False] * 3)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert [devices.shares_device(setting) for setting in ("auto", "cuda", "cuda:0")] == shared


def test_several_devices_are_asked_by_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "counted", lambda: ("cuda", 2))
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        said = '[{"kind": "cuda", "index": 0, "name": "A", "free_bytes": 1.0}]'
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert devices.survey() == [Accelerator("cuda", 0, "A", 1.0)]
    assert asked == [[sys.executable, "-m", "diloco.train.devices"]]

    def fail(command: list[str], **options: Any) -> Any:
        raise subprocess.CalledProcessError(1, command, "", "Traceback\nRuntimeError: the driver is too old\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"the 2 cuda devices cannot be asked: RuntimeError: the driver is too old;"):
        devices.survey()


def test_on_the_cpu_random_numbers_come_back() -> None:
    cpu = torch.device("cpu")
    devices.synchronize(cpu)
    devices.empty_cache(cpu)
    assert devices.name_of(cpu) == "CPU" and devices.native_precision(cpu) == "fp32"
    expected = torch.random.get_rng_state()
    with devices.forked_random(cpu):
        devices.seed_random(cpu, 7)
        assert torch.initial_seed() == 7
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), expected)
