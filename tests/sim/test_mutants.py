"""Known bugs are bugs that can still be made, and the fuzz finds each within its stated seeds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.core_mutants import mutated
from tests.support.mutants import MUTANTS
from tests.support.places import ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_can_be_made_again(name: str) -> None:
    for module, source in mutated(MUTANTS[name]).items():
        compile(source, module, "exec")


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    """What finds each bug."""
    command = [sys.executable, "-m", "tests.support.mutants", "--all"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(map(json.loads, ended.stdout.splitlines()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_is_found(name: str, found: dict[str, str | None]) -> None:
    assert found[name]
