"""A control mesh that hears what a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from diloco.config import WIRE_VERSION
from diloco.protocol.actions import Action, Note
from diloco.protocol.messages.control import Claim, Hello, Status
from diloco.protocol.peer import Peer
from diloco.protocol.states import State
from diloco.swarm.conversations.context import Context
from diloco.swarm.node.mesh import ControlMesh
from diloco.swarm.node.options import RunSpec
from diloco.swarm.wire.gate import Gate
from tests.support.certificates import Nobody
from tests.support.stub_host import ME, OTHER, NoNetwork
from tests.support.stub_wire import Pipe

MANIFEST, DIGEST = "0" * 64, "1" * 64


class Listener:
    """A peer of a run of two fragments, and its mesh."""

    def __init__(self) -> None:
        self.protocol = Peer(ME, ME, "run", MANIFEST, [DIGEST] * 2, Nobody())
        self.transport, self.notes = NoNetwork(), list[tuple[str, Mapping[str, object]]]()
        self.context = Context(
            self.protocol, SimpleNamespace(fragments=()), self.transport, "{}", Gate(),  # type: ignore[arg-type]
            on_event=lambda kind, fields: self.notes.append((kind, fields)),
        )  # fmt: skip
        self.context.carry_out = self.carry_out
        self.mesh = ControlMesh(self.context, RunSpec("run", MANIFEST, "{}"))

    def carry_out(self, actions: Sequence[Action]) -> None:
        self.notes += [(action.kind, action.fields) for action in actions if isinstance(action, Note)]

    def said(self, kind: str) -> list[Mapping[str, object]]:
        return [fields for one, fields in self.notes if one == kind]

    async def hear(self, *sent: bytes) -> list[object]:
        """What is answered on a stream on which somebody says this and ends it."""
        pipe = Pipe(b"".join(sent))
        await self.mesh._serve(OTHER, pipe.reader, pipe)
        return pipe.messages()


def status(state: State = "training", fragments: int = 2) -> Status:
    return Status(state=state, versions=[0] * fragments)


def hello(*claims: Claim, **fields: Any) -> Hello:
    known = {"wire_version": WIRE_VERSION, "run_id": "run", "manifest_hash": MANIFEST, "name": OTHER, "peers": []}
    return Hello(**{**known, "trains": True, "holds": True, "status": status(), "claims": list(claims), **fields})
