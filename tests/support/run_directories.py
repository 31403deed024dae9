"""Directories of runs, written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from diloco.config import compose
from diloco.messages.snapshot import PhaseSeconds
from diloco.rundir.summary import Evaluation, PeerSummary, Summary, Tokens, write_summary

composed = lru_cache(maxsize=32)(lambda *overrides: compose(overrides))
LOSSES = (5.0, 4.0, 3.0)  # at versions 0, 1 and 2, ten seconds and 100 tokens apart


def make(
    place: Path,
    *overrides: str,
    losses: Sequence[float] = LOSSES,
    exit: int = 0,
    began: float = 1000.0,
) -> Path:
    """A run directory as a run leaves it."""
    place.mkdir(parents=True)
    config = composed("experiment=smoke", *overrides)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": place})})
    (place / "config.yaml").write_text(config.to_yaml())
    lines = []
    for step, loss in enumerate(losses):
        line = {"time": began + 10 * step, "peer": "p0", "version": step, "inner_step": 4 * step}
        line |= {"bytes_sent": 1000 * step, "tokens": 100 * step}
        lines += [{**line, "loss": loss + 0.1}, {**line, "eval_loss": loss}]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    spent = [PhaseSeconds(compute=9, wait=wait) for wait in (1, 9)]
    peers = [
        PeerSummary(f"Qm{index}", f"p{index}", 8, 100, "d", 1000, 1000, seconds)
        for index, seconds in enumerate(spent)
    ]
    ends = (len(losses) - 1, Tokens(200, 200), Evaluation(losses[-1]))
    summary = Summary("smoke", "h", "diloco", 21.5, *ends, peers, 0, 0, exit)
    write_summary(place / "summary.json", summary)
    return place
