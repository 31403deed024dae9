"""Reports of a peer while it trains, and their listeners.

training loop -> Report -> json_lines -> a JSON object per line -> read_report -> Report -> table
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diloco.config import Config
from diloco.config.address import reachability
from diloco.messages.control import Figures
from diloco.messages.figures import shown, together
from diloco.messages.snapshot import FATES, PeerRow, Snapshot
from diloco.rundir.metrics import SHARED
from diloco.rundir.summary import Summary
from diloco.text import plain

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0  # between lines of a peer whose outer step does not change
_REACH = {
    "loopback": "on this machine only; swarm=network lets others in",
    "LAN": (
        "in this network; for elsewhere forward the port and set"
        " swarm.announce=[/ip4/PUBLIC_IP/tcp/PORT]"
    ),
    "public": "from anywhere",
}


class Report(Struct, frozen=True, tag_field="t"):
    """`peer` is the name of the peer that reports, `time` unix seconds (virtual if simulated)."""

    peer: str = "?"
    time: float = 0.0

    def told_by(self, peer: str, time: float) -> Self:
        """Copy the report with this peer and time."""
        return replace(self, peer=peer, time=time)


class Stage(Report, frozen=True, tag="stage"):
    """A peer prepares to train.

    `stage` is "data", with bytes of text that are tokenised of how many (0: none is now), or
    "state", with bytes that came in.
    """

    stage: str = ""
    received: int = 0
    wanted: int = 0


class Ready(Report, frozen=True, tag="ready"):
    """A peer has joined the swarm, or has started it (`first`).

    address: the best one, empty if the peer listens nowhere. addresses: all, the best first.
    command: the command to which others append an address to join. advice: how to become reachable,
        if it is not.
    """

    address: str = ""
    addresses: tuple[str, ...] = ()
    first: bool = False
    command: str = "diloco join"
    advice: str = ""

    def invitation(self) -> list[str]:
        """List lines for the user who started a swarm: the best address as a command, then others.

        `command` is `diloco invite ...` for a closed run: its owner makes a link for each
        volunteer.
        """
        best, *others = self.addresses or (self.address,)
        if not best:
            return ["nobody can join through this peer, which listens nowhere"]
        title = "this makes a link by which one volunteer joins"
        if self.command == "diloco join":
            title = "others join with this"
        lines = [f"{title} ({reachability(best)}: {_REACH[reachability(best)]}):"]
        lines.append(f"{self.command} {best}")
        return lines + [f"or, {reachability(addr)}: {self.command} {addr}" for addr in others[:4]]


class Notice(Report, frozen=True, tag="notice"):
    """A line for whoever started the peer."""

    text: str = ""


class PeerStatus(Report, frozen=True, tag="status"):
    """The state of a peer twice a second.

    `outer_steps` is the budget's. None means unknown; a display keeps the value before.
    """

    state: str = ""
    version: int | None = None
    outer_steps: int | None = None
    inner_step: int | None = None
    target_steps: int | None = None
    exchanged: bool = False
    figures: Figures | None = None
    peers: int | None = None
    merged: tuple[int, int] | None = None  # contributors of the newest version, and who trains


class Finished(Report, frozen=True, tag="summary"):
    """The summary of this single peer, after its last step."""

    summary: Summary = Summary()


Listener = Callable[[Report], None]
_READER = msgspec.json.Decoder(Stage | Ready | Notice | PeerStatus | Finished)


def read_report(line: str) -> Report | None:
    """Parse a line of `json_lines`; None for any other line, such as a library's output."""
    try:
        report: Report = _READER.decode(line)
    except msgspec.MsgspecError:
        return None
    return report


def json_lines(report: Report) -> None:
    """Write a report to stdout at once, as a line of JSON; non-finite numbers become null."""
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this peer leaves soon
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()


class WarningLines(logging.Handler):
    """Writes warnings of the log to stdout as well: `diloco local` shows no logs of its peers."""

    def __init__(self, peer: str) -> None:
        super().__init__(logging.WARNING)
        self._peer = peer

    def emit(self, record: logging.LogRecord) -> None:
        json_lines(Notice(self._peer, record.created, record.getMessage()))


