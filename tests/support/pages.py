"""The pages of the documentation, and what they tell a reader to type."""

import re
from pathlib import Path

from tests.support.places import ROOT, script_module

DOCS = ROOT / "diloco" / "docs"
docs = script_module("docs")


def typed(page: Path) -> list[str]:
    """The commands in the code blocks of a page that start diloco; comments behind them are left
    out."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    blocks = [text for language, text in fenced if not language]
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    lines = [one.strip() for line in lines for one in re.split(r"&&|;", line)]
    return [line for line in lines if re.match(r"(diloco|torchrun\b.* -m diloco\.train) ", line)]


def code(page: str) -> str:
    """The Python on a page of the documents."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S))


def block(name: str, page: Path = ROOT / "README.md") -> str:
    """The Python under `<!-- name -->` on a page."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None, name
    return found[1]
