"""Whom a peer calls that comes back to a run."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.attach.bootstrap_peers import Known, known_by, ports_again, remember, seeds_again
from diloco.config import SwarmConfig
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.client.ask import SwarmInfo

TEXT = '{"outer": {"rounds": 7}, "run": {"id": "mine"}}'
OURS = hash_of(TEXT.replace("7", "9"))  # a longer run is the same one
GIVEN, *KNOWN = (f"/ip4/203.0.113.{n}/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg" for n in "789")


def again(monkeypatch: pytest.MonkeyPatch, *given: str, known: Sequence[str] = KNOWN, run: str = OURS) -> Any:
    """What it comes to where the last of those that are called answers; and who was called."""
    called: list[str] = []

    def look(addresses: Sequence[str], identity: Path, gate: object) -> SwarmInfo:
        called.extend(addresses)
        answers: Any = SimpleNamespace(reply=SimpleNamespace(addresses=[addresses[-1]]))
        return SwarmInfo(TEXT, [answers])

    monkeypatch.setattr("diloco.attach.bootstrap_peers.inspect_swarm", look)
    network = SwarmConfig.parse({"initial_peers": list(given), "listen": ["/ip4/0.0.0.0/tcp/0"]})
    return seeds_again(network, known, Path("identity"), "mine", run), called


def test_who_comes_back_joins_at_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joined calls the seeds, too; without others nobody is called, and none of another run is joined."""
    assert again(monkeypatch) == ((KNOWN[-1],), KNOWN)
    assert again(monkeypatch, GIVEN) == ((GIVEN, *KNOWN), [])
    assert again(monkeypatch, known=()) == ((), [])
    assert again(monkeypatch, run="0" * 64) == ((), KNOWN)

    def nobody(*arguments: object, **options: object) -> SwarmInfo:
        raise SwarmError("nobody")

    again(monkeypatch)
    monkeypatch.setattr("diloco.attach.bootstrap_peers.inspect_swarm", nobody)
    assert seeds_again(SwarmConfig.parse({}), KNOWN, Path("identity"), "mine", OURS) == ()


def test_a_peer_remembers_whom_it_knew_in_a_run(tmp_path: Path) -> None:
    """The newest first, and of no other run; half a file, or none, is nothing."""
    key = tmp_path / "identity.key"
    assert known_by(key, OURS) == Known()
    remember(key, OURS, [GIVEN], KNOWN[:1])
    remember(key, OURS, [GIVEN], KNOWN[1:])
    assert known_by(key, OURS) == ([GIVEN], KNOWN[::-1]) and known_by(key, "0" * 64) == Known()
    [file] = tmp_path.iterdir()
    for torn in (file.read_text()[:9], "[]", '{"run": "x"}', json.dumps({"run": OURS, "own": 3, "others": []})):
        file.write_text(torn)
        assert known_by(key, OURS) == Known()
    file.write_text(json.dumps({"run": OURS, "own": [], "others": ["/ip4/1.2.3.4/tcp/1", KNOWN[0]]}))
    assert known_by(key, OURS).others == KNOWN[:1]
    remember(tmp_path / "no" / "such" / "place", OURS, [], [])


def test_a_peer_listens_where_it_did_if_it_can() -> None:
    """Where any port would do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = [f"/ip4/127.0.0.1/tcp/{port}/p2p/me"]
        for listen in ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/4100", "/ip4/127.0.0.1/udp/0/quic"):
            assert ports_again([listen], own) == (listen,)
    assert ports_again(["/ip4/127.0.0.1/tcp/0"], own) == (f"/ip4/127.0.0.1/tcp/{port}",)
