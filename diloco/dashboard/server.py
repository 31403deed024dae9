"""Serves the page, `GET /api/state` and `GET /metrics` (for Prometheus), all from one poller."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nicegui import app, ui
from nicegui.page import page
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily as Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from diloco.dashboard.guard import OwnPageOnly
from diloco.dashboard.page import PageContent, build
from diloco.dashboard.poller import Poller, Source
from diloco.protocol.snapshot import PeerRow, Snapshot

__all__ = ["exposition", "serve"]


def serve(source: Source, host: str, port: int, title: str, directories: Sequence[Path] = ()) -> None:
    """Serves until Ctrl+C; the runs in `directories` are shown beside the swarm.

    A process can run only one server, because NiceGUI's application is a global.
    """
    poller = Poller(source, directories=directories)
    content = PageContent(poller)
    tasks: list[asyncio.Task[None]] = []

    @page("/", title=title)
    def index() -> None:
        build(content)

    @app.get("/api/state")
    def state() -> Response:
        if poller.snapshot is None:
            return Response('{"error": "nobody has answered yet"}', 503, media_type="application/json")
        age = {"X-Diloco-Age-Seconds": f"{poller.seen_s():.1f}"}
        return Response(poller.snapshot.model_dump_json(indent=2), media_type="application/json", headers=age)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(poller), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app.add_middleware(OwnPageOnly, names={host, "localhost", socket.gethostname()})
    app.on_startup(lambda: tasks.append(asyncio.get_running_loop().create_task(poller.run())))
    app.on_shutdown(stop)
    logging.getLogger("nicegui").setLevel(logging.ERROR)
    ui.run(
        host=host, port=port, title=title, reload=False, show=False, dark=None,
        show_welcome_message=False, uvicorn_logging_level="error",
    )  # fmt: skip


def exposition(poller: Poller) -> bytes:
    """The text for Prometheus. While no peer answers, `diloco_up` is 0 and the other metrics keep their last values."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Swarm(poller))
    return generate_latest(registry)


class _Swarm(Collector):
    def __init__(self, poller: Poller) -> None:
        self._poller = poller

    def collect(self) -> Iterator[Metric]:
        poller, snapshot = self._poller, self._poller.snapshot
        up = poller.lost is None and snapshot is not None
        yield Metric("diloco_up", "Whether a peer of the swarm answers", value=float(up))
        yield Metric("diloco_last_answer_seconds", "Seconds since a peer answered", value=poller.seen_s())
        if snapshot is not None:
            yield from _swarm(snapshot)
            yield from _peers(snapshot)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = Metric(name, text, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _swarm(snapshot: Snapshot) -> Iterator[Metric]:
    run, ledger = snapshot.run, snapshot.ledger
    yield Metric("diloco_outer_steps", "Outer steps that every fragment has seen", value=run.version)
    tokens = {name: getattr(ledger, name) for name in ("processed", "applied", "discarded", "in_flight")}
    yield _labelled("diloco_tokens", "Tokens by what became of them", "fate", tokens)
    states: Counter[str] = Counter(row.state for row in snapshot.peers)
    yield _labelled("diloco_peers", "Connected peers by state", "state", states)
    yield Metric("diloco_components", "Disjoint groups of peers", value=len(snapshot.components))
    unheld = sum(row.syncer is None for row in snapshot.fragments)
    yield Metric("diloco_fragments_unheld", "Fragments without a syncer", value=unheld)
    if snapshot.loss:
        yield Metric("diloco_loss", "Mean training loss of the peers (nats per token)", value=snapshot.loss[-1].loss)
    newest = next((row for row in reversed(snapshot.rounds) if row.fragment == 0), None)
    if newest is None:
        return
    counts = {"live": newest.live, "participating": newest.participating, "merged": newest.merged}
    yield _labelled("diloco_round_peers", "Peers of the newest version", "role", counts)
    yield Metric("diloco_round_staleness", "Staleness of the oldest contribution in it", value=newest.staleness)
    if newest.seconds is not None:
        text = "Mean wall seconds of its round by phase"
        yield _labelled("diloco_round_seconds", text, "phase", asdict(newest.seconds))


def _peers(snapshot: Snapshot) -> Iterator[Metric]:
    names = snapshot.names()
    figures: dict[str, tuple[str, Callable[[PeerRow], float]]] = {
        "steps_per_second": ("Inner steps per second", lambda row: row.steps_per_s),
        "tokens": ("Tokens processed", lambda row: row.tokens),
        "version_lag": ("Outer steps behind the swarm", lambda row: row.version_lag),
        "bytes_sent": ("Bytes sent", lambda row: row.bytes_sent),
        "bytes_received": ("Bytes received", lambda row: row.bytes_received),
        "last_seen_seconds": ("Seconds since its last word", lambda row: row.last_seen_s),
    }
    for name, (text, read) in figures.items():
        metric = Metric(f"diloco_peer_{name}", f"{text}, by peer", labels=["peer", "peer_id"])
        for row in snapshot.peers:
            metric.add_metric([names[row.peer_id], row.peer_id], read(row))
        yield metric
