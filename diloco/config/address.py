"""What a volunteer types to join: addresses of peers, and in a closed swarm the token of an invitation.

/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
diloco://ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...,ip4/198.51.100.2/tcp/4100/p2p/12D3Kuu...?token=...

Addresses are copied from chats and terminals, so `problem` says which part of one is damaged, and how.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.errors import ConfigError

__all__ = ["Address", "host_of", "line_of_stdin", "problem", "same_subnet", "scope"]

SCHEME = "diloco:/"  # followed by a multiaddr, which begins with a slash
TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,4096}")
MAX_FILE_CHARACTERS = 1 << 16
EXAMPLE = "/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo..."

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# Prefix of the multihash and length in characters of the ids that libp2p makes: of Ed25519 and of RSA keys.
_ID_LENGTHS = {"12D3Koo": 52, "Qm": 46}
_PASTED = ".,;:!?)]}>\"'`"
_HOST_PORT = re.compile(r"\[?[A-Za-z0-9.:-]+\]?:\d+")
_DNS_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")
_FLAGS = ("quic", "quic-v1", "ws", "wss")


@dataclass(frozen=True)
class Address:
    """Where a swarm is: multiaddrs with a peer id each, or one @FILE with such; and the token of an invitation."""

    peers: tuple[str, ...]
    token: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads either form; `ConfigError` says what is wrong with it."""
        body, token = text.strip(), None
        link = body.startswith("diloco:")
        if link:
            body, mark, query = body.removeprefix(SCHEME).partition("?")
            if mark:
                token = _token(text, query)
        peers = tuple("/" + peer.lstrip("/") if link else peer for peer in body.split(","))
        for peer in peers:
            wrong = None if peer.startswith("@") and len(peer) > 1 and not link else problem(peer)
            if wrong is not None:
                raise ConfigError(f"ADDRESS={_shown(text)} cannot be used: {wrong}")
        return cls(peers, token)

    @classmethod
    def read(cls, text: str) -> Address:
        """Reads the ADDRESS of a command, which may also be `-`, a line on stdin, or an `@FILE` with a whole link.

        Other users of a machine see the arguments of a command, so a link with a token has no place there. The token of
        a file stays in the file: it is `@FILE` here.
        """
        if text == "-":
            return cls.parse(line_of_stdin("ADDRESS"))
        found = cls.parse(text)
        for peer in found.peers:
            if peer.startswith("@") and "?token=" in _content(Path(peer[1:])):
                return replace(found, token=peer)
        return found

    def resolved(self) -> Address:
        """Replaces an `@FILE` by the addresses that the file holds now; `ConfigError` when it cannot be read."""
        peers: list[str] = []
        for peer in self.peers:
            if not peer.startswith("@"):
                peers.append(peer)
                continue
            try:
                lines = Path(peer[1:]).read_text(encoding="utf-8").split()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is no text"
                raise ConfigError(f"ADDRESS={_shown(peer)} cannot be read: {why}") from None
            peers += [one for line in lines for one in Address.parse(line).peers]
        if not peers:
            raise ConfigError(f"ADDRESS={','.join(self.peers)} holds no address yet; try again when its peer is ready")
        return Address(tuple(peers), self.token)

    def __str__(self) -> str:
        if self.token is None and len(self.peers) == 1:
            return self.peers[0]
        token = "" if self.token is None else f"?token={self.token}"
        return SCHEME + "/" + ",".join(peer.lstrip("/") for peer in self.peers) + token


def line_of_stdin(what: str) -> str:
    """The next line of stdin; on a terminal `what` is asked for. Raises ConfigError if there is none."""
    if sys.stdin.isatty():
        sys.stderr.write(f"{what}: ")
        sys.stderr.flush()
    line = sys.stdin.readline().strip()
    if not line:
        raise ConfigError(f"{what}=- stands for a line on stdin, and none came; write it there, or give @FILE")
    return line


