"""Known bugs are still bugs that can be made: their text stands in the code."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_known_bug_can_be_made_again(mutant: Mutant) -> None:
    source = (ROOT / (mutant.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    compile(mutant.applied_to(source), mutant.module, "exec")
