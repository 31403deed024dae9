"""`scripts/works_with`: each member has a row, whatever it does to its process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT

FAMILY = '''"""An oracle, in
two lines.

More, which is on no page.
"""
import os, time
from scripts.families import WORKS, Member, refused, works_with

SOURCES = ("pytest", "nowhere")
PLAYED = {
    "good": lambda: WORKS,
    "set|ting": lambda: works_with("a=1"),
    "refuses": lambda: refused("key=1: not this; use 2"),
    "refuses in two lines": lambda: refused("key=1:\\nnot this"),
    "raises": lambda: 1 / 0,
    "exits": lambda: os._exit(3),
    "hangs": lambda: time.sleep(60),
    "babbles": lambda: "perhaps",
}

def members():
    yield Member("lacks", needs="nowhere")
    for name in PLAYED:
        yield Member(name, quick=name == "good")

def play(name):
    print("a line of", name)
    return PLAYED[name]()
'''
RESULTS = {
    "lacks": "skipped: nowhere is not installed",
    "good": "works",
    "set\\|ting": "works with a=1",
    "refuses": "refused: key=1: not this; use 2",
    "refuses in two lines": "bug: AssertionError: 2 lines instead of one: key=1: not this",
    "raises": "bug: ZeroDivisionError: division by zero",
    "exits": "bug: its process ended with exit code 3",
    "hangs": "bug: no end within 2 s",
    "babbles": "bug: 'perhaps' is no result",
}


def works_with(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = root / "scripts" / "works_with"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_a_member_that_hangs_or_crashes_is_a_row_and_a_page_keeps_other_families(
    tmp_path: Path,
) -> None:
    families, page = tmp_path / "scripts" / "families", tmp_path / "diloco" / "docs"
    families.mkdir(parents=True), page.mkdir(parents=True)
    page /= "works-with.md"
    for name in ("works_with", "families/__init__.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (families / "things.py").write_text(FAMILY)
    (families / "absent.py").write_text("import a_library_that_is_nowhere")

    played = works_with(tmp_path, "things", "--write", "--limit", "2", "--jobs", "4")
    assert played.returncode == 1, played.stderr
    assert re.search(r"^things +9 +2 +1 +5 +1$", played.stderr, re.M), played.stderr
    assert "    a line of raises\n" in played.stderr  # what a bug's process wrote
    first = page.read_text()
    rows = dict(re.findall(r"^\| ([a-z].*?) \| (\S.*) \|$", first, re.M))
    assert rows.pop("member") == "result" and rows.pop("family")
    assert rows == RESULTS
    assert " | An oracle, in two lines. |\n" in first and ", pytest " not in first

    (families / "things.py").rename(families / "others.py")
    works_with(tmp_path, "others", "--write", "--limit", "2", "--jobs", "4")
    both = page.read_text()
    assert first[first.index("## things") :] in both and "\n## others\n" in both

    quick = works_with(tmp_path, "--quick")
    assert quick.returncode == 0, quick.stderr
    assert "absent: 1 skipped: a_library_that_is_nowhere is not installed" in quick.stderr
    assert works_with(tmp_path, "nobody").returncode == 2
