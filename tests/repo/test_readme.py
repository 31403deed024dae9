"""The README keeps its word: its code runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from types import SimpleNamespace

from tests.support.pages import block
from tests.support.places import ROOT

PAGES = [ROOT / "README.md"] + [
    one for room in ("configs", "diloco", "scripts") for one in (ROOT / room).rglob("*.md")
]


def test_the_swarm_loop_is_at_most_ten_lines_away_from_the_plain_one() -> None:
    plain, swarm = (
        [re.sub(r"\s*#.*", "", line).strip() for line in block(name).splitlines()]
        for name in ("plain loop", "swarm loop")
    )
    changed = [line for line in difflib.ndiff(plain, swarm) if line[0] in "+-"]
    assert 0 < len(changed) <= 10, changed


def test_the_plain_loop_runs() -> None:
    subprocess.run([sys.executable, "-c", block("plain loop")], check=True, timeout=120)


def test_the_callback_of_the_readme_is_one_that_a_trainer_takes() -> None:
    from transformers import TrainerCallback

    given: dict[str, object] = {}
    trainer = SimpleNamespace(train=lambda: None)
    names = {
        "model": 1,
        "args": 2,
        "data": 3,
        "Trainer": lambda *_, **settings: given.update(settings) or trainer,
    }
    exec(block("trainer"), names)
    [callback] = given["callbacks"]  # type: ignore[misc]
    assert isinstance(callback, TrainerCallback)


def test_the_design_names_every_room_of_the_package() -> None:
    storeys = (ROOT / "diloco" / "README.md").read_text().split("## Storeys")[1].split("```")[1]
    named = {
        word
        for line in storeys.splitlines()
        for word in line.strip()[:24].split("  ")[0].split(" | ")
    }
    rooms = {place.parent.name for place in (ROOT / "diloco").glob("*/__init__.py")}
    assert rooms and rooms <= named


def test_every_command_of_the_pages_exists_and_each_is_explained() -> None:
    from diloco.cli.main import cli

    used = {
        one for page in PAGES for one in re.findall(r"(?:`|\n)diloco ([a-z]+)\b", page.read_text())
    }
    assert used and used <= cli.commands.keys(), used - cli.commands.keys()
    assert cli.commands.keys() <= used, f"on no page: {cli.commands.keys() - used}"
