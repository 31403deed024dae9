"""What a volunteer types to join: addresses of peers, and in a closed swarm the token of an invitation.

/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
diloco://ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...,ip4/198.51.100.2/tcp/4100/p2p/12D3Kuu...?token=...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from diloco.config.base import PeerAddress
from diloco.errors import ConfigError

__all__ = ["Address"]

SCHEME = "diloco:/"  # followed by a multiaddr, which begins with a slash
TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,4096}")

_PEER = TypeAdapter(PeerAddress)


@dataclass(frozen=True)
class Address:
    """Where a swarm is: multiaddrs with a peer id each (or one @FILE that holds such), and what admits a newcomer."""

    peers: tuple[str, ...]
    token: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads either form; `ConfigError` says what is wrong with it."""
        body, token = text.strip(), None
        if body.startswith("diloco:"):
            body, mark, query = body.removeprefix(SCHEME).partition("?")
            if mark:
                token = query.removeprefix("token=")
                if not query.startswith("token=") or not TOKEN.fullmatch(token):
                    raise ConfigError(f"ADDRESS={text} ends in ?{query}; expected ?token=TOKEN, as an invitation says")
        peers = tuple("/" + peer.lstrip("/") if body != text.strip() else peer for peer in body.split(","))
        for peer in peers:
            try:
                _PEER.validate_python(peer)
            except ValidationError as error:
                raise ConfigError(f"ADDRESS={text} cannot be used: {error.errors()[0]['msg']}") from None
        return cls(peers, token)

    def __str__(self) -> str:
        if self.token is None and len(self.peers) == 1:
            return self.peers[0]
        token = "" if self.token is None else f"?token={self.token}"
        return SCHEME + "/" + ",".join(peer.lstrip("/") for peer in self.peers) + token
