"""Rules of the core and of nodes, broken one at a time: text of a module, and what it becomes.

    python -m tests.support.core_mutants NAME       ends with 1 when the fuzz or the tests of the
                                                    core find it
    python -m tests.support.core_mutants --all      a line for each, as JSON: its name, and what
                                                    finds it

What begins with a number breaks that rule. A mutant whose text is not in its module any more is an
error: when the code changes, so does the mutant.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FEW, SEEDS, NODE_SEEDS = 16, 60, 20

Mutant = list[tuple[str, str, str]]  # a module, what stands in it, and what it becomes
MUTANTS: dict[str, Mutant] = {
    "1: the longer history wins": [
        ("messages.heads", "return self.work, self.id", "return self.number, self.id")
    ],
    "1: of equal work each keeps its own": [
        ("core.peer", "if key > f.tip.key:", "if key[0] > f.tip.key[0]:")
    ],
    "1: ties fall at random": [
        (
            "messages.heads",
            'digest("tie", [line.peer for line, _ in self.lines])[:TIE_DIGITS]',
            'digest("tie", self)[:8]',
        ),
    ],
    "1: a damaged anchor stays": [
        ("core.tips", "f.mismatch, f.damaged = True, event.damaged", "pass")
    ],
    "1: what another history taught is sent": [
        (
            "core.tips",
            "if f.stale or overlaps(tip.book.merged, f.units):",
            "if overlaps(tip.book.merged, f.units):",
        ),
        ("core.contributions", "if not f.unsent or f.stale:", "if not f.unsent:"),
        (
            "core.contributions",
            "    if f.stale or f.waiting is None:",
            "    if f.waiting is None and not f.stale:",
        ),
    ],
    "2: all get records from the author": [("core.tips", "number >= core.settings.fanout or ", "")],
    "2: an author does not look at greater tips": [("core.author", "or f.behind() or", "or")],
    "2: a greater tip that nobody gives counts": [
        (
            "core.facts",
            "any(peer not in self.retry_at for peer in self.greater())",
            "bool(self.greater())",
        ),
    ],
    "2: who failed is asked like others": [
        ("core.tips", "if good := told.keys() - f.retry_at.keys():", "if good := set[str]():")
    ],
    "2: who gives old parts has given": [
        ("core.tips", "and head.key > f.tip.key and _is_b", "and _is_b")
    ],
    "2: who gives old records has given": [
        (
            "core.tips",
            "    if start is None:\n        if asked:",
            "    if start is None:\n        if False:",
        )
    ],
    "2: who is told to wait asks at once": [
        (
            "core.tips",
            'f.fetch, f.times_busy = Fetch("", core.now + pause_s)',
            "f.fetch, f.times_busy = None",
        )
    ],
    "2: who always says not now counts": [
        ("core.tips", "if bad or core.now - since > core.settings.stuck_s / 2:", "if bad:")
    ],
    "3: a dead author has no heir": [
        ("core.facts", "return named if named in able else", "return named or"),
    ],
    "3: the silent stay members": [
        ("core.members", "if now - one.heard > max(floor_s, beats * one.interval_s)]", "if False]")
    ],
    "3: newcomers begin at once": [("core.lifecycle", "if (there or late) and", "if")],
    "3: a sleeper does not notice": [
        ("core.peer", "if core.now - self._looked_at > core.settings.silence_s:", "if False:")
    ],
    "3: only one's own ears count": [
        (
            "core.members",
            "able = self.authors() | (heard - ",
            "able = self.authors() | (heard - heard - ",
        )
    ],
    "3: who leaves stays author": [
        ("core.facts", "or (self.hands_over() and not self.making())", ""),
        ("core.author", " or core.hands_over():", ":"),
    ],
    "3: who leaves publishes what another one makes again": [
        ("core.author", "or f.moving or core.author_of(f) != core.me:", "or f.moving:"),
    ],
    "4: a contribution is offered once": [
        (
            "core.contributions",
            "elif via and (item.to != via or core.now >= item.again):",
            "elif via and item.to != via:",
        ),
    ],
    "4: nobody passes contributions on": [
        (
            "core.contributions",
            "if core.now < item.since + wait_s or f.tip.objection(item.line):",
            "if wait_s or f.tip.objection(item.line):",
        ),
    ],
    "4: contributions have no names": [
        ("core.history", "if line.stamp <= self.book.of(line.peer)[0]:", "if False:")
    ],
    "4: any base will do": [
        ("core.history", "if line.base not in self.bases:", "if False:"),
        ("core.author", "late = len(recent) - 1 - recent.index(item.line.base)", "late = 0"),
    ],
    "4: merged data is merged again": [
        (
            "core.history",
            'return "data" if overlaps(self.book.merged, line.units) else ""',
            'return ""',
        ),
    ],
    "4: a stuck author stays": [
        ("core.contributions", "core.now - known > patience_s:", "core.now - known > 1e9:")
    ],
    "4: a slow peer works for nothing": [
        ("core.contributions", "2 * after >= core.settings.late", "False")
    ],
    "4: a line may claim more than others accept": [
        (
            "core.contributions",
            "if f.steps >= MOST_CYCLES * core.settings.sync_every:",
            "if False:",
        ),
    ],
    "4: a want is a payload": [
        ("core.contributions", 'answer.says == "want" and item.asked', 'answer.says == "want"')
    ],
    "4: a full pool stays full": [
        ("core.contributions", "(f.tip.objection(line) or not _misfit(core, f))", "True")
    ],
    "5: an author waits for nobody": [
        ("core.author", "if missing and core.now < ends_at:", "if False:")
    ],
    "5: who hangs is waited for": [
        ("core.author", "if member.stalled(core.now, stall_s, first_step_s)]", "if False]"),
        (
            "core.patience",
            "return max(self._floor_s, (ROUNDS - 1)",
            "return 1e9 * max(self._floor_s, (ROUNDS - 1)",
        ),
    ],
    "5: a slow peer is waited for again and again": [
        ("core.patience", "self.slow.update(missing)", "pass")
    ],
    "5: two of one version have the same data": [
        ("core.author", "elif not overlaps(taken, item.line.units):", "else:")
    ],
    "5: a merge that failed is tried at once": [
        ("core.author", "f.again = core.now + core.settings.refresh_s", "pass")
    ],
    "6: momentum counts as a lie": [
        (
            "core.tips",
            "Apply(f.index, head, book, record.update, limit,",
            "Apply(f.index, head, book, record.update, limit / 2,",
        )
    ],
    "6: nobody measures an update": [
        (
            "core.tips",
            "Apply(f.index, head, book, record.update, limit,",
            'Apply(f.index, head, book, record.update, float("inf"),',
        ),
    ],
    "6: what was left out may come again": [
        (
            "core.history",
            "Entry(line.stamp, tokens,",
            "Entry(line.stamp if weight else known.stamp, tokens,",
        ),
    ],
    "6: a forged head counts against its alleged author": [
        ("core.tips", "    if signed:\n        core.shun", "    if True:\n        core.shun")
    ],
    "6: a version may have two lines of a peer": [
        (
            "core.history",
            "if len({line.peer for line, _ in head.lines}) < len(head.lines):",
            "if False:",
        ),
    ],
    "6: impossible lines are believed in a head": [
        ("core.tips", "if any(impossible(core, line) for line, _ in head.lines):", "if False:")
    ],
    "6: a beginning may have work": [
        (
            "core.history",
            "if not is_signed(head, head.author, signer, run_id) if head.number else head.work:",
            "if head.number and not is_signed(head, head.author, signer, run_id):",
        ),
    ],
    "leaving: at once": [
        ("core.lifecycle", "if not (core.due or kept or making or alone) or", "if True or")
    ],
    "leaving: without care for its versions": [
        (
            "core.lifecycle",
            "if not (core.due or kept or making or alone) or",
            "if not (core.due or kept or making) or",
        ),
    ],
    "accounts: what is not sent yet is discarded": [
        ("core.contributions", "[1] - f.unsent - (open_", "[1] - (open_")
    ],
    "accounts: the checkpoint knows best": [("core.contributions", "if lost < 0:", "if False:")],
    "status: a hello is not answered": [
        (
            "core.peer",
            "        core.send(peer, self.status())  # what changed since its own hello was read\n",
            "",
        ),
    ],
    "data: dealt from the end": [
        ("core.data", "new = first(gaps(taken), want)", "new = first(gaps(taken)[-1:], want)")
    ],
    "data: dealers do not listen": [
        ("core.data", "for one in (its, *said, *dealt)", "for one in (its, *dealt)")
    ],
    "data: of a pool, is not told": [
        (
            "core.data",
            "f.draft.units if f.draft else NONE, *here)",
            "f.draft.units if f.draft else NONE)",
        )
    ],
    "data: a sleeper keeps it": [
        (
            "core.peer",
            "core.settled_at, core.queue = False, core.now + core.settings.settle_s, NONE",
            "core.settled_at = False, core.now + core.settings.settle_s",
        ),
    ],
    "data: leases are not passed on": [
        ("core.data", "if message.peer == peer and dealer in core.members:", "if False:")
    ],
    "data: anybody grants": [
        (
            "core.data",
            "if message.peer == core.me and peer == core.lease_from:",
            "if message.peer == core.me:",
        )
    ],
}


# Of nodes, and the seed from which on the fuzz of nodes finds them.
NODES: dict[str, tuple[int, Mutant]] = {
    "node: a checkpoint moves while it is written": (
        20,
        [
            (
                "swarm.node.anchors",
                "            if copies:\n                self.end_snapshot()\n",
                "            self.end_snapshot()\n",
            ),
        ],
    ),
    "node: an anchor moves while it is read": (
        20,
        [
            (
                "swarm.wire.tasks",
                "        return self._lock\n\n",
                "        return asyncio.Lock()\n\n",
            ),
        ],
    ),
    "node: what a head leads to is not checked": (
        50,
        [
            (
                "swarm.node.anchors",
                "            if state_of(action.book, parts) != head.state:",
                "            if False:",
            ),
        ],
    ),
}
MUTANTS |= {name: mutant for name, (_, mutant) in NODES.items()}


def mutated(mutant: Mutant) -> dict[str, tuple[Path, str]]:
    """Files and sources by module."""
    sources: dict[str, tuple[Path, str]] = {}
    for name, before, after in mutant:
        path = ROOT / "diloco" / (name.replace(".", "/") + ".py")
        source = (
            sources[f"diloco.{name}"][1]
            if f"diloco.{name}" in sources
            else path.read_text(encoding="utf-8")
        )
        assert source.count(before) == 1, f"{before!r} is {source.count(before)} times in {name}"
        sources[f"diloco.{name}"] = path, source.replace(before, after)
    return sources


class Finder:
    """Imports the modules that are changed; it loads them, too."""

    def __init__(self, sources: dict[str, tuple[Path, str]]) -> None:
        self._sources = sources

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        if fullname not in self._sources:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._sources[fullname][0], loader=self
        )  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        path, source = self._sources[module.__name__]
        exec(compile(source, path, "exec"), module.__dict__)


def find(name: str) -> str:
    """In a fresh process: what finds the mutant, or nothing."""
    sys.meta_path.insert(0, Finder(mutated(MUTANTS[name])))  # type: ignore[arg-type]
    if name in NODES:
        first, _ = NODES[name]
        return _first(range(first, first + NODE_SEEDS), _plays_nodes)
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
    from diloco.testing.fuzz.faults import scenario
    from diloco.testing.fuzz.stage import play

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
