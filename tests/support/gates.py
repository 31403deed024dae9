"""Gates of two peers that meet without a network."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.admission import Admission, RunKey, issue
from diloco.swarm.wire.gate import Gate
from tests.support.stub_wire import connected

SOON = int(time.time()) + 3600


@pytest.fixture
def key(tmp_path: Path) -> RunKey:
    return RunKey.create(tmp_path / "run.key")


def gate(key: RunKey, me: str, role: Any = "worker") -> Gate:
    made = Gate(Admission(issue(key, "run", role, SOON)))
    made.me = me
    return made


async def meet(caller: Gate, callee: Gate) -> int:
    """One gate greets the other, over a stream between them; returns how many bytes both wrote."""
    here, there = connected()
    answering = asyncio.ensure_future(callee.welcome(caller.me, there.reader, there))

    async def opener() -> Any:
        return here.reader, here

    try:
        await caller.greet(callee.me, opener, again=True)
    finally:
        await answering
    return len(here.written) + len(there.written)
