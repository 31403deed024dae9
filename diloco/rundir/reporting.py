"""What one peer reports while it trains: the messages, and two of their listeners, a supervisor's pipe and the log.

training loop -> Message -> to_wire -> one JSON object per line -> read_message -> Message -> live table
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from diloco.config import Config
from diloco.messages.snapshot import Snapshot
from diloco.rundir.files import finite
from diloco.rundir.summary import Summary
from diloco.text import human_bytes, human_count

__all__ = [
    "Finished", "Listener", "Message", "Notice", "Ready", "Stage", "Status", "WarningLines", "json_lines", "log_lines",
    "read_message", "swarm_figures", "to_wire", "who_can_join",
]  # fmt: skip

logger = logging.getLogger(__name__)

LINE_EVERY_S = 30.0  # between lines of the log while the outer step stays the same


@dataclass(frozen=True)
class Message:
    """Base of all messages. `peer` is the name of the peer that reports, `time` unix seconds (virtual if simulated)."""

    t: ClassVar[str]
    peer: str = "?"
    time: float = 0.0


@dataclass(frozen=True)
class Stage(Message):
    """A peer prepares to train. `stage` is "data", with bytes of text that are tokenised of how many (0: none is now),
    or "state", with bytes that came in.
    """

    t = "stage"
    stage: str = ""
    received: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class Ready(Message):
    """A peer has joined the swarm, or has started it (`first`).

    address: the best one, empty if the peer listens nowhere. addresses: all, the best first.
    command: the command to which others append an address to join. advice: how to become reachable, if it is not.
    """

    t = "ready"
    address: str = ""
    addresses: tuple[str, ...] = ()
    first: bool = False
    command: str = "diloco join"
    advice: str = ""


@dataclass(frozen=True)
class Notice(Message):
    """Something that whoever started the peer should know, in one line."""

    t = "notice"
    text: str = ""


@dataclass(frozen=True)
class Status(Message):
    """The state of a peer twice a second: losses in nats per token, `outer_steps` of the budget, counts of this peer.

    A value that is None is not known, and a display keeps the one before.
    """

    t = "status"
    state: str = ""
    version: int | None = None
    outer_steps: int | None = None
    inner_step: int | None = None
    target_steps: int | None = None
    exchanged: bool = False
    loss: float | None = None
    eval_loss: float | None = None
    tokens: int | None = None
    discarded: int | None = None
    tokens_per_s: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    peers: int | None = None

    def over(self, before: Status) -> Status:
        """This status, with values of the one before where they are not known."""
        return replace(before, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Finished(Message):
    """The summary of this single peer, after its last step."""

    t = "summary"
    summary: Summary = field(default_factory=Summary)


Listener = Callable[[Message], None]
_KINDS: dict[str, type[Message]] = {kind.t: kind for kind in (Stage, Ready, Notice, Status, Finished)}


def to_wire(message: Message) -> dict[str, Any]:
    """A message as a JSON object; `t` names its kind. Numbers that JSON lacks become null."""
    content = message.summary.to_message() if isinstance(message, Finished) else asdict(message)
    wire: dict[str, Any] = finite({"t": message.t, "peer": message.peer, "time": message.time, **content})
    return wire


def read_message(content: Mapping[str, Any]) -> Message | None:
    """A message from the JSON object that `json_lines` has written; None for an object of another kind.

    Raises KeyError or TypeError for one whose fields are others.
    """
    kind = _KINDS.get(str(content.get("t")))
    if kind is None:
        return None
    if kind is Finished:
        return Finished(content["peer"], content["time"], Summary.from_message(content))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    fields: dict[str, Any] = {name: value for name, value in values.items() if name != "t"}
    return kind(**fields)


def json_lines(message: Message) -> None:
    """Writes a message to stdout at once, one JSON object per line: `diloco local` reads its peers this way."""
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this peer is about to leave
        sys.stdout.write(json.dumps(to_wire(message)) + "\n")
        sys.stdout.flush()


class WarningLines(logging.Handler):
    """Writes warnings of the log to stdout as well: `diloco local` shows no logs of its peers."""

    def __init__(self, peer: str) -> None:
        super().__init__(logging.WARNING)
        self._peer = peer

    def emit(self, record: logging.LogRecord) -> None:
        json_lines(Notice(self._peer, record.created, record.getMessage()))


class log_lines:
    """Writes messages to the log, for a peer without a terminal: a line per outer step, one every 30 s where that takes
    longer, and at the end one that says where the model is.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._notice, self._place, self._clock = who_can_join(config), config.run.dir, clock
        self._began_at = self._line_at = clock()
        self._shown: int | None = -1  # the outer step of the last line
        self._known = Status()

    def __call__(self, message: Message) -> None:
        if isinstance(message, Ready):
            self._ready(message)
        elif isinstance(message, Notice):
            logger.info("%s", message.text)
        elif isinstance(message, Status):
            self._status(message)
        elif isinstance(message, Finished):
            model = self._place / "model"
            where = f"; the model is in {model}" if model.is_dir() else ""
            logger.info("%s: %s%s", self._place, message.summary.result(), where)

    def _ready(self, message: Ready) -> None:
        if self._notice is not None:
            text, is_warning = self._notice
            logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
        if message.address:
            logger.info("this peer can be reached at %s", message.address)
        if message.address and message.first:
            logger.info("others join with: %s %s", message.command, message.address)

    def _status(self, message: Status) -> None:
        known, now = message.over(self._known), self._clock()
        self._known = known
        stepped = known.version != self._shown and message.state != "evaluating"
        if known.loss is None or not (stepped or now - self._line_at >= LINE_EVERY_S):
            return
        self._shown, self._line_at = known.version, now
        within = "" if stepped else f", inner step {known.inner_step} of {known.target_steps}"
        held_out = "" if known.eval_loss is None else f", held-out {known.eval_loss:.3f}"
        logger.info(
            "[%6.1fs] outer step %s/%s%s, loss %.3f%s, %s tok/s, %s sent, %s",
            now - self._began_at, known.version, known.outer_steps, within, known.loss, held_out,
            human_count(known.tokens_per_s), human_bytes(known.bytes_sent),
            "1 peer" if known.peers == 1 else f"{known.peers} peers",
        )  # fmt: skip


