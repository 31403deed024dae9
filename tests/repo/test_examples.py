"""Each file of scripts/examples is run as its first lines say: a starter, and a second peer at the
printed address."""

from __future__ import annotations

import re

from tests.support.places import EXAMPLES


def test_each_example_is_short_is_in_the_table_and_says_how_both_peers_start() -> None:
    readme = (EXAMPLES[0].parent / "README.md").read_text()
    table = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", readme, re.MULTILINE)
    assert sorted(table) == [file.stem for file in EXAMPLES] and len(readme.split()) < 200
    for file in EXAMPLES:
        text = file.read_text()
        assert len(text.splitlines()) <= 110, file.stem
        assert f"python scripts/examples/{file.name} ADDRESS" in text.split('"""')[1], file.stem
