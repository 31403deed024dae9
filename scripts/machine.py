"""What the figures of a benchmark depend on; imported by the executables beside it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe"]


def describe() -> dict[str, Any]:
    """This machine: processor, cores, memory in GiB, torch's build, and how busy it is (the load of the last minute)."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20),
        "accelerator": accelerator,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def _first(file: str, key: str) -> str | None:
    """The value of the first `key: value` line of a file under /proc; None elsewhere than on Linux."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)
