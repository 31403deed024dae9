"""Who is in the swarm, as one peer sees it: hellos and heartbeats in, live members out. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.messages.control import Hello, Status

__all__ = ["Member", "Membership"]

SILENCE_FLOOR_S = 10.0
SILENCE_FACTOR = 8.0  # heartbeats of the measured interval that may go missing
STALL_FLOOR_S = 20.0
STALL_FACTOR = 10.0  # inner steps of the measured length that may pass without one being done
STALL_UNMEASURED_S = 180.0  # a first step may compile kernels or wait for data
AWAKE_S = 5.0  # longer than this between two looks at the members, and this peer itself was asleep


@dataclass
class Member:
    """Another peer: what it said last, and when it was last heard of and last seen to get on."""

    peer: str
    name: str
    trains: bool
    holds: bool
    status: Status
    heard_at: float
    progress_at: float
    interval_s: float = 0.0
    round_versions: list[int] | None = None  # its anchor when it began the round that it is in
    device: str = ""

    def __post_init__(self) -> None:
        self._note_round()

    def hear(self, status: Status, now: float) -> None:
        """Take in a status; the interval between statuses is measured as a moving average."""
        gap_s = now - self.heard_at
        self.interval_s = gap_s if self.interval_s == 0.0 else 0.9 * self.interval_s + 0.1 * gap_s
        moved = (status.state, status.versions, status.inner_step)
        if moved != (self.status.state, self.status.versions, self.status.inner_step):
            self.progress_at = now
        self.heard_at = now
        if status.figures is None and self.status.figures is not None:
            status = status.model_copy(update={"figures": self.status.figures})
        self.status = status
        self._note_round()

    def _note_round(self) -> None:
        if self.status.state == "training":
            self.round_versions = self.status.versions

    def silence_s(self) -> float:
        """Seconds without a word after which this peer counts as gone, from its own measured heartbeat."""
        return max(SILENCE_FLOOR_S, SILENCE_FACTOR * self.interval_s)

    def stall_s(self) -> float:
        """Seconds without progress after which nobody waits for this peer, from its own measured step time."""
        if self.status.steps_per_s <= 0.0:
            return STALL_UNMEASURED_S
        return max(STALL_FLOOR_S, STALL_FACTOR / self.status.steps_per_s)

    def stalled(self, now: float, progress_at: float = 0.0) -> bool:
        """Whether this peer does not get on; `progress_at` is when something else than its status last said it does."""
        return now - max(self.progress_at, progress_at) > self.stall_s()


class Membership:
    """The members one peer is connected to. Losing one is an ordinary event; nothing here raises."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._in_order: list[Member] | None = None
        self._looked_at: float | None = None

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
        """Take in a hello; True when the peer was not a member before. One that was may be another process by now."""
        new = peer not in self._members
        self._in_order = None
        self._members[peer] = Member(
            peer, hello.name, hello.trains, hello.holds, hello.status, now, now, device=hello.device
        )
        return new

    def remove(self, peer: str) -> bool:
        """Forget a peer; True when it was a member."""
        self._in_order = None
        return self._members.pop(peer, None) is not None

    def silent(self, now: float) -> list[str]:
        """Members not heard of for longer than their own measured heartbeat allows.

        While this peer was asleep (SIGSTOP, laptop lid) nobody was silent: what they said waits to be read.
        """
        asleep_s = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at - AWAKE_S)
        self._looked_at = now
        for member in self._members.values() if asleep_s else ():
            member.heard_at = min(now, member.heard_at + asleep_s)
            member.progress_at = min(now, member.progress_at + asleep_s)
        return [member.peer for member in self.all() if now - member.heard_at > member.silence_s()]

    def highest_version(self, fragment: int) -> int:
        """Highest anchor version of a fragment that any member says it has; -1 when there are no members."""
        return max((m.status.versions[fragment] for m in self._members.values()), default=-1)

    def donors(self, fragment: int, version: int) -> list[str]:
        """Members that have the fragment at that version or a later one, latest first."""
        able = [m for m in self.all() if m.status.versions[fragment] >= version]
        return [m.peer for m in sorted(able, key=lambda m: -m.status.versions[fragment])]
