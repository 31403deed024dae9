"""Known bugs, to be made again one at a time: text of a module, and what it becomes.

    python -m tests.support.mutants NAME [FIRST [SEEDS]]      ends with 1 when the bug is found
    python -m tests.support.mutants --all                     a line for each bug, as JSON: its name, and what finds it

The fuzz has to find each of them within its stated seeds. A few need a coincidence for which thousands of seeds would
have to be played; for those a test arranges it, and has to fail. A mutant whose text is not in its module any more is
an error: when the code changes, so does the mutant.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest

from tests.support.places import ROOT


@dataclass(frozen=True)
class Mutant:
    """One bug: `before` stands once in the module, and becomes `after`; so does each pair of `also`.

    The fuzz finds it in `seeds` from `first` on, or `test` fails.
    """

    name: str
    story: str
    module: str
    before: str
    after: str
    first: int = 0
    seeds: int = 20
    also: tuple[tuple[str, str], ...] = ()
    test: str = ""

    def applied_to(self, source: str) -> str:
        """The source with the bug."""
        for before, after in ((self.before, self.after), *self.also):
            assert source.count(before) == 1, f"{self.name}: {before!r} is {source.count(before)} times in its module"
            source = source.replace(before, after)
        return source


MUTANTS = [
    Mutant(
        "lost-lease-takes-the-outer-state",
        "A syncer loses its lease while a thread merges; the outer state is gone when the thread wants it.",
        "diloco.swarm.node.merging",
        "digest = await in_thread(held.merge_, step, update, judged)",
        "digest = await in_thread(lambda: self._replica.held[fragment.index].merge_(step, update, judged))",
        first=604,
    ),
    Mutant(
        "half-open",
        "A peer is refused by another that has called it; it never calls again, and that one never hears of it.",
        "diloco.swarm.node.mesh",
        "for member in self._protocol.members.all():",
        "for member in []:",
        also=(
            ("if self._penalty(peer) is not None:", "if False:"),
            (
                "            self._dial_named(named)\n",
                "",
            ),
        ),
    ),
    Mutant(
        "refusal-outlives-its-penalty",
        "A peer that was refused for a while, and let in by another, ends long after with that old reason.",
        "diloco.swarm.node.mesh",
        "if not (self._started and self._outgoing):",
        "if True:",
        also=(("if self._started:", "if False:"),),
        test="tests/unit/swarm/test_control.py::test_a_refusal_counts_until_another_peer_lets_this_one_in",
    ),
    Mutant(
        "merges-what-was-forgotten",
        "Another anchor of the same version is adopted while a merge waits for the lock; it merges what was forgotten.",
        "diloco.swarm.node.merging",
        "not syncer.closes(close)",
        "syncer.version != close.base_version",
        test="tests/unit/swarm/test_rounds.py::test_a_version_of_forgotten_contributions_is_not_made",
    ),
    Mutant(
        "the-dead-say-what-is-true",
        "A syncer died of which a donor has not heard; what the donor made since is refused for ever.",
        "diloco.swarm.conversations.certificates",
        "lease = protocol.live_lease(header.fragment)",
        "lease = protocol.leases.get(header.fragment)",
        test="tests/unit/protocol/test_elections.py::test_the_dead_do_not_say_what_version_0_is",
    ),
    Mutant(
        "waits-for-min-peers-for-ever",
        "A peer that was cut off before enough had come waits for `min_peers`, while the others train.",
        "diloco.protocol.peer",
        "enough = len(self.members) + 1 >= self.min_peers or self.under_way()",
        "enough = len(self.members) + 1 >= self.min_peers",
        first=611,
    ),
    Mutant(
        "quorum-waits-for-discarded",
        "Two histories of equal length meet; each side waits for contributions that the other has given up.",
        "diloco.protocol.syncer",
        "return now - member.progress_at > (WAITING_S if has_update else member.stall_s())",
        "return has_update and now - member.progress_at > WAITING_S",
        first=1259,
    ),
    Mutant(
        "waits-for-each-other",
        "Under a quorum each of several peers waits for a fragment to which only it contributed.",
        "diloco.protocol.syncer",
        "return now - member.progress_at > (WAITING_S if has_update else member.stall_s())",
        "return False",
        first=1259,
    ),
    Mutant(
        "shows-an-earlier-certificate",
        "A peer that made versions of its own shows a certificate of an early one, and the syncer passes only that.",
        "diloco.swarm.node.anchors",
        "            passed(self._protocol, fragment)\n",
        "",
        first=41325,
        seeds=1,
    ),
    Mutant(
        "heir-cuts-its-master",
        "Who claimed a fragment before the leaver's last version came goes on from that anchor without its master.",
        "diloco.swarm.node.anchors",
        "if not outer and self._protocol.fragments[fragment].syncer is not None:",
        "if self._protocol.fragments[fragment].syncer is not None:",
        test="tests/sim/test_nothing_stale.py::test_nothing_is_stale_in_these_stories[async-248-changes7-False]",
    ),
    Mutant(
        "successor-merges-again",
        "A successor does not know what is in its anchor, and merges a contribution that is in it.",
        "diloco.protocol.peer",
        "fragment.syncer = Syncer(index, term, fragment.version, self.outer, made_by, merged, opened_at)",
        "fragment.syncer = Syncer(index, term, fragment.version, self.outer, made_by, now=opened_at)",
        test="tests/unit/protocol/test_peer.py::test_a_successor_takes_nothing_that_is_in_its_anchor",
    ),
    Mutant(
        "slow-stream-is-the-next-contribution",
        "A second stream of an earlier contribution is slow, and is taken for the next contribution.",
        "diloco.protocol.syncer",
        "(chunk, base_version) != (offer.chunks, offer.base_version)",
        "chunk != offer.chunks",
        test="tests/unit/protocol/test_syncer.py::test_a_slow_stream_is_not_taken_for_the_next_contribution",
    ),
    Mutant(
        "outcome-is-guessed",
        "After a broken stream a peer guesses whether its contribution was merged.",
        "diloco.swarm.node.rounds",
        "merged = protocol.accounts.merged(fragment).get(protocol.me, -1)",
        "merged = None",
        test="tests/unit/swarm/test_rounds.py::test_after_a_broken_stream_the_anchor_says_what_was_merged",
    ),
    Mutant(
        "caught-up-syncer-forgets-what-is-merged",
        "A syncer that caught up does not know what is in the version that it fetched.",
        "diloco.protocol.peer",
        "syncer.advance(version, fragment.merged(), now)",
        "syncer.advance(version, now=now)",
        test="tests/unit/protocol/test_peer.py::test_a_syncer_takes_nothing_that_is_in_what_it_fetched",
    ),
    Mutant(
        "claims-below-a-published-version",
        "A successor claims at once, below a version that the dead syncer published and that another peer has.",
        "diloco.protocol.succession",
        "return lease is not None and lease.holder not in view.members and lease.version > have",
        "return False",
        test="tests/unit/protocol/test_peer.py::test_nobody_claims_below_a_version_that_was_published",
    ),
    Mutant(
        "leaver-merges-after-handing-over",
        "A leaver gives its outer state away and makes another version, which the heir's state lacks.",
        "diloco.protocol.peer",
        "            self.fragments[fragment].handed_over = True",
        "            pass",
        test="tests/unit/protocol/test_peer.py::test_a_leaver_that_gave_its_outer_state_makes_no_version",
    ),
    Mutant(
        "lost-history-is-not-recounted",
        "Another history wins, and a peer goes on counting its tokens in the one that lost as applied.",
        "diloco.swarm.node.anchors",
        "            self._recount(header.shares)",
        "            pass",
        first=55,
    ),
    Mutant(
        "other-history-is-merged",
        "What was learned from the anchor of another history is merged into this one.",
        "diloco.protocol.peer",
        "if header.base_version == fragment.version and header.base_digest != fragment.digest:",
        "if False:",
        test="tests/unit/protocol/test_peer.py::test_a_contribution_is_refused_with_the_reason",
    ),
    Mutant(
        "higher-version-wins",
        "The history of more versions replaces one of more work: that of a fast peer which was alone.",
        "diloco.protocol.forks",
        "    return outweighs(theirs.shares, here.shares)\n",
        "    return theirs.version >= here.version\n",
        test="tests/unit/protocol/test_forks.py::test_of_equal_histories_that_of_the_syncer_goes_on",
    ),
    Mutant(
        "torn-checkpoint",
        "The own node makes the next version in the tensors of the checkpoint that is being written.",
        "diloco.swarm.node.anchors",
        """            if copies:
                self.end_snapshot()
        terms""",
        """            self.end_snapshot()
        terms""",
        first=264,
    ),
    Mutant(
        "fragment-is-not-locked",
        "A record is applied, and a contribution folded in, while a thread moves the same anchor.",
        "diloco.swarm.conversations.tasks",
        """        return self._lock

