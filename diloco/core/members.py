"""Members: the peers that are connected to this one, what they say, where they can be called, and
how long a version waits for them. Sans-IO; seconds of a monotonic clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Generic, TypeVar

from diloco.messages.control import Figures, Hello, Status
from diloco.messages.fields import Units, forget_oldest
from diloco.messages.heads import Key
from diloco.ranges import NONE

T = TypeVar("T")

MAX_PEERS = 4096  # remembered; identities cost nothing, so the others are forgotten
STALL_STEPS = 10.0  # inner steps at the measured pace in whose time one must be done
STALL_BEATS = 3.0  # in large swarms, where statuses are rare; one that is late is no stall
PAUSE_LIMIT_S = 600.0  # who evaluates and saves for longer, and for four rounds, has stopped
PAUSE_ROUNDS = 4.0
BEATS_PER_S = 64.0  # heard from all others together; in smaller swarms, one every `heartbeat_s`
MAX_ADDRESSES = 4  # kept of one peer, the best first
ROUNDS = 3.0  # median rounds of the contributors for which a version waits
PAUSE_RATE = 0.05  # of all time: what one peer may make the others wait in the long run


@lru_cache(1 << 16)
def score(fragment: int, peer: str) -> int:
    """Rendezvous: the order of peers for a fragment, the lowest first."""
    return -int.from_bytes(sha256(f"{fragment}:{peer}".encode()).digest()[:8])


@lru_cache(1 << 8)
def in_turn(fragments: int, peers: tuple[str, ...]) -> list[str]:
    """By fragment, the first peer in rendezvous order that has no more than its share of them."""
    share, larger = divmod(fragments, len(peers))
    held, chosen = dict.fromkeys(peers, 0), list[str]()
    for fragment in range(fragments):
        most = share + (sum(number > share for number in held.values()) < larger)
        free = (peer for peer in peers if held[peer] < most)
        chosen.append(min(free, key=lambda peer: score(fragment, peer)))
        held[chosen[-1]] += 1
    return chosen


@dataclass
class Member:
    """Another peer, as it says."""

    peer: str
    hello: Hello
    status: Status
    heard_at: float
    progress_at: float  # its last inner step, byte moved, or first head after a step
    tips: dict[int, Key]
    hears: set[str]  # members that may be an author, and are connected to it
    units: Units
    began_at: float  # its round
    began_before: float = -math.inf  # the round before
    stepped: bool = True
    interval_s: float = 0.0  # between its statuses, as a moving average
    paused_at: float = math.inf  # when it began to evaluate or to save; inf while it does not
    resumed_at: float = -math.inf  # when it went on after that
    figures: Figures = field(default_factory=Figures)

    @classmethod
    def of(cls, peer: str, hello: Hello, now: float) -> Member:
        """A member that has said hello."""
        status = hello.status
        return cls(
            peer=peer,
            hello=hello,
            status=status,
            heard_at=now,
            progress_at=now,
            tips=dict(status.tips),
            hears=set(status.hears),
            units=status.units or NONE,
            began_at=now,
        )

    def hear(self, status: Status, now: float) -> None:
        """Take in a status; what it leaves out is as it was."""
        before, gap_s = self.status, now - self.heard_at
        self.interval_s = gap_s if self.interval_s == 0.0 else 0.9 * self.interval_s + 0.1 * gap_s
        steps = status.steps != before.steps
        if steps or (status.tips and self.stepped):
            self.progress_at, self.stepped = now, steps
        elif status.moved != before.moved:
            self.progress_at = now
        if status.position < before.position or (before.waits and not status.waits):
            self.began_before, self.began_at = self.began_at, now
        if before.pauses and not status.pauses:
            self.progress_at = self.resumed_at = now
        self.paused_at = min(self.paused_at, now) if status.pauses else math.inf
        if status.whole:
            self.tips, self.hears = dict(status.tips), set(status.hears)
        else:
            self.tips.update(status.tips)
            if status.hears or status.deaf:
                self.hears = self.hears - set(status.deaf) | set(status.hears)
                if len(self.hears) > MAX_PEERS:
                    self.hears = set(status.hears)
        self.units = self.units if status.units is None else status.units
        self.figures = status.figures or self.figures
        self.status, self.heard_at = status, now

    def pauses(self, now: float, round_s: float = 0.0) -> bool:
        """Return True if it evaluates or saves, and not for too long."""
        return 0 <= now - self.paused_at < max(PAUSE_LIMIT_S, PAUSE_ROUNDS * round_s)

    def stalled(
        self, now: float, floor_s: float, first_step_s: float, round_s: float = 0.0
    ) -> bool:
        """Return True if it makes no progress, by its own pace. A first step may compile kernels; a
        peer that waits for others makes none for a round."""
        pace, limit_s = self.status.steps_per_s, first_step_s
        if pace > 0:
            limit_s = max(floor_s, STALL_STEPS / pace, STALL_BEATS * self.interval_s)
        if self.status.waits:
            limit_s = max(limit_s, round_s)
        return not self.pauses(now, round_s) and now - self.progress_at > limit_s


class Members:
    """The peers that this one is connected to. Losing one is an ordinary event; nothing raises."""

    def __init__(self, me: str, is_author: Callable[[str], bool] = lambda peer: True) -> None:
        self._me, self._is_author = me, is_author
        self._members: dict[str, Member] = {}
        self._order: list[Member] | None = None
        self._authors: frozenset[str] | None = None
        self._able: tuple[bool, frozenset[str]] | None = None
        self._lost_at: dict[str, float] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, peer: str) -> Member:
        return self._members[peer]

    def get(self, peer: str) -> Member | None:
        """The member of that id, or None."""
        return self._members.get(peer)

    def all(self) -> list[Member]:
        """Members in the order of their ids, so that every walk over them is deterministic."""
        if self._order is None:
            self._order = [self._members[peer] for peer in sorted(self._members)]
        return self._order

    def join(self, peer: str, hello: Hello, now: float) -> bool:
        """Take in a hello, perhaps of a new process of a member. Return True if it was none yet."""
        new = peer not in self._members
        self._members[peer] = Member.of(peer, hello, now)
        self._order = self._able = self._authors = None
        return new

    def hear(self, peer: str, status: Status, now: float) -> bool:
        """Take in a status. Return True if it changes who trains or may be an author."""
        member = self._members[peer]
        before = member.status
        member.hear(status, now)
        if status.authors != before.authors or status.hears or status.deaf or status.whole:
            self._able = self._authors = None
        return (status.authors, status.trains) != (before.authors, before.trains)

    def remove(self, peer: str, now: float) -> Member | None:
        """Forget a member."""
        self._order = self._able = self._authors = None
        self._lost_at[peer] = now
        forget_oldest(self._lost_at, MAX_PEERS)
        return self._members.pop(peer, None)

    def was_here(self, peer: str, since: float) -> bool:
        """Return True if a peer is a member, or was one at some time since then."""
        return peer in self._members or self._lost_at.get(peer, -math.inf) >= since

    def silent(self, now: float, floor_s: float, beats: float) -> list[str]:
        """Members that have said nothing for longer than their own heartbeat allows."""
        limits = ((member, max(floor_s, beats * member.interval_s)) for member in self.all())
        return [member.peer for member, limit_s in limits if now - member.heard_at > limit_s]

    def listen(self, now: float) -> None:
        """Give members time to say something again, after this peer slept."""
        for member in self.all():
            member.heard_at = now

    def any_pauses(self, now: float, round_s: float) -> bool:
        """Return True if a member evaluates or saves, and not for too long."""
        begun = (member for member in self.all() if member.paused_at <= now)
        return any(member.pauses(now, round_s) for member in begun)

    def any_moves(self, since: float) -> bool:
        """Return True if a member that trains has made a step, or moved bytes, since then."""
        return any(member.status.trains and member.progress_at >= since for member in self.all())

    def able(self, myself: bool) -> frozenset[str]:
        """Peers that may be an author: members, those that a member hears, and perhaps `me`."""
        if self._able is None or self._able[0] != myself:
            heard = set().union(
                *(member.hears for member in self.all() if self._is_author(member.peer))
            )
            able = self.authors() | (heard - self._members.keys() - {self._me})
            self._able = (myself, able | {self._me} if myself else able)
        return self._able[1]

    def authors(self) -> frozenset[str]:
        """Members that say that they may be an author."""
        if self._authors is None:
            able = (member.peer for member in self.all() if member.status.authors)
            self._authors = frozenset(filter(self._is_author, able))
        return self._authors

    def beat_s(self, heartbeat_s: float) -> float:
        """Seconds between two heartbeats: in a large swarm each peer says less."""
        return max(heartbeat_s, len(self._members) / BEATS_PER_S)


class AddressBook:
    """Addresses by peer id. What a peer says of itself counts more than what others say of it.

    Hellos carry addresses, because the routing tables of libp2p leave out peers that only one other
    peer has met. `is_sound` says what is an address at all, and `may_call` which ones are called on
    hearsay (see `Transport.may_call`).
    """

    def __init__(self) -> None:
        self.is_sound: Callable[[str], bool] = lambda address: False
        self.may_call: Callable[[str], bool] = lambda address: True
        self._said: dict[str, tuple[str, ...]] = {}
        self._hearsay: dict[str, tuple[str, ...]] = {}

    def hear(self, peer: str, said: Mapping[str, Sequence[str]]) -> None:
        """Take in well-formed addresses that a peer says of itself and of others."""
        for other, addresses in said.items():
            known = self._said if other == peer else self._hearsay
            own = (address for address in addresses if address.endswith(f"/p2p/{other}"))
            sound = (address for address in own if self.is_sound(address))
            callable_ = [address for address in sound if other == peer or self.may_call(address)]
            known[other] = tuple(callable_[:MAX_ADDRESSES])
            forget_oldest(known, MAX_PEERS)

    def of(self, peer: str) -> Sequence[str]:
        """Multiaddrs that end with the peer's id; empty when nobody has named any."""
        return self._said.get(peer) or self._hearsay.get(peer, ())

    def all(self, peers: Iterable[str]) -> dict[str, list[str]]:
        """Known addresses of these peers."""
        return {peer: list(found) for peer in peers if (found := self.of(peer))}


