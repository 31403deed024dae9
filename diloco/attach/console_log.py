"""What a peer says on stderr, to whoever started it: the log of most programs shows warnings
only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from diloco.attach.node_link import NodeHandle
from diloco.attach.ranks import RankGroup
from diloco.swarm.node.node import OnEvent
from diloco.text import counted, human_bytes, plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Callbacks:
    """Who hears of an attached peer, and the contexts in which it joins and exchanges; `on_end`:
    whether it has finished.
    """

    on_event: OnEvent
    on_ready: Callable[[str], None]
    on_leave: Callable[[type[BaseException] | None], None]
    on_end: Callable[[bool], None]
    joining: Callable[[], AbstractContextManager[None]]
    exchanging: Callable[[], AbstractContextManager[None]]
    ends_loop: bool


class ConsoleLog:
    """Writes lines to stderr, on rank 0; `quiet` writes none."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._needed = 1  # peers that have to be there before the first inner step
        self._met = False  # whether another peer was ever there

    def say(self, text: str) -> None:
        """Write one line."""
        if not self._quiet and RankGroup.rank_and_size()[0] == 0:
            print(f"diloco: {text}", file=sys.stderr, flush=True)

    def address(self, address: str) -> None:
        """This peer listens."""
        if address:
            self.say(f"others join with address={address!r}")

    def waits(self, view: NodeHandle, needed: int) -> None:
        """So many peers are needed before the first inner step, unless others train."""
        self._met = self._met or view.num_peers > 1
        self._needed = needed if view.look(lambda node: node.clock()[0] == 0) else 1
        self._count(view.num_peers)

    def _count(self, live: int) -> None:
        if live < self._needed:
            self.say(f"waiting for {self._needed - live} of {counted(self._needed, 'peer')}")

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something has happened in the swarm; most of it goes into the log only."""
        logger.info("%s %s", kind, fields)
        if kind in _LINES:
            self.say(_LINES[kind](fields))
        if kind == "join":
            self._met = True
            self._count(fields.get("live", 1))

    def ended(self, finished: bool, steps: int, version: int, sent: int, founder: bool) -> None:
        """This peer has left. A founder that has met nobody is told how not to end before others
        come."""
        done = "done" if finished else "dropped out"
        self.say(
            f"{done} after {steps} inner steps, at outer step {version}; {human_bytes(sent)} sent"
        )
        if finished and not steps:
            self.say("it made no inner step; was there any data?")
        if founder and finished and not self._met:
            self.say(
                "no other peer came; with min_peers=2 the first peer waits for a second one before"
                " it trains"
            )


def _name(fields: Mapping[str, Any]) -> str:
    """How a peer is called: many have no name of their own."""
    name, peer = plain(fields.get("name", "peer")), plain(fields.get("peer", ""))
    return f"{name} ...{peer[-6:]}" if name == "peer" else name


def _now(fields: Mapping[str, Any]) -> str:
    return f"{counted(fields.get('live', 1), 'peer')} now"


def _same_data(fields: Mapping[str, Any]) -> str:
    both = (
        _name({"name": name, "peer": peer})
        for name, peer in zip(fields["names"], fields["peers"], strict=True)
    )
    return (
        f"{' and '.join(both)} train on the same data (cosine of what they contribute"
        f" {fields['cosine']:.4f}), so together they learn what one learns; give each peer other"
        " data: swarm.shard(dataset), or a seed of its own (swarm.seed)"
    )


def _alone_again(fields: Mapping[str, Any]) -> str:
    wait = f" in {fields['wait_s']:.0f} s, unless somebody comes" if fields["wait_s"] else ""
    return (
        "nobody whom this peer knew answers; it goes on alone from outer step"
        f" {fields['version']}{wait}"
    )


_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "join": lambda of: f"{_name(of)} joined, {_now(of)}",
    "leave": lambda of: f"{_name(of)} left, {_now(of)}",
    "lost": lambda of: f"{_name(of)} vanished ({plain(of.get('why', ''))}), {_now(of)}",
    "same_data": _same_data,
    "untrained": lambda of: (
        f"{of['parameters']} of {of['of']} trained parameters {of['why']}: {of['names']}"
    ),
    "alone_again": _alone_again,
    "calls_again": lambda of: (
        f"nobody answers yet; this peer calls its swarm for {of['patience_s']:.0f} s"
    ),
    "rounds_over": lambda of: (
        f"rounds={of['rounds']} are over, and training goes on with the last outer momentum; plan"
        " as many as there are exchanges: rounds=max_steps / sync_every"
    ),
    "unreachable": lambda of: (
        f"others cannot call this peer; it trains all the same ({plain(of.get('advice', ''))})"
    ),
}
