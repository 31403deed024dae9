"""What a node has heard of the swarm since it connected, in bounded histories, for watchers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from msgspec.structs import replace

import diloco.messages.snapshot as schema
from diloco.core.history import Tip
from diloco.core.members import Member
from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.control import Figures
from diloco.messages.fields import forget_oldest
from diloco.messages.snapshot import PhaseSeconds
from diloco.swarm.node.rows import fragment_row, ledger_totals, peer_row, phase_seconds, run_info

# a younger snapshot answers the next request too, so the number of watchers costs nothing
FRESH_S = 0.5
LOOK_EVERY_S = 1.0


class Recorder:
    """What has happened in the swarm, as this node has heard. `now` is seconds of its clock.

    No bug in this class ends the training: `on_failure` is told the error, and what was to be
    recorded is missing.
    """

    def __init__(self, core: Peer, manifest_text: str) -> None:
        self.on_failure: Callable[[str], None] = lambda why: None
        self._core, self._manifest = core, manifest_text
        self._rounds: deque[schema.Round] = deque(maxlen=schema.MAX_HISTORY)
        self._events: deque[schema.LoggedEvent] = deque(maxlen=schema.MAX_HISTORY)
        self._samples: list[tuple[int, str, str]] = []
        self._loss: list[schema.LossPoint] = []
        self._loss_every_s = LOOK_EVERY_S  # that history spans the whole run, ever more coarsely
        self._last: dict[str, Figures] = {}  # of each peer, also of those that left
        self._looked_at = float("-inf")
        self._packed: tuple[float, list[bytes]] | None = None

    def note(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Keep one line of the event log; a new tip is a round, and no event."""
        with self._harmless():
            if kind == "tip":
                tip = self._core.facts.fragments[fields["fragment"]].tip
                self._rounds.append(self._round(tip, now))
                return
            text = " ".join(f"{key}={value}" for key, value in fields.items())
            self._events.append(schema.LoggedEvent(now, kind[:128], text[:512]))

    def add_samples(self, version: int, written: Sequence[tuple[str, str]]) -> None:
        """This peer has evaluated a version: prompts, and what the model writes after them."""
        self._samples = [(version, prompt[-4096:], text[:4096]) for prompt, text in written[:16]]

    def sample(self, now: float) -> None:
        """Take in what the members say of themselves; call it as often as you like."""
        if now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        with self._harmless():
            everybody = self._everybody(now)
            for member in everybody:
                self._last.pop(member.peer, None)  # who was heard last is forgotten last
                self._last[member.peer] = member.figures
            forget_oldest(self._last, 4 * schema.MAX_PEERS)
            told = [one.figures.loss for one in everybody if one.status.trains]
            losses = [loss for loss in told if loss]
            if losses and (not self._loss or now >= self._loss[-1].at + self._loss_every_s):
                tokens, mean = self._core.facts.control.tip.head.work, sum(losses) / len(losses)
                self._loss.append(schema.LossPoint(now, tokens, mean, min(losses), max(losses)))
            if len(self._loss) >= schema.MAX_HISTORY:
                self._loss, self._loss_every_s = self._loss[::2], 2 * self._loss_every_s

    def packed(self, now: float) -> list[bytes]:
        """A snapshot in pieces, perhaps the last one; `PayloadError` when there is none."""
        if self._packed is None or now - self._packed[0] >= FRESH_S:
            self._packed = None
            with self._harmless():
                self._packed = now, schema.pack(self._snapshot(now))
        if self._packed is None:
            raise PayloadError("no snapshot can be made here; ask another peer")
        return self._packed[1]

    def snapshot(self, now: float) -> schema.Snapshot | None:
        """All that this node knows now, with unix times; None when it cannot be put together."""
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
        told = [seconds for one in self._everybody(now) if (seconds := phase_seconds(one.figures))]
        mean = [sum(phase) / len(told) for phase in zip(*map(astuple, told), strict=True)]
        return schema.Round(
            *(head.fragment, head.number, len(facts.members) + 1, facts.num_trainers(), len(lines)),
            *(max(behind, default=0), PhaseSeconds(*mean) if told else None, now),
        )

    def _snapshot(self, now: float) -> schema.Snapshot:
        facts, since, everybody = self._core.facts, time.time() - now, self._everybody(now)
        figures = self._last | {member.peer: member.figures for member in everybody}
        return schema.Snapshot(
            run=run_info(self._core, self._manifest, since + now),
            peers=[peer_row(self._core, member, now) for member in everybody[: schema.MAX_PEERS]],
            fragments=[fragment_row(facts, f) for f in facts.fragments[: schema.MAX_ROWS]],
            rounds=[replace(one, closed_at=since + one.closed_at) for one in self._rounds],
            ledger=ledger_totals(facts, figures),
            loss=[replace(point, at=since + point.at) for point in self._loss],
            events=[replace(event, at=since + event.at) for event in self._events],
            left_out=max(0, len(everybody) - schema.MAX_PEERS),
            samples=self._samples,
        )
