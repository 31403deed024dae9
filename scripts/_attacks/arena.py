"""Honest peers that learn something, one attacker among them, and the figures by which an attack is judged.

    honest peers meet -> version 3 -> the attack begins -> the honest peers reach the last version, or do not

Every honest peer is a production peer of `_fuzz/crowd.py`. It descends to the same target from noisy gradients, so a
model has a loss: the mean squared distance from the target, over that at the start.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from _fuzz.crowd import Crowd, Life, Member, small_pieces
from diloco.sim.virtual_time import DeadlockError, VirtualLoop, virtual_time
from diloco.swarm.wire.streams import BROKEN

if TYPE_CHECKING:
    from _attacks.attacker import Attacker

__all__ = ["ATTACKS", "VERSIONS", "Arena", "Attack", "Outcome", "attack", "play"]

OUTER = {"sync_every": 4, "fragments": 1, "lr": 0.7, "momentum": 0.5}
BEGIN_VERSION = 3
VERSIONS = 16
NOISE = 0.5  # of a gradient, in standard deviations per value
WATCH_EVERY_S = 2.0
PATIENCE_S = 30.0  # beyond one and a half times what the honest peers need alone
SETTLE_S = 5.0
STORM_TURNS = 250_000  # beyond twenty times what the honest peers need alone
FOREVER_S = 1e9
COMMON = (
    "another_history", "claim", "contribution_broke", "fetch_failed", "gave_up_waiting", "inner_state", "join", "leave",
    "lost", "missing", "refused_us", "takeover", "units",
)  # fmt: skip
"""Events that may name any honest peer; every other one that names a peer accuses it."""

Tell = Callable[[str], None]
Act = Callable[["Attacker"], Awaitable[None]]


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


@dataclass(frozen=True)
class Outcome:
    """What the honest peers had in the end.

    Attributes:
        crashed: peers that failed, with the reason. done: whether all others reached the last version.
        seconds: virtual, until then. version: the lowest that one of them has. digests: different anchors.
        loss: of the worst peer; 1 at the start. worst: the same of the worst chunk of eight values.
        clock: tokens that the anchors are said to contain, over those that all peers processed.
        kept: tokens of honest peers that are in the anchor, over those that they processed.
        streams, lines: the most streams that one of them opened and event lines that it wrote.
        named: kinds of events that accuse the attacker. measured: figures of the attack.
    """

    crashed: tuple[str, ...]
    done: bool
    seconds: float
    version: int
    digests: int
    loss: float
    worst: float
    clock: float
    kept: float
    streams: int
    lines: int
    turns: int
    named: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)


class Storm(Exception):
    """The swarm is busier than any honest one."""


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


def play(
    attack: Attack, seed: int = 0, alone: bool = False, calm: Outcome | None = None, tell: Tell = lambda line: None
) -> Outcome:
    """Play an attack; `alone` plays its honest peers without the attacker, and `calm` is what came of that.

    `tell` is called with each line of the story.
    """
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with virtual_time() as loop, small_pieces(*attack.pieces):
            arena = Arena(loop, seed, attack)
            arena.tell = tell
            stage = _Stage(arena, alone, calm)
            try:
                loop.run_until_complete(stage.play())
            except (Storm, DeadlockError) as error:
                arena.failures.append(f"everybody: {str(error)[:60]}")
            return stage.outcome()
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)
        gc.collect()


class _Stage:
    def __init__(self, arena: Arena, alone: bool, calm: Outcome | None) -> None:
        self._arena, self._alone = arena, alone
        attack = arena.attack
        self._limit_s = 600.0 if calm is None else 1.5 * calm.seconds + PATIENCE_S + attack.lasts_s
        self._most_turns = STORM_TURNS + (0 if calm is None else 20 * calm.turns)
        self._ended_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def play(self) -> None:
        arena, attack = self._arena, self._arena.attack
        arena.loop.on_turn = self._look
        inside = 0 if self._alone or attack.who in ("host", "stranger", "nobody") else attack.attackers
        names = "abcdefgh"[: attack.honest + inside]
        for number, name in enumerate(names):
            arena.start(Member(name, step_s=attack.steps_s.get(number, 1.0)), min_peers=len(names))
            await self._until(lambda: all(life.ready for life in arena.living()), 10.0)
        await self._until(lambda: self._lowest() >= BEGIN_VERSION, 120.0)
        self._tasks.append(asyncio.ensure_future(self._watch()))
        if not self._alone:
            await self._begin(inside)
        await self._until(self._over, self._limit_s - arena.loop.seconds)
        self._ended_at = arena.loop.seconds
        for task in self._tasks:
            task.cancel()
        for life in arena.living():
            if life.name in arena.villains:
                arena.crash(life.name)
        await asyncio.sleep(SETTLE_S)

    async def _begin(self, inside: int) -> None:
        """Choose who attacks: a holder, others of the peers that train, or newcomers."""
        from _attacks.attacker import Attacker

        arena, attack = self._arena, self._arena.attack
        members = [life.name for life in arena.living()]
        if attack.who == "syncer":
            arena.villains = [arena.holder()]
        elif inside:
            arena.villains = [name for name in members if name != arena.holder()][-inside:]
        elif attack.who == "host":
            arena.villains = [f"x{number}" for number in range(attack.attackers)]
            for name in arena.villains:
                arena.start(replace(Member(name), trains=False))
            await self._until(lambda: all(arena.lives[name].node is not None for name in arena.villains), 20.0)
            await asyncio.sleep(SETTLE_S)
        else:
            arena.villains = ["x"] if attack.who == "stranger" else []
        attacker = Attacker(arena, arena.villains)
        self._tasks.append(asyncio.ensure_future(self._act(attacker)))

    async def _act(self, attacker: Attacker) -> None:
        try:
            await self._arena.attack.act(attacker)
        except BROKEN as error:
            self._arena.note("", f"the attack ended: {error!r}")

    async def _watch(self) -> None:
        """Somebody looks at the dashboard of each honest peer."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for life in self._arena.honest():
                if life.node is not None and not life.ended:
                    try:
                        life.node.context.recorder.packed(life.node.context.now())
                    except Exception as error:
                        self._arena.failures.append(f"{life.name} cannot be watched: {type(error).__name__}")

    def _look(self) -> None:
        if self._arena.loop.turns > self._most_turns:
            raise Storm("the event loop is busier than any honest swarm")

    def _lowest(self) -> int:
        nodes = [life.node for life in self._arena.living()]
        return min((min(node.protocol.versions) if node is not None else 0 for node in nodes), default=0)

    def _over(self) -> bool:
        return all(life.ended for life in self._arena.trainers())

    async def _until(self, condition: Callable[[], bool], patience_s: float) -> None:
        deadline = self._arena.loop.seconds + patience_s
        while not condition() and self._arena.loop.seconds < deadline:
            await asyncio.sleep(0.25)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """The figures."""
        arena = self._arena
        alive = [life for life in arena.trainers() if not life.ended.startswith(("failed", "could"))]
        nodes = [life.node for life in alive if life.node is not None]
        crashed = [f"{life.name}: {_reason(life.ended)}" for life in arena.trainers() if life not in alive]
        crashed += [line for line in arena.failures if line.split()[0] not in (*arena.villains, *arena.lives)]
        start, losses, worst = float((arena.target**2).mean()), [float("inf")], [float("inf")]
        if nodes:
            distances = [(torch.cat(node.replica.anchors) - arena.target) ** 2 / start for node in nodes]
            losses = [float(distance.mean()) for distance in distances]
            worst = [max(float(part.mean()) for part in torch.split(distance, 8)) for distance in distances]
        processed = {life.name: life.sync.tokens for life in arena.lives.values() if life.sync is not None}
        shares = nodes[0].protocol.accounts.shares(0) if nodes else {}
        mine = [life.name for life in alive]
        applied = sum(shares[name].tokens for name in mine if name in shares)
        clock = max((node.protocol.applied_tokens for node in nodes), default=0)
        names = [life.name for life in arena.honest()]
        return Outcome(
            crashed=tuple(crashed),
            done=bool(alive) and all(life.ended == "done" for life in alive),
            seconds=self._ended_at or arena.loop.seconds,
            version=min((min(node.protocol.versions) for node in nodes), default=0),
            digests=len({tuple(node.protocol.digests) for node in nodes}),
            loss=max(losses),
            worst=max(worst),
            clock=clock / max(1, sum(processed.values())),
            kept=applied / max(1, sum(processed[name] for name in mine)),
            streams=max(sum(n for (one, _), n in arena.opened.items() if one == name) for name in names),
            lines=max(sum(line[10:].split(" ")[0] == name for line in arena.story) for name in names),
            turns=arena.loop.turns,
            named=self._named(names),
            measured=dict(arena.measured),
        )

    def _named(self, honest: list[str]) -> tuple[str, ...]:
        """Kinds of events of honest peers that name an attacker, without those that name any peer."""
        kinds: Counter[str] = Counter()
        for line in self._arena.story:
            name, _, rest = line[10:].partition(" ")
            kind, _, fields = rest.strip().partition(" ")
            if name in honest and kind not in COMMON and any(f"'{who}'" in fields for who in self._arena.villains):
                kinds[kind] += 1
        return tuple(kind for kind, _ in kinds.most_common())


def _reason(ended: str) -> str:
    """How a life ended, in a few words."""
    return ended.removeprefix("failed: ").partition("(")[0]
