"""The README keeps its word: its code runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.pages import block
from tests.support.places import ROOT

PAGES = [ROOT / "README.md"] + [one for room in ("configs", "diloco", "scripts") for one in (ROOT / room).rglob("*.md")]


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
    names = {"model": 1, "args": 2, "data": 3, "Trainer": lambda *_, **settings: given.update(settings) or trainer}
    exec(block("trainer"), names)
    [callback] = given["callbacks"]  # type: ignore[misc]
    assert isinstance(callback, TrainerCallback)


def tree(text: str) -> set[str]:
    """Paths of the files and folders (with a slash) in a drawn tree: four characters per level, `name  # role`."""
    paths: set[str] = set()
    above: list[str] = []
    for line in filter(None, text.splitlines()):
        drawn = re.fullmatch(r"((?:│   |    )*(?:[├└]── )?)([\w.]+/?) +# \S.*", line)
        assert drawn is not None, f"not a line of a tree: {line}"
        depth = 0 if not drawn[1] else len(drawn[1]) // 4
        above[depth:] = [drawn[2].rstrip("/")]
        paths.add("/".join(above) + drawn[2][len(drawn[2].rstrip("/")) :])
    return paths


def test_the_tree_in_the_readme_of_the_package_has_every_folder() -> None:
    root = ROOT / "diloco"
    drawn = (root / "README.md").read_text().split("## Tree")[1].split("```")[1]
    there = {f"{module.parent.relative_to(root)}/" for module in root.rglob("__init__.py")} - {"./"}
    missing, gone = sorted(there - tree(drawn)), sorted(tree(drawn) - there)
    assert not missing and not gone, f"not in the tree: {missing}; only in the tree: {gone}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        headings = [re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in titles(file)]
        assert not heading or heading in headings, target


def titles(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("#")] if file.suffix == ".md" else []


def test_every_command_of_the_pages_exists_and_each_is_explained() -> None:
    from diloco.cli.main import cli

    used = {one for page in PAGES for one in re.findall(r"(?:`|\n)diloco ([a-z]+)\b", page.read_text())}
    assert used and used <= cli.commands.keys(), used - cli.commands.keys()
    assert cli.commands.keys() <= used, f"on no page: {cli.commands.keys() - used}"
