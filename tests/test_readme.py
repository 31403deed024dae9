"""The README keeps its word: its code runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_the_swarm_loop_is_at_most_ten_lines_away_from_the_plain_one() -> None:
    plain, swarm = (
        [re.sub(r"\s*#.*", "", line).strip() for line in block(name).splitlines()]
        for name in ("plain loop", "swarm loop")
    )
    changed = [line for line in difflib.ndiff(plain, swarm) if line[0] in "+-"]
    assert 0 < len(changed) <= 10, changed


def test_the_plain_loop_runs() -> None:
    subprocess.run([sys.executable, "-c", block("plain loop")], check=True, timeout=120)


@pytest.mark.swarm
def test_the_swarm_loop_runs_and_learns() -> None:
    code = block("swarm loop") + "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert "exchanges 3 " in done.stdout


def test_every_module_of_the_package_stands_in_the_tree_of_its_readme() -> None:
    tree = (ROOT / "diloco" / "README.md").read_text().split("## Tree")[1]
    for module in sorted((ROOT / "diloco").rglob("*.py")):
        if module.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\b{module.name}\b", tree), (
                f"{module.relative_to(ROOT)} is not in the tree of diloco/README.md"
            )


def test_every_command_of_the_readme_exists() -> None:
    from diloco.cli.main import cli

    for command in set(re.findall(r"diloco (local|train|host|eval|generate|export|[a-z]+) ", README)):
        used = f"`diloco {command} " in README or f"\ndiloco {command} " in README
        assert command in cli.commands or not used, command
