"""Who misbehaves is refused for longer and longer; whose link is thin, or who tries again, never is."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.limits import bulk_streams
from diloco.protocol.messages import Refusal
from diloco.protocol.messages.bulk import Receipt, Verdict
from diloco.protocol.messages.control import Claim
from diloco.protocol.penalties import FIRST_S, FORGET_S, LONGEST_S, Penalties
from tests.support.scenes import played
from tests.support.stub_host import OTHER
from tests.support.stub_wire import NUMEL, Host, Pipe, contribution, framed

GOOD = contribution(torch.zeros(NUMEL))


def test_each_offence_doubles_the_time_and_a_day_forgets_it() -> None:
    penalties, now = Penalties(), 100.0
    for expected in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        assert penalties.offence("a", "sent nonsense", now) == expected
        assert penalties.refusal("a", now + expected - 1) == "refused for 1 s more: sent nonsense"
        assert penalties.refusal("b", now) is None
        now += expected
        assert penalties.refusal("a", now) is None
    for _ in range(30):
        now += penalties.offence("a", "sent nonsense", now)
    assert penalties.offence("a", "sent nonsense", now) == LONGEST_S
    assert penalties.offence("a", "sent nonsense", now + LONGEST_S + FORGET_S) == FIRST_S

    penalties = Penalties()  # offences on streams that were open already count once
    assert [penalties.offence("a", "x", now) for now in (0.0, 4.0, FIRST_S)] == [FIRST_S, FIRST_S - 4, 2 * FIRST_S]


def test_too_many_streams_at_a_time_or_in_a_second_are_refused() -> None:
    limiter, greedy = bulk_streams(fragments=2), bulk_streams(fragments=2)
    for _ in range(limiter.most):
        assert limiter.opened("a", 0.0) is None
    assert "20 streams of this peer are open; at most 20 may be" in str(limiter.opened("a", 0.0))
    assert limiter.opened("b", 0.0) is None
    limiter.closed("a")
    assert limiter.opened("a", 0.0) is None
    refused = 0
    for _ in range(1000):
        if greedy.opened("a", 0.0) is None:
            greedy.closed("a")
        else:
            refused += 1
    assert refused == 780 and greedy.opened("a", 1.0) is None


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x02hi", "not valid msgpack|does not fit its schema"),
        (framed(Receipt()), "a bulk stream cannot begin with Receipt"),
        (contribution(torch.full((NUMEL,), float("nan"))), "payload holds nan"),
        (contribution(torch.zeros(NUMEL), steps=10**9), "steps are claimed"),
    ],
    ids=["length", "schema", "kind", "nan", "claim"],
)
@played
async def test_an_offence_is_noted_and_told_and_its_peer_refused(sent: bytes, why: str) -> None:
    host = Host()
    host.protocol.fragments[0].came_at = 0.0
    first = await host.serve(sent)
    assert isinstance(first[-1], Refusal) and re.search(why, first[-1].reason)
    assert "refused" in host.notes and "penalty" in host.notes
    again = await host.serve(GOOD)
    assert isinstance(again[-1], Refusal) and again[-1].reason.startswith("refused for 10 s more")
    host.clock = FIRST_S + 1
    assert isinstance((await host.serve(GOOD))[0], Verdict)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 400), min_size=1, max_size=12), lag_s=st.floats(0, 100))
@played
async def test_streams_that_break_and_are_begun_again_are_no_offence(cuts: list[int], lag_s: float) -> None:
    host, whole = Host(), contribution(torch.ones(NUMEL))
    for cut in [*cuts, len(whole)]:
        host.clock += 1 + lag_s
        answers = await host.serve(whole[:cut])
    assert isinstance(answers[0], Verdict)
    assert "penalty" not in host.notes and host.protocol.penalties.refusal(OTHER, host.clock) is None


@pytest.mark.parametrize("outer", [{}, {"quorum": 1, "staleness_limit": 4}], ids=["barrier", "quorum"])
@played
async def test_a_lease_lost_while_the_verdict_travels_is_no_offence(outer: dict[str, Any]) -> None:
    """The syncer has accepted the contribution, and is none when it has told the contributor so."""
    host, pipe = Host(**outer), Pipe(GOOD)

    async def drain() -> None:
        claim = Claim(fragment=0, term=2, version=0, digest=host.protocol.digests[0])
        hello = host.hello(claims=False).model_copy(update={"claims": [claim]})  # it was cut off until now
        host.do(host.protocol.connected(OTHER, hello, host.now()))

    pipe.drain = drain  # type: ignore[method-assign]
    await host.server.serve(OTHER, pipe.reader, pipe)
    verdict, refusal = pipe.messages()
    assert isinstance(verdict, Verdict) and verdict.accepted
    assert isinstance(refusal, Refusal) and re.search("closed meanwhile|another syncer now", refusal.reason)
    assert "penalty" not in host.notes


@played
async def test_nobody_waits_for_a_peer_that_is_refused() -> None:
    host = Host()
    await host.anchors.load()
    host.parameters["w"].sub_(1.0)
    host.do(host.protocol.enter("training", host.now()))
    await host.rounds.send({0: (1, 10)})
    for _ in range(20):
        await asyncio.sleep(0)
    assert host.protocol.versions[0] == 0 and not host.protocol.merging(0), "the other one trains"
    host.do(host.protocol.offence(OTHER, "sent nonsense", host.now()))
    assert host.protocol.merging(0)
    await host.context.tasks.close(1.0)
