"""What a node remembers of the swarm, for watchers.

    statuses, publications, notes -> Recorder (rings of bounded length) -> snapshot -> pieces (see `watch`)

A node knows what it has heard since it connected. The histories of a peer that is longer there reach further back.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import diloco.protocol.snapshot as schema
from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.membership import AddressBook, Member
from diloco.protocol.messages import Message
from diloco.protocol.messages.control import Figures, Published, Status
from diloco.protocol.numbers import MAX_SECONDS, MAX_TOKENS, at_most, forget_oldest, within_bounds
from diloco.protocol.peer import Peer
from diloco.protocol.phase_seconds import PHASES, PhaseSeconds

__all__ = ["Recorder"]

FRESH_S = 0.5  # a younger snapshot answers the next request too, so the number of watchers costs nothing
LOSS_EVERY_S = 1.0
ELSEWHERE_S = 75.0  # the record of a dead peer lives 60 s; one named for longer lives where we cannot reach it
MAX_KNOWN = 4 * schema.MAX_PEERS


class Recorder:
    """What has happened in the swarm, as the node of this protocol core has heard. `now` is seconds of its clock.

    Each history has a bound; that of the loss spans the whole run, ever more coarsely.

    On failure: training needs nothing that is kept here, so no bug in this class ends it. Whatever goes wrong here is
    passed to `on_failure` with the error as one line, and what was to be recorded is missing from the histories.
    """

    def __init__(self, protocol: Peer, manifest_text: str) -> None:
        self.on_failure: Callable[[str], None] = lambda why: None
        self._protocol = protocol
        self._manifest_text = manifest_text
        self._rounds: deque[schema.Round] = deque(maxlen=schema.MAX_HISTORY)
        self._seconds: dict[int, tuple[float, ...]] = {}  # by version: rounds that peers told, and their sums by phase
        self._events: deque[schema.Event] = deque(maxlen=schema.MAX_HISTORY)
        self._samples: list[tuple[int, str, str]] = []
        self._loss: list[schema.LossPoint] = []
        self._loss_every_s = LOSS_EVERY_S
        self._told_rounds: dict[str, int] = {}  # by peer
        self._last: dict[str, Status] = {}  # the last of each peer, also of those that left
        self._named_since: dict[str, float] = {}  # peers in the DHT that are not connected
        self._newest: dict[int, tuple[int, int]] = {}  # term and version of each fragment
        self._packed: tuple[float, list[bytes]] | None = None

    def note(self, kind: str, fields: Mapping[str, object], now: float) -> None:
        """Keep one line of the event log, unless each peer writes such a line in every round."""
        if kind == "units":
            return
        with self._harmless():
            text = " ".join(f"{key}={value}" for key, value in fields.items())
            self._events.append(schema.Event(at=now, kind=kind[:128], text=text[:512]))

    def wrote(self, version: int, written: Sequence[tuple[str, str]]) -> None:
        """This peer has evaluated a version: prompts, and what the model writes after them."""
        self._samples = [(version, prompt[-4096:], text[:4096]) for prompt, text in written]

    def heard(self, peer: str, message: Message, now: float) -> None:
        """A member, or this peer itself, said something. The protocol has taken it in already."""
        with self._harmless():
            match message:
                case Status():
                    self._heard_status(peer, message, now)
                case Published():
                    self._heard_published(message, now)

    def named(self, peers: Mapping[str, object], now: float) -> None:
        """The DHT names these peers."""
        protocol = self._protocol
        strangers = [peer for peer in peers if peer not in protocol.members and peer != protocol.me]
        self._named_since = {peer: self._named_since.get(peer, now) for peer in strangers[: schema.MAX_PEERS]}

    def _heard_status(self, peer: str, status: Status, now: float) -> None:
        protocol = self._protocol
        member = protocol.members.get(peer)
        self._last[peer] = status if member is None else member.status  # with the figures of the last heartbeat
        if len(self._last) > MAX_KNOWN:
            gone = (one for one in self._last if one not in protocol.members and one != protocol.me)
            forgotten = next(gone, peer)
            self._last.pop(forgotten)
            self._told_rounds.pop(forgotten, None)
        figures = status.figures or Figures()
        seconds = _phases(figures)
        if seconds is not None and figures.rounds != self._told_rounds.get(peer, 0):
            self._told_rounds[peer] = figures.rounds
            version = min(status.versions, default=0)
            told = self._seconds.get(version, (0.0,) * (1 + len(PHASES)))
            self._seconds[version] = tuple(map(sum, zip(told, (1.0, *astuple(seconds)), strict=True)))
            forget_oldest(self._seconds, schema.MAX_HISTORY)
        if figures.loss and (not self._loss or now - self._loss[-1].at >= self._loss_every_s):
            self._add_loss(now)

    def _heard_published(self, message: Published, now: float) -> None:
        protocol = self._protocol
        place = (message.term, message.version)  # a successor may make lost versions again
        if message.fragment >= len(protocol.fragments) or place <= self._newest.get(message.fragment, (0, 0)):
            return
        self._newest[message.fragment] = place
        self._rounds.append(
            schema.Round(
                fragment=message.fragment,
                version=message.version,
                live=len(protocol.members) + 1,
                participating=protocol.num_trainers(),
                merged=len(message.contributors),
                staleness=message.staleness,
                seconds=None,
                closed_at=now,
            )
        )

    def _add_loss(self, now: float) -> None:
        protocol = self._protocol
        statuses = [protocol.status(figures=True), *(member.status for member in protocol.members.all())]
        losses = [s.figures.loss for s in statuses if s.in_round and s.figures and s.figures.loss]
        if not losses:
            return
        tokens = protocol.swarm_clock()[1]
        mean = sum(losses) / len(losses)
        self._loss.append(schema.LossPoint(at=now, tokens=tokens, loss=mean, low=min(losses), high=max(losses)))
        if len(self._loss) >= schema.MAX_HISTORY:
            self._loss = self._loss[::2]
            self._loss_every_s *= 2

    def packed(self, now: float) -> list[bytes]:
        """The snapshot in pieces; one that is fresh is not made again. `PayloadError` when there is none."""
        if self._packed is None or now - self._packed[0] >= FRESH_S:
            found = self.snapshot(now)
            with self._harmless():
                self._packed = None if found is None else (now, schema.pack(found))
        if self._packed is None:
            raise PayloadError("no snapshot can be made here; ask another peer")
        return self._packed[1]

    def snapshot(self, now: float) -> schema.Snapshot | None:
        """Everything that this node knows now, with unix times; None when it cannot be put together."""
        with self._harmless():
            return self._snapshot(now)
        return None

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.on_failure(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _snapshot(self, now: float) -> schema.Snapshot:
        protocol, since = self._protocol, time.time() - now
        myself = Member(
            protocol.me, protocol.name, protocol.trains, protocol.holds, protocol.status(figures=True), now, now,
            device=protocol.device,
        )  # fmt: skip
        everybody = [myself, *protocol.members.all()]
        elsewhere = [peer for peer, named_at in self._named_since.items() if now - named_at > ELSEWHERE_S]
        newest = protocol.swarm_clock()[0]
        seconds = {
            version: PhaseSeconds(*(total / rounds for total in totals))
            for version, (rounds, *totals) in self._seconds.items()
        }
        return schema.Snapshot(
            run=_run(protocol, self._manifest_text, since + now),
            peers=[_peer(member, newest, now, protocol.address_book) for member in everybody[: schema.MAX_PEERS]],
            fragments=_fragments(protocol),
            rounds=[
                row.model_copy(update={"closed_at": since + row.closed_at, "seconds": seconds.get(row.version)})
                for row in self._rounds
            ],
            ledger=self._ledger(everybody),
            loss=[point.model_copy(update={"at": since + point.at}) for point in self._loss],
            samples=self._samples,
            events=[event.model_copy(update={"at": since + event.at}) for event in self._events],
            components=[[member.peer for member in everybody[: schema.MAX_PEERS]], *([elsewhere] if elsewhere else [])],
            left_out=max(0, len(everybody) - schema.MAX_PEERS),
        )

    def _ledger(self, everybody: list[Member]) -> schema.LedgerTotals:
        """As far as this node knows. Of peers that left before it came, it counts only the tokens in the model."""
        last = self._last | {member.peer: member.status for member in everybody}
        applied = self._protocol.swarm_clock()[1]
        processed = max(applied, at_most(sum(status.tokens for status in last.values()), MAX_TOKENS))
        discarded = min(processed - applied, sum(s.figures.discarded for s in last.values() if s.figures))
        return schema.LedgerTotals(
            processed=processed,
            applied=applied,
            discarded=discarded,
            in_flight=processed - applied - discarded,
            contributions=self._protocol.accounts.contributions()[: schema.MAX_PEERS],
        )


def _phases(figures: Figures) -> PhaseSeconds | None:
    return PhaseSeconds(*figures.seconds) if len(figures.seconds) == len(PHASES) else None


def _peer(member: Member, newest: int, now: float, places: AddressBook) -> schema.PeerRow:
    status, version = member.status, min(member.status.versions, default=0)
    figures = status.figures or Figures()
    return schema.PeerRow(
        peer_id=member.peer,
        short_id=member.peer[-schema.SHORT :],
        name=member.name,
        state=status.state,
        trains=member.trains,
        holds=member.holds,
        device=member.device,
        version=version,
        version_lag=max(0, newest - version),
        inner_step=status.inner_step,
        target_steps=status.target_steps,
        steps_per_s=status.steps_per_s,
        tokens=status.tokens,
        loss=figures.loss or None,
        bytes_sent=figures.bytes_sent,
        bytes_received=figures.bytes_received,
        last_seen_s=within_bounds(now - member.heard_at, MAX_SECONDS),
        seconds=_phases(figures),
        addresses=list(places.of(member.peer)),
    )


def _fragments(protocol: Peer) -> list[schema.FragmentRow]:
    heirs, rows = protocol.heirs(), []
    for fragment, version in enumerate(protocol.versions[: schema.MAX_FRAGMENTS]):
        lease = protocol.leases.get(fragment)
        rows.append(
            schema.FragmentRow(
                fragment=fragment,
                syncer=None if lease is None else lease.holder,
                term=protocol.leases.term(fragment),
                version=version if lease is None else max(version, lease.version),
                backup=heirs.get(fragment),
            )
        )
    return rows


def _run(protocol: Peer, manifest_text: str, at: float) -> schema.RunInfo:
    manifest: dict[str, Any] = json.loads(manifest_text)
    model = manifest.get("model") or {}
    mode = "synchronous" if protocol.lockstep else "streaming" if protocol.outer.quorum is None else "asynchronous"
    version, applied = protocol.swarm_clock()
    return schema.RunInfo(
        run_id=protocol.run_id,
        manifest_hash=protocol.manifest_hash,
        wire_version=WIRE_VERSION,
        mode=mode,
        model=str(model.get("name") or ""),
        outer_steps=at_most(protocol.planned[0]) or None,
        tokens=protocol.planned[1] or None,
        version=version,
        applied_tokens=applied,
        at=at,
        answered_by=protocol.me,
    )
