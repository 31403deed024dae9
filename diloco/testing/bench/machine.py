"""The machine that a benchmark ran on, and the processor time of processes."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from diloco.train import devices

__all__ = ["cpu_seconds", "describe"]


def describe() -> dict[str, Any]:
    """This machine: processor, cores, memory in GiB, torch's build, and the load of the last minute."""
    kind, count = devices.counted()
    accelerator = devices.name_of(torch.device(kind)) if count else "none"
    if count > 1:
        accelerator = f"{count} x {accelerator}"
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
        "accelerator": accelerator,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def cpu_seconds(processes: set[int]) -> float:
    """Processor time that these processes and all that they started have used so far; 0 elsewhere than on Linux."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        ticks[process] = int(fields[11]) + int(fields[12])
    family = set(processes)
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(process, 0) for process in family) / os.sysconf("SC_CLK_TCK")


def _first(file: str, key: str) -> str | None:
    """The value of the first `key: value` line of a file under /proc; None elsewhere than on Linux."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
