"""The control mesh with a stub in place of the network: what is heard, what is an offence, and what
is none."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from diloco.core.events import Action, Note
from diloco.messages.codec import Message, Refusal
from diloco.messages.control import Answer, Offer, Revocations, Welcome
from diloco.messages.heads import Line
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.context import Context
from diloco.swarm.limits import Penalties
from diloco.swarm.node.mesh import ALIVE_S, DIAL_TIMEOUT_S, RECORD_PERIOD_S, ControlMesh
from diloco.swarm.node.options import RunSpec
from diloco.swarm.rpc.contribution import ContributionHeader, Got
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import FLUSH_BYTES, Outgoing, PeerStream, Traffic
from tests.support.core import ME, OTHER, D, core, hello, status
from tests.support.stub_wire import NoNetwork, Pipe, framed


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


class Blocked(Pipe):
    """Lets a caller in, and then takes nothing that it is sent."""

    def __init__(self) -> None:
        super().__init__(b"")
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(framed(Welcome()))
        self.blocked = asyncio.Event()

    async def drain(self) -> None:
        if len(self.written) > FLUSH_BYTES:
            self.blocked.set()
            await asyncio.Event().wait()


def packed(**fields: object) -> bytes:
    """A frame whose fields need not fit."""
    frame = msgspec.msgpack.encode(fields)
    return len(frame).to_bytes(4, "big") + frame


def hello_with(**fields: object) -> bytes:
    known: dict[str, Any] = msgspec.to_builtins(hello())
    return packed(**{**known, **fields})


def line(fragment: int = 0) -> Line:
    return Line(fragment, OTHER, 5, D, 4, 100, (), 1.5, D)


TOO_MANY = {index: (0, D) for index in range(3)}
GARBAGE, ENDLESS = b"\x00\x00\x00\x02hi", b"\xff\xff\xff\xff"


async def test_a_peer_that_takes_nothing_is_dropped_in_time(loop: VirtualLoop) -> None:
    """Until then it costs little memory."""
    listener, pipe = Listener(), Blocked()

    async def opened(peer: str, protocol: str) -> tuple[asyncio.StreamReader, Blocked]:
        return pipe.reader, pipe

    listener.transport.open = opened  # type: ignore[method-assign]
    assert await listener.mesh.dial(OTHER)
    message = listener.core.status()
    while not pipe.blocked.is_set():
        listener.mesh.broadcast(message)
        await asyncio.sleep(0)
    assert len(pipe.written) < FLUSH_BYTES + 1000
    begun_at = loop.seconds
    while not pipe.closed:
        await asyncio.sleep(0.5)
    assert loop.seconds - begun_at == pytest.approx(DIAL_TIMEOUT_S, abs=1)
    assert OTHER not in listener.mesh._outgoing


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (GARBAGE, "a message does not fit its schema"),
        (ENDLESS, "a frame of 4294967295 bytes is over the limit"),
        (framed(status(tips={2: (0, D)})), "a message about fragment 2, and the run has 2"),
        (framed(Offer(line(fragment=2))), "a message about fragment 2, and the run has 2"),
        (framed(Offer(replace(line(), steps=99))), "100 tokens, 0 ranges of data in 99 steps are"),
        (framed(Answer(7, OTHER, 5, "got")), "a message about fragment 7, and the run has 2"),
        (framed(ContributionHeader(line())), "a control stream does not carry ContributionHeader"),
    ],
    ids=["schema", "length", "status", "offer", "impossible", "answer", "kind"],
)
async def test_an_offence_puts_its_peer_out_for_a_while(
    sent: bytes, why: str, loop: VirtualLoop
) -> None:
    listener = Listener()
    ours = listener.mesh._outgoing[OTHER] = Outgoing(PeerStream(OTHER, *[Pipe(b"")] * 2, Traffic()))  # type: ignore[arg-type]
    [answer] = await listener.hear(framed(hello()), framed(status()), sent, framed(status()))
    assert isinstance(answer, Welcome)
    [penalty] = listener.said("penalty")
    assert penalty["peer"] == OTHER and str(penalty["why"]).startswith(why)
    assert [event["why"] for event in listener.said("lost")] == [penalty["why"]]
    assert OTHER not in listener.core.facts.members
    assert OTHER not in listener.mesh._outgoing and ours.over, "our stream to it ends"
    [refusal] = await listener.hear(framed(hello()))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(f"refused for 10 s more: {why}")
    assert not await listener.mesh.dial(OTHER) and listener.transport.called == []
    listener.context.penalties = Penalties()  # the time is over
    assert isinstance((await listener.hear(framed(hello())))[0], Welcome)
    assert len(listener.said("penalty")) == 1


@pytest.mark.parametrize(
    ("sent", "why", "is_offence"),
    [
        (GARBAGE, "a message does not fit its schema", True),
        (framed(status()), "expected Hello, got Status", True),
        (framed(Got()), "expected Hello, got Got", True),
        (framed(hello(status=status(tips={2: (0, D)}))), "1 fragments there, 2 here", False),
        (framed(hello(status=status(tips=TOO_MANY))), "3 fragments there, 2 here", False),
        (hello_with(wire_version=1, status=5, unknown=1), "wire version 1 there does not", False),
        (hello_with(run_id="another"), "run.id=another is not the run here", False),
        (hello_with(manifest_hash="f" * 64), "the manifest ffffffffffff differs", False),
    ],
    ids=["schema", "status", "kind", "fragment", "fragments", "wire", "run", "manifest"],
)
async def test_who_does_not_begin_with_a_fitting_hello_is_refused(
    sent: bytes, why: str, is_offence: bool
) -> None:
    """Who is of another version or run is not punished for it."""
    listener = Listener()
    [refusal] = await listener.hear(sent)
    assert isinstance(refusal, Refusal) and refusal.reason.startswith(why)
    assert [event["peer"] for event in listener.said("penalty")] == [OTHER] * is_offence
    refused = listener.context.penalties.refusal(OTHER, listener.context.now())
    assert (refused is not None) == is_offence and OTHER not in listener.core.facts.members


HONEST: list[Message] = [
    status(trains=False),
    status(leaves=True),
    status(tips={0: (99, "f" * 64), 1: (99, "f" * 64)}),  # of one who believed a liar
    Offer(line()),  # that came before
    Answer(0, OTHER, 5, "want"),  # to what is settled
    Revocations(number=1, token_ids=[], peer_ids=[], signature="0" * 128),
]


@pytest.mark.parametrize("message", HONEST, ids=lambda message: message.kind)
async def test_what_an_honest_peer_says_late_or_wrong_is_no_offence(message: Message) -> None:
    listener = Listener()
    await listener.hear(framed(hello()), framed(message), framed(message))
    assert listener.said("penalty") == []
    why = "said goodbye" if message == status(leaves=True) else "connection reset"
    assert [event["why"] for event in listener.said("lost") + listener.said("leave")] == [why]


@pytest.mark.parametrize("company", [False, True])
async def test_a_peer_that_is_alone_calls_those_it_lost_at_every_look(
    company: bool, loop: VirtualLoop
) -> None:
    """Whoever still has members calls a vanished one after growing pauses: 15 s more, or a half."""
    listener, called_at = Listener(), list[float]()

    async def opened(peer: str, protocol: str) -> None:
        if peer == OTHER:
            called_at.append(loop.seconds)
        raise ConnectionError

    async def announce(life_s: float, members: Sequence[str]) -> None: ...

    async def announced() -> dict[str, list[str]]:
        return {}

    stubs = {"open": opened, "announce": announce, "announced": announced}
    vars(listener.transport).update(stubs)
    if company:
        listener.core.facts.members.join("third", hello(), loop.seconds)
    listener.mesh.redial_later(OTHER)
    looking = asyncio.ensure_future(listener.mesh._discover())
    await asyncio.sleep(3600)
    looking.cancel()
    pauses_s = [after - before for before, after in pairwise(called_at)]
    if company:
        assert len(called_at) < 20 and pauses_s == sorted(pauses_s) and pauses_s[-1] > 600
    else:
        assert pauses_s == pytest.approx([RECORD_PERIOD_S] * 239)


FIRST = [("speaks", 1, 1), ("ends", 0, 1), ("is silent", 0, ALIVE_S), ("calls again", 0, 0)]


@pytest.mark.parametrize(("first", "refused", "waited_s"), FIRST)
async def test_of_two_processes_with_one_identity_the_first_goes_on(
    first: str, refused: bool, waited_s: float, loop: VirtualLoop
) -> None:
    """One that was killed has no stream any more, or says nothing on it. A connection that a new
    one replaces is ended, or libp2p would go on writing to it."""
    listener, older = Listener(), Pipe(b"")
    older.reader = asyncio.StreamReader()
    older.reader.feed_data(framed(hello(instance="1" * 16)))
    serving = asyncio.ensure_future(listener.mesh._serve(OTHER, older.reader, older))
    await asyncio.sleep(1)
    current = listener.mesh._incoming[OTHER]
    listener.core.facts.members.join(OTHER, hello(), loop.seconds)
    listener.core.facts.members._members[OTHER].interval_s = 1.0
    if first == "speaks":
        asyncio.get_running_loop().call_later(0.9, older.reader.feed_data, framed(status()))
    elif first == "ends":
        asyncio.get_running_loop().call_later(0.9, older.reader.feed_eof)
    begun_at, instance = loop.seconds, ("1" if first == "calls again" else "2") * 16
    said = await listener.hear(framed(hello(instance=instance)))
    assert loop.seconds - begun_at == pytest.approx(waited_s, abs=0.2)
    replaced = first in ("is silent", "calls again")
    assert listener.transport.hung_up == [OTHER] * replaced and older.closed == (not refused)
    if replaced:
        assert said == [] and listener.said("lost") == []
        said = await listener.hear(framed(hello(instance=instance)))
    [answer] = said
    assert isinstance(answer, Refusal if refused else Welcome)
    if isinstance(answer, Refusal):
        assert answer.reason.startswith("its identity is in use by a running peer; ")
        assert listener.mesh._incoming[OTHER] is current and not older.closed
    serving.cancel()
