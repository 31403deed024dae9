"""Where a peer's wall time went, and `summary.json`: what a run came to, for people and for other tools."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from diloco.protocol.shares import Contributor
from diloco.rundir.files import finite, write_atomic

__all__ = [
    "Evaluation",
    "PeerSummary",
    "Phase",
    "Phases",
    "Seconds",
    "Summary",
    "Tokens",
    "merge_peer_summaries",
    "peer_message",
    "write_contributions",
    "write_summary",
]

Phase = Literal["compute", "wait", "comm", "outer"]


@dataclass(frozen=True)
class Seconds:
    """Wall seconds per phase of the training loop.

    compute: inner steps and evaluation. wait: for other peers. comm: encoding, sending, receiving, adopting.
    outer: the outer steps of the fragments that this peer holds, where they hold up its training.
    """

    compute: float = 0.0
    wait: float = 0.0
    comm: float = 0.0
    outer: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.wait + self.comm + self.outer

    def __sub__(self, earlier: Seconds) -> Seconds:
        names = ("compute", "wait", "comm", "outer")
        return Seconds(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def utilization(self) -> float:
        """The share of compute (T_inner / (T_inner + T_sync) of INTELLECT-1); 0 before anything was timed."""
        return self.compute / self.total if self.total > 0 else 0.0


class Phases:
    """Accounts every second of one thread to exactly one phase.

    Work on a GPU counts where the thread waits for it: read the loss before leaving `compute`.
    `start` holds the seconds of earlier sessions of a resumed run.
    """

    def __init__(self, start: Seconds | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._done = start or Seconds()
        self._clock = clock
        self._phase: Phase | None = None
        self._since = 0.0

    def switch(self, phase: Phase | None) -> Phase | None:
        """Ends the present phase and starts `phase` (None: nothing is timed); returns the one that ended."""
        self._done, previous = self.seconds(), self._phase
        self._phase, self._since = phase, self._clock()
        return previous

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Accounts seconds of one phase to another: who waited for what is known only afterwards."""
        done = self.seconds()
        self._done = replace(done, **{source: getattr(done, source) - seconds, target: getattr(done, target) + seconds})
        self._since = self._clock()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """`phase` for the length of a `with` block, then again what was before."""
        previous = self.switch(phase)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds(self) -> Seconds:
        """The account up to now, with the running phase."""
        if self._phase is None:
            return self._done
        elapsed = self._clock() - self._since
        return replace(self._done, **{self._phase: getattr(self._done, self._phase) + elapsed})

    @property
    def utilization(self) -> float:
        return self.seconds().utilization


@dataclass(frozen=True)
class Tokens:
    """Tokens that peers trained on, and what became of them: processed = applied + discarded + in_flight."""

    processed: int = 0
    applied: int = 0
    discarded: int = 0
    in_flight: int = 0


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of the anchor in nats per token; null where it was never evaluated."""

    loss: float | None = None
    perplexity: float | None = field(init=False)

    def __post_init__(self) -> None:
        representable = self.loss is not None and self.loss < 700  # exp overflows beyond; false for NaN, too
        object.__setattr__(self, "perplexity", math.exp(self.loss or 0.0) if representable else None)


@dataclass(frozen=True)
class PeerSummary:
    """One peer's share of the run; `steps` and `tokens` are its own inner steps, counted over all its sessions."""

    peer_id: str
    name: str | None
    steps: int
    tokens: int
    anchor_digest: str | None
    bytes_sent: int
    bytes_received: int
    seconds: Seconds
    utilization: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "utilization", self.seconds.utilization)


@dataclass(frozen=True)
class Summary:
    """`summary.json`; `exit` is the exit code of the command.

    `predicted` stands beside what was achieved: utilization and bytes_sent of a peer as `diloco plan` computes them
    from the measured inner step (step_s) and the limit of the link (bits_per_s; null where none is set).
    `contributions` are the swarm's public record of who gave how much to the final model.
    """

    run_id: str
    manifest_hash: str
    mode: str
    wall_s: float
    outer_steps: int
    tokens: Tokens
    eval: Evaluation
    peers: Sequence[PeerSummary]
    heals: int
    takeovers: int
    exit: int
    predicted: Mapping[str, float | None] | None = None
    contributions: Sequence[Contributor] = ()

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = finite(asdict(self))
        for peer in content["peers"]:
            if peer["name"] is None:
                del peer["name"]
        for absent in ("predicted", "contributions"):
            if not content[absent]:
                del content[absent]
        return content


