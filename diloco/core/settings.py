"""The identity of a peer, and how the histories of its run grow. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from diloco.core.history import Signer
from diloco.protocol import Schedule


@dataclass(frozen=True)
class ProtocolSettings(Schedule):
    """How histories grow: equal on all peers of a run."""

    fragments: int = 1
    sync_every: int = 4  # H, inner steps of a cycle
    staggered: bool = False  # send fragments one by one, evenly over the cycle; else all at its end
    overlap: int = 0  # inner steps from sending until training needs the next head
    quorum: int | None = None  # contributions; None: wait for half, then two rounds (a barrier)
    grace_s: float = 0.0  # for which a version waits for the rest once it has a quorum
    grace_slack: float = 0.0  # instead: this part of what the overlap leaves
    late: int = 8  # versions that a contribution's base may be behind
    staleness_exponent: float = 0.5  # one that is s versions late weighs (1 + s) ** -that
    weights: str = "tokens"  # what a contribution weighs (`author.weights`)
    probation: int = 0  # contributions for which a newcomer weighs a quarter
    delay: int | None = 1  # contributions to a momentum step; None: as many as peers train
    windowed: bool = False  # there are such windows (Delayed Nesterov)
    leased: bool = True  # training takes sequences of the run's list only, and waits for them
    min_peers: int = 1  # nobody begins alone where so many are expected
    heartbeat_s: float = 1.25  # between two statuses
    silence_s: float = 10.0  # a peer that says nothing for so long, or `silence_beats`, is gone
    silence_beats: float = 8.0  # of its own heartbeats
    settle_s: float = 5.0  # a peer that starts, or was asleep, first listens for so long
    stall_s: float = 20.0  # a process may hang for so long: no step, and no byte is moved
    first_step_s: float = 180.0  # the same for its first step, which may compile kernels
    floor_s: float = 20.0  # a barrier waits for the rest at least so long: one may hang (`stall_s`)
    refresh_s: float = 5.0  # after which a contribution is offered, a lease or a donor asked again
    stuck_s: float = 60.0  # an author that has one for so long, and 4 rounds, is passed over
    deadline_s: float = 8.0  # in which the first bytes of an answer come, and the next ones
    looks: bool = False  # others look for what is said here, and hear nothing at once
    tick_s: float = 0.05  # statuses that come within that time are acted upon together
    fanout: int = 2  # peers to which a record is given at a time
    records: int = 8  # kept of a fragment
    pool: int = 256  # contributions of others that are kept


class Sizes(NamedTuple):
    """Bytes of a fragment, and the number of parts in which its anchor is fetched."""

    payload: int
    update: int
    anchor: int
    parts: int


@dataclass(frozen=True)
class Identity:
    """This peer, and its run."""

    me: str
    name: str
    run_id: str
    manifest_hash: str
    signer: Signer
    trains: bool = True  # it makes inner steps
    may_author: bool = True  # others can call it, and its owner and the run allow it
    device: str = ""
    data: str = ""  # names the sequences that numbers stand for here (`Hello.sequences`)
    tokens_per_step: int | None = None  # None where a training loop counts in its own way
    is_author: Callable[[str], bool] = lambda peer: True  # whether a peer's invitation allows it
