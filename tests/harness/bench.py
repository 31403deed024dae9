"""What the benchmarks share: the machine they run on, processor time, and the tables of the pages
in scripts/."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco.attach import devices
from diloco.rundir.compare import gap_of

PAGES = tuple(Path(__file__).parents[2] / "scripts" / name for name in ("README.md", "TABLES.md"))


def describe() -> dict[str, Any]:
    """This machine: processor, cores, memory (GiB), torch's build, load of the last minute."""
    kind, count = devices.count_devices()
    accelerator = devices.name_of(torch.device(kind)) if count else "none"
    memory_kb = int((_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0])
    mine = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(mine),
        "memory_gib": round(memory_kb / 2**20),
        "accelerator": f"{count} x {accelerator}" if count > 1 else accelerator,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def cpu_seconds(processes: set[int]) -> float:
    """Processor time of these processes and all that they started; 0 elsewhere than on Linux."""
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
    """The value of the first `key: value` line of a file under /proc, if there is one."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def place(machine: Mapping[str, Any]) -> str:
    """A machine, as `describe` has it, in words."""
    return f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}"


# -- tables: between <!-- name --> and <!-- end of name --> in scripts/README.md or TABLES.md


def rows_of(name: str) -> list[str]:
    """The lines between the marks of that name."""
    begin, end = _marks(name)
    return _page_of(name).read_text().partition(begin)[2].partition(end)[0].splitlines()


def put(name: str, lines: Sequence[str]) -> None:
    """Replaces the lines between the marks; `ValueError` when they are missing."""
    begin, end = _marks(name)
    page = _page_of(name)
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no {begin} with {end} behind it")
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def gap(losses: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    """Held-out losses over a baseline's in percent, seed by seed, for a cell of a table."""
    found = [gap_of(loss, baseline[seed]) for seed, loss in losses.items() if seed in baseline]
    return f"{spread(found, '+.1f')} %" if found else "-"


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation, which one value does not have."""
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def _page_of(name: str) -> Path:
    return next((page for page in PAGES if _marks(name)[0] in page.read_text()), PAGES[0])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
