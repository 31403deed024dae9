"""Calls addresses over libp2p and says in words why one does not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from diloco.config.address import host_of, scope

__all__ = ["best_first", "call_each", "mute", "start_daemon"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
CALL_S = 10.0
LATECOMERS_S = 1.0  # that the others have once one has answered
_REASONS = {  # what libp2p says, and what that means; the first that is found counts
    "connection refused": "nobody listens on that port",
    "peer id mismatch": "another peer answers there",
    "no route to host": "there is no way to that machine",
    "network is unreachable": "there is no way to that network",
    "no such host": "that host name is unknown",
    "no addresses": "that host name is unknown",
    "gater disallows": "it is not an address to call",
    "failed to negotiate": "what answers there is no peer",
    "deadline exceeded": "no answer",
    "i/o timeout": "no answer",
    "no good addresses": "it cannot be called from here",
}


async def call_each(p2p: P2P, addresses: Sequence[str], all_of_them: bool = False) -> dict[str, str]:
    """Connect to the peers at these addresses, all at once: why it failed by address, or "" where one answered.

    Those that are slower than the first by more than a second count as silent, unless `all_of_them` shall be heard.
    """
    calls = {address: asyncio.ensure_future(_call(p2p, address)) for address in addresses}
    waiting = set(calls.values())
    timeout_s: float = CALL_S
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if not all_of_them and any(call.result() == "" for call in done):
                timeout_s = LATECOMERS_S
    finally:
        for call in waiting:
            call.cancel()
    return {address: call.result() if call.done() else "no answer" for address, call in calls.items()}


async def _call(p2p: P2P, address: str) -> str:
    place, _, peer = address.rpartition("/p2p/")
    try:
        await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(place)])
    except (ControlFailure, P2PDaemonError, OSError, ValueError) as error:
        return _why(str(error), place)
    return ""


def _why(text: str, place: str) -> str:
    """The daemon lists one line per address that it knows of the peer; only ours is of interest."""
    lines = [line for line in text.splitlines() if f"[{place}]" in line] or [text]
    return next((why for said, why in _REASONS.items() if said in lines[-1].lower()), "no peer answers there")


async def mute(identity_path: str | None = None, kind: type[P2P] = P2P) -> P2P:
    """A daemon that only calls others: it listens nowhere, and knows nobody."""
    return await start_daemon(kind, dht_mode="client", no_listen=True, identity_path=identity_path)


async def start_daemon(kind: type[P2P] = P2P, **options: Any) -> P2P:
    """`P2P.create`, but the daemon has a session of its own, and however it ends nothing is printed of it.

    hivemind leaves two things to be noticed when nobody can act on them any more, so that they would end on stderr: a
    daemon that did not start, and the failure of the tasks that talk with one that was killed (see `Libp2p.failed`).
    """
    with _sheltered() as started:
        try:
            p2p = await kind.create(startup_timeout=START_TIMEOUT_S, check_if_identity_free=False, **options)
        except BaseException:
            for daemon in started:
                if daemon.returncode is None:
                    with suppress(ProcessLookupError):  # `terminate` reaps one that has ended, which is printed, too
                        os.kill(daemon.pid, signal.SIGTERM)
                await daemon.wait()
            raise
    for task in (p2p._client.control._read_task, p2p._client.control._write_task):
        task.add_done_callback(_note_end)
    return p2p


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.debug("the connection with a libp2p daemon broke: %r", task.exception())


def best_first(addresses: Sequence[str]) -> list[str]:
    """Public addresses before those of a LAN before loopback; of a LAN, that of the way out before those of bridges."""
    way_out = _way_out()

    def rank(address: str) -> tuple[int, bool, bool]:
        return ("public", "LAN", "loopback").index(scope(address)), host_of(address) != way_out, "/tcp/" not in address

    return sorted(addresses, key=rank)


def _way_out() -> str | None:
    """The address of this machine from which packets to elsewhere would be sent; none is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET
            return str(probe.getsockname()[0])
        except OSError:
            return None


@contextmanager
def _sheltered() -> Iterator[list[Process]]:
    """A daemon that is started inside, in the running loop, has a session of its own; those that were.

    Ctrl+C in a terminal, and what torchrun does to end its ranks, reaches every process of a group. The daemon must
    outlive it for a clean leave; it does not ignore SIGINT reliably, and unblocks it where the mask blocks it.
    """
    loop, started = asyncio.get_running_loop(), list[Process]()

    async def subprocess_exec(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        transport, protocol = await type(loop).subprocess_exec(loop, *arguments, start_new_session=True, **options)
        started.append(Process(transport, protocol, loop))
        return transport, protocol

    loop.subprocess_exec = subprocess_exec  # type: ignore[method-assign]
    try:
        yield started
    finally:
        del loop.subprocess_exec  # what hides the method of the class
