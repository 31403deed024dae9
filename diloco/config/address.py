"""The ADDRESS that a volunteer types: addresses of peers, and in a closed swarm a token.

/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
diloco://ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...,ip4/198.51.100.2/tcp/4100/p2p/12D3Kuu...?token=...
hf://buckets/ORG/NAME

Addresses are copied from chats and terminals, so errors say which part of one is damaged, and how.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.config.explain import show
from diloco.errors import ConfigError
from diloco.text import decoded, masked, small_text

SCHEME = "diloco:/"  # followed by a multiaddr, which begins with a slash
TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,4096}")
EXAMPLE = "/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo..."

_BASE58 = "[1-9A-HJ-NP-Za-km-z]"
# ids of libp2p, of Ed25519 and of RSA keys
_ID = re.compile(f"12D3Koo{_BASE58}{{45}}|Qm{_BASE58}{{44}}")
# Host, port, flags of the transport, the peer's id, and after a relay the id behind it.
_SHAPE = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]+)/(?:tcp|udp)/(\d{1,5})(?:/(?:quic|quic-v1|ws|wss))*"
    r"(?:/p2p/([^/]+)(?:/p2p-circuit/p2p/([^/]+))?)?"
)
# Quotes of all kinds and what nobody sees, around what is copied from a chat or a document.
_AROUND = "\"'`<>\u00ab\u00b4\u00bb\u200b\u200e\u200f\u2018-\u201f\u2039\u203a\u2060\ufeff\ufffd"
_COPIED = re.compile(rf"(?:diloco:/?)?/(?:ip4|ip6|dns4?|dns6)/[^\s{_AROUND}]+")
_PASTED = ".,;:!?)]}>\"'`/"
_HOST_PORT = re.compile(r"\[?([A-Za-z0-9.:-]+)\]?:(\d+)")
_DNS_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    """The way to a swarm: multiaddrs with a peer id each, one @FILE, or the URL of a mailbox; an
    invitation's token."""

    peers: tuple[str, ...]
    token: str | None = None

    @property
    def mailbox(self) -> str | None:
        """The URL of the store, if it is one."""
        return next(filter(is_mailbox, self.peers), None)

    @property
    def overrides(self) -> list[str]:
        """The settings by which a command joins here, as they are typed."""
        if self.mailbox is not None:
            return [f"swarm.mailbox={self.mailbox!r}"]
        return [f"swarm.initial_peers=[{','.join(map(repr, self.callable))}]"]

    @property
    def callable(self) -> tuple[str, ...]:
        """The addresses that can be called, or `@FILE`."""
        return tuple(peer for peer in self.peers if not is_mailbox(peer))

    @classmethod
    def parse(cls, text: str, shown: str | None = None) -> Address:
        """Read any form, also in quotes or after `diloco join`.

        `ConfigError` says what is wrong, in `shown`.
        """
        text = unquoted(text)
        source = show(shown or text, 160)
        if (text.startswith("@") and len(text) > 1 and "," not in text) or is_mailbox(text):
            return cls((text,))
        peers, token = list[str](), None
        for entry in _COPIED.findall(text) or [text]:
            is_link = entry.startswith("diloco:")
            body, mark, query = entry.partition("?") if is_link else (entry, "", "")
            if mark:
                token = query.removeprefix("token=")
                if token == query or not TOKEN.fullmatch(token):
                    damaged = f"ADDRESS={source}: its token is damaged or missing"
                    raise ConfigError(f"{damaged}; copy the whole link again")
            for peer in body.removeprefix(SCHEME).rstrip(",;").split(","):
                peers.append("/" + peer.lstrip("/") if is_link else peer)
        for peer in peers:
            if (wrong := address_error(peer)) is not None:
                raise ConfigError(f"ADDRESS={source} cannot be used: {wrong}")
        return cls(tuple(peers), token)

    @classmethod
    def read(cls, text: str) -> Address:
        """Read the ADDRESS of a command, which may also be `-`, a line on stdin.

        Of an `@FILE` with a whole link the token stays in the file, and is `@FILE` here. (Other
        users see the arguments of a command.)
        """
        if text == "-":
            return cls.parse(line_of_stdin("ADDRESS"))
        parsed = cls.parse(text)
        for peer in parsed.peers:
            with suppress(OSError):  # a peer may be about to write its address into it
                content = small_text(Path(peer[1:])) if peer.startswith("@") else ""
                if is_mailbox(unquoted(content)):
                    return cls.parse(content)
                if "token=" in content:
                    return replace(parsed, token=peer)
        return parsed

    def resolved(self) -> Address:
        """Replace an `@FILE` by the addresses it holds now; `ConfigError` if it is unreadable."""
        peers = list[str]()
        for peer in self.peers:
            peers += addresses_in(Path(peer[1:])) if peer.startswith("@") else [peer]
        if not peers:
            empty = f"ADDRESS={','.join(self.peers)} holds no address yet"
            raise ConfigError(f"{empty}; try again when its peer is ready")
        return Address(tuple(peers), self.token)

    def __str__(self) -> str:
        if self.token is None and len(self.peers) == 1:
            return self.peers[0]
        token = "" if self.token is None else f"?token={self.token}"
        return SCHEME + "/" + ",".join(peer.lstrip("/") for peer in self.peers) + token