def write_summary(path: Path, summary: Summary) -> None:
    """Raises ConfigError where `path` cannot be written."""
    write_atomic(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def write_contributions(path: Path, contributions: Sequence[Contributor]) -> None:
    """The public record as CSV, one line for each peer. Raises ConfigError where `path` cannot be written."""
    text = io.StringIO()
    table = csv.DictWriter(text, [column.name for column in fields(Contributor)], lineterminator="\n")
    table.writeheader()
    for row in contributions:
        # Names are strangers' words, and a spreadsheet takes these for formulas.
        name = f"'{row.name}" if row.name.startswith(("=", "+", "-", "@")) else row.name
        table.writerow({**asdict(row), "name": name})
    write_atomic(path, text.getvalue())


def peer_message(summary: Summary) -> dict[str, Any]:
    """The fields of a supervisor's "summary" message, from the summary of a single peer.

    Its `tokens` are the four counts as this peer knows them: processed is its own, the others are the swarm clock's.
    """
    [peer] = summary.to_json()["peers"]
    shared = summary.to_json()
    names = ("tokens", "eval", "heals", "takeovers", "outer_steps", "exit", "predicted", "contributions")
    return {**peer, **{name: shared[name] for name in names if name in shared}}


def merge_peer_summaries(
    messages: Sequence[Mapping[str, Any]], *, run_id: str, manifest_hash: str, mode: str, wall_s: float, exit: int
) -> Summary:
    """One summary of a swarm from the "summary" messages of its peers (fields that are missing count as zero).

    - processed: the sum of what each peer trained on. A peer that was killed sends no message, but the swarm clock may
      have counted it; so it is never less than applied + discarded.
    - applied, discarded: the swarm clock, which only grows: the largest count that any peer has seen.
    - in_flight: the rest, so the invariant of `Tokens` holds.
    - outer_steps: the largest; eval: of the peer that is furthest, since anchors of equal version are bit-identical.
    - contributions: as the peer that is furthest has them.
    - heals, takeovers: sums, since each is counted by the one peer that does it.
    """
    counts = [_counts(message) for message in messages]
    applied = max((count.applied for count in counts), default=0)
    discarded = max((count.discarded for count in counts), default=0)
    processed = max(sum(count.processed for count in counts), applied + discarded)
    evaluated = [message for message in messages if _evaluated(message) is not None]
    furthest = max(evaluated, key=lambda message: int(message.get("outer_steps") or 0), default=None)
    return Summary(
        run_id=run_id,
        manifest_hash=manifest_hash,
        mode=mode,
        wall_s=wall_s,
        outer_steps=max((int(message.get("outer_steps") or 0) for message in messages), default=0),
        tokens=Tokens(processed, applied, discarded, processed - applied - discarded),
        eval=Evaluation(None if furthest is None else _evaluated(furthest)),
        peers=[_peer(message) for message in messages],
        heals=sum(int(message.get("heals") or 0) for message in messages),
        takeovers=sum(int(message.get("takeovers") or 0) for message in messages),
        exit=exit,
        contributions=_contributions(messages),
        predicted=next((message["predicted"] for message in messages if message.get("predicted")), None),
    )


def _counts(message: Mapping[str, Any]) -> Tokens:
    tokens = message.get("tokens") or 0
    if not isinstance(tokens, Mapping):
        return Tokens(processed=int(tokens))
    return Tokens(**{name: int(tokens.get(name) or 0) for name in ("processed", "applied", "discarded", "in_flight")})


def _contributions(messages: Sequence[Mapping[str, Any]]) -> list[Contributor]:
    told = [message for message in messages if message.get("contributions")]
    furthest: Mapping[str, Any] = max(told, key=lambda message: int(message.get("outer_steps") or 0), default={})
    return [Contributor(**row) for row in furthest.get("contributions", ())]


def _evaluated(message: Mapping[str, Any]) -> float | None:
    loss = (message.get("eval") or {}).get("loss")
    return None if loss is None else float(loss)


def _peer(message: Mapping[str, Any]) -> PeerSummary:
    seconds = message.get("seconds") or {}
    return PeerSummary(
        peer_id=str(message.get("peer_id") or ""),
        name=message.get("name") or message.get("peer"),
        steps=int(message.get("steps") or 0),
        tokens=_counts(message).processed,
        anchor_digest=message.get("anchor_digest"),
        bytes_sent=int(message.get("bytes_sent") or 0),
        bytes_received=int(message.get("bytes_received") or 0),
        seconds=Seconds(**{name: float(seconds.get(name) or 0) for name in ("compute", "wait", "comm", "outer")}),
    )
