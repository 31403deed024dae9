"""Serves `page.html` and its content `GET /api/page`, `GET /api/state` (the newest snapshot) and
`GET /metrics` (Prometheus)."""

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
from typing import Any
from urllib.parse import urlsplit

from diloco.dashboard import tables
from diloco.errors import DilocoError
from diloco.messages.figures import shown
from diloco.messages.snapshot import FATES, PeerRow, Snapshot
from diloco.swarm.client.watch import SwarmWatcher

logger = logging.getLogger(__name__)

Gauge = tuple[str, str, Mapping[str, float]]

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
        if path not in ("/api/state", "/api/page"):
            return 404, "text/plain", b"there are /, /api/page, /api/state and /metrics\n"
        if (seen := self.snapshot) is None:
            return 503, "application/json", b'{"error": "nobody has answered yet"}'
        content = seen.json() if path == "/api/state" else json.dumps(tables.page(seen)).encode()
        return 200, "application/json", content

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
    up, age_s, seen = float(dashboard.answers), dashboard.seen_s(), dashboard.snapshot
    gauges: list[Gauge] = [
        ("up", "Whether a peer of the swarm answers", {"": up}),
        ("last_answer_seconds", "Seconds since a peer answered", {"": age_s}),
        *([] if seen is None else [*_swarm(seen), *_peers(seen)]),
    ]
    lines = list[str]()
    for name, text, values in gauges:
        lines.append(f"# HELP diloco_{name} {text}\n# TYPE diloco_{name} gauge\n")
        lines += (f"diloco_{name}{label} {float(value)}\n" for label, value in values.items())
    return "".join(lines)


def _label(**labels: str) -> str:
    quoted = (f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in labels.items())
    return f"{{{','.join(quoted)}}}"


def _swarm(seen: Snapshot) -> Iterator[Gauge]:
    """Yield name, meaning, and by label (`{name="value"}` or "") the values of each metric."""

    def by(label: str, values: Any) -> dict[str, float]:
        return {_label(**{label: name}): value for name, value in values.items()}

    fates = {fate: getattr(seen.ledger, fate) for fate in FATES}
    yield "outer_steps", "Outer steps that every fragment has seen", {"": seen.run.version}
    yield "tokens", "Tokens by what became of them", by("fate", fates)
    states = [Counter(row.state for row in rows) for rows in (seen.peers, seen.fragments)]
    yield "peers", "Connected peers by state", by("state", states[0])
    yield "fragments", "Fragments by what the answering peer does", by("state", states[1])
    if seen.loss:
        yield "loss", "Mean training loss of the peers (nats per token)", {"": seen.loss[-1].loss}
    if (newest := seen.newest_round()) is not None:
        roles = {role: getattr(newest, role) for role in ("live", "participating", "merged")}
        yield "round_peers", "Peers of the newest version", by("role", roles)
        yield "round_staleness", "Staleness of its oldest contribution", {"": newest.staleness}
        if newest.seconds is not None:
            phases = by("phase", asdict(newest.seconds))
            yield "round_seconds", "Mean wall seconds of its round by phase", phases


def _peers(seen: Snapshot) -> Iterator[Gauge]:
    names = seen.names()
    for name, mark in shown(PeerRow).items():
        known = [(row, value) for row in seen.peers if (value := getattr(row, name)) is not None]
        name = re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", name))
        if mark.meaning:
            labels = [_label(peer=names[row.peer_id], peer_id=row.peer_id) for row, _ in known]
            values = (value for _, value in known)
            yield f"peer_{name}", f"{mark.meaning}, by peer", dict(zip(labels, values, strict=True))
