"""The page of a swarm that is not there."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peers import Command, command, eventually, free_port
from tests.support.places import ROOT

PEERS = 64


FAKE = str(ROOT / "tests" / "support" / "fake_swarm.py")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[str, Command]]:
    """Address and process of the page of a fake swarm."""
    port = free_port()
    with command(FAKE, str(port), str(PEERS), directory=tmp_path) as process:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.process.poll() is None, process.stderr
            try:
                return bool(fetch(f"{url}/api/state"))
            except (urllib.error.URLError, ConnectionError):
                return False

        eventually(answers, "the page")
        yield url, process


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return bytes(reply.read())
