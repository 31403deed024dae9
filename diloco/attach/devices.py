"""Accelerators of this machine: `cuda` (also AMD's), `xpu` (Intel's) and `mps` (Apple's)."""

from __future__ import annotations

import os
import random
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]

KINDS = ("cuda", "xpu", "mps")  # a build of torch supports one of them
# From data sheets: 10^12 operations per second in bf16 (T4, V100: fp16), added up in fp32, without
# sparsity. The first pattern that is in a device's name counts; `$` is the end of the name, as
# laptop versions of the GeForce cards have longer names.
PEAKS = """
GB200: 2500, B200: 2250, G?H200: 989, H100 NVL: 835, H100 PCIe: 756, H100: 989, A100: 312, A40:
149.7, A30: 165, A10: 125, L40S: 362, L40: 181, L4: 121, V100-SXM2: 125, T4: 65, RTX A6000: 154.8,
RTX 5090$: 209.5, RTX 4090$: 165.2, RTX 3090$: 71, MI300X: 1307.4, MI325X: 1307.4
"""
REFUSED_S = 30.0  # the other ranks wait, until torchrun ends them after rank 0's error


@contextmanager
def _default_modes() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


default_modes = _default_modes()
"""Decorates what a training loop calls: its modes and default device mean nothing inside."""


def place(kind: str, index: int) -> str:
    """Return the value of train.device for a device."""
    return f"{kind}:{index}" if kind != "mps" else kind


def count_devices() -> tuple[str, int]:
    """Return kind and number of this machine's accelerators; `("cpu", 0)` without any."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in KINDS:
        return "cpu", 0
    return accelerator.type, torch.accelerator.device_count()


def choose(setting: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device of train.device for a rank, one of `local_size` on this machine.

    Without a number in the setting it is the device number `local_rank`. Raises `ConfigError` if
    this machine has no such device.
    """
    wanted, _, number = setting.partition(":")
    kind, count = ("cpu", 0) if wanted == "cpu" else count_devices()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return torch.device("cpu")
    if wanted not in ("auto", kind) or (number and int(number) >= count):
        raise ConfigError(
            f"train.device={setting} is not there: this machine has {_words(kind, count)};"
            " use auto or cpu"
        )
    if not number and local_size > count:
        raise ConfigError(
            f"train.device={setting}: {local_size} processes on this machine, which has"
            f" {_words(kind, count)}; start {count}, or use train.device=cpu"
        )
    return torch.device(place(kind, int(number or local_rank)))


def _words(kind: str, count: int) -> str:
    if not count:
        return "no accelerator that torch can use"
    names = [place(kind, index) for index in range(count)]
    return names[0] if count == 1 else f"{names[0]} to {names[-1]}"


def pick_device(setting: str) -> torch.device:
    """Choose the device of this process by torchrun's environment, and make it the current one.

    With LOCAL_RANK alone a process is one of several peers, which take the devices in turn. Where
    the device is not there, one rank raises `ConfigError`, and the others wait: torchrun ends all
    as soon as one has ended.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    try:
        if alone:
            device = choose(setting, local_rank % max(1, count_devices()[1]))
        else:
            device = choose(setting, local_rank, local_size)
    except ConfigError:
        if alone or local_rank == 0:
            raise
        time.sleep(REFUSED_S)
        raise SystemExit(ConfigError.exit_code) from None
    if device.index is not None:
        # else libraries would allocate memory on the first device
        torch.accelerator.set_device_index(device.index)
    return device


def backend_of(device: torch.device, setting: str = "auto") -> str:
    """The backend of torch.distributed for tensors of a device, chosen by train.device."""
    # ranks whose setting has a number may share a device, which NCCL refuses
    shared = ":" in setting and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if device.type == "cuda" and not shared and dist.is_nccl_available():
        return "nccl"
    if device.type == "xpu" and not shared and dist.is_xccl_available():
        return "xccl"
    return "gloo"


def name_of(device: torch.device) -> str:
    """Name the hardware in a few words."""
    module: Any = torch.get_device_module(device)
    named = device.type in ("cuda", "xpu")
    return str(module.get_device_name(device)) if named else device.type.upper()


def free_bytes(device: torch.device) -> float:
    """Bytes of an accelerator's memory that no process uses."""
    if device.type == "mps":  # which shares the memory of the machine
        return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return float(torch.accelerator.get_memory_info(device)[0])


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most bytes in use at a time: of this process, and of its tensors on a cuda or xpu device."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type in ("cuda", "xpu"):
        peaks["peak_device_bytes"] = torch.get_device_module(device).max_memory_allocated(device)
    return peaks


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of dense 16-bit matrix products (data sheet); None if unknown."""
    for pattern, peak in re.findall(r"([^:,\n]+): ([\d.]+)", PEAKS):
        if re.search(rf"\b{pattern.strip()}(?!\w)(?!.* MIG )", name_of(device)):
            return 1e12 * float(peak)
    return None


def native_precision(device: torch.device) -> Precision:
    """The fastest precision that the device computes natively and that trains well."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "xpu" else "fp32"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Release unused cached memory of the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


# -- random numbers --------------------------------------------------------------------------------


def forked_random(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which the generators of CPU and device are as before it."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def seed_random(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of the device."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.manual_seed(seed)


def random_states() -> dict[str, Tensor]:
    """States of the generators of accelerators that are in use, by name such as `cuda.0`."""
    kind, count = count_devices()
    module: Any = torch.get_device_module(kind) if count else None
    if kind == "mps":
        return {"mps.0": module.get_rng_state()}
    if module is None or not module.is_initialized():
        return {}
    return {f"{kind}.{index}": state for index, state in enumerate(module.get_rng_state_all())}


def restore_random(states: Mapping[str, Tensor]) -> None:
    """The inverse of `random_states`; ignores those of devices that this machine lacks."""
    kind, count = count_devices()
    for name, state in states.items():
        its_kind, _, index = name.partition(".")
        if its_kind == kind and index.isdigit() and int(index) < count:
            module: Any = torch.get_device_module(kind)
            module.set_rng_state(state, torch.device(place(kind, int(index))))


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch (accelerators: once in use), Python and numpy."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = dict(numpy.random.get_state(legacy=False))
    twister = legacy.pop("state")
    tensors = {
        "torch": torch.get_rng_state(),  # (5056,) uint8
        "python": torch.tensor(words),  # (625,) int64
        # (624,) int64, because torch has few operations on uint32
        "numpy": torch.tensor(twister["key"].astype(numpy.int64)),
        **random_states(),
    }
    python = {"version": version, "gauss": gauss}
    return tensors, {"python": python, "numpy": {**legacy, "position": twister["pos"]}}


def restore_rng(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`; ignores the state of devices that this machine lacks."""
    torch.set_rng_state(tensors["torch"])
    python, legacy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    kept = {key: legacy[key] for key in ("bit_generator", "has_gauss", "gauss")}
    numpy.random.set_state({**kept, "state": {"key": keys, "pos": legacy["position"]}})
    restore_random(tensors)
