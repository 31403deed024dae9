"""Whom a peer calls that comes back to a run."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.attach.bootstrap_peers import called_again, known_by, remember
from diloco.config import SwarmConfig
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.client.ask import SwarmInfo

TEXT = '{"outer": {"rounds": 7}, "run": {"id": "mine"}}'
OURS = hash_of(TEXT.replace("7", "9"))  # a longer run is the same one
GIVEN, *KNOWN = (
    f"/ip4/203.0.113.{n}/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
    for n in "789"
)
KEY = Path("identity")


def again(
    monkeypatch: pytest.MonkeyPatch, *given: str, known: Sequence[str] = KNOWN, run: str = OURS
) -> Any:
    """What it comes to where the last of those that are called answers; and who was called."""
    called: list[str] = []

    def look(addresses: Sequence[str], identity: Path, gate: object) -> SwarmInfo:
        called.extend(addresses)
        answers: Any = SimpleNamespace(reply=SimpleNamespace(addresses=[addresses[-1]]))
        return SwarmInfo(TEXT, [answers])

    monkeypatch.setattr("diloco.attach.bootstrap_peers.inspect_swarm", look)
    network = SwarmConfig.parse({"initial_peers": list(given), "listen": ["/ip4/0.0.0.0/tcp/0"]})
    return called_again(network, KEY, "mine", run, known)[0].initial_peers, called


def test_who_comes_back_joins_at_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joined calls the seeds, too; without others nobody is called, and none of another run is
    joined."""
    assert again(monkeypatch) == ((KNOWN[-1],), KNOWN)
    assert again(monkeypatch, GIVEN) == ((GIVEN, *KNOWN), [])
    assert again(monkeypatch, known=()) == ((), [])
    assert again(monkeypatch, run="0" * 64) == ((), KNOWN)

    def nobody(*arguments: object, **options: object) -> SwarmInfo:
        raise SwarmError("nobody")

    monkeypatch.setattr("diloco.attach.bootstrap_peers.inspect_swarm", nobody)
    assert called_again(SwarmConfig.parse({}), KEY, "mine", OURS, KNOWN)[0].initial_peers == ()


def test_a_peer_remembers_whom_it_knew_in_a_run(tmp_path: Path) -> None:
    """The newest first, and of no other run; half a file, or none, is nothing."""
    key, nothing = tmp_path / "identity.key", ([], [])
    assert known_by(key, OURS) == nothing
    remember(key, OURS, [GIVEN], KNOWN[:1])
    remember(key, OURS, [GIVEN], KNOWN[1:])
    assert known_by(key, OURS) == ([GIVEN], KNOWN[::-1]) and known_by(key, "0" * 64) == nothing
    [file] = tmp_path.iterdir()
    for torn in (
        file.read_text()[:9],
        "[]",
        '{"run": "x"}',
        json.dumps({"run": OURS, "own": 3, "others": []}),
    ):
        file.write_text(torn)
        assert known_by(key, OURS) == nothing
    file.write_text(
        json.dumps({"run": OURS, "own": [], "others": ["/ip4/1.2.3.4/tcp/1", KNOWN[0]]})
    )
    assert known_by(key, OURS)[1] == KNOWN[:1]
    remember(tmp_path / "no" / "such" / "place", OURS, [], [])


def test_a_peer_listens_where_it_did_if_it_can(tmp_path: Path) -> None:
    """Where any port would do."""
    key = tmp_path / "identity.key"

    def listens(listen: str) -> Sequence[str]:
        network = SwarmConfig.parse({"listen": [listen], "initial_peers": [GIVEN]})
        return called_again(network, key, "mine", OURS, ())[0].listen

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        remember(
            key, OURS, [GIVEN.replace("203.0.113.7", "127.0.0.1").replace("4100", str(port))], []
        )
        for listen in ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/4100"):
            assert listens(listen) == (listen,)
    assert listens("/ip4/127.0.0.1/tcp/0") == (f"/ip4/127.0.0.1/tcp/{port}",)
