"""One real peer that attacks: `python -m diloco.testing.attacks.bent ATTACK BEGIN_VERSION [overrides]`.

It is `diloco train` with the same overrides, until its anchors have the version; then its node is bent as in virtual
time (`attacker.py`). It attacks a fragment that it holds where the attack is a syncer's, and else one that it does not.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

from diloco.errors import guard
from diloco.swarm.node.node import Node
from diloco.testing.attacks.arena import Attack
from diloco.testing.attacks.attacker import Attacker, bend
from diloco.testing.attacks.catalogue import ATTACKS
from diloco.train.__main__ import peer

LOOK_S = 0.2


class Ground:
    """What an attack finds around it; as `Arena`, with real peers."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lives = {node.protocol.me: SimpleNamespace(node=node)}
        self.measured: dict[str, float] = {}
        self.idle = _Idle(node)
        self.loop = self

    @property
    def seconds(self) -> float:
        """Seconds of the loop that the attack runs in."""
        return asyncio.get_running_loop().time()

    def honest(self) -> list[Any]:
        """All other peers."""
        return [SimpleNamespace(name=member.peer, ended="") for member in self.node.protocol.members.all()]

    def note(self, name: str, text: str) -> None:
        """For people."""
        print(f"attack: {name} {text}", file=sys.stderr, flush=True)


class _Idle:
    def __init__(self, node: Node) -> None:
        self._node = node

    def add(self, name: str) -> None:
        """The training loop of this process goes no further than its next exchange."""

        async def never(counts: object) -> None:
            await asyncio.Event().wait()

        bend(self._node, "send", lambda _: never)


async def attacks(node: Node, attack: Attack, begin_version: int) -> None:
    """Wait for the version, and attack."""
    ground, protocol = Ground(node), node.protocol
    index: int | None = None
    while index is None or min(protocol.versions) < begin_version:
        await asyncio.sleep(LOOK_S)
        held = {lease.fragment for lease in protocol.leases.held_by(protocol.me)}
        wanted = sorted(held if attack.who == "syncer" else set(range(len(protocol.fragments))) - held)
        index = wanted[0] if wanted else None
    ground.note(protocol.me, f"begins {attack.name} on fragment {index} at versions {protocol.versions}")
    await attack.act(Attacker(ground, [protocol.me], index))  # type: ignore[arg-type]


def main() -> int:
    """As `python -m diloco.train`, with an attacker inside."""
    attack, begin_version = ATTACKS[sys.argv[1]], int(sys.argv[2])
    opened = Node.open

    async def open_bent(*arguments: Any) -> Node:
        node = await opened(*arguments)
        node.context.tasks.spawn(attacks(node, attack, begin_version))
        return node

    Node.open = open_bent  # type: ignore[assignment]
    return guard(lambda: peer(sys.argv[3:]))


if __name__ == "__main__":
    sys.exit(main())
