"""Who is connected to this peer, what they say, and where they can be called. Sans-IO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from diloco.config.address import address_error
from diloco.core.limits import MAX_PEERS
from diloco.core.units import NONE
from diloco.messages.control import Figures, Hello, Status
from diloco.messages.fields import Units, forget_oldest
from diloco.messages.heads import Key

STALL_STEPS = 10.0  # inner steps at the measured pace in whose time one must be done
# Large swarms say their progress seldom; one message that is late must not look like a stall.
STALL_BEATS = 3.0
PAUSE_LIMIT_S = 600.0  # a training loop that evaluates and saves for longer than this has stopped
# heartbeats heard from all others together; in smaller swarms each says one every `heartbeat_s`
BEATS_PER_S = 64.0
MAX_ADDRESSES = 4  # kept of one peer, the best first


@dataclass
class Member:
    """Another peer, as it says."""

    peer: str
    hello: Hello
    status: Status
    heard: float
    moved: float  # when it made an inner step, or got the first head after one
    tips: dict[int, Key]
    hears: set[str]  # members that may be an author, and are connected to it
    units: Units = NONE
    stepped: bool = True
    interval_s: float = 0.0  # between its statuses, as a moving average
    began_at: float = 0.0  # a round
    paused_at: float = math.inf  # when it began to evaluate or to save; inf while it does not
    resumed_at: float = -math.inf  # when it went on after that
    figures: Figures = field(default_factory=Figures)

    @classmethod
    def of(cls, peer: str, hello: Hello, now: float) -> Member:
        """A member that has said hello."""
        said = hello.status
        return cls(
            peer,
            hello,
            said,
            now,
            now,
            dict(said.tips),
            set(said.hears),
            said.units or NONE,
            began_at=now,
        )

    def hear(self, status: Status, now: float) -> None:
        """Take in a status; what it leaves out is as it was."""
        gap_s = now - self.heard
        self.interval_s = gap_s if self.interval_s == 0.0 else 0.9 * self.interval_s + 0.1 * gap_s
        steps = status.steps != self.status.steps
        if steps or (status.tips and self.stepped):
            self.moved, self.stepped = now, steps
        if status.position < self.status.position or (self.status.waits and not status.waits):
            self.began_at = now  # a round
        if self.status.pauses and not status.pauses:
            self.moved = self.resumed_at = now
        self.paused_at = min(self.paused_at, now) if status.pauses else math.inf
        if status.whole:
            self.tips, self.hears = dict(status.tips), set(status.hears)
        else:
            self.tips.update(status.tips)
            self.hears = self.hears - set(status.deaf) | set(status.hears)
            if len(self.hears) > MAX_PEERS:
                self.hears = set(status.hears)
        self.units = self.units if status.units is None else status.units
        self.figures = status.figures or self.figures
        self.status, self.heard = status, now

    def pauses(self, now: float) -> bool:
        """Whether it evaluates or saves, and not for too long."""
        return 0 <= now - self.paused_at < PAUSE_LIMIT_S

    def stalled(self, now: float, floor_s: float, first_step_s: float) -> bool:
        """Whether it makes no progress, by its own measured pace. A first step may compile
        kernels."""
        if self.pauses(now):
            return False
        pace = self.status.steps_per_s
        limit_s = (
            max(floor_s, STALL_STEPS / pace, STALL_BEATS * self.interval_s)
            if pace > 0
            else first_step_s
        )
        return now - self.moved > limit_s


class Members:
    """The peers that this one is connected to. Losing one is an ordinary event; nothing here
    raises."""

    def __init__(self, me: str, is_author: Callable[[str], bool] = lambda peer: True) -> None:
        self._me, self._is_author = me, is_author
        self._members: dict[str, Member] = {}
        self._order: list[Member] | None = None
        self._authors: frozenset[str] | None = None
        self._able: tuple[bool, frozenset[str]] | None = None

    def __contains__(self, peer: str) -> bool:
        return peer in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, peer: str) -> Member | None:
        """The member of that id, or None."""
        return self._members.get(peer)

    def all(self) -> list[Member]:
        """Members in the order of their ids, so that every walk over them is deterministic."""
        if self._order is None:
            self._order = [self._members[peer] for peer in sorted(self._members)]
        return self._order

    def join(self, peer: str, hello: Hello, now: float) -> bool:
        """Take in a hello; True when the peer was no member before. A known peer may be another
        process by now."""
        new = peer not in self._members
        self._members[peer] = Member.of(peer, hello, now)
        self._order = self._able = self._authors = None
        return new

    def hear(self, peer: str, status: Status, now: float) -> bool:
        """A member says its status; whether that changes who is there and able."""
        member = self._members[peer]
        before = member.status
        member.hear(status, now)
        changed = (status.authors, status.trains) != (before.authors, before.trains)
        if status.authors != before.authors or status.hears or status.deaf or status.whole:
            self._able = self._authors = None
        return changed

    def remove(self, peer: str) -> Member | None:
        """Forget a member."""
        self._order = self._able = self._authors = None
        return self._members.pop(peer, None)

    def silent(self, now: float, floor_s: float, beats: float) -> list[str]:
        """Members that have said nothing for longer than their own heartbeat allows."""
        return [
            one.peer for one in self.all() if now - one.heard > max(floor_s, beats * one.interval_s)
        ]

    def any_pauses(self, now: float) -> bool:
        """Whether a member evaluates or saves, and not for too long."""
        return any(one.status.pauses and one.pauses(now) for one in self.all())

    def able(self, myself: bool) -> frozenset[str]:
        """Peers that may be an author: members, those whom a member hears, and this peer if it says
        so."""
        if self._able is None or self._able[0] != myself:
            heard = set[str]().union(
                *(one.hears for one in self.all() if self._is_author(one.peer))
            )
            able = self.authors() | (heard - self._members.keys() - {self._me})
            self._able = (myself, able | {self._me} if myself else able)
        return self._able[1]

    def authors(self) -> frozenset[str]:
        """Members that say that they may be an author."""
        if self._authors is None:
            able = (one.peer for one in self.all() if one.status.authors)
            self._authors = frozenset(filter(self._is_author, able))
        return self._authors

    def beat_s(self, heartbeat_s: float) -> float:
        """Seconds between two heartbeats: in a large swarm each peer says less."""
        return max(heartbeat_s, len(self._members) / BEATS_PER_S)


class AddressBook:
    """Addresses by peer id. What a peer says of itself counts more than what others say of it.

    Hellos carry addresses, because the routing tables of libp2p leave out peers that only one other
    peer has met. `may_call` says which addresses are called on hearsay (see `Transport.may_call`).
    """

    def __init__(self) -> None:
        self.may_call: Callable[[str], bool] = lambda address: True
        self._said: dict[str, tuple[str, ...]] = {}
        self._hearsay: dict[str, tuple[str, ...]] = {}

    def hear(self, peer: str, said: Mapping[str, Sequence[str]]) -> None:
        """Take in what a peer says of itself and of others, without malformed addresses and those
        of another peer."""
        for other, addresses in said.items():
            itself = other == peer
            known = self._said if itself else self._hearsay
            found = [
                one
                for one in addresses
                if one.endswith(f"/p2p/{other}") and address_error(one) is None
            ]
            found = found if itself else [one for one in found if self.may_call(one)]
            known[other] = tuple(found[:MAX_ADDRESSES])
            forget_oldest(known, MAX_PEERS)

    def of(self, peer: str) -> Sequence[str]:
        """Multiaddrs that end with the peer's id; empty when nobody has named any."""
        return self._said.get(peer) or self._hearsay.get(peer, ())

    def all(self, peers: Iterable[str]) -> dict[str, list[str]]:
        """Known addresses of these peers."""
        return {peer: list(found) for peer in peers if (found := self.of(peer))}
