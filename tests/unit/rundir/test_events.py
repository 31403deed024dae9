"""Every event that the package logs has a kind that is documented, and no other is."""

from __future__ import annotations

import ast

from diloco.rundir.events import EventKind
from tests.support.places import PACKAGE

EMITTERS = {"note", "on_event", "_on_event", "event", "_event"}
ELSEWHERE = {"join", "leave", "lost"}  # chosen by a condition; core/peer.py


def test_every_kind_of_event_is_documented() -> None:
    found = set()
    for folder in ("core", "swarm", "attach", "train", "rundir"):
        for file in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    kind = node.args[0]
                    if name in EMITTERS and isinstance(kind, ast.Constant):
                        found.add(kind.value)
    assert found | ELSEWHERE == set(EventKind)
