"""Audits in a swarm: no honest syncer is accused, liars are proved to everybody, and what is wrong is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.audit import versions_until
from diloco.outer.codecs import codec
from diloco.outer.fragments import partition
from diloco.outer.merkle import LEAF
from diloco.outer.shown import Shown
from diloco.protocol.audits import wrong_counts
from diloco.protocol.heads import sign_head
from diloco.protocol.limits import ACCUSATIONS, ACCUSATIONS_PER_S, Buckets
from diloco.protocol.messages.audits import AuditRequest
from diloco.swarm.conversations import audit
from diloco.swarm.conversations.audit import Evidence
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.node import auditor as auditor_module
from diloco.swarm.node.auditor import Auditor
from diloco.swarm.node.node import Node
from diloco.swarm.wire.streams import Stream
from tests.support.certificates import digest_of, record_of
from tests.support.slow import slow
from tests.support.stories import Story, agreed, story

EVERYTHING = {"audit": 1.0, "momentum": 0.5}
MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "small updates": {"codec_up": "e3m0", "codec_down": "e3m0"},
    "whole values": {"codec_down": "fp16"},
    "rda": {"merge": "rda"},
    "delayed": {"optimizer": "delayed_nesterov"},
    "overlap": {"overlap": 1},
    "staggered": {"staggered": True, "overlap": 1},
    "top-k": {"codec_up": "topk", "momentum": 0.0},
}


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> list[Evidence]:
    """All that is judged from now on."""
    found: list[Evidence] = []
    convicts = Auditor._convicts

    async def convicts_and_keeps(self: Auditor, one: Evidence) -> bool:
        found.append(one)
        return await convicts(self, one)

    monkeypatch.setattr(Auditor, "_convicts", convicts_and_keeps)
    return found


@contextmanager
def three_peers(seconds: float = 0.0, **outer: Any) -> Iterator[tuple[Story, str, str]]:
    """A story, the only syncer, and the other two; all of them have trained for so long."""
    with story(2, fragments=1, outer_steps=None, outer={**EVERYTHING, **outer}) as swarm:
        swarm.begin("abc")
        swarm.run_for(seconds)
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        yield swarm, holder, "abc".replace(holder, "")


def noted(swarm: Story, kind: str) -> list[str]:
    return [line for line in swarm.crowd.story if line.split()[2] == kind]


def lies(swarm: Story, name: str, by: float = 0.3) -> None:
    """A syncer adds something to each fragment that it holds, in every version from now on."""
    for held in swarm.node(name).replica.held.values():

        def merge_(*arguments: Any, held: Any = held, honest: Callable[..., str] = held.merge_) -> str:
            held.master[:4].add_(by)
            return honest(*arguments)

        held.merge_ = merge_  # type: ignore[method-assign]


class Deaf(list[str]):
    """Keeps nothing: in this story somebody is to be accused."""

    def __iadd__(self, other: Any) -> Deaf:  # type: ignore[misc]
        return self


# -- honest syncers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode if mode == "barrier" else slow(mode) for mode in MODES])
def test_no_honest_syncer_is_accused_not_even_by_a_joiner(mode: str, evidence: list[Evidence]) -> None:
    with story(1, fragments=1, outer_steps=None, outer={**EVERYTHING, **MODES[mode]}) as swarm:
        swarm.begin("abc")
        swarm.run_for(8.0)
        swarm.start("d")
        swarm.run_for(8.0)
        nodes = swarm.run_to_the_end(16)
        agreed(swarm, nodes)
        assert not noted(swarm, "proved") and not noted(swarm, "penalty")
        assert all(node.auditor.audited or node.replica.held for node in nodes)
    assert any(one.steps[0][0].version == 1 for one in evidence)
    assert any(one.steps[0][0].version > 1 for one in evidence)


@pytest.mark.parametrize(
    "outer", [{"audit": 0.0}, {"robust": "none"}, {"codec_up": "fp32"}, {"flatten": 0.5}, {"quorum": 1}]
)
def test_where_nothing_is_audited_nothing_is_kept_or_said(outer: dict[str, Any], evidence: list[Evidence]) -> None:
    with story(1, fragments=1, outer={**EVERYTHING, **outer}) as swarm:
        swarm.start("abc", min_peers=3)
        [node] = [node for node in swarm.run_to_the_end() if node.replica.held]
        assert node.replica.held[0].kept == []
        record = node.protocol.fragments[0].record
        assert record is not None and (record.head.weights, record.head.update) == ([], bytes(32))
    assert not evidence


# -- liars ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["barrier", "rda"])
def test_a_syncer_that_adds_something_is_out_everywhere(mode: str) -> None:
    """And the others go on."""
    with story(2, fragments=2, outer_steps=None, outer={**EVERYTHING, **MODES[mode]}) as swarm:
        swarm.begin("abcd")
        swarm.watch._accused = Deaf()
        swarm.run_for(4.0)
        liar = swarm.beliefs(swarm.node("a"))[0].holder
        others = "abcd".replace(liar, "")
        lies(swarm, liar)
        swarm.run_until(lambda: all(swarm.kinds(name)["proved"] for name in others), "all others have the proof")
        assert all(f"'peer': '{liar}'" in line for line in noted(swarm, "proved"))
        swarm.crowd.crash(liar)
        nodes = swarm.run_to_the_end(4)
        agreed(swarm, nodes)
        assert {node.protocol.name for node in nodes} == set(others)


def test_a_peer_that_joined_later_proves_it_too(evidence: list[Evidence]) -> None:
    with three_peers(6.0) as (swarm, liar, others):
        swarm.start("d")
        swarm.run_for(48.0)
        for name in "abc":
            auditor = swarm.node(name).auditor
            auditor._pick = lambda count, members: []  # type: ignore[method-assign]
            auditor._watches.clear()
        swarm.watch._accused = Deaf()
        evidence.clear()
        lies(swarm, liar)
        swarm.run_until(lambda: swarm.kinds("d")["proved"] > 0, "the newcomer proves it")
        swarm.run_for(5.0)
        assert all(swarm.kinds(name)["proved"] for name in [*others, "d"])
    assert evidence[-1].steps[0][0].version > 1


async def refuses(stream: Stream, request: AuditRequest) -> None:
    await stream.refuse("not now")


async def sleeps(stream: Stream, request: AuditRequest) -> None:
    await asyncio.sleep(1e6)


@pytest.mark.parametrize(("shows", "said"), [(refuses, "not now"), (sleeps, "Timeout")])
def test_who_shows_nothing_is_in_the_end_an_offender(
    shows: Callable[[Stream, Any], Awaitable[None]], said: str
) -> None:
    with three_peers() as (swarm, holder, others):
        swarm.node(holder)._server._answers[AuditRequest] = shows
        told = swarm.kinds
        swarm.run_until(lambda: told(others[0])["audit_failed"] > 0, "it is noticed")
        assert not noted(swarm, "penalty")
        swarm.watch._accused = Deaf()
        swarm.run_until(lambda: told(others[0])["penalty"] > 0, "it is penalised")
        assert told(others[0])["audit_failed"] == 4
        [*_, why] = noted(swarm, "audit_failed")
        assert f"'syncer': '{holder}'" in why and said in why
        assert not noted(swarm, "proved")


def test_a_syncer_that_shows_something_else_is_an_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    with three_peers(4.0) as (swarm, holder, _):
        kept = type(swarm.node(holder).replica.held[0].kept[0])
        show = kept.show

        def another(self: Any, part: Any) -> list[Shown]:
            return [shown._replace(payload=shown.payload ^ 1) for shown in show(self, part)]

        swarm.watch._accused = Deaf()
        monkeypatch.setattr(kept, "show", another)
        swarm.run_until(lambda: bool(noted(swarm, "penalty")), "it is penalised")
        assert f"{holder} shows another thing as what" in noted(swarm, "audit_failed")[0]
        assert not noted(swarm, "proved")


# -- requests that are refused ----------------------------------------------------------------------------------------


def test_a_wrong_request_is_refused_with_its_reason() -> None:
    with three_peers(20.0, audit=0.1) as (swarm, holder, others):

        def ask(name: str, why: str, **wrong: Any) -> bool:
            """Whether a peer is penalised that asks the syncer for that, and is refused for that reason."""
            asker, version = swarm.node(name), swarm.node(holder).replica.held[0].kept[-1].version
            fields = {"manifest_hash": asker.protocol.manifest_hash, "fragment": 0, "version": version, "numbers": [0]}
            before = swarm.kinds(holder)["penalty"]

            async def asks() -> None:
                async with asker.context.open(holder) as stream:
                    await stream.send(AuditRequest(**{**fields, **wrong}))
                    with pytest.raises(PayloadError, match=why):
                        while True:
                            audit.expect(await stream.receive(), audit.Opening)

            swarm.loop.run_until_complete(asks())
            swarm.run_for(1.0)
            return swarm.kinds(holder)["penalty"] > before

        one, other = others
        assert not ask(one, "version 1 of fragment 0 is not kept here any more", version=1)
        assert not ask(one, "is not kept here any more", version=2**40)
        assert not ask(one, "the manifest 000000000000 is not the one here", manifest_hash="0" * 64)
        assert not ask(one, r"over \d+ parts of version", numbers=[0] * 40)
        assert ask(one, "an audit of fragment 9, and the run has 1", fragment=9)
        assert ask(other, "an audit of a part that fragment 0 does not have", numbers=[10**6])


# -- proofs that prove nothing ----------------------------------------------------------------------------------------


def tampered(node: Node, one: Evidence) -> list[tuple[str, Evidence]]:
    """Evidence that was changed on its way in some way, and what is said of it; `node` is that of the accuser."""
    (*before, (head, update)), (shown, *more) = one.steps, one.shown
    unsigned = head.model_copy(update={"weights": list(reversed(head.weights)), "coefficients": [0.0] * 3})
    signed = {"head": sign_head(node.protocol.signer, node.protocol.run_id, unsigned)}
    fewer = one.record.model_copy(update={"lines": one.record.lines[:-1]})
    wrong = {
        "another update": [*before, (head, update._replace(payload=update.payload ^ 1))],
        "another path": [*before, (head, update._replace(paths=[[bytes(32)]]))],
        "a gap": [*before[:-1], one.steps[-1]],
        "another end": before,
        "too short": [one.steps[-1]],
    }
    steps = {how: replace(one, steps=found) for how, found in wrong.items()}
    forged = one.record.model_copy(update=signed)
    return [
        ("shows another update to version", steps["another update"]),
        ("shows another update to version", steps["another path"]),
        ("shows another contribution of", replace(one, shown=[shown._replace(payload=shown.payload ^ 1), *more])),
        ("shows another contribution of", replace(one, shown=[shown._replace(paths=[[bytes(32)] * 9]), *more])),
        ("not in a row, of one syncer under one term", steps["a gap"]),
        ("the last step of a proof is not that of its certificate", steps["another end"]),
        ("does not say what the momentum is", steps["too short"]),
        ("a head in a proof is not signed by", replace(one, steps=[*before, (forged.head, update)], record=forged)),
        ("a certificate has other lines than its head", replace(one, record=fewer, shown=one.shown[:-1])),
    ]


def test_a_wrong_proof_convicts_nobody(evidence: list[Evidence], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a forged one is an offence, and of a flood of them most are refused before anything is computed."""
    monkeypatch.setattr("diloco.protocol.limits.EventLines.suppressed", lambda self, kind, peer, now: 0)
    with three_peers(20.0) as (swarm, _, others):
        accuser, hearer = (swarm.node(name) for name in others)
        one = next(one for one in evidence if len(one.steps) > 4)

        def accuse(wrong: Evidence, says: str, penalised: bool = True) -> None:
            before, penalties = noted(swarm, "refused"), swarm.kinds(hearer.protocol.name)["penalty"]

            async def accuses() -> None:
                async with accuser.context.open(hearer.protocol.me) as stream:
                    with pytest.raises((PayloadError, EOFError, OSError)):
                        await audit.offer(accuser.context, stream, wrong)
                        await stream.receive()

            swarm.loop.run_until_complete(accuses())
            swarm.run_for(1.0)
            lines = noted(swarm, "refused")[len(before) :]
            [refused] = [line for line in lines if line.split()[1] == hearer.protocol.name]
            assert says in refused
            assert (swarm.kinds(hearer.protocol.name)["penalty"] > penalties) == penalised, says
            hearer.protocol.penalties._records.clear()

        for _ in range(4):
            accuse(one, "proves nothing", penalised=False)
        for _ in range(2):
            accuse(one, "too many proofs are offered by this peer", penalised=False)
        for says, wrong in tampered(accuser, one):
            hearer.auditor._accusations = Buckets(ACCUSATIONS_PER_S, ACCUSATIONS)
            accuse(wrong, says)
        unknown = one.record.model_copy(update={"head": one.record.head.model_copy(update={"fragment": 7})})
        accuse(replace(one, record=unknown), "about a part that this run does not have")
        assert not noted(swarm, "proved")


