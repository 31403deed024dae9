"""What a training process sees of its node: figures for logs and watchers, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from diloco.outer.digest import anchor_digest
from diloco.protocol.shares import Contributor
from diloco.protocol.snapshot import Snapshot
from diloco.swarm.node.node import Node
from diloco.swarm.node.runtime import Runtime

__all__ = ["NodeView"]

T = TypeVar("T")


class NodeView:
    """A node that lives in a runtime, seen from the training loop's thread, also after it was closed."""

    def __init__(self, node: Node, runtime: Runtime) -> None:
        self.node = node
        self.closed = False
        self._runtime = runtime

    def look(self, question: Callable[[Node], T]) -> T:
        """What a function finds in the node; nothing moves there meanwhile."""
        if self.closed:
            return question(self.node)

        async def here() -> T:
            return question(self.node)

        return self._runtime.call(here())

    def close(self) -> None:
        """Close the node. Can be called twice."""
        if not self.closed:
            self.closed = True
            self._runtime.call(self.node.close())

    @property
    def address(self) -> str:
        """The best address at which others reach this peer; empty when there is none."""
        return next(iter(self.node.addresses), "")

    @property
    def num_peers(self) -> int:
        """Connected peers, this one included."""
        return 1 + len(self.node.protocol.members)

    def membership(self) -> dict[str, int]:
        """Peers that are connected (`live`), that train, and that contributed to the newest version of fragment 0."""
        protocol = self.node.protocol
        return {"live": self.num_peers, "training": protocol.num_trainers(), "merged": protocol.num_merged()}

    def contributions(self) -> list[Contributor]:
        """How much each peer contributed to this peer's anchor."""
        return self.look(lambda node: node.protocol.accounts.contributions())

    def observe(self) -> Snapshot | None:
        """What this peer knows of the swarm; None when it has left."""
        return None if self.closed else self._runtime.call(self.node.observe())

    def anchor_digest(self) -> str:
        """Digest of the whole anchor (hex); equal on all peers at equal version."""
        return self.look(lambda node: anchor_digest(node.protocol.digests))

    def anchors(self) -> dict[str, str]:
        """`version:digest` (its first 16 digits) of each fragment's anchor now; equal on all peers at equal version."""

        def pairs(node: Node) -> dict[str, str]:
            both = zip(node.protocol.versions, node.protocol.digests, strict=True)
            return {str(fragment): f"{version}:{digest[:16]}" for fragment, (version, digest) in enumerate(both)}

        return self.look(pairs)
