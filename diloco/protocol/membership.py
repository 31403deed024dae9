"""The members of the swarm, as one peer sees them, and where they can be called. Sans-IO.

hellos and heartbeats in -> live members and addresses out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco.config.address import problem
from diloco.protocol.messages.control import Hello, Status
from diloco.protocol.numbers import forget_oldest, leaps_too_far

__all__ = ["AddressBook", "Member", "Membership"]

SILENCE_FLOOR_S = 10.0
SILENCE_FACTOR = 8.0  # heartbeats at the measured interval that may go missing
STALL_FLOOR_S = 20.0
STALL_FACTOR = 10.0  # inner steps at the measured pace in whose time one must be done
STALL_INTERVALS = 3.0  # Large swarms say their progress seldom; one message that is late must not look like a stall.
STALL_UNMEASURED_S = 180.0  # a first step may compile kernels or wait for data
AWAKE_S = 5.0  # When more time than this passes between two looks at the members, this peer itself was asleep.
MAX_ADDRESSES = 4  # kept of one peer, the best first
MAX_PEERS = 4096  # whose addresses are kept


@dataclass
class Member:
    """Another peer: its last status, when it was heard of last, and when it made progress last.

    `ended_cycle` tells whether its inner steps have begun again with 0 since it was `starting`.
    """

    peer: str
    name: str
    trains: bool
    may_hold: bool
    status: Status
    heard_at: float
    progress_at: float
    device: str = ""
    interval_s: float = 0.0
    ended_cycle: bool = False
    round_versions: list[int] | None = None  # its anchors when it began the round that it is in
    began_at: float = 0.0  # when it was heard to begin that round
    pace: float = 0.0  # inner steps per second, as it said when it took steps last
    paused_at: float = -math.inf  # when it was heard last to save or to evaluate: it takes no steps, and says less pace

    def __post_init__(self) -> None:
        self._note_round(begins=True)

    @property
    def holds(self) -> bool:
        """Whether it can be a syncer now."""
        return self.may_hold and not self.status.blank

    def hear(self, status: Status, now: float) -> None:
        """Take in a status; the interval between statuses is measured as a moving average."""
        gap_s = now - self.heard_at
        self.interval_s = gap_s if self.interval_s == 0.0 else 0.9 * self.interval_s + 0.1 * gap_s
        moved = (status.state, status.versions, status.inner_step)
        if moved != (self.status.state, self.status.versions, self.status.inner_step):
            self.progress_at = now
        if (status.inner_step, status.tokens) == (self.status.inner_step, self.status.tokens):
            self.paused_at = now if status.steps_per_s < self.pace else self.paused_at
        else:
            self.pace = status.steps_per_s or self.pace
        begins = self.status.state != "training" or status.inner_step < self.status.inner_step
        self.heard_at = now
        begins_again = self.ended_cycle or status.inner_step < self.status.inner_step
        self.ended_cycle = begins_again and status.state != "starting"
        if status.figures is None and self.status.figures is not None:
            status = status.model_copy(update={"figures": self.status.figures})
        self.status = status
        self._note_round(begins)

    def _note_round(self, begins: bool) -> None:
        """A syncer's anchors may move on while it trains, if it is too slow for the others."""
        if self.status.state == "training" and begins:
            self.began_at, self.round_versions = self.heard_at, self.status.versions

    def silence_s(self) -> float:
        """Seconds of silence after which this peer counts as gone, from its own measured heartbeat."""
        return max(SILENCE_FLOOR_S, SILENCE_FACTOR * self.interval_s)

    def stall_s(self) -> float:
        """Seconds without progress after which nobody waits for this peer, from its own measured step time."""
        if self.status.steps_per_s <= 0.0:
            return STALL_UNMEASURED_S
        return max(STALL_FLOOR_S, STALL_FACTOR / self.status.steps_per_s, STALL_INTERVALS * self.interval_s)

    def stalled(self, now: float, progress_at: float = 0.0) -> bool:
        """Whether this peer makes no progress; `progress_at` is when a chunk showed some, and not its status."""
        return now - max(self.progress_at, progress_at) > self.stall_s()


