"""Known bugs, to be made again one at a time: text of a module, and what it becomes.

    python -m tests.support.mutants NAME [FIRST [SEEDS]]      ends with 1 when the bug is found
    python -m tests.support.mutants --all                     a line for each bug, as JSON: its name, and what finds it

The fuzz has to find each within its stated seeds. A mutant whose text is not in its module any more is an error:
when the code changes, so does the mutant.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from tests.support.places import ROOT

SEEDS = 20


@dataclass(frozen=True)
class Mutant:
    """One bug: `before` stands once in the module, and becomes `after`; so does each pair of `also`.

    The fuzz finds it in `SEEDS` from `first` on.
    """

    name: str
    story: str
    module: str
    before: str
    after: str
    first: int = 0
    also: tuple[tuple[str, str], ...] = ()

    def applied_to(self, source: str) -> str:
        """The source with the bug."""
        for before, after in ((self.before, self.after), *self.also):
            assert source.count(before) == 1, f"{self.name}: {before!r} is {source.count(before)} times in its module"
            source = source.replace(before, after)
        return source


MUTANTS = [
    Mutant(
        "torn-checkpoint",
        "The own node makes the next version in the tensors of the checkpoint that is being written.",
        "diloco.swarm.node.anchors",
        """            if copies:
                self.end_snapshot()
""",
        """            self.end_snapshot()
""",
    ),
    Mutant(
        "fragment-is-not-locked",
        "An anchor is moved while it is read, or while a thread moves it.",
        "diloco.swarm.wire.tasks",
        """        return self._lock

""",
        """        return asyncio.Lock()

""",
    ),
    Mutant(
        "what-a-head-leads-to-is-not-checked",
        "The anchor here is damaged, and moves by every update all the same.",
        "diloco.swarm.node.anchors",
        "            if state_of(action.book, parts) != head.state:",
        "            if False:",
        first=50,
    ),
]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with its bug."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = ROOT / (mutant.module.replace(".", "/") + ".py")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = self._mutant.applied_to(self._path.read_text(encoding="utf-8"))
        exec(compile(source, str(self._path), "exec"), module.__dict__)


def find(name: str, first: int | None = None, seeds: int | None = None) -> str | None:
    """In a fresh process: the seed that finds the bug, or None."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    assert mutant.module not in sys.modules, "the module is imported already; play mutants in a process of their own"
    sys.meta_path.insert(0, _Finder(mutant))
    sys.path.insert(0, str(ROOT / "scripts"))
    scenario = importlib.import_module("diloco.testing.fuzz.faults").scenario
    play = importlib.import_module("diloco.testing.fuzz.stage").play
    begin = mutant.first if first is None else first
    for seed in range(begin, begin + (SEEDS if seeds is None else seeds)):
        try:
            violation = play(scenario(seed)).violation
        except Exception as error:
            violation = repr(error)
        if violation is not None:
            return f"seed {seed}: {violation[:300]}"
    return None


def find_all() -> None:
    """Print what finds each bug, as soon as it is known. Each is played in a process of its own, forked from one that
    has imported the libraries, and nothing of diloco.
    """
    for library in ("numpy", "omegaconf", "pydantic", "safetensors.torch", "scipy.stats", "torch"):
        importlib.import_module(library)
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(_found, [mutant.name for mutant in MUTANTS]):
            print(json.dumps(found), flush=True)


def _found(name: str) -> tuple[str, str | None]:
    return name, find(name)


if __name__ == "__main__" and sys.argv[1] == "--all":
    find_all()
elif __name__ == "__main__":
    found = find(sys.argv[1], *map(int, sys.argv[2:]))
    print(f"{sys.argv[1]}: {'not found' if found is None else f'found by {found}'}")
    sys.exit(found is not None)
