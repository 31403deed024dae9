"""What peers ask each other: each module of this folder has one question, its schema, and both
sides.

A class with `@answers(KIND)` answers questions of that kind. A function with `@for_doctor(NAME)`
asks; what it returns is a line of `diloco doctor`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from diloco.messages.base import Message, Place
from diloco.swarm.wire.streams import PeerStream
from diloco.swarm.wire.transport import Transport

if TYPE_CHECKING:  # a process that only watches does not load torch
    from diloco.swarm.context import Context


class Answering(Protocol):
    """The answering side of a question in one node."""

    async def answer(self, stream: PeerStream, request: Any) -> None:
        """Send the answer; `PayloadError` refuses with its text."""


ForDoctor = Callable[[Transport, str], Awaitable[str]]
_Side = TypeVar("_Side", bound="Callable[[Context], Answering]")
_Ask = TypeVar("_Ask", bound=ForDoctor)

ANSWERS: dict[type[Message], Callable[[Context], Answering]] = {}
"""What makes the answering side of a node, by the kind of question."""
FOR_DOCTOR: dict[str, ForDoctor] = {}
"""What `diloco doctor` asks each peer, by the name of its line: transport and peer to text."""


def answers(kind: type[Message]) -> Callable[[_Side], _Side]:
    """Register what answers questions of a kind: a class that a node makes with its `Context`."""
    assert kind.place is Place.REQUEST and kind.roles, f"{kind.__name__} begins no bulk stream"

    def register(side: _Side) -> _Side:
        ANSWERS[kind] = side
        return side

    return register


def for_doctor(name: str) -> Callable[[_Ask], _Ask]:
    """Register a question of `diloco doctor`; a peer that does not answer it has no line."""

    def register(ask: _Ask) -> _Ask:
        FOR_DOCTOR[name] = ask
        return ask

    return register


def load_questions() -> None:
    """Import every module of this folder."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