""",
        """        return asyncio.Lock()

""",
        first=0,
    ),
    Mutant(
        "begins-between-versions",
        "A newcomer begins from fragments of which some are a version ahead of the round under way.",
        "diloco.protocol.view",
        "if not self.lockstep or not self.trains:",
        "if True:",
        test="tests/unit/protocol/test_peer.py::test_nobody_begins_in_the_middle_of_a_publication",
    ),
    Mutant(
        "record-of-another-version",
        "An update is applied to an anchor that it does not follow.",
        "diloco.protocol.heads",
        "if (head.version, head.digest_before, head.skipped) != (version + 1, digest, skipped):",
        "if False:",
        test="tests/unit/protocol/test_heads.py::test_heads_that_do_not_link_or_do_not_add_up_are_not_adopted",
    ),
    Mutant(
        "higher-version-wins-the-lease",
        "Of two claims under one term the higher version wins, so that the order of arrival decides.",
        "diloco.protocol.fragment",
        "rank = (score(peer, claim.fragment), peer, claim.version)",
        "rank = (score(peer, claim.fragment) + 1e9 * (claim.version > current.version), peer, claim.version)",
        test="tests/unit/protocol/test_leases.py::test_the_order_of_arrival_does_not_matter",
    ),
    Mutant(
        "late-offer-survives-a-fetched-version",
        "A contribution on its way is in the version that its syncer fetched, and is merged once more.",
        "diloco.protocol.syncer",
        "if self.collects(peer) and not offer.whole and offer.base_version > self._merged.get(peer, -1)",
        "if self.collects(peer) and not offer.whole",
        test="tests/unit/protocol/test_syncer.py::test_what_is_in_a_version_that_was_fetched_is_dropped",
    ),
    Mutant(
        "flight-outlives-its-cancellation",
        "A flight that is given up leaves its stream running, and sends parameters that train on.",
        "diloco.swarm.conversations.tasks",
        """            if not task.done():
                task.cancel()
                await asyncio.wait([task])""",
        """            pass""",
        test="tests/unit/swarm/test_rounds.py::test_a_cancelled_exchange_sends_nothing_more",
    ),
    Mutant(
        "two-finish-and-wait-for-each-other",
        "Two peers at different places of the cycle finish, each waiting for what the other would send next.",
        "diloco.train.attachment",
        "if self.outer.staggered and self.outer.barrier:",
        "if False:",
        test="tests/sim/test_attachment.py::test_who_finishes_in_mid_cycle_sends_the_rest_too",
    ),
    Mutant(
        "history-comes-back",
        "Another history wins, and then this one after all; a peer forgot what it had in it.",
        "diloco.swarm.node.own_tokens",
        "        for base, tokens in lost.items():\n            self.was_left_out(base, tokens)\n",
        "",
        test="tests/unit/swarm/test_own_tokens.py::test_a_history_that_comes_back_has_everything_that_was_in_it",
    ),
    Mutant(
        "on-its-way-is-left-out",
        "A contribution whose fate is open is in a fetched anchor, and is taken for an earlier one that was left out.",
        "diloco.swarm.node.own_tokens",
        "missing = total - sum(self._applied.values()) if settled else 0",
        "missing = total - sum(self._applied.values())",
        test="tests/unit/swarm/test_own_tokens.py::test_a_contribution_on_its_way_is_not_one_that_was_left_out",
    ),
    Mutant(
        "given-up-and-merged",
        "A peer gives a contribution up for another history, while its own thread, once syncer, merges it.",
        "diloco.swarm.node.rounds",
        "exchange.discarded = self._protocol.accounts.merged(fragment).get(self._protocol.me, -1) < base_version",
        "exchange.discarded = True",
        test="tests/unit/swarm/test_rounds.py::test_what_the_adopted_anchor_holds_is_not_discarded",
    ),
    Mutant(
        "two-failures-wake-each-other",
        "Two exchanges fail at once and for ever; each failure is news that wakes the other.",
        "diloco.swarm.node.rounds",
        "await asyncio.sleep(RETRY_S)  # a failure is an event, so two flights would wake each other",
        "await self._context.tasks.pause(RETRY_S)",
        test="tests/unit/swarm/test_rounds.py::test_a_failed_fetch_waits_for_news",
    ),
    Mutant(
        "counted-when-taken",
        "Another history wins when an exchange is over and not yet taken; its tokens stay applied.",
        "diloco.swarm.node.rounds",
        "if exchange.fragment == CONTROL_FRAGMENT:  # at once: another history may win before this is taken",
        "if False:",
        also=(
            (
                "        if not exchange.discarded:\n            return 0\n",
                "        own = self._anchors.own_tokens\n"
                "        fate = own.was_left_out if exchange.discarded else own.was_applied\n"
                "        fate(exchange.base_version, exchange.tokens)\n"
                "        if not exchange.discarded:\n            return 0\n",
            ),
        ),
        test="tests/unit/swarm/test_rounds.py::test_tokens_that_arrived_are_discarded_when_another_wins",
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
    """In a fresh process: the test or the seed that finds the bug, or None. With `first`, seeds are played anyway."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    assert mutant.module not in sys.modules, "the module is imported already; play mutants in a process of their own"
    sys.meta_path.insert(0, _Finder(mutant))
    sys.path.insert(0, str(ROOT / "scripts"))
    if mutant.test and first is None:
        ended = pytest.main([str(ROOT / mutant.test), "--quiet", "-p", "no:cacheprovider", "-m", ""])
        return mutant.test if ended is pytest.ExitCode.TESTS_FAILED else None
    scenario = importlib.import_module("diloco.testing.fuzz.faults").scenario
    play = importlib.import_module("diloco.testing.fuzz.stage").play
    begin = mutant.first if first is None else first
    for seed in range(begin, begin + (mutant.seeds if seeds is None else seeds)):
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
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # what pytest says of the test
        return name, find(name)


if __name__ == "__main__" and sys.argv[1] == "--all":
    find_all()
elif __name__ == "__main__":
    found = find(sys.argv[1], *map(int, sys.argv[2:]))
    print(f"{sys.argv[1]}: {'not found' if found is None else f'found by {found}'}")
    sys.exit(found is not None)
