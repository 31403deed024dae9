"""How a libp2p daemon begins and ends: with nothing on the user's screen that is not ours."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.proto import p2pd_pb2
from swarm_helpers import SMOKE, command, free_port

from diloco.config import SwarmConfig
from diloco.swarm.wire.dialing import mute, start_daemon
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p

NOBODY = "QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"


def printed_of(scene: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What asyncio would print of errors that nobody awaited, until all garbage is collected."""
    printed: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: printed.append(f"{context['message']} {context.get('task')}"))
        await asyncio.wait_for(scene(), 30)
        gc.collect()

    asyncio.run(work())
    return printed


class Daemon:
    """Stands for hivemind's P2P; `create` ends as the test wants."""

    children: list[asyncio.subprocess.Process] = []  # noqa: RUF012
    ends: Callable[[], Coroutine[Any, Any, Any]]

    @classmethod
    async def create(cls, **options: Any) -> Any:
        cls.children.append(await asyncio.create_subprocess_exec("sleep", "1000"))
        return await cls.ends()


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_daemon_that_does_not_start_has_ended_before_the_loop_is_closed(
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


def test_a_connection_with_a_daemon_that_breaks_is_no_error_that_nobody_heard_of(
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


@pytest.mark.swarm
def test_who_loses_its_daemon_prints_nothing_of_what_was_still_to_be_said(tmp_path: Path) -> None:
    async def scene() -> None:
        listen = ["/ip4/127.0.0.1/tcp/0"]
        peer = await Libp2p.connect(SwarmConfig(listen=tuple(listen)), tmp_path / "key", Gate())
        control = peer._p2p._client.control
        peer._p2p._child.kill()
        await peer._p2p._child.wait()
        control._pending_messages.put_nowait(p2pd_pb2.PersistentConnectionRequest(callId=b"1"))
        await asyncio.wait([control._write_task])
        await peer.close()

    assert printed_of(scene) == []


@pytest.mark.swarm
def test_a_visit_that_is_given_up_while_it_calls_leaves_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[Any] = []

    async def kept(*arguments: Any) -> Any:
        daemons.append(await mute(*arguments))
        return daemons[-1]

    monkeypatch.setattr("diloco.swarm.wire.libp2p.mute", kept)

    async def scene() -> None:
        called = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        visiting = asyncio.ensure_future(Libp2p.visit([f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"]))
        await called.wait()
        visiting.cancel()
        await asyncio.wait([visiting])
        assert visiting.cancelled() and daemons[0]._child.returncode is not None
        server.close()

    assert printed_of(scene) == []


@pytest.mark.swarm
@pytest.mark.parametrize(
    "arguments",
    [
        ("diloco", "doctor"),
        ("diloco.train", *SMOKE, "swarm.initial_peers="),
    ],
    ids=lambda arguments: arguments[-1],
)
def test_whom_nobody_answers_reads_one_line_of_ours(arguments: tuple[str, ...], tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{NOBODY}"
    typed = (*arguments[:-1], arguments[-1] + address) if arguments[-1].endswith("=") else (*arguments, address)
    with command("-m", *typed, directory=tmp_path) as started:
        started.done(3)
    said = [line for line in (started.stderr + started.stdout).splitlines() if "cannot be reached" in line]
    assert len(said) == 1 and "Loop" not in started.stderr and "asyncio" not in started.stderr
    assert started.stderr.count("\n") <= 1, started.stderr
