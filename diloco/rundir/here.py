"""The runs of this machine: those in a folder of runs, and those that this user's peers joined."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.rundir.compare import is_run, read_json
from diloco.rundir.files import number
from diloco.rundir.presence import LIVING, Record, data_home, pause_file, read_records

__all__ = ["RunHere", "read_run", "runs_here"]

TAIL_BYTES = 1 << 16  # of metrics.jsonl, which may be long


@dataclass(frozen=True)
class RunHere:
    """One run directory, and what is known of it.

    state: of its peers on this machine, one of `LIVING`; "done", "left" or "failed" after its end; "gone" if its
        process is not there any more; "elsewhere" if it is another machine's.
    why: of a pause or a failure. since: unix seconds. loss: the newest one, in nats per token. exit: exit code.
    addresses: where the swarm may be found; none once the run has ended.
    """

    run_id: str
    where: Path
    state: str
    why: str = ""
    since: float | None = None
    version: int | None = None
    loss: float | None = None
    exit: int | None = None
    addresses: tuple[str, ...] = ()
    peers: dict[str, Record] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.state in LIVING

    @property
    def token(self) -> str | None:
        """`@FILE` with the invitation of a living peer to a closed run."""
        return next((record.token for record in self.peers.values() if record.lives and record.token), None)

    @property
    def paused_by_hand(self) -> bool:
        """Whether `diloco pause` was told to this run, and `diloco resume` was not since."""
        return self.lives and pause_file(self.where).exists()

    @property
    def unpausable(self) -> str:
        """Why none of its living peers can pause; empty if one can."""
        whys = [record.unpausable for record in self.peers.values() if record.lives]
        return whys[0] if whys and all(whys) else ""

    def to_json(self) -> dict[str, Any]:
        """For `diloco status --json`."""
        return {
            "run_id": self.run_id, "where": str(self.where), "state": self.state, "why": self.why,
            "since": self.since, "version": self.version, "loss": self.loss, "exit": self.exit,
            "address": next(iter(self.addresses), None), "peers": sorted(self.peers),
        }  # fmt: skip


def runs_here(folder: Path = Path("runs")) -> list[RunHere]:
    """The runs in a folder, and those in the directories of this user's peers; living ones first, then the newest."""
    found = [read_run(place) for place in _directories(folder)]
    return sorted(found, key=lambda run: (not run.lives, -(run.since or 0.0), str(run.where)))


def _directories(folder: Path) -> Iterator[Path]:
    for place in (folder, *sorted(data_home().glob("peer-*/runs"))):
        with contextlib.suppress(OSError):
            yield from sorted(one for one in place.iterdir() if one.is_dir() and is_run(one))


def read_run(directory: Path) -> RunHere:
    """What one run directory says."""
    records, summary = read_records(directory), read_json(directory / "summary.json")
    version, loss = _newest(directory / "metrics.jsonl")
    if version is None:
        outer_steps = number(summary.get("outer_steps"))
        version = None if outer_steps is None else int(outer_steps)
    shown = _shown(list(records.values()), number(summary.get("exit")))
    manifest = read_json(directory / "manifest.json").get("run")
    run_id = shown.run_id or str((manifest.get("id") if isinstance(manifest, dict) else None) or directory.name)
    living = [record for record in records.values() if record.lives]
    return RunHere(
        run_id, directory, shown.state, shown.why, shown.since or None, version, loss, shown.exit,
        _addresses(directory, living), records,
    )  # fmt: skip


def _shown(records: Sequence[Record], code: float | None) -> Record:
    """The record that stands for a run: of a living peer, one that trains before one that pauses; else the newest.

    Without a record (a simulation, or an older diloco) the exit code of the summary says how the run ended.
    """
    living = [record for record in records if record.lives]
    for state in LIVING:
        for record in living:
            if record.state == state:
                return record
    if not records:
        return Record(state="gone") if code is None else Record(state="failed" if code else "done", exit=int(code))
    newest = max(records, key=lambda record: record.since)
    if newest.exit is not None or newest.lives:
        failed = [record for record in records if record.exit]
        return failed[0] if failed else newest
    if newest.elsewhere:
        return _changed(newest, "elsewhere", f"on {newest.machine}")
    return _changed(newest, "gone", f"its process ended without a word while {newest.state}")


def _changed(record: Record, state: str, why: str) -> Record:
    return Record(run_id=record.run_id, state=state, why=why, since=record.since, machine=record.machine)


def _addresses(directory: Path, living: Sequence[Record]) -> tuple[str, ...]:
    """Where the swarm of a living run may be found, the best first."""
    if not living:
        return ()
    written: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        written = (directory / "address").read_text().split()
    return tuple(dict.fromkeys([*written, *(one for record in living for one in record.addresses)]))


def _newest(path: Path) -> tuple[int | None, float | None]:
    """The newest version and loss in a file of metrics, of which only the end is read."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().splitlines()
    version: float | None = None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                version = number(content.get("version")) if version is None else version
                loss = number(content.get("loss"))
                if loss is not None:
                    return (None if version is None else int(version)), loss
    return (None if version is None else int(version)), None
