"""What a peer asks of a node on a bulk stream: offences have a price, and nothing else does."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from diloco.core.events import AnchorPart
from diloco.messages.base import Message, Place
from diloco.messages.bulk import Get, No, PartHeader, Values
from diloco.messages.codec import Refusal, kinds
from diloco.messages.heads import Line
from diloco.outer.digest import part_digest
from diloco.swarm.client.ask import ask_for_doctor
from diloco.swarm.limits import FIRST_S
from diloco.swarm.rpc.contribution import ContributionHeader, Got
from diloco.swarm.rpc.probe import ProbeReply, ProbeResult
from diloco.swarm.rpc.registry import ANSWERS, load_questions
from diloco.swarm.rpc.state import StateServer, _fill_update, ask
from diloco.swarm.rpc.updates import Arrival, Update, payload_digest
from diloco.swarm.wire.streams import PeerStream, Traffic
from tests.support.alone import Alone, alone
from tests.support.core import OTHER
from tests.support.places import ROOT
from tests.support.stub_wire import Pipe, connected, framed
from tests.unit.messages.test_codec import EXAMPLES

NUMEL = 6


async def serve(node: Alone, sent: bytes) -> list[object]:
    """What is answered on a stream of another peer."""
    pipe = Pipe(sent)
    await node._server.serve(OTHER, pipe.reader, pipe)
    return pipe.messages()


def contribution(
    node: Alone, value: float = 0.0, stamp: int = 10**13, norm: float | None = None
) -> bytes:
    """Of that other peer, to the head that is here."""
    values = torch.full((NUMEL,), value)
    payload = values.view(torch.uint8)
    said = float(values.norm()) if norm is None else norm
    base, digest = node.core.facts.control.tip.head.id, payload_digest(payload)
    line = Line(0, OTHER, stamp, base, 1, 10, (), said, digest)
    return framed(ContributionHeader(line)) + payload.numpy().tobytes()


WRONG: dict[str, tuple[Callable[[Alone], bytes], str]] = {
    "length": (lambda node: b"\xff\xff\xff\xff", "over the limit"),
    "schema": (lambda node: b"\x00\x00\x00\x02hi", "does not fit its schema"),
    "kind": (lambda node: framed(Got()), "a bulk stream cannot begin with Got"),
    "nan": (lambda node: contribution(node, nan, norm=1.0), "payload holds nan"),
    "norm": (lambda node: contribution(node, 1.0, norm=99.0), "norm 2.44949, and its line says 99"),
}


@pytest.mark.parametrize(("sent", "why"), WRONG.values(), ids=WRONG)
def test_an_offence_is_noted_and_told_and_its_peer_refused(
    sent: Callable[[Alone], bytes], why: str
) -> None:
    async def scene(node: Alone) -> None:
        answer = (await serve(node, sent(node)))[-1]
        assert isinstance(answer, Refusal) and re.search(why, answer.reason)
        assert "refused" in node.said and "penalty" in node.said
        again = (await serve(node, contribution(node)))[-1]
        assert isinstance(again, Refusal) and again.reason.startswith("refused for 10 s more")
        await asyncio.sleep(FIRST_S + 1)
        assert isinstance((await serve(node, contribution(node)))[0], Got)

    alone(scene)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 400), min_size=1, max_size=8))
def test_streams_that_break_and_are_begun_again_are_no_offence(cuts: list[int]) -> None:
    async def scene(node: Alone) -> None:
        whole = contribution(node, 1.0)
        answers = [await serve(node, whole[:cut]) for cut in [*cuts, len(whole)]]
        assert any(isinstance(one, Got) for said in answers for one in said)
        penalties, now = node.context.penalties, node.context.now()
        assert "penalty" not in node.said and penalties.refusal(OTHER, now) is None

    alone(scene)


def test_what_nobody_wants_is_refused_without_a_penalty() -> None:

    async def scene(node: Alone) -> None:
        sent = contribution(node)
        assert isinstance((await serve(node, sent))[0], Got)
        [answer] = await serve(node, sent)
        assert isinstance(answer, Refusal) and "is wanted" in answer.reason
        assert "penalty" not in node.said

    alone(scene)


load_questions()
QUESTIONS = [one for one in EXAMPLES if type(one) in ANSWERS]


def test_every_kind_of_question_has_an_answering_side() -> None:
    asked = {kind for kind in kinds().values() if kind.place is Place.REQUEST}
    assert {type(one) for one in QUESTIONS} == set(ANSWERS) == asked


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.kind)
def test_a_question_is_answered_or_refused_with_a_reason(question: Any) -> None:
    async def observed(peer: str) -> str:
        return ""

    async def scene(node: Alone) -> None:
        network: Any = node.context.transport
        network.observed = observed
        pipe = Pipe(framed(question) + bytes(getattr(question, "sends", 0)))
        await node._server.serve(OTHER, pipe.reader, pipe)
        first: Any = pipe.messages()[0]
        assert isinstance(first, Message) and first.place is Place.ANSWER
        assert not isinstance(first, Refusal) or first.reason
        assert "penalty" not in node.said and node._server.serving == 0 and pipe.closed

    alone(scene)


def told() -> dict[str, list[str]]:
    """What the lines of `diloco doctor` say that questions bring, of a node that is up for 7 s."""

    async def scene(node: Alone) -> dict[str, list[str]]:
        class Network:
            async def open(self, peer: str, protocol: str) -> Any:
                here, there = connected()
                node.context.tasks.spawn(node._server.serve(OTHER, there.reader, there))
                return here.reader, here

        await asyncio.sleep(7)
        reply = ProbeReply(1, "run", "ann", 0.0, [], [])
        network: Any = Network()
        return await ask_for_doctor(network, [ProbeResult("p", reply, 0.0, 0.0)])

    return alone(scene)


def test_a_question_is_added_by_one_file() -> None:
    assert told() == {}
    code = "from diloco.config import compose; from tests.unit.swarm import test_server as test"
    compose = "compose(['experiment=smoke', 'run.code=tests/support/ping.py'])"
    command = [sys.executable, "-c", f"{code}; {compose}; print(test.told())"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout == "{'uptime': ['ann up 7 s']}\n"


def test_a_donor_that_answers_a_resumed_update_with_an_anchor_is_believed() -> None:
    """1. An update breaks off after its first part. 2. The peer sleeps. 3. It asks for the rest,
    and the donor, which no longer has that update, sends the first part of its anchor."""

    async def scene(node: Alone) -> None:
        await node.learn()
        tip, values = node.core.facts.control.tip, torch.arange(float(NUMEL))
        head = with_fields(tip.head, number=9, prev="unknown")
        update = Update(values, ("", ""))
        broken_off = Arrival(with_fields(tip.head, prev=tip.head.id), update, parts=1)
        node.context.arrivals[0] = broken_off
        answer = PartHeader(head, tip.book, (part_digest(values),))
        pipe = Pipe(answer, values.view(torch.uint8).numpy().tobytes())
        stream = PeerStream(OTHER, pipe.reader, pipe, Traffic())
        part = await ask(node.context, stream, Get(0, tip.key))
        assert isinstance(part, AnchorPart) and part.part == 0 and part.values.equal(values)
        [question] = pipe.messages()
        assert question == Get(0, tip.key, part=1, held=broken_off.head.id)

    alone(scene)


def test_an_update_that_is_whole_and_unused_is_asked_for_anew() -> None:
    """1. Its stream breaks after the last part, before the core has it. 2. Donors have no more
    parts to give, so a question that resumes would be answered with `No` for ever."""

    async def scene(node: Alone) -> None:
        await node.learn()
        tip, update = node.core.facts.control.tip, Update.of(torch.zeros(8, dtype=torch.uint8))
        head = with_fields(tip.head, prev=tip.head.id)
        node.context.arrivals[0] = Arrival(head, update, len(update.digests))
        pipe = Pipe(No())
        stream = PeerStream(OTHER, pipe.reader, pipe, Traffic())
        assert await ask(node.context, stream, Get(0, tip.key)) is None
        assert pipe.messages() == [Get(0, tip.key)]

    alone(scene)


def test_who_waits_for_a_part_that_nobody_has_waits_no_longer() -> None:
    async def scene(node: Alone) -> None:
        head = node.core.facts.control.tip.head
        arrival = Arrival(head, Update(torch.zeros(8, dtype=torch.uint8), ("", "")), parts=1)
        arrival.live = True
        server, stream = StateServer(node.context), Pipe()
        waits = asyncio.ensure_future(server._wait_for_part(stream, arrival, 1))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert not waits.done()
        arrival.live, began_at = False, node.context.now()
        node.context.tasks.notify()
        with pytest.raises(ConnectionError, match="nobody has the rest"):
            await waits
        assert node.context.now() - began_at < 1.0

    alone(scene)


def test_a_stream_that_another_one_has_replaced_fills_no_update() -> None:
    """1. A part has come, and is being hashed. 2. Another donor is asked for what is missing, from
    that part on. 3. The first stream counts its part no more, or one would be left out."""

    async def scene(node: Alone) -> None:
        part, head = torch.ones(8, dtype=torch.uint8), node.core.facts.control.tip.head
        update = Update(torch.zeros(8, dtype=torch.uint8), (payload_digest(part),))
        for is_replaced in (True, False):
            pipe, arrival = Pipe(Values(), part.numpy().tobytes()), Arrival(head, update)
            stream = PeerStream(OTHER, pipe.reader, pipe, Traffic())
            node.context.fetching[0] = PeerStream(OTHER, pipe.reader, pipe, Traffic())
            if not is_replaced:
                node.context.fetching[0] = stream
            with pytest.raises(ConnectionError) if is_replaced else nullcontext():
                await _fill_update(node.context, stream, Get(0, head.key), arrival)
            assert arrival.parts == int(not is_replaced)

    alone(scene)