# -- what contributions count -----------------------------------------------------------------------------------------

OUTER = OuterConfig(method="diloco", sync_every=1)
A, B = digest_of("a"), digest_of("b")


@pytest.mark.parametrize(
    ("weights", "coefficients", "why"),
    [
        ([0.25, 0.75], [0.25, 0.75], None),
        ([0.25, 0.75], [0.0, 0.5], None),
        ([0.5, 0.5], [0.5, 0.5], None),  # the heavier one is capped
        ([0.75, 0.25], [0.75, 0.25], "counts what b contributed in another way"),
        ([0.25, 0.75], [0.5, 0.75], "are not parts of their sum"),
        ([0.1, 0.3], [0.1, 0.3], "are not parts of their sum"),
        ([0.0, 1.0], [0.0, 1.0], "counts what a contributed in another way"),
        ([1.0], [1.0], "does not say what each of its 2 contributions counts"),
        ([], [], "does not say what each of its 2 contributions counts"),
    ],
)
def test_weights_follow_from_the_lines(weights: list[float], coefficients: list[float], why: str | None) -> None:
    record = record_of(1, A, B, {"a": 10, "b": 30}, weights=weights, coefficients=coefficients)
    found = wrong_counts(OUTER, record)
    assert found is None if why is None else why in str(found)


