"""Each file of scripts/examples is run as its first lines say: a starter, and a second peer at the printed address."""

from __future__ import annotations

import re

from tests.support.examples import FOLDER, NAMES


def test_each_example_is_short_is_in_the_table_and_says_how_both_peers_start() -> None:
    table = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == NAMES
    assert len((FOLDER / "README.md").read_text().split()) < 200
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 100, name
        shown = text.split('"""')[1]
        assert f"python scripts/examples/{name}.py ADDRESS" in shown, name
