"""Serves `page.html`, `GET /api/state` (the newest snapshot) and `GET /metrics` (for
Prometheus)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from urllib.parse import urlsplit

from diloco.errors import DilocoError
from diloco.messages.snapshot import Snapshot
from diloco.swarm.client.watch import SwarmWatcher

logger = logging.getLogger(__name__)

EVERY_S = 1.0
PAGE = Path(__file__).with_name("page.html").read_bytes()
SCRIPTS = re.findall(rb"<script>(.*?)</script>", PAGE, re.S)
HASHES = " ".join(
    f"'sha256-{base64.b64encode(hashlib.sha256(one).digest()).decode()}'" for one in SCRIPTS
)
HEADERS = {  # the page's own script only, nothing from elsewhere, and in no frame of another site
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {HASHES}; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard(ThreadingTCPServer):
    """Listens on `host` and `port` (0: any free one) at once, and answers while `watch` runs.

    Raises OSError if it cannot listen there. `snapshot` is the newest one; it stays when the swarm
    no longer answers.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Request)
        self.snapshot: Snapshot | None = None
        self.answers = False  # whether a peer answered when it was last asked
        self._names = {host.lower(), "localhost", socket.gethostname().lower()}
        self._clock = clock
        self._seen_at = clock()

    async def watch(self, watcher: SwarmWatcher) -> None:
        """Asks once a second, for all pages together, until cancelled."""
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
        # Ctrl+C cancels this task. Before Python 3.12 a wait_for that has just finished swallows
        # the cancellation.
        watching = asyncio.current_task()
        try:
            while watching is not None and not watching.cancelling():
                await self.poll(watcher)
                await asyncio.sleep(EVERY_S)
        finally:
            self.shutdown()

    async def poll(self, watcher: SwarmWatcher) -> None:
        """Asks once."""
        try:
            self.snapshot = await watcher.ask()
        except DilocoError as error:
            self.answers = False
            logger.debug("nobody answers: %r", error)
        else:
            self.answers, self._seen_at = True, self._clock()

    def seen_s(self) -> float:
        """Seconds since the last answer."""
        return self._clock() - self._seen_at

    def answer(self, host: str, path: str) -> tuple[int, str, bytes]:
        """Status, type and body for a request with this `Host`.

        A site may have its own name point to 127.0.0.1, and then read the page as its own (DNS
        rebinding). Its name stays in `Host`, so only addresses and names of this machine are
        answered.
        """
        if not self._own(host):
            return (
                403,
                "text/plain",
                b"not served under this name; open the address that diloco dashboard printed\n",
            )
        if path == "/":
            return 200, "text/html; charset=utf-8", PAGE
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", exposition(self).encode()
        if path != "/api/state":
            return 404, "text/plain", b"there are /, /api/state and /metrics\n"
        if self.snapshot is None:
            return 503, "application/json", b'{"error": "nobody has answered yet"}'
        return 200, "application/json", self.snapshot.json()

    def _own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class _Request(BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    timeout = 10.0  # of a connection that says nothing

    def do_GET(self) -> None:
        status, kind, body = self.server.answer(
            self.headers.get("Host", ""), urlsplit(self.path).path
        )
        self.send_response(status)
        age = {"X-Diloco-Age-Seconds": f"{self.server.seen_s():.1f}"}
        for name, text in {
            **HEADERS,
            **age,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def exposition(dashboard: Dashboard) -> str:
    """The text for Prometheus. While no peer answers, `diloco_up` is 0 and the other metrics keep
    their last values."""
    snapshot = dashboard.snapshot
    gauges = [
        _gauge("up", "Whether a peer of the swarm answers", {"": float(dashboard.answers)}),
        _gauge("last_answer_seconds", "Seconds since a peer answered", {"": dashboard.seen_s()}),
        *(() if snapshot is None else (*_swarm(snapshot), *_peers(snapshot))),
    ]
    return "".join(gauges)


def _gauge(name: str, text: str, values: Mapping[str, float]) -> str:
    """A metric with a value for each label, as `{name="value"}` or ""."""
    lines = [f"diloco_{name}{label} {float(value)}\n" for label, value in values.items()]
    return "".join([f"# HELP diloco_{name} {text}\n# TYPE diloco_{name} gauge\n", *lines])


def _label(**labels: str) -> str:
    shown = (
        f'{name}="{json.dumps(text, ensure_ascii=False)[1:-1]}"' for name, text in labels.items()
    )
    return f"{{{','.join(shown)}}}"


def _swarm(snapshot: Snapshot) -> Iterator[str]:
    run, ledger = snapshot.run, snapshot.ledger
    yield _gauge("outer_steps", "Outer steps that every fragment has seen", {"": run.version})
    fates = {
        _label(fate=name): getattr(ledger, name)
        for name in ("processed", "applied", "discarded", "in_flight")
    }
    yield _gauge("tokens", "Tokens by what became of them", fates)
    yield _gauge(
        "peers",
        "Connected peers by state",
        Counter(_label(state=row.state) for row in snapshot.peers),
    )
    doing = Counter(_label(state=row.state) for row in snapshot.fragments)
    yield _gauge("fragments", "Fragments by what the answering peer does about them", doing)
    if snapshot.loss:
        yield _gauge(
            "loss", "Mean training loss of the peers (nats per token)", {"": snapshot.loss[-1].loss}
        )
    newest = next((row for row in reversed(snapshot.rounds) if row.fragment == 0), None)
    if newest is None:
        return
    counts = {
        _label(role=name): getattr(newest, name) for name in ("live", "participating", "merged")
    }
    yield _gauge("round_peers", "Peers of the newest version", counts)
    yield _gauge(
        "round_staleness", "Staleness of the oldest contribution in it", {"": newest.staleness}
    )
    if newest.seconds is not None:
        phases = {_label(phase=name): value for name, value in asdict(newest.seconds).items()}
        yield _gauge("round_seconds", "Mean wall seconds of its round by phase", phases)


FIGURES = {  # of a peer: name of the metric, field, meaning
    "steps_per_second": ("steps_per_s", "Inner steps per second"),
    "tokens": ("tokens", "Tokens processed"),
    "version_lag": ("version_lag", "Outer steps behind the swarm"),
    "bytes_sent": ("bytes_sent", "Bytes sent"),
    "bytes_received": ("bytes_received", "Bytes received"),
    "last_seen_seconds": ("last_seen_s", "Seconds since its last word"),
}


def _peers(snapshot: Snapshot) -> Iterator[str]:
    names = snapshot.names()
    for name, (field, text) in FIGURES.items():
        values = {
            _label(peer=names[row.peer_id], peer_id=row.peer_id): getattr(row, field)
            for row in snapshot.peers
        }
        yield _gauge(f"peer_{name}", f"{text}, by peer", values)