def who_can_join(config: Config) -> tuple[str, bool] | None:
    """One line on whether strangers can join, and whether that line is a warning; None without a swarm.

    Commands show it first, because everybody who starts a peer should know it.
    """
    run_key = config.run.key
    if config.outer.method != "diloco":
        return None
    if run_key is not None and config.swarm.admit == "anyone":
        return f"public run: anyone may contribute, invited peers make the versions, by key {run_key[:16]}", False
    if run_key is not None:
        return f"closed run: invited peers only, by key {run_key[:16]}", False
    if config.only_here:
        return "open run, on this machine only", False
    return (
        "open run: anyone who can reach this peer can join, read the model and change it; "
        "to close a run, start it with a key: diloco keygen run.key, then swarm.key_path=run.key"
    ), True


def swarm_figures(snapshot: Snapshot | None) -> dict[str, float]:
    """The swarm's figures for a single wandb run, by name; empty without a snapshot."""
    if snapshot is None:
        return {}
    peers, ledger = snapshot.peers, snapshot.ledger
    figures: dict[str, float] = {
        "version": snapshot.run.version,
        "peers": len(peers) + snapshot.left_out,
        "training": sum(row.trains and row.state in ("training", "exchanging") for row in peers),
        "steps_per_s": sum(row.steps_per_s for row in peers),
        "payload_bytes": sum(row.bytes for row in ledger.contributions),
    }
    figures |= {f"tokens/{name}": getattr(ledger, name) for name in ("processed", "applied", "discarded", "in_flight")}
    if snapshot.loss:
        figures["loss"] = snapshot.loss[-1].loss
    newest = next((row for row in reversed(snapshot.rounds) if row.fragment == 0), None)
    if newest is not None:
        figures |= {"merged": newest.merged, "staleness": newest.staleness}
        if newest.seconds is not None:
            figures |= {f"seconds/{name}": value for name, value in asdict(newest.seconds).items()}
    return {f"swarm/{name}": value for name, value in figures.items()}