class Buckets(Generic[T]):
    """A bucket by key, which holds `burst`, fills by `per_s` a second, and begins full.

    Memory is bounded: full buckets are forgotten, and when none is full, the oldest ones.
    """

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s, self.burst = per_s, burst
        self._filled: dict[T, tuple[float, float]] = {}  # how much is in it, and when that was

    def left(self, key: T, now: float) -> float:
        """Its level now; below 0 after `delay_s` has lent some."""
        left, at = self._filled.get(key, (self.burst, now))
        return min(self.burst, left + max(0.0, now - at) * self.per_s)

    def take(self, key: T, now: float, amount: float = 1.0) -> bool:
        """Take so much, if it is there; otherwise nothing changes."""
        return self.left(key, now) >= amount and self.delay_s(key, now, amount) == 0.0

    def delay_s(self, key: T, now: float, amount: float = 1.0) -> float:
        """Take so much in any case; returns how many seconds the taker has to wait for it."""
        if key not in self._filled and len(self._filled) >= MAX_PEERS:
            kept = self._filled.items()
            self._filled = {key: level for key, level in kept if self.left(key, now) < self.burst}
            forget_oldest(self._filled, MAX_PEERS - 1)
        left, (_, at) = self.left(key, now) - amount, self._filled.get(key, (0.0, now))
        self._filled[key] = (left, max(now, at))
        return max(0.0, -left / self.per_s)


