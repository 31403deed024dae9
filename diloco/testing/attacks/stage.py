"""One attack is played: the honest peers meet, the attacker begins, and what came of it is counted.

Nothing is left of a swarm that was played, whatever an attack did to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from diloco.sim.virtual_time import DeadlockError, virtual_time
from diloco.swarm.wire.streams import BROKEN
from diloco.testing.attacks.arena import Arena, Attack
from diloco.testing.attacks.attacker import Attacker
from diloco.testing.fuzz.crowd import Member, small_pieces

__all__ = ["COMMON", "Outcome", "play"]

BEGIN_VERSION = 3


WATCH_EVERY_S = 2.0


PATIENCE_S = 30.0  # beyond one and a half times what the honest peers need alone


SETTLE_S = 5.0


STORM_TURNS = 250_000  # beyond twenty times what the honest peers need alone


COMMON = (
    "another_history", "claim", "contribution_broke", "fetch_failed", "gave_up_waiting", "inner_state", "join", "leave",
    "lost", "missing", "refused_us", "takeover", "units",
)  # fmt: skip
"""Events that may name any honest peer; every other one that names a peer accuses it."""


Tell = Callable[[str], None]


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
