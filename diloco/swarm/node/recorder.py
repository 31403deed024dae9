"""Bounded histories of the swarm since a node connected, for watchers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal

from msgspec.structs import asdict, replace

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
DAY_S, LEDGERS_S = 86_400.0, 1800.0  # how long the board looks back, and how often it looks
Known = tuple[str, Figures]  # device and figures of a peer
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
        self._loss, self._held_out = _Curve(), _Curve()
        self._last: dict[str, Known] = {}  # by peer, also of those that left
        self._ledgers: deque[tuple[float, dict[str, int]]] = deque()  # of the last day
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
                self._last[member.peer] = member.hello.device, member.figures
            forget_oldest(self._last, 4 * schema.MAX_PEERS)
            facts, tip = self._core.facts, self._core.facts.control.tip
            training = [member.figures.loss for member in everybody if member.status.trains]
            held_out = [loss for member in everybody if (loss := member.figures.eval_loss)][:1]
            self._loss.add(now, tip.head.work, [loss for loss in training if loss])
            if not self._held_out or [self._held_out[-1].loss] != held_out:  # a new measurement
                self._held_out.add(now, tip.head.work, held_out)
            while self._ledgers and now - self._ledgers[0][0] > DAY_S:
                self._ledgers.popleft()
            is_due = not self._ledgers or now >= self._ledgers[-1][0] + LEDGERS_S
            if facts.life.ready and is_due:
                tokens = {peer: entry.tokens for peer, entry in tip.book.ledger.items()}
                self._ledgers.append((now, tokens))

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
        known = self._last | {m.peer: (m.hello.device, m.figures) for m in everybody}
        here = {peer: entry.tokens for peer, entry in facts.control.tip.book.ledger.items()}
        began_at, before = self._ledgers[0] if self._ledgers else (now, here)
        return schema.Snapshot(
            run=run_info(self._core, self._manifest, since + now),
            peers=[
                replace(peer_row(self._core, member, now), bulk=self.way(member.peer))
                for member in everybody[: schema.MAX_PEERS]
            ],
            fragments=[fragment_row(facts, f) for f in facts.fragments[: schema.MAX_ROWS]],
            rounds=[replace(entry, closed_at=since + entry.closed_at) for entry in self._rounds],
            ledger=ledger_totals(facts, known, now - began_at, before),
            loss=[replace(point, at=since + point.at) for point in self._loss],
            held_out=[replace(point, at=since + point.at) for point in self._held_out],
            events=[replace(event, at=since + event.at) for event in self._events],
            left_out=max(0, len(everybody) - schema.MAX_PEERS),
            samples=self._samples,
        )


class _Curve(list[schema.LossPoint]):
    """A history that spans the run: when it is full, every second point goes."""

    every_s = LOOK_EVERY_S

    def add(self, now: float, tokens: int, losses: Sequence[float]) -> None:
        """Append mean and range of the losses, if there are any, and it is time."""
        if losses and (not self or now >= self[-1].at + self.every_s):
            mean = sum(losses) / len(losses)
            self.append(schema.LossPoint(now, tokens, mean, min(losses), max(losses)))
        if len(self) >= schema.MAX_HISTORY:
            self[:], self.every_s = self[::2], 2 * self.every_s


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
        **figures.shared(),
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
    state: schema.FragmentPhase
    state = "following" if author in facts.members else "indirect" if author else "alone"
    state = "collecting" if author == facts.me else state
    state = "fetching" if f.inbox.behind() else state if facts.life.ready else "settling"
    here = sum(not f.tip.objection(item.line) for item in f.pool.values())
    numbers, short = (f.index, head.number, head.work), head.id[:ID_DIGITS]
    return schema.FragmentRow(*numbers, short, head.next, author or None, here, state)


def ledger_totals(
    facts: Facts, known: Mapping[str, Known], recent_s: float, before: Mapping[str, int]
) -> schema.LedgerTotals:
    """Totals as known here; of peers that left before this one came, only the merged tokens.
    `before` are their tokens `recent_s` ago."""
    applied = facts.control.tip.head.work
    all_figures = [figures for _, figures in known.values()]
    processed = max(applied, at_most(sum(each.tokens for each in all_figures), MAX_TOKENS))
    discarded = min(processed - applied, sum(each.discarded for each in all_figures))
    under_way = processed - applied - discarded
    board = [
        schema.Standing(
            **asdict(row),
            device=device,
            recent_tokens=at_most(row.tokens - before.get(row.peer_id, 0), MAX_TOKENS),
            trained_s=(figures.trained_s if figures else None) or None,
        )
        for row in contributors(facts)
        for device, figures in [known.get(row.peer_id, ("", None))]
    ]
    return schema.LedgerTotals(processed, applied, discarded, under_way, board, recent_s)


def contributors(facts: Facts) -> list[schema.Contributor]:
    """The public record, as it follows from the anchor: it is equal on all peers."""
    rows = [
        schema.Contributor(
            *(peer, entry.name, entry.contributions, entry.tokens),
            *(_payload_bytes(facts, peer), entry.first, entry.last),
        )
        for peer, entry in facts.control.tip.book.ledger.items()
        if entry.contributions
    ]
    return rows[: schema.MAX_PEERS]


def _payload_bytes(facts: Facts, peer: str) -> int:
    known = ((f.tip.book.ledger.get(peer), f.sizes.payload) for f in facts.fragments)
    return at_most(sum(entry.contributions * nbytes for entry, nbytes in known if entry), MAX_BYTES)


# -- the record for this peer's own program --------------------------------------------------------


@dataclass(frozen=True)
class PeerRecord:
    """State of a peer's part of the swarm; `version` and `applied_tokens` are of fragment 0."""

    peer: str
    addresses: Sequence[str]  # its own
    others: Sequence[str]  # an address of each other peer
    trainers: Sequence[str]  # that train and stay, this one included, in the order of their ids
    others_that_train: int  # or leave after having trained
    live: int
    training: int
    merged: int  # in the newest version
    planned: Planned
    version: int
    applied_tokens: int
    ready: bool  # it has the state that the others had when it came
    anchors: Mapping[str, str]  # by fragment, version:digest, with 16 digits of its digest
    anchor_digest: str  # of the whole anchor (hex); equal on all peers at equal version
    contributions: Sequence[schema.Contributor]
    heals: int  # anchors that were damaged
    takeovers: int  # versions that another peer made in its place


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
        contributions=contributors(facts),
        heals=facts.heals,
        takeovers=facts.takeovers,
    )
