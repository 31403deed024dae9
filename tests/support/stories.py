"""A `Crowd` of production peers that a test drives step by step, and asks what became of whom.

All that these tests know of the insides of a node stands here.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diloco.core.facts import Facts
from diloco.messages.heads import Head
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from tests.harness.fuzz.crowd import Crowd
from tests.harness.fuzz.invariants import Watch
from tests.harness.fuzz.lives import PeerSpec
from tests.harness.fuzz.virtual import virtual_swarm

STEPS = 4
STEP_S = 0.5
TOKENS_PER_ROUND = STEPS * 8  # a step of the crowd is of 8 tokens


class DrivenCrowd(Crowd):
    """A `Crowd` whose virtual time passes as long as a test says."""

    def node(self, name: str) -> Node:
        """The node of a peer's newest life."""
        node = self.lives[name].node
        assert node is not None
        return node

    def facts(self, name: str) -> Facts:
        return self.node(name).core.facts

    def run_for(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def run_until(self, condition: Callable[[], object], what: str = "something") -> None:
        """Let virtual time pass until something is so; `Violation` when it is in vain."""
        self.loop.run_until_complete(self.until(condition, 600.0, what, 0.05))


class Story(DrivenCrowd):
    """Named peers that train in rounds of 4 steps, half a second each, and all invariants watched.

    Args:
        loop: where virtual time passes. seed: of all that is drawn, also of latencies and of the
            order of starts.
        fragments: of the model. outer_steps: after which trainers are done; None is never.
        outer: more settings of the outer step. settings: of the `Crowd`.

    Whatever breaks an invariant raises `Violation`.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int = 0,
        fragments: int = 4,
        outer_steps: int | None = 3,
        *,
        outer: dict[str, Any] | None = None,
        heartbeat_s: float = 1.0,
        **settings: Any,
    ) -> None:
        steps = {"sync_every": STEPS, "fragments": fragments, **(outer or {})}
        super().__init__(loop, seed, steps, heartbeat_s=heartbeat_s, **settings)
        self.random, self.watch = random.Random(seed), Watch(self)
        # tokens of fragment 0 that each counts as discarded when all rest
        self.lost: dict[str, int] = {}
        if outer_steps is not None:
            self.goal = outer_steps

    def begin(self, names: str) -> None:
        """All of these peers start, and train."""
        self.starts(names, min_peers=len(names))
        nodes = self.nodes
        self.run_until(lambda: all(self.facts(name).loop.steps for name in nodes()), "all train")

    def starts(self, names: str, min_peers: int = 1, trains: bool = True) -> None:
        """Peers of these names start, the first of a swarm a little before the others."""
        for name in self.random.sample(names, len(names)):
            first = not self.living()
            latency_s = self.random.choice([0.02, 0.1, 0.3])
            spec = PeerSpec(name, trains, step_s=STEP_S, latency_s=latency_s)
            life = self.start(spec, min_peers)
            if first:
                self.run_until(lambda life=life: life.ready, "the first peer listens")

    def run_to_the_end(self, outer_steps: int = 0) -> dict[str, Node]:
        """Until every living trainer is done; if given, after so many outer steps more. Then all
        rest and leave. Returns the nodes of those that lived, by name."""
        if outer_steps:
            self.goal = outer_steps + max(self.version(name) for name in self.nodes())
        goal, self.goal = self.goal, 10**9
        done = lambda: all(self.version(name) >= goal for name in self.nodes())  # noqa: E731
        self.run_until(done, "all are done")
        self.loop.run_until_complete(self.watch.rest())
        nodes = self.nodes()
        self.lost = {name: self.discarded(name) for name in nodes}
        self.loop.run_until_complete(self.watch.finish())
        return nodes

    # -- what is so --------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Node]:
        """The nodes of peers that are in the swarm and stay there, by name."""
        return {life.name: life.node for life in self.members() if life.node is not None}

    def version(self, name: str) -> int:
        """The lowest version of a peer's fragments."""
        return min(f.tip.head.number for f in self.facts(name).fragments)

    def work(self, name: str) -> int:
        """The swarm clock at a peer's anchor."""
        return self.facts(name).control.tip.head.work

    def merged(self, name: str, of: str) -> tuple[int, int]:
        """Contributions of a peer, and tokens, that are in another one's anchor of fragment 0."""
        entry = self.facts(name).control.tip.book.ledger.get(of)
        return (entry.contributions, entry.tokens) if entry else (0, 0)

    def authors(self, name: str) -> list[str]:
        """The author of each fragment's next version, as a peer sees it."""
        facts = self.facts(name)
        return [facts.author_of(f) for f in facts.fragments]

    def made(self) -> list[Head]:
        """All versions that were made, also those that were lost."""
        return [made.head for made in self.watch.versions.made.values() if made.head.number]

    def kinds(self, name: str) -> Counter[str]:
        """How many events of each kind a peer told."""
        told = [line.split() for line in self.story]
        return Counter(words[2] for words in told if words[1] == name)

    def discarded(self, name: str) -> int:
        """Tokens of fragment 0 that a peer counts as discarded."""
        return self.node(name).core.discarded()


@contextmanager
def story(*arguments: Any, **settings: Any) -> Iterator[Story]:
    """A `Story` in a virtual time of its own, with several chunks and parts of each fragment."""
    with virtual_swarm() as loop:
        yield Story(loop, *arguments, **settings)
