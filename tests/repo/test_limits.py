"""What may not grow: each figure has a ceiling. Whoever comes below one lowers it here; nobody
raises one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.support.places import PACKAGE, ROOT

CEILINGS = {
    "lines of code of the longest function": 60,
    "lines of the longest module": 400,
    "modules of more than 400 lines": 0,
    "modules of the largest room": 13,
    "comments that switch the formatter off": 0,
}
TWICE = set[str]()  # names of classes that may be in two modules

TREES = {
    file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))
}


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A docstring and a signature of many arguments are no code."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_figure_of_the_tree_is_over_its_ceiling() -> None:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    modules = [len(file.read_text().splitlines()) for file in TREES]
    folders = [ROOT / name for name in ("diloco", "scripts", "tests")]
    sources = [file.read_text() for folder in folders for file in folder.rglob("*.py")]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = {
        "lines of code of the longest function": max(
            lines_of_code(node) for node in nodes if isinstance(node, kinds)
        ),
        "lines of the longest module": max(modules),
        "modules of more than 400 lines": sum(lines > 400 for lines in modules),
        "modules of the largest room": max(Counter(file.parent for file in TREES).values()),
        "comments that switch the formatter off": sum(
            len(re.findall("# fmt: (?:skip|off)", text)) for text in sources
        ),
    }
    assert {name: value for name, value in found.items() if value > CEILINGS[name]} == {}


def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, list[Path]] = {}
    for file, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(file)
    assert {name for name, files in places.items() if len(files) > 1} <= TWICE
