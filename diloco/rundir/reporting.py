"""What one peer says while it trains, to whoever listens: a supervisor, a live table, or the log."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from diloco.config import Config
from diloco.protocol.snapshot import Snapshot
from diloco.rundir.files import finite

__all__ = ["Listener", "json_lines", "log_lines", "swarm_figures", "who_can_join"]

logger = logging.getLogger(__name__)

Listener = Callable[[Mapping[str, Any]], None]


def json_lines(message: Mapping[str, Any]) -> None:
    """One JSON object per line on stdout, at once: the language between `diloco local` and its peers."""
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and this peer about to leave
        sys.stdout.write(json.dumps(finite(dict(message))) + "\n")
        sys.stdout.flush()


class log_lines:
    """Messages as log lines, one per outer step, for a peer that nobody watches."""

    def __init__(self, config: Config) -> None:
        self._notice = who_can_join(config, config.run.key)
        self._began_at = time.monotonic()
        self._version = -1

    def __call__(self, message: Mapping[str, Any]) -> None:
        if message["t"] == "ready" and self._notice is not None:
            text, is_warning = self._notice
            logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
        if message["t"] == "ready" and message.get("address"):
            logger.info("this peer can be reached at %s", message["address"])
            if message.get("first"):
                logger.info("others join with: %s %s", message["command"], message["address"])
        if message["t"] != "status" or message["version"] == self._version or message["loss"] is None:
            return
        self._version = message["version"]
        logger.info(
            "[%6.1fs] outer step %s/%s loss %.3f, %d peers",
            time.monotonic() - self._began_at,
            message["version"],
            message["outer_steps"],
            message["loss"],
            message["peers"],
        )


def who_can_join(config: Config, run_key: str | None) -> tuple[str, bool] | None:
    """One line on whether strangers can join, and whether it is a warning; None without a swarm.

    What whoever starts a peer should know before anything else.
    """
    if config.outer.method != "diloco":
        return None
    if run_key is not None:
        return f"closed run: invited peers only, by key {run_key[:16]}", False
    if config.only_here:
        return "open run, on this machine only", False
    return (
        "open run: anyone who can reach this peer can join, read the model and change it; "
        "to close a run, start it with a key: diloco keygen run.key, then swarm.key_path=run.key"
    ), True


def swarm_figures(snapshot: Snapshot | None) -> dict[str, float]:
    """A swarm in a few numbers, for one wandb run; none without a snapshot."""
    if snapshot is None:
        return {}
    peers, ledger = snapshot.peers, snapshot.ledger
    figures: dict[str, float] = {
        "version": snapshot.run.version,
        "peers": len(peers) + snapshot.left_out,
        "training": sum(row.trains and row.state in ("training", "exchanging") for row in peers),
        "components": len(snapshot.components),
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
            figures |= {f"seconds/{name}": value for name, value in newest.seconds.model_dump().items()}
    return {f"swarm/{name}": value for name, value in figures.items()}
