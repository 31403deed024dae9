"""Bounded histories of the swarm since a node connected, for watchers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal

from msgspec.structs import replace

import diloco.messages.snapshot as schema
from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.history import Tip
from diloco.core.members import Member
from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.control import Figures, Planned
from diloco.messages.fields import (
    MAX_BYTES,
    MAX_SECONDS,
    MAX_TOKENS,
    at_most,
    forget_oldest,
    within_bounds,
)
from diloco.messages.snapshot import PHASES, PhaseSeconds
from diloco.outer.digest import anchor_digest, fragment_digest

# requests within this time get the same snapshot, so more watchers cost nothing
FRESH_S = 0.5
LOOK_EVERY_S = 1.0
ID_DIGITS = 16
State = Literal["starting", "ready", "training", "exchanging", "evaluating", "leaving"]


class Recorder:
    """Histories of the swarm as this node knows it. `now` is seconds of the node's clock.

    No error in this class ends the training: `on_failure` gets it, and the record is incomplete.
    """

    def __init__(self, core: Peer, manifest_text: str) -> None:
        self.on_failure: Callable[[str], None] = lambda why: None
        self.way: Callable[[str], str] = lambda peer: ""  # route of bulk bytes to a peer
        self._core, self._manifest = core, manifest_text
        self._rounds: deque[schema.Round] = deque(maxlen=schema.MAX_HISTORY)
        self._events: deque[schema.LoggedEvent] = deque(maxlen=schema.MAX_HISTORY)
        self._samples: list[tuple[int, str, str]] = []
        self._loss: list[schema.LossPoint] = []
        self._loss_every_s = LOOK_EVERY_S  # doubled when the history is full: it spans the run
        self._last: dict[str, Figures] = {}  # last figures by peer, also of those that left
        self._looked_at = float("-inf")
        self._packed: tuple[float, list[bytes]] | None = None

    def note(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Keep one line of the event log; a new tip is kept as a round instead."""
        with self._harmless():
            if kind == "tip":
                tip = self._core.facts.fragments[fields["fragment"]].tip
                self._rounds.append(self._round(tip, now))
                return
            text = " ".join(f"{key}={value}" for key, value in fields.items())
            self._events.append(schema.LoggedEvent(now, kind[:128], text[:512]))

    def add_samples(self, version: int, written: Sequence[tuple[str, str]]) -> None:
        """Keep prompts, and their continuations by the model of this version."""
        self._samples = [(version, prompt[-4096:], text[:4096]) for prompt, text in written[:16]]

    def sample(self, now: float) -> None:
        """Keep the members' own figures and losses; frequent calls change nothing."""
        if now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        with self._harmless():
            everybody = self._everybody(now)
            for member in everybody:
                self._last.pop(member.peer, None)  # inserted anew, so that the oldest go first
                self._last[member.peer] = member.figures
            forget_oldest(self._last, 4 * schema.MAX_PEERS)
            reported = [member.figures.loss for member in everybody if member.status.trains]
            losses = [loss for loss in reported if loss]
            if losses and (not self._loss or now >= self._loss[-1].at + self._loss_every_s):
                tokens, mean = self._core.facts.control.tip.head.work, sum(losses) / len(losses)
                self._loss.append(schema.LossPoint(now, tokens, mean, min(losses), max(losses)))
            if len(self._loss) >= schema.MAX_HISTORY:
                self._loss, self._loss_every_s = self._loss[::2], 2 * self._loss_every_s

    def packed(self, now: float) -> list[bytes]:
        """Return a snapshot in pieces, at most `FRESH_S` old; `PayloadError` if there is none."""
        if self._packed is None or now - self._packed[0] >= FRESH_S:
            self._packed = None
            with self._harmless():
                self._packed = now, schema.pack_snapshot(self._snapshot(now))
        if self._packed is None:
            raise PayloadError("no snapshot can be made here; ask another peer")
        return self._packed[1]

    def snapshot(self, now: float) -> schema.Snapshot | None:
        """Make a snapshot with unix times; None if that fails."""
        with self._harmless():
            return self._snapshot(now)
        return None

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.on_failure(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _everybody(self, now: float) -> list[Member]:
        myself = Member.of(self._core.facts.me, self._core.hello(), now)
        myself.figures = self._core.figures
        return [myself, *self._core.facts.members.all()]

    def _round(self, tip: Tip, now: float) -> schema.Round:
        facts, head, lines = self._core.facts, tip.head, tip.head.counted
        bases = {line.base for line in lines}
        behind = [at for at, base in enumerate(reversed(tip.book.recent)) if base in bases]
        phases = [
            seconds for member in self._everybody(now) if (seconds := phase_seconds(member.figures))
        ]
        mean = [sum(phase) / len(phases) for phase in zip(*map(astuple, phases), strict=True)]
        return schema.Round(
            *(head.fragment, head.number, len(facts.members) + 1, facts.num_trainers(), len(lines)),
            *(max(behind, default=0), PhaseSeconds(*mean) if phases else None, now),
        )

    def _snapshot(self, now: float) -> schema.Snapshot:
        facts, since, everybody = self._core.facts, time.time() - now, self._everybody(now)
        figures = self._last | {member.peer: member.figures for member in everybody}
        return schema.Snapshot(
            run=run_info(self._core, self._manifest, since + now),
            peers=[
                replace(peer_row(self._core, member, now), bulk=self.way(member.peer))
                for member in everybody[: schema.MAX_PEERS]
            ],
            fragments=[fragment_row(facts, f) for f in facts.fragments[: schema.MAX_ROWS]],
            rounds=[replace(entry, closed_at=since + entry.closed_at) for entry in self._rounds],
            ledger=ledger_totals(facts, figures),
            loss=[replace(point, at=since + point.at) for point in self._loss],
            events=[replace(event, at=since + event.at) for event in self._events],
            left_out=max(0, len(everybody) - schema.MAX_PEERS),
            samples=self._samples,
        )


# -- rows of a snapshot ----------------------------------------------------------------------------


def phase_seconds(figures: Figures) -> PhaseSeconds | None:
    """Return the wall seconds of a peer's last round by phase; None before the first."""
    return PhaseSeconds(*figures.seconds) if len(figures.seconds) == len(PHASES) else None


def _fewest_steps(facts: Facts) -> int:
    return min(f.tip.head.number for f in facts.fragments)


def run_info(core: Peer, manifest_text: str, at: float) -> schema.RunInfo:
    """Describe the run and its progress."""
    facts, manifest = core.facts, json.loads(manifest_text)
    settings, (steps, tokens, _) = facts.settings, facts.planned
    concurrent = "streaming" if settings.barrier else "asynchronous"
    return schema.RunInfo(
        facts.identity.run_id,
        "synchronous" if settings.lockstep else concurrent,
        str((manifest.get("model") or {}).get("name") or "")[:128],
        at_most(steps) or None,
        tokens or None,
        _fewest_steps(facts),
        facts.control.tip.head.work,
        at,
        facts.me,
    )


def peer_row(core: Peer, member: Member, now: float) -> schema.PeerRow:
    """Describe a peer, which may be this one, by its own statements."""
    facts, hello, status, figures = core.facts, member.hello, member.status, member.figures
    version = min(_version(f, member) for f in facts.fragments)
    return schema.PeerRow(
        peer_id=member.peer,
        name=hello.name,
        state=_state(member),
        trains=hello.trains,
        authors=hello.authors,
        device=hello.device,
        version=version,
        version_lag=max(0, _fewest_steps(facts) - version),
        inner_step=status.position,
        target_steps=status.cycle,
        steps_per_s=status.steps_per_s,
        tokens=figures.tokens,
        loss=figures.loss or None,
        bytes_sent=figures.bytes_sent,
        bytes_received=figures.bytes_received,
        last_seen_s=within_bounds(now - member.heard_at, MAX_SECONDS),
        seconds=phase_seconds(figures),
        addresses=list(core.addresses.of(member.peer)),
    )


def _version(f: FragmentState, member: Member) -> int:
    """Version of a member's tip, at most the one here; one before all known ones if unknown."""
    key, recent, number = member.tips.get(f.index, (0, "")), f.tip.book.recent, f.tip.head.number
    if tuple(key) >= f.tip.key:
        return number
    return max(0, number - len(recent) + (recent.index(key[1]) if key[1] in recent else -1))


def _state(member: Member) -> State:
    status = member.status
    if status.leaves:
        return "leaving"
    if not status.trains:
        return "starting" if member.hello.trains else "ready"
    return "evaluating" if status.pauses else "exchanging" if status.waits else "training"


def fragment_row(facts: Facts, f: FragmentState) -> schema.FragmentRow:
    """Describe a fragment's tip here, and the work of this peer on it."""
    head, author = f.tip.head, facts.author_of(f)
    state: Literal["following", "collecting", "fetching", "settling", "alone"]
    state = "collecting" if author == facts.me else "following" if author else "alone"
    state = "fetching" if f.inbox.behind() else state if facts.life.ready else "settling"
    here = sum(not f.tip.objection(item.line) for item in f.pool.values())
    numbers, short = (f.index, head.number, head.work), head.id[:ID_DIGITS]
    return schema.FragmentRow(*numbers, short, head.next, author or None, here, state)


def ledger_totals(facts: Facts, last: Mapping[str, Figures]) -> schema.LedgerTotals:
    """Totals as known here; of peers that left before this one came, only the merged tokens."""
    tip = facts.control.tip
    applied = tip.head.work
    processed = max(applied, at_most(sum(figures.tokens for figures in last.values()), MAX_TOKENS))
    discarded = min(processed - applied, sum(figures.discarded for figures in last.values()))
    rows = [
        schema.Contributor(
            *(peer, entry.name, entry.contributions, entry.tokens),
            *(_payload_bytes(facts, peer), entry.first, entry.last),
        )
        for peer, entry in tip.book.ledger.items()
        if entry.contributions
    ]
    under_way = processed - applied - discarded
    return schema.LedgerTotals(processed, applied, discarded, under_way, rows[: schema.MAX_PEERS])


def _payload_bytes(facts: Facts, peer: str) -> int:
    known = ((f.tip.book.ledger.get(peer), f.sizes.payload) for f in facts.fragments)
    return at_most(sum(entry.contributions * nbytes for entry, nbytes in known if entry), MAX_BYTES)


# -- the record for this peer's own program --------------------------------------------------------


@dataclass(frozen=True)
class PeerRecord:
    """State of a peer's part of the swarm; `version` and `applied_tokens` are of fragment 0.

    Attributes:
        peer: this peer's id. addresses: its own. others: one of each other peer.
        trainers: the peers that train and stay, this one included, in the order of their ids.
        others_that_train: how many of the others train, or leave after having trained.
        live, training, merged: peers that are connected, that train, in the newest version.
        ready: True once this peer has the state that the others had when it came.
        anchors: `version:digest` of each fragment, with the first 16 digits of its digest.
        anchor_digest: of the whole anchor (hex); equal on all peers at equal version.
        contributions: how much each peer contributed to the anchor.
        heals, takeovers: anchors that were damaged; versions that another peer made in its place.
    """

    peer: str
    addresses: Sequence[str]
    others: Sequence[str]
    trainers: Sequence[str]
    others_that_train: int
    live: int
    training: int
    merged: int
    planned: Planned
    version: int
    applied_tokens: int
    ready: bool
    anchors: Mapping[str, str]
    anchor_digest: str
    contributions: Sequence[schema.Contributor]
    heals: int
    takeovers: int


def record_of(core: Peer, addresses: Sequence[str]) -> PeerRecord:
    """Return the record of the peer with that core."""
    facts, head = core.facts, core.facts.control.tip.head
    trainers = [member for member in facts.members.all() if member.hello.trains]
    stay = (member.peer for member in trainers if not member.status.leaves)
    tips = [(f.tip.head.number, fragment_digest(f.tip.parts)) for f in facts.fragments]
    return PeerRecord(
        peer=facts.me,
        addresses=addresses,
        others=core.others_at(),
        trainers=sorted([facts.me, *stay]),
        others_that_train=len(trainers),
        live=len(facts.members) + 1,
        training=facts.num_trainers(),
        merged=len(head.counted),
        planned=facts.planned,
        version=head.number,
        applied_tokens=head.work,
        ready=facts.life.ready,
        anchors={str(i): f"{number}:{digest[:16]}" for i, (number, digest) in enumerate(tips)},
        anchor_digest=anchor_digest([digest for _, digest in tips]),
        contributions=ledger_totals(facts, {}).contributions,
        heals=facts.heals,
        takeovers=facts.takeovers,
    )
