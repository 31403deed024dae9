"""A core without tensors and without a network, and what it is told."""

from typing import Any, cast

from msgspec.structs import replace

from diloco.core import events
from diloco.core.events import Connected
from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.history import Tip, genesis, sign
from diloco.core.peer import Peer
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages.control import Figures, Hello, Status
from diloco.messages.heads import Book, Entry, Head, Line
from diloco.protocol import WIRE_VERSION
from tests.support.fake_tensors import RUN, Signer

ME, OTHER, D = "a" * 46, "b" * 46, "ab" * 32
GENESIS = [genesis(index, "run", [D]) for index in range(2)]


class Nobody:
    """Signs nothing, and believes every signature."""

    def sign(self, content: bytes) -> bytes:
        return b""

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return True


def core(me: str = ME, fragments: int = 2, authors: bool = True, **settings: Any) -> Peer:
    """A core which listens, and whose training loop waits to begin."""
    identity = Identity(me, "me", "run", D, Nobody(), may_author=authors, device="cpu")
    sizes, arithmetic = [Sizes(10, 10, 40, 1)] * fragments, cast(Any, None)
    run = identity, ProtocolSettings(**{"fragments": fragments, **settings}), arithmetic
    peer = Peer(*run, GENESIS[:fragments], sizes, 0.0, 0, planned=(9, 0, 0))
    peer.receive(events.Begun(), 0.0)
    return peer


def status(**said: Any) -> Status:
    """A whole one of a peer that trains."""
    tips = {tip.head.fragment: tip.key for tip in GENESIS}
    return Status(**{"whole": True, "tips": tips, "trains": True, **said})


def hello_of(name: str = "other", **said: Any) -> Hello:
    """That of another peer, which trains."""
    said_first = status(**{"authors": True, **said})
    return Hello(WIRE_VERSION, "run", D, name, True, True, said_first, device="gpu")


def hello(**fields: Any) -> Hello:
    return replace(hello_of(), **fields)


def join(peer: Peer, other: str = OTHER, figures: Figures | None = None, **hello: Any) -> None:
    """Another peer says hello, and its figures."""
    peer.receive(Connected(other, hello_of(**hello)), peer.facts.now)
    member = peer.facts.members.get(other)
    assert member is not None
    member.figures = figures or Figures()


def line_of(peer: str, base: str, **fields: Any) -> Line:
    """A contribution that is signed, by default of one token."""
    known = dict(fragment=0, stamp=10**9, steps=1, tokens=1, units=(), norm=1.0, root="0" * 64)
    line: Line = sign(Line(peer=peer, base=base, **(known | fields)), Signer(peer), RUN)
    return line


def advance(
    facts: Facts, f: FragmentState, *contributors: str, base: str = "", tokens: int = 10
) -> None:
    """The tip moves to a version with contributions of so many tokens each."""
    here, book, number = f.tip.head, f.tip.book, f.tip.head.number + 1
    ledger, lines = dict(book.ledger), []
    for peer in contributors:
        said = dict(fragment=f.index, stamp=number, tokens=tokens, root=D, name=peer[:1])
        lines.append((line_of(peer, base or here.id, **said), 1.0))
        known = ledger.get(peer, Entry(0, 0, 0, number))
        times, total = known.contributions + 1, known.tokens + tokens
        ledger[peer] = Entry(number, total, times, known.first, number, peer[:1])
    work = here.work + tokens * len(lines)
    head = Head(f.index, number, here.id, ME, ME, tuple(lines), 1, work, D, D)
    f.tip = Tip(head, Book(ledger, (*book.recent, here.id)[-facts.settings.late :]))
