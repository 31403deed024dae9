"""Audits in a swarm: no honest syncer is accused, liars are proved to everybody, and what is wrong is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
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
from diloco.protocol.messages.audits import Accusation, AuditRequest
from diloco.swarm.conversations import audit
from diloco.swarm.conversations.audit import Evidence
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.node import auditor as auditor_module
from diloco.swarm.node.auditor import Auditor
from diloco.swarm.node.node import Node
from diloco.swarm.wire.streams import Stream
from tests.support.certificates import digest_of, record_of
from tests.support.stories import Story, agreed, story

EVERYTHING = {"audit": 1.0, "momentum": 0.5}
MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "small updates": {"codec_up": "e3m0", "codec_down": "e3m0"},
    "whole values": {"codec_down": "fp16"},
    "rda": {"merge": "rda"},
    "trimmed mean": {"robust": "trimmed_mean"},
    "centered clip": {"robust": "centered_clip"},
    "delayed": {"optimizer": "delayed_nesterov"},
    "fedbuff": {"optimizer": "fedbuff"},
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


def noted(swarm: Story, kind: str) -> list[str]:
    return [line for line in swarm.crowd.story if line.split()[2] == kind]


def lies(swarm: Story, name: str, by: float = 0.3) -> None:
    """A syncer adds something to each fragment that it holds, in every version from now on."""
    for held in swarm.node(name).replica.held.values():

        def merge_(*arguments: Any, held: Any = held, honest: Callable[..., str] = held.merge_) -> str:
            held.master[:4].add_(by)
            return honest(*arguments)

        held.merge_ = merge_  # type: ignore[method-assign]


# -- honest syncers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_no_honest_syncer_is_accused_by_those_who_were_there_nor_by_one_who_joined(
    mode: str, evidence: list[Evidence]
) -> None:
    with story(1, fragments=2, outer_steps=None, outer={**EVERYTHING, **MODES[mode]}) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(8.0)
        swarm.start("d")
        swarm.run_for(30.0)
        nodes = swarm.run_to_the_end(24)
        agreed(swarm, nodes)
        assert not noted(swarm, "proved") and not noted(swarm, "penalty")
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


@pytest.mark.parametrize("mode", ["barrier", "rda", "fedbuff"])
def test_a_syncer_that_adds_something_is_out_everywhere_and_the_others_go_on(mode: str) -> None:
    with story(2, fragments=2, outer_steps=None, outer={**EVERYTHING, **MODES[mode]}) as swarm:
        swarm.start("abcd", min_peers=4)
        swarm.run_until_training()
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


class Deaf(list[str]):
    """Keeps nothing: in this story somebody is to be accused."""

    def __iadd__(self, other: Any) -> Deaf:  # type: ignore[misc]
        return self


def test_a_peer_that_joined_later_proves_it_too(evidence: list[Evidence]) -> None:
    with story(3, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(6.0)
        swarm.start("d")
        swarm.run_for(8.0)
        swarm.run_for(40.0)
        liar = swarm.beliefs(swarm.node("a"))[0].holder
        for name in "abc":
            swarm.node(name).auditor._pick = lambda count, members: []  # type: ignore[method-assign]
        for name in "abc":
            swarm.node(name).auditor._watches.clear()
        swarm.watch._accused = Deaf()
        evidence.clear()
        lies(swarm, liar)
        swarm.run_until(lambda: swarm.kinds("d")["proved"] > 0, "the newcomer proves it")
        swarm.run_for(5.0)
        assert all(swarm.kinds(name)["proved"] for name in "abcd".replace(liar, ""))
    assert evidence[-1].steps[0][0].version > 1


def test_a_syncer_that_shows_nothing_is_an_event_and_in_the_end_an_offender() -> None:
    async def refuses(stream: Stream, request: AuditRequest) -> None:
        await stream.refuse("not now")

    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        answers(swarm.node(holder), AuditRequest, refuses)
        other = "abc".replace(holder, "")[0]
        swarm.run_until(lambda: swarm.kinds(other)["audit_failed"] > 0, "it is noticed")
        assert not noted(swarm, "penalty")
        swarm.watch._accused = Deaf()
        swarm.run_until(lambda: swarm.kinds(other)["penalty"] > 0, "it is penalised")
        assert swarm.kinds(other)["audit_failed"] == 4
        [*_, why] = noted(swarm, "audit_failed")
        assert f"'syncer': '{holder}'" in why and "not now" in why
        assert not noted(swarm, "proved")


def test_an_audit_that_times_out_is_an_event() -> None:
    async def sleeps(stream: Stream, request: AuditRequest) -> None:
        await asyncio.sleep(1e6)

    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        answers(swarm.node(holder), AuditRequest, sleeps)
        swarm.run_until(lambda: bool(noted(swarm, "audit_failed")), "it is noticed")
        assert "Timeout" in noted(swarm, "audit_failed")[0]


def test_a_syncer_that_shows_something_else_is_an_offender() -> None:
    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(4.0)
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        held = swarm.node(holder).replica.held[0]
        show = type(held.kept[0]).show

        def another(self: Any, part: Any) -> list[Shown]:
            return [shown._replace(payload=shown.payload ^ 1) for shown in show(self, part)]

        swarm.watch._accused = Deaf()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(held.kept[0]), "show", another)
            swarm.run_until(lambda: bool(noted(swarm, "penalty")), "it is penalised")
        assert f"{holder} shows another thing as what" in noted(swarm, "audit_failed")[0]
        assert not noted(swarm, "proved")


def answers(node: Node, kind: type, handler: Callable[[Stream, Any], Awaitable[None]]) -> None:
    node._server._answers[kind] = handler


# -- requests that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why", "penalised"),
    [
        ({"version": 1}, "version 1 of fragment 0 is not kept here any more", False),
        ({"version": 2**40}, "is not kept here any more", False),
        ({"numbers": [10**6]}, "an audit of a part that fragment 0 does not have", True),
        ({"fragment": 9}, "an audit of fragment 9, and the run has 1", True),
        ({"manifest_hash": "0" * 64}, "the manifest 000000000000 is not the one here", False),
        ({"numbers": [0] * 40}, "over ", False),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(wrong: dict[str, Any], why: str, penalised: bool) -> None:
    with story(2, fragments=1, outer_steps=None, outer={**EVERYTHING, "audit": 0.1}) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(20.0)
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        asker = swarm.node("abc".replace(holder, "")[0])
        version = swarm.node(holder).replica.held[0].kept[-1].version
        fields = {"manifest_hash": asker.protocol.manifest_hash, "fragment": 0, "version": version, "numbers": [0]}

        async def asks() -> None:
            async with asker.context.open(holder) as stream:
                await stream.send(AuditRequest(**{**fields, **wrong}))
                with pytest.raises(PayloadError, match=why):
                    while True:
                        audit.expect(await stream.receive(), audit.Opening)

        swarm.loop.run_until_complete(asks())
        swarm.run_for(1.0)
        assert bool(swarm.kinds(holder)["penalty"]) == penalised


# -- proofs that prove nothing ----------------------------------------------------------------------------------------


def tampered(node: Node, one: Evidence, how: str) -> Evidence:
    """Evidence that was changed on its way; `node` is that of the accuser."""
    head, update = one.steps[-1]
    other = update._replace(payload=update.payload ^ 1)
    signer, run = node.protocol.signer, node.protocol.run_id
    match how:
        case "update":
            return replace(one, steps=[*one.steps[:-1], (head, other)])
        case "path":
            return replace(one, steps=[*one.steps[:-1], (head, update._replace(paths=[[bytes(32)]]))])
        case "contribution":
            return replace(one, shown=[one.shown[0]._replace(payload=one.shown[0].payload ^ 1), *one.shown[1:]])
        case "contribution's path":
            return replace(one, shown=[one.shown[0]._replace(paths=[[bytes(32)] * 9]), *one.shown[1:]])
        case "gap":
            return replace(one, steps=[*one.steps[:-2], one.steps[-1]])
        case "another end":
            return replace(one, steps=one.steps[:-1])
        case "too short":
            return replace(one, steps=one.steps[-1:])
        case "unsigned":
            forged = head.model_copy(update={"weights": list(reversed(head.weights)), "coefficients": [0.0] * 3})
            record = one.record.model_copy(update={"head": sign_head(signer, run, forged)})
            return replace(one, steps=[*one.steps[:-1], (record.head, update)], record=record)
        case "lines":
            record = one.record.model_copy(update={"lines": one.record.lines[:-1]})
            return replace(one, record=record, shown=one.shown[:-1])
    return one


WRONG = {
    "update": "shows another update to version",
    "path": "shows another update to version",
    "contribution": "shows another contribution of",
    "contribution's path": "shows another contribution of",
    "gap": "not in a row, of one syncer under one term",
    "another end": "the last step of a proof is not that of its certificate",
    "too short": "does not say what the momentum is",
    "unsigned": "a head in a proof is not signed by",
    "lines": "a certificate has other lines than its head",
    "nothing": "proves nothing",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_proof_convicts_nobody_and_only_a_forged_one_is_an_offence(how: str, evidence: list[Evidence]) -> None:
    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(20.0)
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        accuser, hearer = (swarm.node(name) for name in "abc".replace(holder, ""))
        wrong = tampered(accuser, next(one for one in evidence if len(one.steps) > 4), how)

        async def accuses() -> None:
            async with accuser.context.open(hearer.protocol.me) as stream:
                with pytest.raises((PayloadError, EOFError, OSError)):
                    await audit.offer(accuser.context, stream, wrong)
                    await stream.receive()

        swarm.loop.run_until_complete(accuses())
        swarm.run_for(1.0)
        [refused] = [line for line in noted(swarm, "refused") if f" {hearer.protocol.name} " in line]
        assert WRONG[how] in refused
        assert bool(swarm.kinds(hearer.protocol.name)["penalty"]) == (how != "nothing")
        assert not noted(swarm, "proved")


def test_a_flood_of_proofs_is_refused_before_anything_is_computed(evidence: list[Evidence]) -> None:
    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(20.0)
        holder = swarm.beliefs(swarm.node("a"))[0].holder
        accuser, hearer = (swarm.node(name) for name in "abc".replace(holder, ""))

        async def accuses() -> None:
            async with accuser.context.open(hearer.protocol.me) as stream:
                with pytest.raises((PayloadError, EOFError, OSError)):
                    await audit.offer(accuser.context, stream, one)
                    await stream.receive()

        one = next(each for each in evidence if len(each.steps) > 4)
        for _ in range(6):
            swarm.loop.run_until_complete(accuses())
        reasons = [line for line in noted(swarm, "refused") if f" {hearer.protocol.name} " in line]
        assert ["proves nothing" in line for line in reasons] == [True] * 4 + [False] * 2
        assert "too many proofs are offered by this peer" in reasons[-1]


def test_a_proof_of_what_the_run_does_not_have_is_an_offence() -> None:
    with story(2, fragments=1, outer_steps=None, outer=EVERYTHING) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        accuser, hearer = swarm.node("a"), swarm.node("b")
        offered = Accusation(manifest_hash=accuser.protocol.manifest_hash, fragment=7, author="c", part=0, steps=3)

        async def accuses() -> None:
            async with accuser.context.open("b") as stream:
                await stream.send(offered)
                with pytest.raises(PayloadError, match="about a part that this run does not have"):
                    audit.expect(await stream.receive(), audit.Wanted)

        swarm.loop.run_until_complete(accuses())
        assert swarm.kinds(hearer.protocol.name)["penalty"]


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


@pytest.mark.parametrize("begins", [1, 60])
@pytest.mark.parametrize("certainty", [0.5, 0.95])
def test_a_bias_in_one_part_of_a_hundred_is_audited_within_the_stated_versions(
    begins: int, certainty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default of `outer.audit`, 200 runs of a syncer and three others. What is audited there is proved:
    `test_audit.py`.
    """

    async def nothing(*arguments: Any) -> None: ...

    monkeypatch.setattr(auditor_module, "in_thread", nothing)
    monkeypatch.setattr(auditor_module, "show", lambda *arguments: None)
    [fragment] = partition({"w": 100 * LEAF}, 1)
    replica = SimpleNamespace(settings=OUTER, fragments=[fragment], down=codec("int8"))
    protocol = SimpleNamespace(me="me", members=["s", "b", "c"])
    context: Any = SimpleNamespace(replica=replica, protocol=protocol)
    stated = versions_until(certainty, 100, 1, OUTER.audit)
    assert stated == {0.5: 35, 0.95: 150}[certainty]
    lasted = []
    for seed in range(200):
        auditors = [Auditor(context, f"{seed} {number}") for number in range(3)]
        lasted.append(asked_for(auditors, begins, seed % 100, 3000) - begins + 1)
    within = sum(versions <= stated for versions in lasted) / len(lasted)
    print(f"begins at {begins}: {within:.1%} of 200 liars within {stated} versions, median {sorted(lasted)[100]}")
    assert within >= certainty - 3 * math.sqrt(certainty * (1 - certainty) / 200)
