"""The tables of scripts/README.md that executables write, each between two marks. Imported by `claims` and `chaos`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["place", "put", "rows_of"]

README = Path(__file__).parents[1] / "README.md"


def rows_of(name: str, readme: Path = README) -> list[str]:
    """The lines between the marks of that name."""
    begin, end = _marks(name)
    return readme.read_text().partition(begin)[2].partition(end)[0].splitlines()


def put(name: str, lines: Sequence[str], readme: Path = README) -> None:
    """Replaces the lines between the marks; `ValueError` when they are missing."""
    begin, end = _marks(name)
    text = readme.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme.name} has no {begin} with {end} behind it")
    readme.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def place(machine: Mapping[str, Any]) -> str:
    """A machine, as `machine.describe` has it, in words."""
    return f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"
