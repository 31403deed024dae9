"""`summary.json`: the result of a run; and the timer of a peer's phases."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, to_builtins

from diloco.messages.figures import PeerFigures
from diloco.messages.snapshot import Contributor, Phase, PhaseSeconds, Tokens
from diloco.rundir.files import write_atomic

# A spreadsheet reads such texts as formulas; names and ids are what strangers choose.
FORMULAS = ("=", "+", "-", "@", "\t", "\r")


class PhaseTimer:
    """Counts every second of one thread in exactly one phase.

    A resumed run counts on from `start`. `settle` waits for the device, so that queued work counts
    in the phase that queued it.
    """

    def __init__(
        self,
        start: PhaseSeconds | None = None,
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._done = PhaseSeconds(*(max(0.0, value) for value in astuple(start or PhaseSeconds())))
        self._clock, self._settle = clock, settle
        self._phase: Phase | None = None
        self._since = 0.0

    def switch(self, phase: Phase | None) -> Phase | None:
        """Start `phase` (None: nothing is timed); return the phase that ended."""
        self._settle()
        self._done, previous = self.seconds(), self._phase
        self._phase, self._since = phase, self._clock()
        return previous

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Move seconds, at most those that `source` has, to another phase.

        Only after a wait is it known what the thread waited for.
        """
        done = self.seconds()
        before, after = getattr(done, source), getattr(done, target)
        seconds = min(seconds, before)
        self._done = replace(done, **{source: before - seconds, target: after + seconds})
        self._since = self._clock()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Time a `with` block as `phase`, then continue the phase before it."""
        previous = self.switch(phase)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds(self) -> PhaseSeconds:
        """Return the seconds up to now, including the current phase."""
        if self._phase is None:
            return self._done
        elapsed = self._clock() - self._since
        return replace(self._done, **{self._phase: getattr(self._done, self._phase) + elapsed})


class Evaluation(Struct, frozen=True):
    """Held-out loss of the anchor in nats per token; None if it was never evaluated."""

    loss: float | None = None

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss; None if that is unknown or overflows a float."""
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None


class PeerSummary(PeerFigures, frozen=True, kw_only=True):
    """One peer's part of a run; `steps` and `seconds` are those of all its sessions."""

    peer_id: str
    name: str | None = None
    steps: int = 0
    anchor_digest: str | None = None
    seconds: PhaseSeconds = PhaseSeconds()

    @property
    def utilization(self) -> float:
        return self.seconds.utilization


class Summary(Struct, frozen=True):
    """The content of `summary.json`, for one peer or for a swarm.

    exit: the exit code of the command.
    contributions: the swarm's public record: how much each peer contributed to the final model.
    virtual_s: the length of a simulated run, None of a real one.
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
    virtual_s: float | None = None

    def result(self, of_steps: int | None = None) -> str:
        """Describe how far the run came, and its held-out loss."""
        at = f"outer step {self.outer_steps}" + (f" of {of_steps}" if of_steps else "")
        loss = self.eval.loss
        return at if loss is None else f"{at}, held-out loss {loss:.3f} nats per token"

    def to_json(self) -> dict[str, Any]:
        """Return JSON with perplexity and utilization, and without empty parts."""
        content: dict[str, Any] = to_builtins(self)
        content["eval"]["perplexity"] = self.eval.perplexity
        for row, peer in zip(content["peers"], self.peers, strict=True):
            row["utilization"] = peer.utilization
            if peer.name is None:
                del row["name"]
        if not self.contributions:
            del content["contributions"]
        if self.virtual_s is None:
            del content["virtual_s"]
        return content


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary.json`; non-finite numbers become null. Raises `ConfigError` if it cannot."""
    text = msgspec.json.encode(summary.to_json())
    write_atomic(path, msgspec.json.format(text, indent=2) + b"\n")


def read_summary(path: Path) -> Summary | None:
    """Read the summary in a file; None if there is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    return None


def write_contributions(path: Path, contributions: Sequence[Contributor]) -> None:
    """Write the public record as CSV, one line per peer. Raises `ConfigError` if it cannot."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Contributor.__struct_fields__)
    for row in contributions:
        cells = to_builtins(row).values()
        table.writerow([f"'{cell}" if str(cell).startswith(FORMULAS) else cell for cell in cells])
    write_atomic(path, text.getvalue())


def merge_peer_summaries(parts: Sequence[Summary], **known: Any) -> Summary:
    """Merge the summaries of a swarm's peers, and `known` fields that none of them has.

    applied, discarded: the largest count of any peer, because the swarm clock only grows.
    processed: the sum over the peers, and at least both, which may have tokens of a killed peer
        that left no summary. in_flight: the rest.
    eval, contributions: from the peer with the most outer steps that has them.
    heals, takeovers: only one peer counts each.
    """
    applied = max((part.tokens.applied for part in parts), default=0)
    discarded = max((part.tokens.discarded for part in parts), default=0)
    processed = max(sum(part.tokens.processed for part in parts), applied + discarded)
    furthest = sorted(parts, key=lambda part: part.outer_steps, reverse=True)
    return Summary(
        **known,
        outer_steps=furthest[0].outer_steps if parts else 0,
        tokens=Tokens(processed, applied, discarded, processed - applied - discarded),
        eval=next((part.eval for part in furthest if part.eval.loss is not None), Evaluation()),
        peers=[peer for part in parts for peer in part.peers],
        heals=sum(part.heals for part in parts),
        takeovers=sum(part.takeovers for part in parts),
        contributions=next((part.contributions for part in furthest if part.contributions), ()),
    )
