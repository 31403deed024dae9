"""The tables that executables write, each between two marks, in scripts/README.md or TABLES.md beside it, and what they
say of several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.rundir.comparison import gap_of

__all__ = ["gap", "place", "put", "rows_of", "spread"]

PAGES = tuple(Path(__file__).parents[3] / "scripts" / name for name in ("README.md", "TABLES.md"))


def rows_of(name: str, page: Path | None = None) -> list[str]:
    """The lines between the marks of that name."""
    begin, end = _marks(name)
    return (page or _page_of(name)).read_text().partition(begin)[2].partition(end)[0].splitlines()


def put(name: str, lines: Sequence[str], page: Path | None = None) -> None:
    """Replaces the lines between the marks; `ValueError` when they are missing."""
    begin, end = _marks(name)
    page = page or _page_of(name)
    text = page.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page.name} has no {begin} with {end} behind it")
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def place(machine: Mapping[str, Any]) -> str:
    """A machine, as `machine.describe` has it, in words."""
    return f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}"


def gap(losses: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    """Held-out losses over a baseline's in percent, seed by seed, for a cell of a table."""
    found = [gap_of(loss, baseline[seed]) for seed, loss in losses.items() if seed in baseline]
    return f"{spread(found, '+.1f')} %" if found else "-"


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation, which one value does not have."""
    deviation = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def _page_of(name: str) -> Path:
    """The page that has the marks of that name; the first page if none has."""
    return next((page for page in PAGES if _marks(name)[0] in page.read_text()), PAGES[0])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
