"""Keeps pages of other sites away from the dashboard, which a browser on this machine can reach.

1. A site may have its own name point to 127.0.0.1 and then read the page as its own (DNS rebinding). The request still
   says the site's name in `Host`. Therefore only addresses and names of this machine are answered.
2. A site may open a web socket to the page. The browser says in `Origin` who asks, and it has to be the page itself.
3. A site may show the page in a frame of its own. The headers of every answer forbid that, and anything from elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["OwnPageOnly", "objection"]

HEADERS = {
    # NiceGUI compiles its templates in the browser, and writes its start into the page.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class OwnPageOnly:
    """Middleware: what others ask is answered with 403, or for a web socket by closing it."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """`names` are host names of this machine; IP addresses are always answered."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        why = objection(headers.get("host", ""), headers.get("origin"), self._names)
        if why is not None and scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if why is not None:
            return await PlainTextResponse(why + "\n", 403)(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def objection(host: str, origin: str | None, names: Collection[str]) -> str | None:
    """Why a request with these headers is not answered; None if it is."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        asker = None if origin is None else urlsplit(origin).netloc
    except ValueError:
        return "the Host or the Origin of the request is no address"
    if not (_is_address(name) or name in {one.lower() for one in names}):
        return "the page is not served under this name; open it by the address that diloco dashboard printed"
    if asker is not None and asker.lower() != host.lower():
        return "another site asks for the page"
    return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
