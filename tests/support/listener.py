"""A control mesh that hears what a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from diloco.core.events import Action, Note
from diloco.messages.control import Hello, Status
from diloco.swarm.context import Context
from diloco.swarm.node.mesh import ControlMesh
from diloco.swarm.node.options import RunSpec
from diloco.swarm.wire.gate import Gate
from tests.support.core import GENESIS, ME, OTHER, D, core, hello_of
from tests.support.stub_wire import NoNetwork, Pipe


class Listener:
    """A peer of a run of two fragments, and its mesh."""

    def __init__(self) -> None:
        self.core = core()
        self.transport, self.notes = NoNetwork(ME), list[tuple[str, Mapping[str, object]]]()
        replica: Any = SimpleNamespace(fragments=())
        told = lambda *event: self.notes.append(event)  # noqa: E731
        self.context = Context(self.core, replica, self.transport, Gate(), told)
        self.context.carry_out = self.carry_out
        self.mesh = ControlMesh(self.context, RunSpec("run", D, "{}"))

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Note):
                self.context.note(action.kind, **action.fields)

    def said(self, kind: str) -> list[Mapping[str, object]]:
        return [fields for one, fields in self.notes if one == kind]

    async def hear(self, *sent: bytes) -> list[object]:
        """What is answered on a stream on which somebody says this and ends it."""
        pipe = Pipe(*sent)
        await self.mesh._serve(OTHER, pipe.reader, pipe)
        return pipe.messages()


def status(**said: Any) -> Status:
    """A whole one of a peer that trains."""
    tips = {tip.head.fragment: tip.key for tip in GENESIS}
    return Status(**{"whole": True, "tips": tips, "trains": True, **said})


def hello(**fields: Any) -> Hello:
    return replace(hello_of(), **fields)
