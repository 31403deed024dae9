"""Rules of the core and of nodes, broken one at a time: the mutants in `core_mutants.txt`.

    python -m tests.support.core_mutants NAME       ends with 1 when a fuzz or a test finds it
    python -m tests.support.core_mutants --all      a JSON line for each: name, and what finds it

What begins with a number breaks that rule. A mutant whose text is not in its module any more is an
error: when the code changes, so does the mutant.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import Loader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.places import ROOT

FEW, SEEDS, NODE_SEEDS = 16, 60, 20
# Mutants of nodes, and the seed from which on the fuzz of nodes finds them.
NODES = {
    "node: a checkpoint moves while it is written": 20,
    "node: an anchor moves while it is read": 20,
    "node: what a head leads to is not checked": 50,
}

Mutant = list[tuple[str, str, str]]  # a module, what stands in it, and what it becomes


def _edit(text: str) -> tuple[str, str, str]:
    module, *lines = text.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] == mark) for mark in "-+")
    return module, before, after


def _read(text: str) -> dict[str, Mutant]:
    """`= ` gives a mutant's name, `@ ` a module, in which the lines with - become those with +."""
    named = (block.split("\n@ ") for block in f"\n{text}".split("\n= ")[1:])
    return {name: [_edit(edit) for edit in edits] for name, *edits in named}


MUTANTS = _read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def mutated(mutant: Mutant) -> dict[str, tuple[Path, str]]:
    """Files and sources by module."""
    sources: dict[str, tuple[Path, str]] = {}
    for name, before, after in mutant:
        path = ROOT / "diloco" / (name.replace(".", "/") + ".py")
        _, source = sources.get(f"diloco.{name}", (path, path.read_text(encoding="utf-8")))
        assert source.count(before) == 1, f"{before!r} is {source.count(before)} times in {name}"
        sources[f"diloco.{name}"] = path, source.replace(before, after)
    return sources


class Finder(Loader):
    """Imports the modules that are changed; it loads them, too."""

    def __init__(self, sources: dict[str, tuple[Path, str]]) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, *_: object) -> object:
        path, _source = self._sources.get(fullname, ("", ""))
        return spec_from_file_location(fullname, path, loader=self) if path else None

    def exec_module(self, module: ModuleType) -> None:
        path, source = self._sources[module.__name__]
        exec(compile(source, path, "exec"), module.__dict__)


def find(name: str) -> str:
    """In a fresh process: what finds the mutant, or nothing."""
    sys.meta_path.insert(0, Finder(mutated(MUTANTS[name])))  # type: ignore[arg-type]
    if name in NODES:
        return _first(range(NODES[name], NODES[name] + NODE_SEEDS), _plays_nodes)
    if why := _first(range(FEW), _plays_cores):
        return why
    failed: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            failed.extend([report.nodeid] * report.failed)

    tests = str(ROOT / "tests/unit/core")
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no", tests], [Watch()])
    return failed[0] if failed else _first(range(FEW, SEEDS), _plays_cores)


def _first(seeds: range, plays: Callable[[int], str]) -> str:
    return next((f"seed {seed}: {why[:200]}" for seed in seeds if (why := plays(seed))), "")


def _plays_cores(seed: int) -> str:
    from tests.support.core_fuzz import World, broken

    return broken(World(seed))


def _plays_nodes(seed: int) -> str:
    from tests.harness.fuzz.faults import scenario
    from tests.harness.fuzz.stage import play

    try:
        return play(scenario(seed)).violation or ""
    except Exception as error:
        return repr(error)


def find_all() -> None:
    """Print what finds each, as soon as it is known."""

    def found(name: str) -> str:
        command = [sys.executable, "-m", "tests.support.core_mutants", name]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        return json.dumps([name, ended.stdout.splitlines()[-1] if ended.returncode == 1 else None])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(found, MUTANTS):
            print(line, flush=True)


if __name__ == "__main__" and sys.argv[1] == "--all":
    find_all()
elif __name__ == "__main__":
    found_by = find(sys.argv[1])
    print(found_by or "not found")
    sys.exit(bool(found_by))
