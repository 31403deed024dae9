"""What a node is told when it is made: which run it joins, how it reaches others, and where it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config import SwarmConfig, flatten
from diloco.errors import PayloadError
from diloco.swarm.conversations.inner_state import Snapshot
from diloco.swarm.node.saved import Saved
from diloco.swarm.node.spot import Loss
from diloco.swarm.wire.gate import Gate

__all__ = ["NodeOptions", "RunSpec"]

SHOWN = 40  # characters of a value of a manifest


@dataclass(frozen=True)
class RunSpec:
    """The run as its peers know it on the wire. Peers with another manifest hash are refused.

    `tokens_per_step` is what an honest peer reports for one inner step; None where every peer chooses its own batch.
    """

    id: str
    manifest_hash: str  # 64 hexadecimal digits
    manifest_text: str  # JSON
    tokens_per_step: int | None = None

    def differences(self, theirs: str) -> list[str]:
        """The keys in which another peer's manifest differs from this one, as `key is THERE there, HERE here`.

        Raises `PayloadError` when the text, which is untrusted, is no manifest.
        """
        try:
            here, there = (dict(flatten(json.loads(text))) for text in (self.manifest_text, theirs))
        except (ValueError, AttributeError, RecursionError):
            raise PayloadError("the other side's manifest is not valid") from None
        keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        return [f"{key} is {_shown(there.get(key))} there, {_shown(here.get(key))} here" for key in keys]


@dataclass(frozen=True)
class NodeOptions:
    """The run that a node joins, and this peer's own settings.

    `network` travels whole: a new setting of `swarm.` needs no change here. `saved` is what a checkpoint kept; without
    it the node begins with the parameters of its replica, at version 0.
    """

    run: RunSpec
    network: SwarmConfig
    identity_path: Path  # the private key; it is made when it is missing
    name: str = "peer"  # in tables and logs
    saved: Saved | None = None
    gate: Gate = field(default_factory=Gate)  # decides who is let in; the default lets everybody in
    trains: bool = True  # False: this peer only holds fragments
    device: str = ""  # shown to watchers
    inner_state: Snapshot = lambda: None  # what a joiner gets of the inner optimizer; called in other threads
    loss: Loss | None = None  # for spot checks; without it this peer's contributors are not checked against data
    seed: str | None = None  # for choices that no other peer may foresee; None takes the operating system's randomness


def _shown(value: object) -> str:
    return str(value)[:SHOWN]
