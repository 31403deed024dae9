"""Stories told of a `Crowd` of production peers: all invariants are watched, and a test asks what became of whom.

All that a story knows of the insides of a node stands here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import Units, count, union
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.node import Node
from diloco.testing.fuzz.crowd import Crowd, Life, Member, small_pieces
from diloco.testing.fuzz.invariants import Violation, Watch, check_end
from diloco.testing.fuzz.lineage import Made
from diloco.testing.fuzz.stage import quiet_process

__all__ = ["SEQUENCES_PER_ROUND", "TOKENS_PER_ROUND", "Belief", "Dealt", "Story", "agreed", "story"]

STEPS = 4
STEP_S = 0.5
TOKENS_PER_ROUND = STEPS * 8  # a step of the crowd is of 8 tokens
SEQUENCES_PER_ROUND = STEPS * 2  # in 2 sequences
PATIENCE_S = 600.0
TOLD = 30  # lines of the story behind a violation


class Belief(NamedTuple):
    """Who is syncer of a fragment under which term, as one peer sees it."""

    holder: str
    term: int


class Dealt(NamedTuple):
    """The state of the data at the end of a story: the work units of each contribution that is in the model, and
    `cursor`, `open` and `free` of the `Ledger` of the peer that deals.
    """

    learned: list[Units]
    cursor: int
    open: Units
    free: Units

    @property
    def applied(self) -> Units:
        """All that is in the model."""
        return union(*self.learned)

    @property
    def twice(self) -> int:
        """Sequences that are in the model more than once."""
        return sum(map(count, self.learned)) - count(self.applied)


class Story:
    """Named peers that train in rounds of 4 steps, half a second each.

    Args:
        loop: where virtual time passes. seed: of all that is drawn, also of latencies and of the order of starts.
        fragments: of the model. outer_steps: after which trainers are done; None is never.
        outer: more settings of the outer step. settings: of the `Crowd`.

    Whatever breaks an invariant raises `Violation`.
    """

    def __init__(
        self, loop: VirtualLoop, seed: int = 0, fragments: int = 4, outer_steps: int | None = 3, *,
        outer: dict[str, Any] | None = None, heartbeat_s: float = 1.0, **settings: Any,
    ) -> None:  # fmt: skip
        steps = {"sync_every": STEPS, "fragments": fragments, "lr": 0.7, "momentum": 0.9, **(outer or {})}
        self.loop, self.fragments, self.random = loop, fragments, random.Random(seed)
        self.crowd = Crowd(loop, seed, steps, heartbeat_s=heartbeat_s, **settings)
        self.watch = Watch(self.crowd)
        if outer_steps is not None:
            self.crowd.goal = outer_steps

    # -- what happens -------------------------------------------------------------------------------------------------

    def begin(self, names: str) -> None:
        """All of these peers start, and train."""
        self.start(names, min_peers=len(names))
        self.run_until_training()

    def start(self, names: str, min_peers: int = 1, trains: bool = True) -> None:
        """Peers of these names start; where nobody is there yet, one of them does so a little before the others."""
        for name in self.random.sample(names, len(names)):
            first = not self.crowd.living()
            latency_s = self.random.choice([0.02, 0.1, 0.3])
            life = self.crowd.start(Member(name, trains, STEP_S, latency_s), min_peers)
            if first:
                self.run_until(lambda life=life: life.ready, "the first peer listens")

    def freeze(self, name: str, seconds: float) -> None:
        """A peer is stopped for a while; its clock goes on."""
        self.crowd.torn = True
        owner = self.crowd.lives[name].owner
        self.loop.freeze(owner)
        self.loop.at(self.loop.seconds + seconds, self.loop.thaw, owner)

    def split(self, one: str, other: str) -> None:
        """Peers of two sides reach each other no more, and notice at once."""
        self.crowd.torn = True
        for pair in product(one, other):
            self.crowd.network.cut(*pair)
            self.crowd.network.reset(*pair)

    def mend(self, one: str, other: str) -> None:
        """Peers of two sides can reach each other again."""
        for pair in product(one, other):
            self.crowd.network.mend(*pair)

    # -- time passes --------------------------------------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let virtual time pass until the turn after which something is so; `Violation` when it is in vain."""
        reached, look = self.loop.create_future(), self.loop.on_turn
        assert look is not None

        def looks() -> None:
            look()
            if not reached.done() and (self.crowd.failures or condition()):
                reached.set_result(None)

        self.loop.on_turn = looks
        try:
            self.loop.run_until_complete(asyncio.wait([reached], timeout=PATIENCE_S))
        finally:
            self.loop.on_turn = look
        if self.crowd.failures or not reached.done():
            raise Violation("\n".join([*self.crowd.failures, f"waits until {what}:", *self.crowd.story[-TOLD:]]))

    def settle(self) -> None:
        """Until all peers are in the swarm, and believe in the same living syncers."""

        def settled() -> bool:
            living = [life for life in self.crowd.living() if not life.leaving]
            one, *others = beliefs = [self.beliefs(node) for node in self.nodes().values()] or [{}]
            alike = len(beliefs) == len(living) and all(belief == one for belief in others)
            holders = {belief.holder for belief in one.values()}
            return alike and len(one) == self.fragments and holders <= self.nodes().keys()

        self.run_until(settled, "all believe in the same syncers")

    def run_until_training(self) -> None:
        """Until all trainers take inner steps. Before that, the others would wait for a peer that dies."""
        self.settle()
        trainers = [node.protocol for node in self.nodes().values() if node.protocol.trains]
        self.run_until(lambda: all(peer.state == "training" for peer in trainers), "all train")

    def run_to_the_end(self, outer_steps: int = 0) -> list[Node]:
        """Until every living trainer is done; if given, after so many outer steps more.

        Returns the nodes of the living by name, as they were before anybody left. They all left then, and the last
        checks were made.
        """
        if outer_steps:
            fragments = [fragment for node in self.nodes().values() for fragment in node.protocol.fragments]
            self.crowd.goal = outer_steps + max(fragment.steps for fragment in fragments)
        self.run_until(lambda: all(map(_done, self.crowd.living())), "all trainers are done")
        lives = sorted(self.crowd.lives.items())
        nodes = [self.node(name) for name, life in lives if life.ended in ("", "done") and not life.leaving]
        self.last_beliefs = [self.beliefs(node) for node in nodes]
        self.last_held = [self.held(node.protocol.name) for node in nodes]
        self.run_until(lambda: not any(life.member.trains for life in self.crowd.living()), "all trainers have left")
        for life in self.crowd.living():
            self.crowd.leave(life.name)
        self.run_until(lambda: not self.crowd.living(), "all hosts have left")
        self.run_for(5.0)
        check_end(self.crowd, self.watch.lineage)
        return nodes

    # -- what is so ---------------------------------------------------------------------------------------------------

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
        return min(self.node(name).protocol.versions)

    def beliefs(self, node: Node) -> dict[int, Belief]:
        """Whom a node believes to be syncer of each fragment; those without one are left out."""
        leases = [(fragment, node.protocol.leases.get(fragment)) for fragment in range(self.fragments)]
        return {fragment: Belief(lease.holder, lease.term) for fragment, lease in leases if lease is not None}

    def held(self, name: str) -> list[int]:
        """The fragments that a peer is syncer of."""
        return sorted(self.node(name).replica.aggregates)

    def made(self) -> list[Made]:
        """All versions that were made, also those that were lost."""
        return list(self.watch.lineage.made.values())

    def contributors(self, made: Made) -> str:
        """Names of the peers whose contributions a version is made of."""
        return "".join(whose.peer for whose, _ in made.contributions)

    def kinds(self, name: str) -> Counter[str]:
        """How many events of each kind a peer told."""
        told = [line.split() for line in self.crowd.story]
        return Counter(words[2] for words in told if words[1] == name)

    def discarded_tokens(self) -> int:
        """Tokens that all peers together counted as discarded."""
        return sum(life.sync.discarded_tokens for life in self.crowd.lives.values() if life.sync is not None)

    def dealer(self) -> str:
        """The syncer of the control fragment, which deals out the data."""
        [name] = [name for name, node in self.nodes().items() if CONTROL_FRAGMENT in node.protocol.syncers]
        return name

    def dealt(self, nodes: list[Node]) -> Dealt:
        """Which data the last anchors of these nodes were learned from, and which data is left."""
        [ledger] = [
            node.protocol.accounts.dealer.ledger for node in nodes if CONTROL_FRAGMENT in node.replica.aggregates
        ]
        assert ledger is not None
        learned = self.watch.lineage.units(nodes[0].protocol.digests[CONTROL_FRAGMENT])
        return Dealt(learned, ledger.cursor, ledger.open, ledger.free)

    def has_units(self, name: str) -> Units:
        """The sequences that are leased to a peer, and that are not in the model as far as it knows."""
        return self.node(name).protocol.accounts.units


