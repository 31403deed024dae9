"""What a peer says on stderr, to whoever started it: how others join, for whom it waits, who comes and goes, the end.

The log of most programs shows warnings only, so there these lines would reach nobody. Rank 0 has the node,
and therefore speaks alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from diloco.attach.node_link import NodeHandle
from diloco.attach.ranks import RankGroup
from diloco.swarm.node.node import OnEvent
from diloco.text import counted, human_bytes, plain

__all__ = ["ConsoleLog", "Listener"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listener:
    """Who hears of an attached peer: of events, of its address, and of its end (whether it has finished).

    `joining` is the context in which it joins, and `exchanging` that of later calls. `on_leave` is told which error, if
    any, makes it leave. Without `ends_loop` the loop looks at `interrupted` itself.
    """

    on_event: OnEvent
    on_ready: Callable[[str], None]
    on_end: Callable[[bool], None] = lambda finished: None
    joining: Callable[[], AbstractContextManager[None]] = nullcontext
    exchanging: Callable[[], AbstractContextManager[None]] = nullcontext
    on_leave: Callable[[type[BaseException] | None], None] = lambda kind: None
    ends_loop: bool = False


def _name(fields: Mapping[str, Any]) -> str:
    """How a peer is called: many have no name of their own."""
    name, peer = plain(fields.get("name", "peer")), plain(fields.get("peer", ""))
    return f"{name} ...{peer[-6:]}" if name == "peer" else name


class ConsoleLog:
    """Writes lines to stderr, on rank 0; `quiet` writes none."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._needed = 1  # peers that have to be there before the first inner step
        self.met = False  # whether another peer was ever there

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
        self.met = self.met or view.num_peers > 1
        self._needed = needed if view.look(lambda node: node.clock()[0] == 0) else 1
        self._count(view.num_peers)

    def _count(self, live: int) -> None:
        if live < self._needed:
            self.say(f"waiting for {self._needed - live} of {counted(self._needed, 'peer')}")

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something has happened in the swarm; most of it goes into the log only."""
        logger.info("%s %s", kind, fields)
        live = fields.get("live", 1)
        match kind:
            case "join":
                self.met = True
                self.say(f"{_name(fields)} joined, {counted(live, 'peer')} now")
                self._count(live)
            case "leave":
                self.say(f"{_name(fields)} left, {counted(live, 'peer')} now")
            case "lost":
                self.say(f"{_name(fields)} vanished ({plain(fields.get('why', ''))}), {counted(live, 'peer')} now")
            case "same_data":
                both = (_name({"name": n, "peer": p}) for n, p in zip(fields["names"], fields["peers"], strict=True))
                self.say(
                    f"{' and '.join(both)} train on the same data (cosine of what they contribute "
                    f"{fields['cosine']:.4f}), so together they learn what one learns; give each peer other data: "
                    "swarm.shard(dataset), or a seed of its own (swarm.seed)"
                )
            case "untrained":
                self.say(
                    f"{fields['parameters']} of {fields['of']} trained parameters {fields['why']}: {fields['names']}"
                )
            case "alone_again":
                wait = f" in {fields['wait_s']:.0f} s, unless somebody comes" if fields["wait_s"] else ""
                self.say(
                    f"nobody whom this peer knew answers; it goes on alone from outer step {fields['version']}{wait}"
                )
            case "calls_again":
                self.say(f"nobody answers yet; this peer calls its swarm for {fields['patience_s']:.0f} s")
            case "rounds_over":
                self.say(
                    f"rounds={fields['rounds']} are over, and training goes on with the last outer momentum; plan as "
                    "many as there are exchanges: rounds=max_steps / sync_every"
                )
            case "unreachable":
                self.say(f"others cannot call this peer; it trains all the same ({plain(fields.get('advice', ''))})")

    def ended(self, finished: bool, steps: int, version: int, sent: int, founder: bool) -> None:
        """This peer has left. A founder that has met nobody is told how not to end before others come."""
        done = "done" if finished else "dropped out"
        self.say(f"{done} after {steps} inner steps, at outer step {version}; {human_bytes(sent)} sent")
        if finished and not steps:
            self.say("it made no inner step; was there any data?")
        if founder and finished and not self.met:
            self.say("no other peer came; with min_peers=2 the first peer waits for a second one before it trains")
