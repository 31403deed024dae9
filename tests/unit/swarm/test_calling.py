"""How a libp2p daemon begins and ends: with nothing on the user's screen that is not ours."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from diloco.swarm.wire.dialing import start_daemon
from tests.support.printing import printed_of


class Daemon:
    """Stands for hivemind's P2P; `create` ends as the test wants."""

    def __init__(self, ends: Callable[[Process], Coroutine[Any, Any, Any]]) -> None:
        self.ends = ends

    async def create(self, **options: Any) -> Any:
        self.child = await asyncio.create_subprocess_exec("sleep", "1000")
        return await self.ends(self.child)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_daemon_that_does_not_start_has_ended(cancelled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Before the loop is closed."""
    waiting = asyncio.Event()

    async def ends(child: Process) -> None:
        waiting.set()
        if not cancelled:
            raise P2PDaemonError("Daemon failed to start")
        await asyncio.Event().wait()

    async def scene() -> None:
        daemon = Daemon(ends)
        starting = asyncio.ensure_future(start_daemon(daemon))  # type: ignore[arg-type]
        await waiting.wait()
        if cancelled:
            starting.cancel()
        [outcome] = await asyncio.gather(starting, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError if cancelled else P2PDaemonError)
        assert daemon.child.returncode == -15

    assert printed_of(scene) == [] and caplog.records == []


def test_a_broken_connection_with_a_daemon_is_no_unheard_error() -> None:
    async def breaks() -> None:
        raise ConnectionResetError("Connection lost")

    async def starts(child: Process) -> Any:
        child.kill()
        tasks = {name: asyncio.ensure_future(breaks()) for name in ("_read_task", "_write_task")}
        return SimpleNamespace(_client=SimpleNamespace(control=SimpleNamespace(**tasks)))

    async def scene() -> None:
        p2p = await start_daemon(Daemon(starts))  # type: ignore[arg-type]
        await asyncio.wait([p2p._client.control._read_task, p2p._client.control._write_task])

    assert printed_of(scene) == []
