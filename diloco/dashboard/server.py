"""Serves `page.html`, `GET /api/state` (the newest snapshot) and `GET /metrics` (Prometheus)."""

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
SCRIPTS = [hashlib.sha256(script) for script in re.findall(rb"<script>(.*?)</script>", PAGE, re.S)]
HASHES = " ".join(f"'sha256-{base64.b64encode(script.digest()).decode()}'" for script in SCRIPTS)
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
PEER_METRICS = {  # name of the metric: field, meaning
    "steps_per_second": ("steps_per_s", "Inner steps per second"),
    "tokens": ("tokens", "Tokens processed"),
    "version_lag": ("version_lag", "Outer steps behind the swarm"),
    "bytes_sent": ("bytes_sent", "Bytes sent"),
    "bytes_received": ("bytes_received", "Bytes received"),
    "last_seen_seconds": ("last_seen_s", "Seconds since its last word"),
}


class Dashboard(ThreadingTCPServer):
    """Listens on `host` and `port` (0: any free one) at once, and answers while `watch` runs.

    Raises OSError if it cannot listen. `snapshot` stays when the swarm no longer answers.
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
        """Ask once a second, for all pages together, until cancelled."""
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
        # Ctrl+C cancels this task. A wait_for of Python 3.11 that has just finished swallows that.
        watching = asyncio.current_task()
        try:
            while watching is not None and not watching.cancelling():
                await self.poll(watcher)
                await asyncio.sleep(EVERY_S)
        finally:
            self.shutdown()

    async def poll(self, watcher: SwarmWatcher) -> None:
        """Ask once."""
        try:
            self.snapshot = await watcher.ask()
        except DilocoError as error:
            self.answers = False
            logger.debug("nobody answers: %r", error)
        else:
            self.answers, self._seen_at = True, self._clock()

    def seen_s(self) -> float:
        """The seconds since the last answer."""
        return self._clock() - self._seen_at

    def answer(self, host: str, path: str) -> tuple[int, str, bytes]:
        """Return status, type and body for a request with this `Host`.

        A web site may point its own name to 127.0.0.1, and then read the page as its own (DNS
        rebinding). Its name stays in `Host`, so only addresses and names of this machine are
        answered.
        """
        if not self._is_own(host):
            why = b"not served under this name; open the address that diloco dashboard printed\n"
            return 403, "text/plain", why
        if path == "/":
            return 200, "text/html; charset=utf-8", PAGE
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", exposition(self).encode()
        if path != "/api/state":
            return 404, "text/plain", b"there are /, /api/state and /metrics\n"
        if self.snapshot is None:
            return 503, "application/json", b'{"error": "nobody has answered yet"}'
        return 200, "application/json", self.snapshot.json()

    def _is_own(self, host: str) -> bool:
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
        host, path = self.headers.get("Host", ""), urlsplit(self.path).path
        status, kind, body = self.server.answer(host, path)
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(len(body))}
        own["X-Diloco-Age-Seconds"] = f"{self.server.seen_s():.1f}"
        for name, text in {**HEADERS, **own}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def exposition(dashboard: Dashboard) -> str:
    """Return the text for Prometheus; if no peer answers, only `diloco_up` and the age change."""
    up, age_s, snapshot = float(dashboard.answers), dashboard.seen_s(), dashboard.snapshot
    gauges = [
        _gauge("up", "Whether a peer of the swarm answers", {"": up}),
        _gauge("last_answer_seconds", "Seconds since a peer answered", {"": age_s}),
    ]
    if snapshot is not None:
        gauges += [*_swarm(snapshot), *_rounds(snapshot), *_peers(snapshot)]
    return "".join(gauges)


def _gauge(name: str, text: str, values: Mapping[str, float]) -> str:
    """Format a metric with a value for each label, which is `{name="value"}` or ""."""
    lines = [f"diloco_{name}{label} {float(value)}\n" for label, value in values.items()]
    return "".join([f"# HELP diloco_{name} {text}\n# TYPE diloco_{name} gauge\n", *lines])


def _label(**labels: str) -> str:
    quoted = (f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in labels.items())
    return f"{{{','.join(quoted)}}}"


def _swarm(snapshot: Snapshot) -> Iterator[str]:
    ledger = snapshot.ledger
    version = {"": snapshot.run.version}
    yield _gauge("outer_steps", "Outer steps that every fragment has seen", version)
    fates = ("processed", "applied", "discarded", "in_flight")
    tokens = {_label(fate=name): getattr(ledger, name) for name in fates}
    yield _gauge("tokens", "Tokens by what became of them", tokens)
    states = Counter(_label(state=row.state) for row in snapshot.peers)
    yield _gauge("peers", "Connected peers by state", states)
    states = Counter(_label(state=row.state) for row in snapshot.fragments)
    yield _gauge("fragments", "Fragments by what the answering peer does about them", states)
    if snapshot.loss:
        loss = {"": snapshot.loss[-1].loss}
        yield _gauge("loss", "Mean training loss of the peers (nats per token)", loss)


def _rounds(snapshot: Snapshot) -> Iterator[str]:
    newest = next((row for row in reversed(snapshot.rounds) if row.fragment == 0), None)
    if newest is None:
        return
    roles = ("live", "participating", "merged")
    counts = {_label(role=name): getattr(newest, name) for name in roles}
    yield _gauge("round_peers", "Peers of the newest version", counts)
    staleness = {"": newest.staleness}
    yield _gauge("round_staleness", "Staleness of the oldest contribution in it", staleness)
    if newest.seconds is not None:
        phases = {_label(phase=name): value for name, value in asdict(newest.seconds).items()}
        yield _gauge("round_seconds", "Mean wall seconds of its round by phase", phases)


def _peers(snapshot: Snapshot) -> Iterator[str]:
    names = snapshot.names()
    labels = [_label(peer=names[row.peer_id], peer_id=row.peer_id) for row in snapshot.peers]
    for name, (field, text) in PEER_METRICS.items():
        values = [getattr(row, field) for row in snapshot.peers]
        yield _gauge(f"peer_{name}", f"{text}, by peer", dict(zip(labels, values, strict=True)))