class Lines:
    """Writes reports as lines: one per peer and outer step, and every 10 s in a longer one of a
    peer that makes inner steps.

        [ 12.3s] p0 v3/16 merged 4/4 loss 2.61 held-out 2.70 tok/s 4.1k sent 1.2 MB training

    `known` is the newest state of each peer, and `total` the outer steps of the budget. A value
    that a report lacks keeps its last one: a display must never end a run.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        total: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known: dict[str, PeerStatus] = {}
        self.total, self.clock, self.began = total, clock, clock()
        self._write = write
        self._shown: dict[str, tuple[int | None, float]] = {}  # step and time of the last line
        self._told: dict[str, str] = {}  # texts, and the peer that said each first

    def __call__(self, report: Report) -> None:
        peer = plain(report.peer)
        if isinstance(report, Ready):
            self._ready(peer, report)
        elif isinstance(report, Notice):
            # peers with the same files, or that one peer has left, say the same
            if self._told.setdefault(report.text, peer) == peer:
                self.note(f"{peer}: {report.text}")
        elif isinstance(report, PeerStatus):
            self.learn(report)
            self._status(peer, self.known[peer])

    def note(self, text: str) -> None:
        """Write a line for an event."""
        self._write(f"[{self.clock() - self.began:5.1f}s] {plain(text)}")

    def learn(self, status: PeerStatus) -> None:
        """Merge the known values of a status into `known`."""
        peer, fields = plain(status.peer), status.__struct_fields__
        before = self.known.get(peer, PeerStatus(peer, state="starting"))
        known = {name: value for name in fields if (value := getattr(status, name)) is not None}
        self.known[peer] = replace(before, **known | {"state": plain(status.state) or before.state})
        self.total = status.outer_steps or self.total

    def step_of(self, status: PeerStatus) -> str:
        """Format the outer step and the number of them."""
        version = "-" if status.version is None else str(status.version)
        return version if self.total is None else f"{version}/{self.total}"

    def _ready(self, peer: str, report: Ready) -> None:
        self.note(f"{peer} ready" + (f" at {report.address}" if report.address else ""))
        if report.advice:
            self.note(f"{peer}: {report.advice}")
        if report.first:
            first, *others = map(plain, report.invitation())
            self.note(first)
            for line in others:  # for copying: nothing stands before it
                self._write(line)

    def _status(self, peer: str, status: PeerStatus) -> None:
        now, (version, at) = self.clock(), self._shown.get(peer, (None, self.began))
        evaluated = status.state in ("training", "waiting", "leaving", "done")
        is_due = now - at >= LINE_EVERY_S and status.inner_step is not None
        is_due = is_due or (status.version != version and evaluated)
        if not is_due and status.state not in ("done", "left"):
            return
        self._shown[peer] = status.version, now
        marks = [(name, mark) for name, mark in shown(Figures).items() if mark.rank < 2]
        known = [(mark, getattr(status.figures, name, None)) for name, mark in marks]
        figures = " ".join(
            f"{mark.title} {mark.text(value)}" for mark, value in known if mark.title
        )
        self.note(f"{peer} v{self.step_of(status)}{merged_of(status)} {figures} {status.state}")


def merged_of(status: PeerStatus) -> str:
    """Format how many of the training peers are in the newest version; empty without one."""
    merged, training = status.merged or (0, 0)
    return f" merged {merged}/{max(merged, training)}" if merged and status.version else ""


def log_lines(config: Config, clock: Callable[[], float] = time.monotonic) -> Listener:
    """Write reports to the log, for a peer without a terminal; last, where the model is."""
    lines, notice = Lines(lambda text: logger.info("%s", text), clock=clock), who_can_join(config)

    def listen(report: Report) -> None:
        if isinstance(report, Ready) and notice is not None:
            text, is_warning = notice
            logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
        lines(report)
        if isinstance(report, Finished):
            directory = config.run.dir / "model"
            where = f"; the model is in {directory}" if directory.is_dir() else ""
            logger.info("%s: %s%s", config.run.dir, report.summary.result(), where)

    return listen


def who_can_join(config: Config) -> tuple[str, bool] | None:
    """Say in a line if strangers can join, and if that is a warning; None without a swarm."""
    key = config.run.key
    if config.outer.method != "diloco":
        return None
    if key is not None and config.swarm.admit == "anyone":
        who = "anyone may contribute, invited peers make the versions"
        return f"public run: {who}, by key {key[:16]}", False
    if key is not None:
        return f"closed run: invited peers only, by key {key[:16]}", False
    if config.only_here:
        return "open run, on this machine only", False
    risk = "anyone who can reach this peer can join, read the model and change it"
    remedy = "start it with a key: diloco keygen run.key, then swarm.key_path=run.key"
    return f"open run: {risk}; to close a run, {remedy}", True


def swarm_figures(snapshot: Snapshot | None) -> dict[str, float]:
    """Return the swarm's figures for a single wandb run, by name; empty without a snapshot."""
    if snapshot is None:
        return {}
    peers, ledger = snapshot.peers, snapshot.ledger
    figures: dict[str, float] = {
        "version": snapshot.run.version,
        "peers": len(peers) + snapshot.left_out,
        "training": sum(row.trains and row.state in ("training", "exchanging") for row in peers),
        "payload_bytes": sum(row.bytes for row in ledger.contributions),
    }
    sums = together(peers, PeerRow)
    figures |= {name: sums[name] for name in sums if f"swarm/{name}" not in SHARED.values()}
    for name in FATES:
        figures[f"tokens/{name}"] = getattr(ledger, name)
    if snapshot.loss:
        figures["loss"] = snapshot.loss[-1].loss
    newest = snapshot.newest_round()
    if newest is not None:
        figures |= {"merged": newest.merged, "staleness": newest.staleness}
        if newest.seconds is not None:
            figures |= {f"seconds/{name}": value for name, value in asdict(newest.seconds).items()}
    return {f"swarm/{name}": value for name, value in figures.items()}
