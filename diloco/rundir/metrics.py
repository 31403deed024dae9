"""Logs of one peer: metrics and events in the run directory, and in Weights & Biases."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.rundir.events import COUNTED, EventText
from diloco.rundir.files import JsonLines

logger = logging.getLogger(__name__)

AGGREGATE_EVERY_S = 30.0
# a peer's figures that are the swarm's: anchors are equal
SHARED = {"eval_loss": "swarm/held_out_loss", "swarm_tokens_per_s": "swarm/tokens_per_s"}


class RunLog:
    """`metrics.jsonl` and `events.jsonl` of one peer; a line has `time` (unix seconds) and `peer`.

    `metrics.jsonl`: version, inner_step (counted over this peer's sessions), tokens (swarm clock)
    and the measured values; one line per outer step has bytes_sent, swarm_tokens_per_s (applied
    since the one before) and the seconds of each phase so far. grad_norm is that of the last step
    before it is clipped, mfu needs a device whose peak is known.
    `events.jsonl`: `kind`, an `EventKind`, and the fields of that kind. `say` gets a line for
    people of each event that has one.

    Raises `ConfigError` if a file cannot be opened. If a line cannot be written later (the disk is
    full), that line is lost, one warning says so, and the run goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        peer: str,
        wandb: WandbLog | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.peer, self._clock, self._wandb = peer, clock, wandb
        self._say, self._text = say, EventText(COUNTED)
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        self._events = JsonLines(run_dir / "events.jsonl")
        self._writable = True

    def metric(self, *, version: int, inner_step: int, tokens: int, **measured: Any) -> None:
        """Log a line without values that are None. Losses are in nats per token."""
        record = {"version": version, "inner_step": inner_step, "tokens": tokens}
        record |= {name: value for name, value in measured.items() if value is not None}
        self._write(self._metrics, record)
        if self._wandb is not None:
            self._wandb.log(record)

    def samples(self, version: int, written: Sequence[tuple[str, str]]) -> None:
        """Log a `sample` event for each prompt, with the text that this version's model wrote."""
        for prompt, text in written:
            self.event("sample", version=version, prompt=prompt, text=text)
        if self._wandb is not None:
            self._wandb.samples([[version, *sample] for sample in written])

    def event(self, kind: str, **fields: Any) -> None:
        self._write(self._events, {"kind": kind, **fields})
        if (text := self._text(kind, fields)) is not None:
            self._say(text)

    def swarm_event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Log an event of the swarm node, whose `peer` becomes `subject`."""
        renamed = {"subject" if key == "peer" else key: value for key, value in fields.items()}
        self.event(kind, **renamed)

    def _write(self, lines: JsonLines, record: dict[str, Any]) -> None:
        assert not record.keys() & {"time", "peer"}, f"a line has its own time and peer: {record}"
        try:
            lines.write({"time": self._clock(), "peer": self.peer, **record})
            self._writable = True
        except ConfigError as error:
            if self._writable:
                logger.warning("%s; until then its lines are lost", error)
            self._writable = False

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WandbLog:
    """A wandb run per peer, grouped by run id, with an id that survives a resume.

    With `aggregate` there is one run, `swarm`, for all peers. The peer that leads logs what
    `figures` returns instead of its own metrics: once per outer step, and every 30 s in a long one.

    A failure of the service is one warning, and the run goes on with its own files.
    """

    def __init__(
        self, config: Config, peer: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        settings = config.wandb
        self.figures: Callable[[], Mapping[str, Any]] = dict
        self._aggregate, self._clock = settings.aggregate, clock
        self._logged: tuple[int, float] = (-1, -math.inf)  # version and time
        self._run: Any = None
        peer = "swarm" if settings.aggregate else peer
        if settings.mode == "disabled" or (settings.aggregate and not config.run.lead):
            return
        try:
            import wandb

            self._table = wandb.Table
            self._run = wandb.init(
                mode=None if os.environ.get("WANDB_MODE") else settings.mode,  # the variable wins
                project=settings.project,
                entity=settings.entity,
                group=os.environ.get("WANDB_RUN_GROUP") or config.run.id,  # set by a sweep
                name=peer,
                id=re.sub(r"[^A-Za-z0-9_-]", "-", f"{config.run.id}-{peer}")[:128],
                resume="allow",
                dir=str(config.run.dir),
                config=config.model_dump(mode="json"),
                # Its console capture would swallow the lines for the supervisor; and it must not
                # ask for a key.
                settings=wandb.Settings(
                    console="off", silent=True, init_timeout=30, login_timeout=10
                ),
            )
        except Exception as error:
            self._give_up(f"wandb.mode={settings.mode}: cannot start", error)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a line of `metrics.jsonl`."""
        self._try("log", lambda: self._log(record))

    def samples(self, rows: list[list[Any]]) -> None:
        """Log a table of versions, prompts and texts."""
        columns: Any = ["outer step", "prompt", "text"]
        self._try("log", lambda: self._run.log({"samples": self._table(columns, rows)}))

    def close(self) -> None:
        self._try("finish", lambda: self._run.finish())
        self._run = None

    def _log(self, record: Mapping[str, Any]) -> None:
        if self._aggregate:
            record = self._swarm(record)
        if record:
            self._run.log(dict(record))

    def _swarm(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the swarm's figures if they are due."""
        version, at = self._logged
        shared = {name: record[key] for key, name in SHARED.items() if key in record}
        if not shared and record["version"] <= version and self._clock() - at < AGGREGATE_EVERY_S:
            return {}
        self._logged = record["version"], self._clock()
        return {**self.figures(), **shared}

    def _try(self, task: str, work: Callable[[], None]) -> None:
        """Call `work`; after the first failure, warn and make no more calls."""
        if self._run is not None:
            try:
                work()
            except Exception as error:
                self._give_up(f"wandb: cannot {task}", error)

    def _give_up(self, fault: str, error: Exception) -> None:
        self._run = None
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("%s (%s); the run goes on, its metrics are in metrics.jsonl", fault, reason)
