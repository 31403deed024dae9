"""Registry of the requests between peers. The asking and the answering side of a request are in one
module of this folder. So are its messages, except those of `state`: they are in `messages.bulk`,
because the core uses `Get`.

A class with `@answers(KIND)` answers requests of that kind. A function with `@for_doctor(NAME)`
asks a peer, and returns the text of a line of `diloco doctor`.
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
    """The answering side of a request in one node."""

    async def answer(self, stream: PeerStream, request: Any) -> None:
        """Send the answer; `PayloadError` refuses with its text."""


ForDoctor = Callable[[Transport, str], Awaitable[str]]
_Side = TypeVar("_Side", bound="Callable[[Context], Answering]")
_Ask = TypeVar("_Ask", bound=ForDoctor)

ANSWERS: dict[type[Message], Callable[[Context], Answering]] = {}
"""Constructors of the answering side of a node, by kind of request."""
FOR_DOCTOR: dict[str, ForDoctor] = {}
"""Functions by which `diloco doctor` asks each peer, by line: from transport and peer to text."""


def answers(kind: type[Message]) -> Callable[[_Side], _Side]:
    """Register a class that answers requests of a kind; a node makes it with its `Context`."""
    assert kind.place is Place.REQUEST and kind.roles, f"{kind.__name__} begins no bulk stream"

    def register(side: _Side) -> _Side:
        ANSWERS[kind] = side
        return side

    return register


def for_doctor(name: str) -> Callable[[_Ask], _Ask]:
    """Register a request of `diloco doctor`; a peer that does not answer it has no line."""

    def register(ask: _Ask) -> _Ask:
        FOR_DOCTOR[name] = ask
        return ask

    return register


def load_questions() -> None:
    """Import every module of this folder."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
