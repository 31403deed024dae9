"""`summary.json`: the result of a run, for people and for other tools; and the timer of a peer's
phases."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from diloco.messages.snapshot import Contributor, Phase, PhaseSeconds
from diloco.rundir.files import finite, write_atomic


class PhaseTimer:
    """Counts every second of one thread in exactly one phase, on from the `start` of a resumed run;
    `settle` waits for the device, so that what it was given counts in the phase in which it was
    given.
    """

    def __init__(
        self,
        start: PhaseSeconds | None = None,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._done = PhaseSeconds(*(max(0.0, value) for value in astuple(start or PhaseSeconds())))
        self._clock = clock
        self._settle = settle
        self._phase: Phase | None = None
        self._since = 0.0

    def switch(self, phase: Phase | None) -> Phase | None:
        """Ends the current phase and starts `phase` (None: nothing is timed); returns the phase
        that ended."""
        self._settle()
        self._done, previous = self.seconds(), self._phase
        self._phase, self._since = phase, self._clock()
        return previous

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Moves seconds from one phase to another, because only afterwards is it known what the
        thread waited for.

        No more than the phase has: a second counts once, and none is negative.
        """
        done = self.seconds()
        seconds = min(seconds, getattr(done, source))
        self._done = replace(
            done,
            **{source: getattr(done, source) - seconds, target: getattr(done, target) + seconds},
        )
        self._since = self._clock()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Times a `with` block as `phase`, then continues the phase before it."""
        previous = self.switch(phase)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds(self) -> PhaseSeconds:
        """The seconds up to now, including the current phase."""
        if self._phase is None:
            return self._done
        elapsed = self._clock() - self._since
        return replace(self._done, **{self._phase: getattr(self._done, self._phase) + elapsed})


class Tokens(Struct, frozen=True):
    """Tokens that peers trained on, by their fate: processed = applied + discarded + in_flight."""

    processed: int = 0
    applied: int = 0
    discarded: int = 0
    in_flight: int = 0


class Evaluation(Struct, frozen=True):
    """Held-out loss of the anchor in nats per token; None if it was never evaluated."""

    loss: float | None = None

    @property
    def perplexity(self) -> float | None:
        """None where it is not a number of this machine; a NaN compares as False."""
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None


class PeerSummary(Struct, frozen=True):
    """One peer's part of a run; `steps` and `tokens` count its own inner steps over all its
    sessions."""

    peer_id: str
    name: str | None
    steps: int
    tokens: int
    anchor_digest: str | None
    bytes_sent: int
    bytes_received: int
    seconds: PhaseSeconds

    @property
    def utilization(self) -> float:
        return self.seconds.utilization


class Summary(Struct, frozen=True):
    """The content of `summary.json`, for one peer or for a swarm.

    exit: the exit code of the command.
    contributions: the swarm's public record: how much each peer contributed to the final model.
    """

    run_id: str = ""
    manifest_hash: str = ""
    mode: str = ""
    wall_s: float = 0.0
    outer_steps: int = 0
    tokens: Tokens = Tokens()
    eval: Evaluation = Evaluation()
    peers: Sequence[PeerSummary] = ()
    heals: int = 0
    takeovers: int = 0
    exit: int = 0
    contributions: Sequence[Contributor] = ()

    def result(self, of_steps: int | None = None) -> str:
        """How far it came, and its held-out loss, for people."""
        at = f"outer step {self.outer_steps}" + (f" of {of_steps}" if of_steps else "")
        return (
            at
            if self.eval.loss is None
            else f"{at}, held-out loss {self.eval.loss:.3f} nats per token"
        )

    def to_json(self) -> dict[str, Any]:
        """With what follows from it: perplexity and utilization. Contributions are left out if
        there are none."""
        content: dict[str, Any] = to_builtins(self)
        content["eval"]["perplexity"] = self.eval.perplexity
        for told, peer in zip(content["peers"], self.peers, strict=True):
            told["utilization"] = peer.utilization
            if peer.name is None:
                del told["name"]
        if not self.contributions:
            del content["contributions"]
        return dict(finite(content))


def write_summary(path: Path, summary: Summary) -> None:
    """Writes `summary.json`. Raises `ConfigError` if `path` cannot be written."""
    write_atomic(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def write_contributions(path: Path, contributions: Sequence[Contributor]) -> None:
    """Writes the public record as CSV, one line per peer. Raises `ConfigError` if `path` cannot be
    written."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(Contributor.__struct_fields__), lineterminator="\n")
    table.writeheader()
    for row in contributions:
        table.writerow({key: _cell(value) for key, value in to_builtins(row).items()})
    write_atomic(path, text.getvalue())


def _cell(value: object) -> object:
    """A value for a spreadsheet, which would read some texts as formulas; names and ids are what
    strangers choose."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def merge_peer_summaries(
    parts: Sequence[Summary],
    *,
    run_id: str,
    manifest_hash: str,
    mode: str,
    wall_s: float,
    exit: int,
) -> Summary:
    """One summary of a swarm from the summaries of its peers.

    applied, discarded: the largest count of any peer, because the swarm clock only grows.
    processed: the sum over the peers, and at least both, which may have tokens of a killed peer
        that left no summary. in_flight: the rest. eval,
    contributions: from the peer with the most outer steps that has them. heals, takeovers: only one
        peer counts each.
    """
    applied = max((part.tokens.applied for part in parts), default=0)
    discarded = max((part.tokens.discarded for part in parts), default=0)
    processed = max(sum(part.tokens.processed for part in parts), applied + discarded)
    furthest = sorted(parts, key=lambda part: part.outer_steps, reverse=True)
    return Summary(
        run_id=run_id,
        manifest_hash=manifest_hash,
        mode=mode,
        wall_s=wall_s,
        outer_steps=max((part.outer_steps for part in parts), default=0),
        tokens=Tokens(processed, applied, discarded, processed - applied - discarded),
        eval=next((part.eval for part in furthest if part.eval.loss is not None), Evaluation()),
        peers=[peer for part in parts for peer in part.peers],
        heals=sum(part.heals for part in parts),
        takeovers=sum(part.takeovers for part in parts),
        exit=exit,
        contributions=next((part.contributions for part in furthest if part.contributions), ()),
    )
