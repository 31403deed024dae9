"""The tables that executables write, each between two marks, in scripts/README.md or TABLES.md beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["place", "put", "rows_of"]

PAGES = tuple(Path(__file__).parents[1] / name for name in ("README.md", "TABLES.md"))


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


def _page_of(name: str) -> Path:
    """The page that has the marks of that name; the first page if none has."""
    return next((page for page in PAGES if _marks(name)[0] in page.read_text()), PAGES[0])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
