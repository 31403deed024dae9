"""Serves the page, `GET /api/state` and `GET /metrics`, all from one poller."""

from __future__ import annotations

import asyncio
import logging

from nicegui import app, ui
from nicegui.page import page
from starlette.responses import Response

from diloco.dashboard.page import PageContent, build
from diloco.dashboard.poller import Poller, Source
from diloco.dashboard.prometheus import exposition

__all__ = ["serve"]


def serve(source: Source, host: str, port: int, title: str) -> None:
    """Serves until Ctrl+C. A process can run only one server, because NiceGUI's application is a global."""
    poller = Poller(source)
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

    app.on_startup(lambda: tasks.append(asyncio.get_running_loop().create_task(poller.run())))
    app.on_shutdown(stop)
    logging.getLogger("nicegui").setLevel(logging.ERROR)
    ui.run(
        host=host, port=port, title=title, reload=False, show=False, dark=None,
        show_welcome_message=False, uvicorn_logging_level="error",
    )  # fmt: skip