def test_a_head_without_contributions_moves_nothing() -> None:
    assert "not named" in str(wrong_counts(OUTER, record_of(1, A, B, {})))
    assert wrong_counts(OUTER, record_of(1, A, A, {})) is None
    assert "not named" in str(wrong_counts(OUTER, record_of(1, A, A, {}, weights=[1.0])))
    off = OuterConfig(method="diloco", sync_every=1, audit=0.0)
    assert wrong_counts(off, record_of(1, A, B, {"a": 1})) is None
    assert "not named" in str(wrong_counts(off, record_of(1, A, B, {"a": 1}, weights=[1.0])))


# -- how long a lie lasts ---------------------------------------------------------------------------------------------


def asked_for(auditors: Sequence[Auditor], first: int, altered: int, until: int) -> int:
    """The version at which one of them asks for that part for the first time, from version `first` on."""
    asked: list[tuple[int, int]] = []

    def ask_due(record: Any, watches: list[Any]) -> None:
        asked.extend((watch.number, record.version) for watch in watches if watch.due == record.version)
        watches[:] = [watch for watch in watches if watch.due > record.version]

    record = record_of(1, A, A, {"a": 1}, weights=[1.0], coefficients=[1.0])
    for auditor in auditors:
        auditor._ask_due = ask_due  # type: ignore[method-assign]
    for version in range(1, until):
        head = record.head.model_copy(update={"version": version})
        followed = record.model_copy(update={"head": head})
        for auditor in auditors:
            drive(auditor.follow(UpdateRecord(followed, torch.empty(0), [b""])))
        if version >= first and (altered, version) in asked:
            return version
    pytest.fail("never")


