"""Who takes part in a fuzz: peers, their lives, and their checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.attach.swarm import Attachment
from diloco.core.fragment import FragmentState
from diloco.swarm.node.node import Node
from diloco.swarm.node.saved import Saved


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class PeerSpec:
    """What a peer is, in all its lives."""

    name: str
    trains: bool = True
    reachable: bool = True  # others can call it, so it may make versions
    step_s: float = 1.0
    latency_s: float = 0.1
    clock: tuple[float, float] = (1.0, 0.0)  # rate, and offset in seconds
    lie: float = 1.0  # what its contributions are multiplied with
    boundary_s: float = 0.0  # work after each exchange: evaluation, and writing the checkpoint


@dataclass(frozen=True)
class LifeCheckpoint:
    """What the next life of a peer goes on from."""

    saved: Saved
    counters: tuple[int, int, int]  # steps, tokens, discarded tokens
    inner: Mapping[str, Any]


@dataclass(eq=False)
class Life:
    """One process of a peer. `ended` is "" while it lives, then "left", "done", "killed", or what
    it failed with."""

    member: PeerSpec
    number: int
    seeds: list[str]
    min_peers: int
    # the first is what it goes on from
    checkpoints: list[LifeCheckpoint] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    sync: Attachment | None = None  # once a trainer has attached its model
    node: Node | None = None  # once it joins
    ready: bool = False  # it has joined
    began: bool = False  # it has trained
    leaving: bool = False
    ended: str = ""
    hangs: bool = False  # its training loop does
    at_rest: bool = False  # its training loop has stopped, because all rest
    flips: int = 0  # of its anchors, by faults
    # no life before this one trained, so its counters are all that the peer ever did
    fresh: bool = True

    @property
    def name(self) -> str:
        """The peer's id."""
        return self.member.name

    @property
    def owner(self) -> str:
        """The owner of everything that this life does in the loop."""
        return f"{self.member.name}.{self.number}"

    @property
    def fragments(self) -> list[FragmentState]:
        """Of its node; none while there is no node."""
        return [] if self.node is None else self.node.core.facts.fragments

    @property
    def work(self) -> int:
        """Tokens in all its anchors."""
        return sum(f.tip.head.work for f in self.fragments)

    @property
    def state(self) -> object:
        """What a violation tells of it."""
        if self.node is None or not self.ready:
            return "not in the swarm"
        facts = self.node.core.facts
        seen = [(f.tip.head.number, facts.author_of(f), "".join(f.pool)) for f in self.fragments]
        return {
            "ready": facts.life.ready,
            "runs": self.node.core.runs,
            "number, author and bag": seen,
        }
