"""A core without tensors and without a network, and what it is told."""

from __future__ import annotations

from typing import Any

from diloco.core.events import Connected
from diloco.core.facts import Facts, Fragment
from diloco.core.history import Tip, genesis
from diloco.core.peer import Peer
from diloco.core.settings import Identity, Settings, Sizes
from diloco.messages.codec import WIRE_VERSION
from diloco.messages.control import Figures, Hello, Status
from diloco.messages.heads import Book, Entry, Head, Line

ME, OTHER, D = "a" * 46, "b" * 46, "ab" * 32
GENESIS = [genesis(index, "run", [D]) for index in range(2)]


class Nobody:
    """Signs nothing, and believes every signature."""

    def sign(self, content: bytes) -> bytes:
        return b""

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return True


def core(me: str = ME, fragments: int = 2, authors: bool = True, **settings: Any) -> Peer:
    """A core which listens."""
    identity = Identity(me, "me", "run", D, Nobody(), may_author=authors, device="cpu")
    sizes = [Sizes(10, 10, 40, 1)] * fragments
    arithmetic: Any = None
    settings = {"fragments": fragments, **settings}
    return Peer(
        identity,
        Settings(**settings),
        arithmetic,
        GENESIS[:fragments],
        sizes,
        0.0,
        0,
        planned=(9, 0, 0),
    )


def hello_of(name: str = "other", figures: Figures | None = None, **status: Any) -> Hello:
    """That of another peer, which trains."""
    said = {
        "whole": True,
        "tips": {tip.head.fragment: tip.key for tip in GENESIS},
        "trains": True,
        "authors": True,
    }
    return Hello(
        WIRE_VERSION,
        "run",
        D,
        name,
        trains=True,
        authors=True,
        status=Status(**(said | status)),
        device="gpu",
    )


def join(peer: Peer, other: str = OTHER, figures: Figures | None = None, **hello: Any) -> None:
    """Another peer says hello, and its figures."""
    peer.receive(Connected(other, hello_of(**hello)), peer.facts.now)
    member = peer.facts.members.get(other)
    assert member is not None
    member.figures = figures or Figures()


def advance(
    facts: Facts, f: Fragment, *contributors: str, base: str = "", tokens: int = 10
) -> None:
    """The tip moves to a version with contributions of so many tokens each."""
    here = f.tip
    lines = [
        Line(
            f.index,
            peer,
            here.head.number + 1,
            base or here.head.id,
            1,
            tokens,
            (),
            1.0,
            D,
            peer[:1],
        )
        for peer in contributors
    ]
    work, number = here.head.work + tokens * len(lines), here.head.number + 1
    head = Head(
        f.index, number, here.head.id, ME, ME, tuple((line, 1.0) for line in lines), 1, work, D, D
    )
    ledger = dict(here.book.ledger)
    for line in lines:
        known = ledger.get(line.peer, Entry(0, 0, 0, number))
        ledger[line.peer] = Entry(
            line.stamp,
            known.tokens + tokens,
            known.contributions + 1,
            known.first,
            number,
            line.name,
        )
    f.tip = Tip(head, Book(ledger, (*here.book.recent, here.head.id)[-facts.settings.late :]))