def drive(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


@pytest.mark.slow
@pytest.mark.parametrize("begins", [1, 60])
def test_a_bias_in_one_of_100_parts_is_audited_in_time(begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the stated versions, with the default of `outer.audit`, in 200 runs of a syncer and three others.

    What is audited there is proved: `test_audit.py`.
    """

    async def nothing(*arguments: Any) -> None: ...

    monkeypatch.setattr(auditor_module, "in_thread", nothing)
    monkeypatch.setattr(auditor_module, "show", lambda *arguments: None)
    [fragment] = partition({"w": 100 * LEAF}, 1)
    replica = SimpleNamespace(settings=OUTER, fragments=[fragment], down=codec("int8"))
    context: Any = SimpleNamespace(replica=replica, protocol=SimpleNamespace(me="me", members=["s", "b", "c"]))
    lasted = []
    for seed in range(200):
        auditors = [Auditor(context, f"{seed} {number}") for number in range(3)]
        lasted.append(asked_for(auditors, begins, seed % 100, 3000) - begins + 1)
    for certainty, stated in ((0.5, 35), (0.95, 150)):
        assert versions_until(certainty, 100, 1, OUTER.audit) == stated
        within = sum(versions <= stated for versions in lasted) / len(lasted)
        assert within >= certainty - 3 * math.sqrt(certainty * (1 - certainty) / 200), certainty
