"""Known bugs are still bugs that can be made, and the fuzz finds each of them within its stated seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant

FOUND = [mutant for mutant in MUTANTS if mutant.first is not None]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_known_bug_can_be_made_again(mutant: Mutant) -> None:
    source = (ROOT / (mutant.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    compile(mutant.applied_to(source), mutant.module, "exec")


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", FOUND, ids=[mutant.name for mutant in FOUND])
def test_the_fuzz_finds_a_known_bug(mutant: Mutant) -> None:
    command = [sys.executable, "-m", "tests.mutants", mutant.name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and f"{mutant.name}: seed" in ended.stdout, ended.stdout + ended.stderr
