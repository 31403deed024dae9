"""What a training loop asks of its peer besides training, its data and figures; and what its user hears of it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from diloco.config import SwarmConfig
from diloco.errors import ConfigError
from diloco.swarm.node.node import Node
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.wire.libp2p import identity_number
from diloco.train.arguments import as_typed
from diloco.train.attachment import Attachment
from diloco.train.island import Island
from diloco.train.shards import Living, shard
from diloco.train.voice import Voice

__all__ = ["Outlook"]


class Outlook(ABC):
    """The half of a `Swarm` that answers questions; see there for what is set."""

    network: SwarmConfig
    _typed: bool  # errors name the arguments of `Swarm`
    runtime: Runtime | None
    on_event: Callable[[str, dict[str, object]], None]
    on_ready: Callable[[str], None]

    def __init__(self, voice: Voice) -> None:
        self.attachment: Attachment | None = None
        self._voice = voice
        self._sharded = False  # whether `shard` was asked for
        self._living: Living | None = None
        self._seed: int | None = None
        self._told_address: str | None = None

    @abstractmethod
    def _key_file(self) -> Path:
        """Where this peer's private key is, or will be."""

    @property
    def seed(self) -> int:
        """A seed of this peer (32 bits), for the order of its data: other peers have others, and it stays the same as
        long as `identity` does. All ranks of an island ask for it together, once there is a process group.
        """
        if self._seed is None:
            self._seed = self._own_seed()
        return self._seed

    @property
    def index(self) -> int:
        """Which of the peers that train now this one is, in the order of their ids: 0 for one alone, and before a model
        is attached. It changes when others come and go. Rank 0 knows it, the other ranks of an island say 0.
        """
        if self.attachment is None or self.attachment.view is None:
            return 0
        return self.attachment.view.look(lambda node: _trainers(node).index(node.protocol.me))

    def shard(self, dataset: Any, *, index: int | None = None, of: int | None = None) -> Any:
        """The data of this peer: other peers have the same data in another order, or other items.

        A dataset with a length comes in an order that follows from `seed`; one of the library datasets stays one. A
        loader may put it into an order of its own besides. Of a stream this peer gets its share: each item belongs to
        one of the peers that are attached when it is reached, and those of a peer that goes to the others. This works
        in workers of a DataLoader, too, if all peers have equally many.

        With `index` and `of` it is a fixed part of any dataset: the parts of different index have nothing in common.

        Raises `ConfigError` for what cannot be sharded: a mapping, an array of tokens without `index` and `of`, and a
        stream without them on an island of several ranks, of which rank 0 alone knows who is there.
        """
        self._sharded = True
        return shard(dataset, lambda: self.seed, self._peers_there, index, of)

    def _share_among(self, living: Living | None) -> None:
        """Tell a share of a stream, that was taken before there was a swarm, who is there."""
        self._living = living or self._living

    def figures(self) -> dict[str, float]:
        """This peer's part in the swarm, for the logs of the training loop; empty before it is attached, and on ranks
        other than 0: peers that are connected, outer steps, bytes, tokens that were lost, and the share of the time in
        which this peer waited for others.
        """
        sync = self.attachment
        if sync is None or sync.view is None:
            return {}
        seconds, traffic = sync.phases.seconds(), sync.view.node.traffic
        return {
            "diloco/peers": sync.view.num_peers,
            "diloco/round": sync.version,
            "diloco/bytes_sent": traffic.bytes_sent,
            "diloco/bytes_received": traffic.bytes_received,
            "diloco/wait_share": seconds.wait / max(sum(astuple(seconds)), 1e-9),
            "diloco/tokens_discarded": sync.discarded_tokens,
        }

    def _own_seed(self) -> int:
        rank, size = Island.place()
        if size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"swarm.seed: {os.environ['WORLD_SIZE']} processes were started together, and there is no process "
                "group yet, in which rank 0 would tell it; make one first, or ask after attach(...)"
            )
        seed = 0
        if rank == 0:
            file = self._key_file()
            simulated = int.from_bytes(sha256(str(file).encode()).digest()[:6], "big")  # a file that is never made
            with as_typed(self._typed):
                seed = (identity_number(file) if self.runtime is None else simulated) % 2**32
        if size == 1:
            return seed
        island = Island.here(torch.device("cpu")) if self.attachment is None else self.attachment.island
        return island.share_integers([seed])[0]

    # -- what is heard of the swarm -----------------------------------------------------------------------------------

    def _peers_there(self) -> Living:
        if Island.place()[1] > 1:
            raise ConfigError(
                "shard: rank 0 alone knows who is there, so the ranks cannot share a stream; give index, of"
            )
        self._living = self._living or Living()
        return self._living

    def _heard(self, kind: str, fields: dict[str, object]) -> None:
        if kind in ("join", "leave", "lost") and self.attachment is not None and self.attachment.node is not None:
            self._share(self.attachment.node)
        self.on_event(kind, fields)

    def _share(self, node: Node) -> None:
        if self._living is not None:
            self._living.are(node.protocol.me, _trainers(node))

    def _told(self, address: str) -> None:
        """The address is known, perhaps for the second time."""
        if address != self._told_address:
            self._told_address = address
            self.on_ready(address)

    def _ready(self, address: str) -> None:
        self._told(address)
        if self.attachment is not None and self.attachment.view is not None:
            self.attachment.view.look(self._share)
            self._voice.waits(self.attachment.view, self.network.min_peers)

    def _ended(self, finished: bool) -> None:
        sync = self.attachment
        if sync is not None and sync.view is not None:
            sent, founder = sync.view.node.traffic.bytes_sent, not self.network.initial_peers
            self._voice.ended(finished, sync.steps, sync.version, sent, founder)


def _trainers(node: Node) -> list[str]:
    """The peers that train, this one included, in the order of their ids."""
    protocol = node.protocol
    others = (member.peer for member in protocol.members.all() if member.trains and not member.status.gone)
    return sorted([protocol.me, *others])
