"""How a libp2p daemon begins and ends: with nothing on the user's screen that is not ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from diloco.swarm.wire.dialing import start_daemon
from tests.support.printing import printed_of


class Daemon:
    """Stands for hivemind's P2P; `create` ends as the test wants."""

    children: list[asyncio.subprocess.Process] = []  # noqa: RUF012
    ends: Callable[[], Coroutine[Any, Any, Any]]

    @classmethod
    async def create(cls, **options: Any) -> Any:
        cls.children.append(await asyncio.create_subprocess_exec("sleep", "1000"))
        return await cls.ends()


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_daemon_that_does_not_start_has_ended(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.Event()

    async def fails() -> None:
        raise P2PDaemonError("Daemon failed to start")

    async def waits() -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Daemon, "ends", fails if how == "fails" else waits, raising=False)

    async def scene() -> None:
        starting = asyncio.ensure_future(start_daemon(Daemon))
        if how == "is cancelled":
            await waiting.wait()
            starting.cancel()
        [outcome] = await asyncio.gather(starting, return_exceptions=True)
        assert isinstance(outcome, P2PDaemonError if how == "fails" else asyncio.CancelledError)
        assert Daemon.children.pop().returncode == -15

    assert printed_of(scene) == [] and caplog.records == []


def test_a_broken_connection_with_a_daemon_is_no_unheard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks() -> None:
        raise ConnectionResetError("Connection lost")

    async def starts() -> Any:
        Daemon.children.pop().kill()
        tasks = {name: asyncio.ensure_future(breaks()) for name in ("_read_task", "_write_task")}
        return SimpleNamespace(_client=SimpleNamespace(control=SimpleNamespace(**tasks)))

    monkeypatch.setattr(Daemon, "ends", starts, raising=False)

    async def scene() -> None:
        p2p = await start_daemon(Daemon)
        await asyncio.wait([p2p._client.control._read_task, p2p._client.control._write_task])

    assert printed_of(scene) == []