class Patience:
    """For whom the versions of one fragment wait at a barrier, as its author sees it.

    It begins with all. Who is missing from a version is slow, and not waited for until it is quick.
    A slow peer's own word counts for nothing, but that it evaluates or saves a checkpoint. For how
    long this makes the others wait is taken from its bucket, which fills slowly.
    """

    def __init__(self, floor_s: float) -> None:
        self.slow: set[str] = set()
        self._paused: set[str] = set()  # while they were waited for
        self._floor_s = floor_s
        self._pauses: Buckets[str] = Buckets(PAUSE_RATE, PAUSE_LIMIT_S)  # beyond patience

    def wait_s(self, rounds_s: Collection[float]) -> float:
        """How long the rest is waited for, by the rounds of those that came (cf. 1604.00981)."""
        median_s = statistics.median_low(rounds_s) if rounds_s else 0.0
        return max(self._floor_s, (ROUNDS - 1) * median_s)

    def pauses(
        self,
        missing: Mapping[str, Member | None],
        seconds: float,
        now: float,
        round_s: float = 0.0,
    ) -> bool:
        """Return True if one of them pauses, and may: the time since the last call comes out of its
        bucket."""
        self._pauses.burst = max(PAUSE_LIMIT_S, PAUSE_ROUNDS * round_s)
        members = [member for member in missing.values() if member is not None]
        pausing = [member.peer for member in members if now >= member.paused_at]
        self._paused.update(pausing)
        return any([self._pauses.take(peer, now, seconds) for peer in pausing])

    def forgive(self, resumed: Collection[str], now: float) -> None:
        """These went on after a pause: they are waited for again, if their buckets allow."""
        for peer in sorted(self.slow & self._paused & set(resumed)):
            self._paused.remove(peer)
            if self._pauses.take(peer, now, self._floor_s):
                self.slow.remove(peer)

    def closed(self, rounds_s: Mapping[str, float], missing: Collection[str]) -> None:
        """A version is made; `rounds_s`: from its base until a contribution was here."""
        longest_s = statistics.median_low(rounds_s.values()) + self.wait_s(rounds_s.values())
        self.slow.update(missing)
        self.slow -= {peer for peer, round_s in rounds_s.items() if round_s <= longest_s}
