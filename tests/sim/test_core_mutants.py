"""Every rule of core and nodes is needed: without it a schedule of faults or a test of the core
fails."""

import json
import subprocess
import sys

import pytest

from tests.support.core_mutants import MUTANTS, ROOT, mutated


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_can_be_broken(name: str) -> None:
    for path, source in mutated(MUTANTS[name]).values():
        compile(source, path, "exec")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_broken_rule_is_found() -> None:
    command = [sys.executable, "-m", "tests.support.core_mutants", "--all"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stderr
    found = dict(map(json.loads, ended.stdout.splitlines()))
    assert found.keys() == MUTANTS.keys()
    assert [name for name, what in found.items() if what is None] == []
