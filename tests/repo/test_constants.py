"""No absolute time decides who is merged: each constant in seconds has its reason in
`diloco/core/README.md`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.places import PACKAGE

ROOMS = ("attach", "core", "swarm")
README = PACKAGE / "core" / "README.md"
ROW = re.compile(r"\| `(\w+)` (\w+) \| ([\d., ]+) \| [^|]+ \|")


def seconds_of(file: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and value of each constant in seconds, and of each default of a setting."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    settings = [node.body for node in tree.body if getattr(node, "name", "") == "ProtocolSettings"]
    for node in [*tree.body, *(field for body in settings for field in body)]:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, number in pairs:
                if isinstance(name, ast.Name) and re.search("(?<!_per)_s$", name.id.lower()):
                    seconds = eval(compile(ast.Expression(number), "", "eval"), {})
                    yield file.stem, name.id, f"{seconds:,.10g}"


def test_each_constant_in_seconds_has_its_value_and_its_reason_on_the_page() -> None:
    files = sorted(file for room in ROOMS for file in (PACKAGE / room).rglob("*.py"))
    files.append(PACKAGE / "signals.py")
    code = {(name, module): value for file in files for module, name, value in seconds_of(file)}
    page = {(name, module): value for name, module, value in ROW.findall(README.read_text())}
    assert len(code) > 40 and page == code