class Membership:
    """The members that one peer is connected to. Losing one is an ordinary event; nothing here raises.

    `generation` grows whenever somebody joins, ends, or says that it takes part no more, so that what follows from the
    set of peers that take part can be cached.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._members: dict[str, Member] = {}
        self._in_order: list[Member] | None = None
        self._looked_at: float | None = None
        self._highest: list[int] | None = None  # versions, by fragment; None when it has to be computed anew

    def __contains__(self, peer: str) -> bool:
        return peer in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, peer: str) -> Member | None:
        """The member of that id, or None."""
        return self._members.get(peer)

    def all(self) -> list[Member]:
        """Members in the order of their ids, so that every walk over them is deterministic."""
        if self._in_order is None:
            self._in_order = [self._members[peer] for peer in sorted(self._members)]
        return self._in_order

    def join(self, peer: str, hello: Hello, now: float) -> bool:
        """Take in a hello; True when the peer was not a member before. A known peer may be another process by now."""
        new = peer not in self._members
        self._members[peer] = Member(peer, hello.name, hello.trains, hello.holds, hello.status, now, now, hello.device)
        self._changed()
        return new

    def hear(self, peer: str, status: Status, now: float) -> None:
        """A member says its status."""
        member = self._members[peer]
        before = member.status
        member.hear(status, now)
        if (status.gone, status.blank) != (before.gone, before.blank):
            self.generation += 1
        if self._highest is not None and status.versions != before.versions:
            if any(new < old for new, old in zip(status.versions, before.versions, strict=True)):
                self._highest = None
            else:
                self._highest = list(map(max, self._highest, status.versions))

    def remove(self, peer: str) -> Member:
        """Forget a member."""
        self._changed()
        return self._members.pop(peer)

    def _changed(self) -> None:
        self.generation += 1
        self._in_order = self._highest = None

    def silent(self, now: float) -> list[str]:
        """Members that have said nothing for longer than their own measured heartbeat allows.

        Nobody was silent while this peer was asleep (SIGSTOP, laptop lid): their messages wait to be read.
        """
        asleep_s = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at - AWAKE_S)
        self._looked_at = now
        for member in self._members.values() if asleep_s else ():
            member.heard_at = min(now, member.heard_at + asleep_s)
            member.progress_at = min(now, member.progress_at + asleep_s)
        return [member.peer for member in self.all() if now - member.heard_at > member.silence_s()]

    def highest_version(self, fragment: int) -> int:
        """Highest anchor version of a fragment that any member says it has; -1 when there are no members."""
        if not self._members:
            return -1
        if self._highest is None:
            self._highest = list(map(max, zip(*(m.status.versions for m in self._members.values()), strict=True)))
        return self._highest[fragment]

    def donors(self, fragment: int, version: int) -> list[str]:
        """Members that have the fragment at that version or a later one that may be adopted, latest first."""
        if self.highest_version(fragment) < version:
            return []
        said = ((m, m.status.versions[fragment]) for m in self.all())
        able = [m for m, newest in said if newest >= version and not leaps_too_far(version, newest)]
        return [m.peer for m in sorted(able, key=lambda m: -m.status.versions[fragment])]


class AddressBook:
    """Addresses by peer id. What a peer says of itself counts more than what others say of it.

    libp2p finds a peer by its id if its routing tables have the peer. These tables leave out networks whose addresses
    they take for neither public nor private, and peers that only one other peer has met. Hellos therefore carry
    addresses: a newcomer can call every peer that its first contact has met. Another identity answers at a wrong
    address, or nobody. `may_call` says which addresses are called on hearsay (see `Transport.may_call`).
    """

    def __init__(self) -> None:
        self.may_call: Callable[[str], bool] = lambda address: True
        self._said: dict[str, tuple[str, ...]] = {}
        self._hearsay: dict[str, tuple[str, ...]] = {}

    def hear(self, peer: str, said: Mapping[str, Sequence[str]]) -> None:
        """Take in what a peer says of itself and of others, without malformed addresses and those of another peer."""
        for other, addresses in said.items():
            itself = other == peer
            known = self._said if itself else self._hearsay
            found = [one for one in addresses if one.endswith(f"/p2p/{other}") and problem(one) is None]
            found = found if itself else [one for one in found if self.may_call(one)]
            known[other] = tuple(found[:MAX_ADDRESSES])
            forget_oldest(known, MAX_PEERS)

    def of(self, peer: str) -> Sequence[str]:
        """Multiaddrs that end with the peer's id; empty when nobody has named any."""
        return self._said.get(peer) or self._hearsay.get(peer, ())

    def all(self, peers: Iterable[str]) -> dict[str, list[str]]:
        """Known addresses of these peers."""
        return {peer: list(found) for peer in peers if (found := self.of(peer))}
