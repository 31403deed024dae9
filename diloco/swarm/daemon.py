"""Starts hivemind's two halves in this process's own event loop: the libp2p daemon and the DHT node.

hivemind.DHT would fork a process of its own; `DHTNode` on a `P2P` of our loop needs none, and leaves nothing behind:
the daemon ends when the process that started it does, however that ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from diloco.errors import ConfigError, SwarmError

__all__ = ["identity_number", "open_daemon", "peer_id", "peer_id_of", "read_addresses", "sheltered", "watch"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
_ADDRESS = re.compile(r"^/(ip4|ip6|dns|dns4|dns6)/[^/]+/(tcp|udp)/\d+(/.*)?/p2p/[1-9A-HJ-NP-Za-km-z]+$")


def peer_id_of(address: str) -> str:
    """The peer id at the end of a multiaddr; `ConfigError` says what a correct address looks like."""
    if not _ADDRESS.match(address):
        raise ConfigError(
            f"swarm.initial_peers: {address!r} is not a peer address; "
            "one looks like /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..."
        )
    return address.rsplit("/", 1)[1]


async def read_addresses(entries: Sequence[str], timeout_s: float) -> list[str]:
    """Replace each `@FILE` by the address in that file, waiting until somebody has written it.

    Raises:
        SwarmError: a file did not appear in time.
        ConfigError: an entry is no address.
    """
    addresses = []
    for entry in entries:
        if entry.startswith("@"):
            path = Path(entry[1:])
            try:
                entry = await asyncio.wait_for(_appears(path), timeout_s)
            except asyncio.TimeoutError:
                raise SwarmError(f"swarm.initial_peers: no address in {path} after {timeout_s:.0f} s") from None
        peer_id_of(entry)
        addresses.append(entry)
    return addresses


async def _appears(path: Path) -> str:
    while not path.exists():
        await asyncio.sleep(0.05)
    return path.read_text().strip()


def _identity(path: Path) -> bytes:
    """The private key in this file, which is made when it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            P2P.generate_identity(str(path))
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"swarm.identity_path={path} cannot be used: {error.strerror}; name another file") from None


def _own_id(path: Path) -> str:
    key = _identity(path)
    try:
        return str(PeerID.from_identity(key).to_base58())
    except Exception:  # of protobuf or of the library for keys, by what is wrong with it
        raise ConfigError(f"swarm.identity_path={path} holds no private key; name another file, or a new one") from None


def identity_number(path: Path) -> int:
    """A number below 2**48 that belongs to the key in this file, which is made when it is missing."""
    return int.from_bytes(hashlib.sha256(_own_id(path).encode()).digest()[:6], "big")


def _explain(error: Exception, initial_peers: Sequence[str], listen: Sequence[str]) -> Exception:
    text = str(error)
    if "failed to listen" in text:
        return SwarmError(f"swarm.listen={','.join(listen)} cannot be listened on; choose another address or port")
    if initial_peers:
        return SwarmError(
            f"swarm.initial_peers={','.join(initial_peers)} cannot be reached; "
            "check that a peer is running there and that its port is open"
        )
    return SwarmError(f"the libp2p daemon did not start: {' '.join(text.split())[:300]}")


def _check_free(listen: Sequence[str]) -> None:
    """`SwarmError` when somebody listens on one of these ports; the daemon would share it, as libp2p reuses ports."""
    for address in listen:
        _, family, host, transport, port, *_ = address.split("/")
        if family not in ("ip4", "ip6") or port == "0":
            continue
        kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
        with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6, kind) as probe:
            if transport == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not kept by connections that ended
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                raise SwarmError(
                    f"swarm.listen={address} cannot be listened on: {error.strerror}; choose another port, or 0 for any"
                ) from None


@contextmanager
def sheltered() -> Iterator[None]:
    """A daemon that is started inside, in the running loop, has a session of its own.

    Ctrl+C in a terminal, and what torchrun does to end its ranks, reaches every process of a group. The daemon must
    outlive it for a clean leave; it does not ignore SIGINT reliably, and unblocks it where the mask blocks it.
    """
    loop = asyncio.get_running_loop()
    loop.subprocess_exec = partial(loop.subprocess_exec, start_new_session=True)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loop.subprocess_exec  # what hides the method of the class


async def open_daemon(
    initial_peers: Sequence[str], listen: Sequence[str], announce: Sequence[str], identity_path: Path
) -> tuple[P2P, DHTNode]:
    """Start listening and join the DHT.

    Args:
        initial_peers: multiaddrs of peers of the swarm; empty starts a new one.
        listen, announce: multiaddrs to listen on, and those to tell others when they differ.
        identity_path: private key of this peer; made when there is none.

    Raises:
        SwarmError: nobody answers at the initial peers, the port is taken, this identity is that of an initial peer, or
            the daemon does not start.
        ConfigError: the identity cannot be written, or is none.
    """
    own = _own_id(identity_path)
    if any(peer_id_of(address) == own for address in initial_peers):
        raise SwarmError(f"swarm.identity_path={identity_path} is in use by a running peer; give this one another file")
    _check_free(listen)
    try:
        with sheltered():
            p2p = await P2P.create(
                initial_peers=[Multiaddr(address) for address in initial_peers] or None,
                host_maddrs=[Multiaddr(address) for address in listen],
                announce_maddrs=[Multiaddr(address) for address in announce] or None,
                identity_path=str(identity_path),
                startup_timeout=START_TIMEOUT_S,
                check_if_identity_free=False,
            )
    except (P2PDaemonError, OSError, ValueError) as error:
        raise _explain(error, initial_peers, listen) from error
    try:
        dht = await DHTNode.create(p2p=p2p, initial_peers=[Multiaddr(address) for address in initial_peers] or None)
    except Exception as error:
        await p2p.shutdown()
        raise _explain(error, initial_peers, listen) from error
    logger.debug("daemon of %s started by process %d", own, os.getpid())
    return p2p, dht


def peer_id(text: str) -> PeerID:
    """hivemind's object for a peer id."""
    return PeerID.from_base58(text)


async def watch(p2p: P2P) -> None:
    """Raises `SwarmError` when the daemon ends by itself: a peer without one would train on alone and not know it."""
    code = await p2p._child.wait()
    raise SwarmError(
        f"this peer's libp2p daemon ended (code {code}); run the same command again to go on from the checkpoint"
    )
