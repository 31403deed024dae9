"""Known bugs are bugs that can still be made, and the fuzz finds each within its stated seeds, or a test does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_known_bug_can_be_made_again(mutant: Mutant) -> None:
    source = (ROOT / (mutant.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    compile(mutant.applied_to(source), mutant.module, "exec")


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_known_bug_is_found(mutant: Mutant) -> None:
    command = [sys.executable, "-m", "tests.mutants", mutant.name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and f"{mutant.name}: found by" in ended.stdout, ended.stdout + ended.stderr
