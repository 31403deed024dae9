"""Known bugs of nodes, to be made again one at a time, as `core_mutants` breaks the rules of the core.

    python -m tests.support.mutants NAME       ends with 1 when the fuzz finds the bug within `SEEDS`
    python -m tests.support.mutants --all      a line for each bug, as JSON: its name, and what finds it

A mutant whose text is not in its module any more is an error: when the code changes, so does the mutant.
"""

from __future__ import annotations

import importlib
import sys

from tests.support.core_mutants import Finder, Mutant, find_all, mutated

SEEDS = 20

MUTANTS: dict[str, Mutant] = {
    # The own node makes the next version in the tensors of the checkpoint that is being written.
    "torn-checkpoint": [
        (
            "swarm.node.anchors",
            "            if copies:\n                self.end_snapshot()\n",
            "            self.end_snapshot()\n",
        ),
    ],
    # An anchor is moved while it is read, or while a thread moves it.
    "fragment-is-not-locked": [
        ("swarm.wire.tasks", "        return self._lock\n\n", "        return asyncio.Lock()\n\n"),
    ],
    # The anchor here is damaged, and moves by every update all the same.
    "what-a-head-leads-to-is-not-checked": [
        ("swarm.node.anchors", "            if state_of(action.book, parts) != head.state:", "            if False:"),
    ],
}
FIRST = {"torn-checkpoint": 70, "fragment-is-not-locked": 70, "what-a-head-leads-to-is-not-checked": 50}  # seeds


def find(name: str) -> str:
    """In a fresh process: the seed that finds the bug, or nothing."""
    sys.meta_path.insert(0, Finder(mutated(MUTANTS[name])))  # type: ignore[arg-type]
    scenario = importlib.import_module("diloco.testing.fuzz.faults").scenario
    play = importlib.import_module("diloco.testing.fuzz.stage").play
    first = FIRST[name]
    for seed in range(first, first + SEEDS):
        try:
            violation = play(scenario(seed)).violation
        except Exception as error:
            violation = repr(error)
        if violation is not None:
            return f"seed {seed}: {violation[:300]}"
    return ""


if __name__ == "__main__" and sys.argv[1] == "--all":
    find_all("tests.support.mutants", MUTANTS)
elif __name__ == "__main__":
    found = find(sys.argv[1])
    print(found or "not found")
    sys.exit(bool(found))
