"""Observations of a worker on its machine: power, the CPU's other users, and its own directory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

POWER, PROCESSES = Path("/sys/class/power_supply"), Path("/proc")
BUSY = 0.25  # the share of the CPU time that others may use


def plugged_in(power: Path = POWER) -> bool | None:
    """Return True on mains power, or without a battery; None is not known (only Linux says so)."""
    kinds = {file.parent: _text(file) for file in power.glob("*/type")}
    batteries = [at for at, kind in kinds.items() if kind == "Battery"]
    if not any(_text(at / "scope") != "Device" for at in batteries):  # a mouse has one, too
        return True if power.is_dir() else None
    return any(_text(at / "online") == "1" for at in kinds)


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""


class Quiet:
    """For how long other processes have used less than `BUSY` of the time of all CPUs.

    Own are this process, its ended children, and one session. Only Linux has the figures.
    """

    def __init__(self, processes: Path = PROCESSES) -> None:
        self._processes = processes
        self._before, self._since = self._ticks(0), time.monotonic()

    def measure(self, session: int) -> float | None:
        """Return seconds; None is not known."""
        ticks, before = self._ticks(session), self._before
        if ticks is None or before is None:
            return None
        if ticks[0] - before[0] >= os.sysconf("SC_CLK_TCK"):
            if ticks[1] - before[1] >= BUSY * (ticks[0] - before[0]):
                self._since = time.monotonic()
            self._before = ticks
        return time.monotonic() - self._since

    def _ticks(self, session: int) -> tuple[float, float] | None:
        """Return the ticks of all CPUs since the boot, and those in which others were busy."""
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in _text(self._processes / "stat").split()[1:9]]
        if not ticks:
            return None
        own = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
        for file in self._processes.glob("[0-9]*/stat"):
            fields = _text(file).rpartition(")")[2].split()  # from the third field on
            own += sum(map(int, fields[11:15])) if fields[3:4] == [str(session)] else 0
        return sum(ticks), sum(ticks) - sum(ticks[3:5]) - own


def used_bytes(directory: Path) -> int:
    """Return the bytes on disk of all files below a directory; some may vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def has_trained(directory: Path, since: float) -> bool:
    """Return True if a peer of the worker has written figures of an inner step since then."""
    files = [file.stat() for file in directory.glob("diloco/peer-*/runs/*/metrics.jsonl")]
    return any(file.st_size and file.st_mtime >= since for file in files)