def agreed(swarm: Story, nodes: list[Node], version: int | None = None) -> None:
    """All trainers end with the same anchors, and all peers believe in the same living syncers.

    A host need not have the last version of a fragment that it does not hold: the trainers do not wait for that.
    """
    names = {node.protocol.name for node in nodes}
    one = next(node for node in nodes if node.protocol.trains).protocol
    for node, beliefs, held in zip(nodes, swarm.last_beliefs, swarm.last_held, strict=True):
        for fragment in range(swarm.fragments) if node.protocol.trains else held:
            mine, its = ((each.versions[fragment], each.digests[fragment]) for each in (node.protocol, one))
            assert mine == its, (node.protocol.name, fragment)
        assert beliefs == swarm.last_beliefs[0] and len(beliefs) == swarm.fragments, node.protocol.name
        assert held == [fragment for fragment, lease in beliefs.items() if lease.holder == node.protocol.name]
        assert {lease.holder for lease in beliefs.values()} <= names
    if version is not None:
        assert set(one.versions) == {version}


def _done(life: Life) -> bool:
    return not life.member.trains or (life.node is not None and life.node.protocol.state == "done")


@contextmanager
def story(*arguments: Any, **settings: Any) -> Iterator[Story]:
    """A `Story` in a virtual time of its own, with several chunks and parts of each fragment."""
    with quiet_process(), virtual_time() as loop, small_pieces():
        yield Story(loop, *arguments, **settings)
