"""This machine as one process finds it: device, cores, and free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from diloco.attach import devices

__all__ = ["GIB", "Machine", "free_memory", "inspect_machine", "machine_at"]

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """This machine: the device, and the free bytes on it and in main memory (equal if the device is the CPU)."""

    device: torch.device
    name: str
    threads: int
    device_bytes: float
    main_bytes: float
    precision: devices.Precision  # native

    @property
    def shared(self) -> bool:
        """Whether the device uses main memory."""
        return self.device.type in ("cpu", "mps")


def inspect_machine(device: str, threads: int | None = None) -> Machine:
    """This machine with its present load; `device` is the value of train.device. Raises `ConfigError` if this machine
    has no such device.
    """
    return machine_at(devices.pick_device(device), threads)


def machine_at(device: torch.device, threads: int | None = None) -> Machine:
    """The same for a device that this process has already."""
    cores, main, native = _cores(), free_memory(), devices.native_precision(device)
    if device.type != "cpu":
        free = devices.free_bytes(device)
        return Machine(device, devices.name_of(device), threads or cores, free, main, native)
    idle = max(1, cores // 2, round(cores - os.getloadavg()[0]))
    return Machine(device, "CPU", threads or min(cores, idle), main, main, native)


def _cores() -> int:
    """Cores that the affinity of this process and the quota of its container allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period or 100_000)))


def free_memory() -> float:
    """Bytes of main memory that the kernel has left and that the limit of this container allows."""
    free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))  # where the kernel does not say more
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit.isdigit() and used.isdigit():
        lines = (_read("/sys/fs/cgroup/memory.stat") or "").splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file")), 0)
        free = min(free, int(limit) - int(used) + cache)  # the kernel drops caches before it refuses memory
    return free


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None
