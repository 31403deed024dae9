"""How a libp2p daemon begins and ends: with nothing on the user's screen that is not ours."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.swarm.wire.dialing import client_daemon
from diloco.swarm.wire.libp2p import Libp2p
from tests.support.peers import SMOKE, command, dead_port
from tests.support.printing import printed_of

NOBODY = "QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"


def test_a_visit_that_is_given_up_while_it_calls_leaves_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[Any] = []

    async def kept(*arguments: Any) -> Any:
        daemons.append(await client_daemon(*arguments))
        return daemons[-1]

    monkeypatch.setattr("diloco.swarm.wire.libp2p.client_daemon", kept)

    async def scene() -> None:
        called = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        visiting = asyncio.ensure_future(Libp2p.client([f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"]))
        await called.wait()
        visiting.cancel()
        await asyncio.wait([visiting])
        assert visiting.cancelled() and daemons[0]._child.returncode is not None
        server.close()

    assert printed_of(scene) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("diloco", "doctor"), ("diloco.train", *SMOKE, "swarm.initial_peers=")],
    ids=lambda arguments: arguments[-1],
)
def test_whom_nobody_answers_reads_one_line_of_ours(arguments: tuple[str, ...], tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{NOBODY}"
    typed = (*arguments[:-1], arguments[-1] + address) if arguments[-1].endswith("=") else (*arguments, address)
    with command("-m", *typed, directory=tmp_path) as started:
        started.done(3)
    said = [line for line in (started.stderr + started.stdout).splitlines() if "cannot be reached" in line]
    assert len(said) == 1 and "Loop" not in started.stderr and "asyncio" not in started.stderr
    assert started.stderr.count("\n") <= 1, started.stderr
