"""Whom a peer calls that comes back to a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.config import SwarmConfig
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.visit.look import Found
from diloco.train.seeds import seeds_again

TEXT = '{"budget": {"tokens": 5}, "run": {"id": "mine"}}'
OURS = hash_of(TEXT.replace("5", "7"))  # a longer run is the same one
GIVEN, *KNOWN = (f"/ip4/203.0.113.{n}/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg" for n in "789")


def again(monkeypatch: pytest.MonkeyPatch, *given: str, known: Sequence[str] = KNOWN, run: str = OURS) -> Any:
    """What it comes to where the last of those that are called answers; and who was called."""
    called: list[str] = []

    def look(addresses: Sequence[str], identity: Path, gate: object) -> Found:
        called.extend(addresses)
        answers: Any = SimpleNamespace(reply=SimpleNamespace(addresses=[addresses[-1]]))
        return Found(TEXT, [answers])

    monkeypatch.setattr("diloco.train.seeds.look", look)
    network = SwarmConfig.parse({"initial_peers": list(given), "listen": ["/ip4/0.0.0.0/tcp/0"]})
    return seeds_again(network, known, Path("identity"), "mine", run), called


def test_who_comes_back_joins_at_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joined calls the seeds, too; without others nobody is called, and none of another run is joined."""
    assert again(monkeypatch) == ((KNOWN[-1],), KNOWN)
    assert again(monkeypatch, GIVEN) == ((GIVEN, *KNOWN), [])
    assert again(monkeypatch, known=()) == ((), [])
    assert again(monkeypatch, run="0" * 64) == ((), KNOWN)

    def nobody(*arguments: object, **options: object) -> Found:
        raise SwarmError("nobody")

    again(monkeypatch)
    monkeypatch.setattr("diloco.train.seeds.look", nobody)
    assert seeds_again(SwarmConfig.parse({}), KNOWN, Path("identity"), "mine", OURS) == ()