def _content(path: Path) -> str:
    """The text of a file; empty where there is none yet, as a peer may be about to write its address into it."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_FILE_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        return ""


def _token(text: str, query: str) -> str:
    token = query.removeprefix("token=")
    if query in ("", "token", "token="):
        raise ConfigError(f"ADDRESS={_shown(text)}: its token is missing after '?'; copy the whole link again")
    if query.startswith("token=") and token[-1] in _PASTED and TOKEN.fullmatch(token.rstrip(_PASTED)):
        raise ConfigError(f"ADDRESS={_shown(text)}: its token ends in {token[-1]!r}, pasted along; drop it")
    if not query.startswith("token=") or not TOKEN.fullmatch(token):
        raise ConfigError(
            f"ADDRESS={_shown(text)} ends in ?{_shown(query)[:40]}; expected ?token=TOKEN, as an invitation says"
        )
    return token


def problem(address: str) -> str | None:
    """What is wrong with the address of a peer, as a clause with its remedy; None when nothing is."""
    if not address.strip("/"):
        return f"it is empty; one looks like {EXAMPLE}"
    if re.match(r"https?:", address):
        return f"it is the address of a web page; that of a peer looks like {EXAMPLE}"
    if not address.startswith("/"):
        if _HOST_PORT.fullmatch(address):
            host, _, port = address.rpartition(":")
            return f"it is HOST:PORT; write {_family(host.strip('[]'))}/tcp/{port}/p2p/PEER_ID, as the peer prints it"
        return f"it does not begin with '/'; one looks like {EXAMPLE}"
    if any(character.isspace() for character in address):
        return "there is a space in it; quote or copy it again in one piece"
    *_, last = address.split("/")
    parts = address[1:].split("/")
    wrong = _host(parts) or _port(parts) or _rest(parts)
    if wrong is not None and last and last[-1] in _PASTED and problem(address.rstrip(_PASTED)) is None:
        return f"it ends in {last[-1]!r}, pasted along; drop it"
    return wrong


def _host(parts: list[str]) -> str | None:
    kind, value = parts[0], parts[1] if len(parts) > 1 else ""
    if kind in ("dns", "dns4", "dns6"):
        return None if _DNS_NAME.fullmatch(value) else f"{value!r} is no host name"
    if kind not in ("ip4", "ip6"):
        return f"/{kind} is not known; it begins with /ip4/, /ip6/ or /dns/, such as {EXAMPLE}"
    try:
        found = ipaddress.IPv4Address(value) if kind == "ip4" else ipaddress.IPv6Address(value)
    except ValueError:
        other = {"ip4": "ip6", "ip6": "ip4"}[kind]
        if _family(value) == f"/{other}/{value}":
            return f"{value} after /{kind} belongs after /{other}"
        return f"{value!r} is no IP{kind[2]} address"
    if found.is_unspecified:
        return f"{value} is where a peer listens, not where others reach it; put the address of its machine there"
    return None


def _port(parts: list[str]) -> str | None:
    kind, port = parts[2] if len(parts) > 2 else "", parts[3] if len(parts) > 3 else ""
    if kind == "p2p":
        return f"the port is missing before /p2p; one looks like {EXAMPLE}"
    if kind not in ("tcp", "udp") or not port:
        return f"it has no port and no peer id; one looks like {EXAMPLE}"
    if not (port.isascii() and port.isdigit()):
        return f"{port!r} after /{kind} is no port"
    fits = len(port) <= 5 and 1 <= int(port) <= 65535
    return None if fits else f"port {port[:20]} after /{kind} is not one of 1 to 65535"


def _rest(parts: list[str]) -> str | None:
    """Checks what follows the port: flags of the transport, the peer's id, and after a relay the id behind it."""
    rest = [part for part in parts[4:] if part not in _FLAGS]
    if rest and rest[-1] == "" and len(rest) % 2 and rest[:-1]:
        return "it ends in '/', pasted along or cut off; copy it again"
    if not rest or rest[0] != "p2p":
        return "/p2p/PEER_ID is missing at its end; copy the whole line that the peer printed"
    if "p2p-circuit" in rest:
        at = rest.index("p2p-circuit")
        return _rest([*parts[:4], *rest[:at]]) or _rest([*parts[:4], *rest[at + 1 :]])
    if len(rest) > 2:
        return f"/{'/'.join(rest[2:])[:40]} after the peer id is not known; drop it"
    return _peer_id(rest[1] if len(rest) > 1 else "")


def _peer_id(text: str) -> str | None:
    if not text:
        return "the peer id after /p2p/ is missing; copy the whole line that the peer printed"
    strange = next((character for character in text if character not in _BASE58), None)
    if strange is not None:
        return f"its peer id {_shown(text)} holds {strange!r}, which no peer id does; copy it again"
    wanted = next((length for prefix, length in _ID_LENGTHS.items() if text.startswith(prefix)), None)
    if wanted is None:
        return f"{_shown(text)} is no peer id; one begins with 12D3Koo or Qm"
    if len(text) < wanted:
        return f"its peer id is cut off after {len(text)} of {wanted} characters; copy the whole line again"
    if len(text) > wanted:
        return f"its peer id has {len(text) - wanted} characters too many, from {text[wanted:][:20]!r} on; drop them"
    return None


def host_of(address: str) -> str:
    """The IP or host name that a multiaddr begins with; empty where there is none."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def scope(address: str) -> str:
    """From where a multiaddr can be reached: `loopback`, `LAN` or `public` (host names count as public)."""
    try:
        found = ipaddress.ip_address(host_of(address))
    except ValueError:
        return "loopback" if host_of(address) == "localhost" else "public"
    if found.is_loopback:
        return "loopback"
    # Shared addresses of carriers (100.64/10) are neither private nor global to Python; from outside they are private.
    return "public" if found.is_global else "LAN"


def same_subnet(address: str, other: str) -> bool:
    """Whether two multiaddrs name IP addresses of one /24, or one /64 of IPv6; loopback is no subnet."""
    try:
        one, two = (ipaddress.ip_address(host_of(each)) for each in (address, other))
    except ValueError:
        return False
    if one.version != two.version or one.is_loopback:
        return False
    length = 24 if one.version == 4 else 64
    return two in ipaddress.ip_network(f"{one}/{length}", strict=False)


def _family(host: str) -> str:
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}"
    except ValueError:
        return f"/dns/{host}"


def _shown(text: str) -> str:
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain if len(plain) <= 160 else f"{plain[:157]}..."
