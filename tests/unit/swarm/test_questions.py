"""What peers ask each other: a question is one module, and all keep the same promises."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from diloco.messages.base import Message, Place
from diloco.messages.codec import Refusal, kinds
from diloco.swarm.client.ask import ask_for_doctor
from diloco.swarm.rpc.probe import ProbeReply, ProbeResult
from diloco.swarm.rpc.registry import ANSWERS, load_questions
from tests.support.alone import Alone, alone
from tests.support.core import OTHER
from tests.support.places import ROOT
from tests.support.stub_wire import Pipe, connected, framed
from tests.unit.messages.test_codec import EXAMPLES

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
    """As `run.code` it is known to the node that answers and to the doctor that asks."""
    assert told() == {}
    code = "from diloco.config import compose; from tests.unit.swarm import test_questions as test"
    compose = "compose(['experiment=smoke', 'run.code=tests/support/ping.py'])"
    command = [sys.executable, "-c", f"{code}; {compose}; print(test.told())"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout == "{'uptime': ['ann up 7 s']}\n"
