"""Honest peers that learn something, one attacker among them, and the figures by which an attack is judged.

    honest peers meet -> version 3 -> the attack begins -> the honest peers reach the last version, or do not

Every honest peer is a production peer of `testing.fuzz.crowd`. It descends to the same target from noisy gradients,
so a model has a loss: the mean squared distance from the target, over that at the start.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco.sim.virtual_time import VirtualLoop
from diloco.testing.fuzz.crowd import Crowd, Life, Member

__all__ = ["ATTACKS", "VERSIONS", "Act", "Arena", "Attack", "attack"]

OUTER = {"sync_every": 4, "fragments": 1, "lr": 0.7, "momentum": 0.5}
VERSIONS = 16
NOISE = 0.5  # of a gradient, in standard deviations per value
FOREVER_S = 1e9

Act = Callable[[Any], Awaitable[None]]  # of an `Attacker`


@dataclass(frozen=True)
class Attack:
    """One attack, and what of the swarm it needs.

    Attributes:
        name: on the command line. finding: its number in the reviews. who: the attacker's role. what: in a few words.
        act: what the attacker does; it may end, or go on until the honest peers are done.
        proof: the events of honest peers must name the attacker.
        limits: the largest harmless value of each figure that the attack measures.
        honest: how many honest peers there are. attackers: how many others, of whom the first one acts.
        lasts_s: virtual seconds in which the honest peers are not held to go on.
        outer, elements, units, adamw, steps_s, pieces: of the swarm; `steps_s` by number of the honest peer.
    """

    name: str
    finding: str
    who: str
    what: str
    act: Act
    proof: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    honest: int = 4
    attackers: int = 1
    lasts_s: float = 0.0
    outer: Mapping[str, Any] = field(default_factory=dict)
    elements: int = 400
    units: bool = False
    adamw: bool = False
    steps_s: Mapping[int, float] = field(default_factory=dict)
    pieces: tuple[int, int] = (64, 128)


ATTACKS: dict[str, Attack] = {}
"""All attacks by name, in the order of the table."""


def attack(name: str, finding: str, who: str, what: str, **options: Any) -> Callable[[Act], Act]:
    """Make an attack of what an attacker does; the options are those of `Attack`."""

    def register(act: Act) -> Act:
        assert name not in ATTACKS, f"two attacks are called {name}"
        ATTACKS[name] = Attack(name, finding, who, what, act, **options)
        return act

    return register


class Arena(Crowd):
    """A crowd that learns a target. A peer in `idle` takes no more inner steps, and its node goes on."""

    def __init__(self, loop: VirtualLoop, seed: int, attack: Attack) -> None:
        outer = {**OUTER, **attack.outer}
        super().__init__(loop, seed, outer, elements=attack.elements, units=attack.units)
        self.goal = VERSIONS
        self.attack = attack
        self.idle: set[str] = set()
        self.villains: list[str] = []
        self.measured: dict[str, float] = {}
        self.opened: Counter[tuple[str, str]] = Counter()
        self.target = 1.0 + 0.5 * torch.sin(torch.arange(float(attack.elements * outer["fragments"])))
        self._open = self.network.open
        self.network.open = self._count  # type: ignore[method-assign]

    async def _count(self, source: str, target: str, protocol: str) -> Any:
        self.opened[source, target] += 1
        return await self._open(source, target, protocol)

    def _parameters(self) -> Tensor:
        return torch.zeros(self.attack.elements * self.outer["fragments"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """As in the fuzz, or AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=0.02) if self.attack.adamw else super().optimizer(model)

    def gradient(self, life: Life, w: Tensor, r: random.Random) -> Tensor:
        """Towards the target, with noise."""
        assert life.lockstep is not None
        if life.name in self.idle:
            life.lockstep.call(asyncio.sleep(FOREVER_S))
        noise = torch.randn(w.numel(), generator=torch.Generator().manual_seed(r.getrandbits(62)))
        return w.detach() - self.target + NOISE * noise

    def honest(self) -> list[Life]:
        """The newest life of each honest peer."""
        return [life for name, life in sorted(self.lives.items()) if name not in self.villains]

    def trainers(self) -> list[Life]:
        """Honest peers that train, or would if they had not failed."""
        return [life for life in self.honest() if life.member.trains]

    def joins(self, name: str) -> Life:
        """An honest newcomer."""
        return self.start(Member(name))

    def holder(self) -> str:
        """Who holds the control fragment, as most peers believe."""
        leases = [life.node.protocol.leases.get(0) for life in self.living() if life.node is not None]
        return Counter(lease.holder for lease in leases if lease is not None).most_common(1)[0][0]
