"""Connecting to addresses over libp2p, and readable reasons for failures."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from tempfile import gettempdir
from typing import Any

from diloco.config.address import host_of, reachability
from diloco.swarm.wire.hivemind_names import P2P, ControlFailure, Multiaddr, P2PDaemonError, PeerID

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
CALL_S = 10.0
DESCRIPTORS = 2**14
LATECOMERS_S = 1.0  # time left for the other addresses, once the first has answered
_NO_NETWORK, _NO_NAME = "there is no way to that network", "that host name is unknown"
LOCAL = {_NO_NETWORK, _NO_NAME}  # the only reasons on a machine without a network
_REASONS = {  # by text in libp2p's error; the first match counts
    "connection refused": "nobody listens on that port",
    "peer id mismatch": "another peer answers there",
    "no route to host": "there is no way to that machine",
    "network is unreachable": _NO_NETWORK,
    "no such host": _NO_NAME,
    "no addresses": _NO_NAME,
    "gater disallows": "it is not an address to call",
    "failed to negotiate": "what answers there is no peer",
    "deadline exceeded": "no answer",
    "i/o timeout": "no answer",
    "no good addresses": "it cannot be called from here",
}


async def call_each(p2p: P2P, addresses: Sequence[str]) -> dict[str, str]:
    """Connect to these addresses at once; return the error by address, "" if a peer answered.

    An address that is a second slower than the first one counts as silent.
    """
    calls = {address: asyncio.ensure_future(_call(p2p, address)) for address in addresses}
    waiting, timeout_s, first = set(calls.values()), CALL_S, asyncio.FIRST_COMPLETED
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=first)
            if not done:
                break
            if any(call.result() == "" for call in done):
                timeout_s = LATECOMERS_S
    finally:
        for call in waiting:
            call.cancel()
    return {at: call.result() if call.done() else "no answer" for at, call in calls.items()}


async def _call(p2p: P2P, address: str) -> str:
    multiaddr, _, peer = address.rpartition("/p2p/")
    try:
        await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(multiaddr)])
    except (ControlFailure, P2PDaemonError, OSError, ValueError) as error:
        # The error has one line for each address that the daemon knows of the peer.
        text = str(error)
        lines = [line for line in text.splitlines() if f"[{multiaddr}]" in line] or [text]
        reason = lines[-1].lower()
        if multiaddr.startswith("/dns") and "no good addresses" in reason:
            return _NO_NAME
        return next(
            (why for words, why in _REASONS.items() if words in reason), "no peer answers there"
        )
    return ""


async def client_daemon(identity_path: str | None = None) -> P2P:
    """Start a daemon that only makes calls: it does not listen, and has no known peers."""
    return await start_daemon(P2P, dht_mode="client", no_listen=True, identity_path=identity_path)


async def start_daemon(kind: type[P2P], **options: Any) -> P2P:
    """As `P2P.create`, but the daemon has its own session, and its end prints nothing.

    Ctrl+C in a terminal reaches every process of a group, and so does the signal by which torchrun
    ends its ranks. The daemon must outlive both for a clean leave, and does not ignore SIGINT
    reliably.

    hivemind leaves two errors unretrieved, which are then printed: that of a daemon that did not
    start, and of tasks connected to a killed daemon. It would also put its sockets into /tmp, which
    may be read-only or full.
    """
    _allow_descriptors()
    folder = gettempdir()
    sockets = f"/unix{folder if len(folder) < 64 else '/tmp'}/hivemind-"
    kind = type(kind.__name__, (kind,), {"_UNIX_SOCKET_PREFIX": sockets})
    loop, started = asyncio.get_running_loop(), list[Process]()

    async def subprocess_exec(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        options["start_new_session"] = True
        transport, protocol = await type(loop).subprocess_exec(loop, *arguments, **options)
        started.append(Process(transport, protocol, loop))
        return transport, protocol

    loop.subprocess_exec = subprocess_exec  # type: ignore[method-assign]
    options |= {"startup_timeout": START_TIMEOUT_S, "check_if_identity_free": False}
    try:
        p2p = await kind.create(**options)
    except BaseException:
        for daemon in started:
            if daemon.returncode is None:
                # `terminate` would reap an ended daemon, and print a warning
                with suppress(ProcessLookupError):
                    os.kill(daemon.pid, signal.SIGTERM)
            await daemon.wait()
        raise
    finally:
        del loop.subprocess_exec  # the instance attribute, which hides the method of the class
    for task in (p2p._client.control._read_task, p2p._client.control._write_task):
        task.add_done_callback(_note_end)
    return p2p


def _allow_descriptors() -> None:
    """Raise the soft limit of open files: each stream takes one or two, here and in the daemon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may allow less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.debug("the connection with a libp2p daemon broke: %r", task.exception())


def best_first(addresses: Sequence[str]) -> list[str]:
    """Sort addresses: public, then LAN (that of the default route first), then loopback."""
    way_out, scopes = _way_out(), ("public", "LAN", "loopback")

    def rank(address: str) -> tuple[int, bool, bool]:
        scope = scopes.index(reachability(address))
        return scope, host_of(address) != way_out, "/tcp/" not in address

    return sorted(addresses, key=rank)


def _way_out() -> str | None:
    """Find this machine's source address for outgoing packets. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET
            return str(probe.getsockname()[0])
        except OSError:
            return None
