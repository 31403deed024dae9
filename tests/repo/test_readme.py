"""The README keeps its word: its code runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import re
from types import SimpleNamespace

from tests.support.pages import block
from tests.support.places import ROOT

PAGES = [ROOT / "README.md"] + [
    one for room in ("configs", "diloco", "scripts") for one in (ROOT / room).rglob("*.md")
]


def test_two_lines_make_a_loop_a_peer() -> None:
    """One import, one `with`; the loop is as it was."""
    lines = [re.sub(r"#.*", "", line) for line in block("swarm loop").splitlines()]
    assert len([line for line in lines if "swarm" in line.lower()]) == 2


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
    rooms_page = (ROOT / "diloco" / "README.md").read_text().split("## Rooms")[1].split("```")[1]
    named = {
        word
        for line in rooms_page.splitlines()
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