def is_mailbox(text: str) -> bool:
    """Return True for the URL of a store, through which peers exchange objects."""
    scheme = re.match(r"([a-z][a-z0-9+]*)://\S", text)
    return scheme is not None and scheme[1] not in ("diloco", "http", "https")


def line_of_stdin(name: str) -> str:
    """Read a line of stdin, with a prompt on a terminal; ConfigError if there is none."""
    if sys.stdin.isatty():
        print(f"{name}: ", end="", file=sys.stderr, flush=True)
    raw = getattr(sys.stdin, "buffer", None)
    line = unquoted(sys.stdin.readline() if raw is None else decoded(raw.readline()))
    if not line:
        none = f"{name}=- stands for a line on stdin, and none came"
        raise ConfigError(f"{none}; write it there, or give @FILE")
    return line


def addresses_in(path: Path) -> list[str]:
    """List the addresses in a file: several a line, links, and notes after a # are allowed.

    Raises `ConfigError` when it cannot be read or a line has none.
    """
    try:
        lines = re.sub(r"(?m)(^|\s)#.*", "", small_text(path)).splitlines()
    except OSError as error:
        raise ConfigError(f"ADDRESS=@{path} cannot be read: {error.strerror}") from None
    filled = [line for line in lines if unquoted(line)]
    return [peer for line in filled for peer in Address.parse(line, f"@{path}").peers]


def unquoted(text: str) -> str:
    """Strip quotes and blanks around a text."""
    return re.sub(rf"^[\s{_AROUND}]+|[\s{_AROUND}]+$", "", text)


def address_error(address: str) -> str | None:
    """Describe the fault of a peer's address, with the remedy; None if it is valid."""
    if "/" not in address and masked(address) != address:
        need = "that goes into a file, and an address is needed besides"
        return f"it may be a token; {need}: ADDRESS swarm.token=@FILE"
    if re.match(r"https?:", address):
        return f"it is the address of a web page; that of a peer looks like {EXAMPLE}"
    if match := _HOST_PORT.fullmatch(address):
        right = f"{_family(match[1])}/tcp/{match[2]}/p2p/PEER_ID"
        return f"it is HOST:PORT; write {right}, as the peer prints it"
    shape = _SHAPE.fullmatch(address)
    wrong = _wrong(*shape.groups()) if shape else f"it is damaged; one looks like {EXAMPLE}"
    bare = address.rstrip(_PASTED)
    if wrong is not None and bare != address and address_error(bare) is None:
        return f"it ends in {address[-1]!r}, pasted along; drop it"
    return wrong


def _wrong(kind: str, host: str, port: str, *ids: str | None) -> str | None:
    """Describe the fault of an address of the right shape; None if it is valid."""
    is_ip, copy = kind.startswith("ip"), "copy the whole line that the peer printed"
    try:
        unspecified = is_ip and ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return f"{host!r} is no IP{kind[2]} address"
    if _family(host)[:4] != f"/{kind[:3]}" or not (is_ip or _DNS_NAME.fullmatch(host)):
        return f"{host!r} does not belong after /{kind}"
    if unspecified:
        return f"{host} is where a peer listens, not where others reach it; put its machine there"
    if not 1 <= int(port) <= 65535:
        return f"port {port} is not one of 1 to 65535"
    if ids[0] is None:
        return f"/p2p/PEER_ID is missing at its end; {copy}"
    for peer_id in filter(None, ids):
        if not _ID.fullmatch(peer_id):
            return f"its peer id {show(peer_id)} is cut off or damaged; {copy}"
    return None


def peer_id_of(address: str) -> str:
    """Return the peer id at the end of a multiaddr; `ConfigError` shows a correct one."""
    wrong = address_error(address)
    if wrong is not None:
        raise ConfigError(f"swarm.initial_peers: {address!r} is not a peer address: {wrong}")
    return address.rsplit("/", 1)[1]


def host_of(address: str) -> str:
    """Return the IP or host name that a multiaddr begins with; empty where there is none."""
    return [*address.split("/"), "", ""][2]


def reachability(address: str) -> str:
    """Classify a multiaddr: `loopback`, `LAN`, or `public` (also host names)."""
    try:
        ip = ipaddress.ip_address(host_of(address))
    except ValueError:
        return "loopback" if host_of(address) == "localhost" else "public"
    if ip.is_loopback:
        return "loopback"
    # Shared addresses of carriers (100.64/10) are neither private nor global to Python.
    return "public" if ip.is_global else "LAN"


def same_subnet(address: str, other: str) -> bool:
    """Return True if two multiaddrs name IP addresses of one /24, or /64 of IPv6; no loopback."""
    try:
        first, second = (ipaddress.ip_address(host_of(each)) for each in (address, other))
    except ValueError:
        return False
    if first.version != second.version or first.is_loopback:
        return False
    length = 24 if first.version == 4 else 64
    return second in ipaddress.ip_network(f"{first}/{length}", strict=False)


def _family(host: str) -> str:
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}"
    except ValueError:
        return f"/dns/{host}"
