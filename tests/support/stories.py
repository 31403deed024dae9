"""Stories told of a `Crowd` of production peers: all invariants are watched, and a test asks what
became of whom.

All that a story knows of the insides of a node stands here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diloco.messages.heads import Head
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from diloco.testing.fuzz.crowd import Crowd
from diloco.testing.fuzz.invariants import Watch
from diloco.testing.fuzz.lives import PeerSpec
from diloco.testing.fuzz.virtual import virtual_swarm

__all__ = ["STEP_S", "TOKENS_PER_ROUND", "Story", "story"]

STEPS = 4
STEP_S = 0.5
TOKENS_PER_ROUND = STEPS * 8  # a step of the crowd is of 8 tokens
PATIENCE_S = 600.0
LOOKS_EVERY_S = 0.05


class Story:
    """Named peers that train in rounds of 4 steps, half a second each.

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
        self.loop, self.fragments, self.random = loop, fragments, random.Random(seed)
        self.crowd = Crowd(loop, seed, steps, heartbeat_s=heartbeat_s, **settings)
        self.watch = Watch(self.crowd)
        # tokens of fragment 0 that each counts as discarded when all rest
        self.lost: dict[str, int] = {}
        if outer_steps is not None:
            self.crowd.goal = outer_steps

    # -- what happens ------------------------------------------------------------------------------

    def begin(self, names: str) -> None:
        """All of these peers start, and train."""
        self.start(names, min_peers=len(names))
        nodes = self.nodes
        self.run_until(lambda: all(one.core.facts.steps for one in nodes().values()), "all train")

    def start(self, names: str, min_peers: int = 1, trains: bool = True) -> None:
        """Peers of these names start; where nobody is there yet, one of them does so a little
        before the others."""
        for name in self.random.sample(names, len(names)):
            first = not self.crowd.living()
            latency_s = self.random.choice([0.02, 0.1, 0.3])
            spec = PeerSpec(name, trains, step_s=STEP_S, latency_s=latency_s)
            life = self.crowd.start(spec, min_peers)
            if first:
                self.run_until(lambda life=life: life.ready, "the first peer listens")

    # -- time passes -------------------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let virtual time pass until something is so; `Violation` when it is in vain."""
        self.loop.run_until_complete(self.crowd.until(condition, PATIENCE_S, what, LOOKS_EVERY_S))

    def run_to_the_end(self, outer_steps: int = 0) -> dict[str, Node]:
        """Until every living trainer is done; if given, after so many outer steps more. Then all
        rest and leave.

        Returns the nodes of those that lived, by name.
        """
        if outer_steps:
            self.crowd.goal = outer_steps + max(self.version(name) for name in self.nodes())
        goal, self.crowd.goal = self.crowd.goal, 10**9
        done = lambda: all(self.version(name) >= goal for name in self.nodes())  # noqa: E731
        self.run_until(done, "all are done")
        self.loop.run_until_complete(self.watch.rest())
        nodes = self.nodes()
        self.lost = {name: node.core.discarded() for name, node in nodes.items()}
        self.loop.run_until_complete(self.watch.finish())
        return nodes

    # -- what is so --------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Node]:
        """The nodes of peers that are in the swarm and stay there, by name."""
        return {life.name: life.node for life in self.crowd.members() if life.node is not None}

    def node(self, name: str) -> Node:
        """The node of a peer's newest life."""
        node = self.crowd.lives[name].node
        assert node is not None
        return node

    def version(self, name: str) -> int:
        """The lowest version of a peer's fragments."""
        return min(f.tip.head.number for f in self.node(name).core.facts.fragments)

    def work(self, name: str) -> int:
        """The swarm clock at a peer's anchor."""
        return self.node(name).core.facts.control.tip.head.work

    def merged(self, name: str, of: str) -> tuple[int, int]:
        """Contributions of a peer, and tokens, that are in another one's anchor of fragment 0."""
        entry = self.node(name).core.facts.control.tip.book.ledger.get(of)
        return (entry.contributions, entry.tokens) if entry else (0, 0)

    def authors(self, name: str) -> list[str]:
        """The author of each fragment's next version, as a peer sees it."""
        facts = self.node(name).core.facts
        return [facts.author_of(f) for f in facts.fragments]

    def made(self) -> list[Head]:
        """All versions that were made, also those that were lost."""
        return [made.head for made in self.watch.versions.made.values() if made.head.number]

    def kinds(self, name: str) -> Counter[str]:
        """How many events of each kind a peer told."""
        told = [line.split() for line in self.crowd.story]
        return Counter(words[2] for words in told if words[1] == name)

    def discarded(self, name: str) -> int:
        """Tokens of fragment 0 that a peer counts as discarded."""
        return self.node(name).core.discarded()


@contextmanager
def story(*arguments: Any, **settings: Any) -> Iterator[Story]:
    """A `Story` in a virtual time of its own, with several chunks and parts of each fragment."""
    with virtual_swarm() as loop:
        yield Story(loop, *arguments, **settings)
