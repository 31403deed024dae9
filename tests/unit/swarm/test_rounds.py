"""The conversations of a node with a stub in place of the network: what moves anchors when things do not fit."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diloco.outer.digest import digest_of
from diloco.protocol.exchange import Exchange
from diloco.protocol.fragment import Lease
from diloco.protocol.heads import wrong_record
from diloco.protocol.messages.bulk import Contribution, StateHeader, Verdict
from diloco.protocol.shares import Share
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.contribution import Answered, keep
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.parts import copy_state
from diloco.testing.fuzz.crowd import small_pieces
from tests.support.certificates import MANIFEST, RUN, Keys, line_of, record_of
from tests.support.coroutines import Slow, turns, until
from tests.support.stub_host import ME, OTHER, StubHost

CONTRIBUTE = "diloco.swarm.node.rounds.contribute"


def full(value: float) -> Tensor:
    return torch.full((6,), float(value))


@pytest.mark.parametrize("wrong", ["before", "update"])
async def test_a_record_that_leads_elsewhere_is_replaced_by_the_state(wrong: str) -> None:
    host, target = StubHost(OTHER), full(3)
    record = host.record(1, target, before="f" * 64 if wrong == "before" else None)
    if wrong == "update":
        record.update[0] ^= 1
    await host.catch_up({0: [record], -1: host.state(1, target)})
    assert host.client.asked == [0, -1] and torch.equal(host.replica.anchors[0], target)
    assert host.protocol.versions == [1] and host.protocol.digests == [digest_of(target)] == host.replica.digests()
    assert host.protocol.heals == ("digest_mismatch" in host.notes) == (wrong == "update")


def three(host: StubHost) -> list[UpdateRecord]:
    """Records in a row, to anchors that are ones, twos and threes."""
    anchors = [host.replica.anchors[0].clone(), full(1), full(2), full(3)]
    return [
        host.record(version, anchor, before=digest_of(anchors[version - 1]))
        for version, anchor in enumerate(anchors[1:], 1)
    ]


async def test_records_in_a_row_are_applied_one_by_one() -> None:
    """Without those that came meanwhile."""
    host = StubHost(OTHER)
    records = three(host)
    await host.anchors.adopt_record(records[0])
    assert await host.anchors.adopt_records(records)
    assert host.protocol.versions == [3] and torch.equal(host.replica.anchors[0], full(3))
    assert host.protocol.fragments[0].shares[OTHER].contributions == 3
    assert not await host.anchors.adopt_records(records), "all of them are here"
    await host.catch_up({3: records})
    assert host.protocol.versions == [3] and "fetch_failed" not in host.notes


@pytest.mark.parametrize(("codec", "kept"), [("fp32", 1), ("fp16", 1), ("int8", 3), ("e3m0", 7)])
async def test_records_are_kept_while_they_are_smaller_than_the_state(codec: str, kept: int) -> None:
    host = StubHost(ME, numel=9000, codec_down=codec)
    digests = [host.protocol.digests[0], *(f"{number:064x}" for number in range(9))]
    update = torch.zeros(host.replica.update_nbytes(0), dtype=torch.uint8)
    for version, (before, digest) in enumerate(pairwise(digests), 1):
        host.context.keep_record(UpdateRecord(record_of(version, before, digest, {ME: 1}), update))
        host.protocol.fragments[0].move(version, digest, 0.0)
    for base in range(-1, 10):
        found = [record.header.version for record in host.context.records_since(0, base)]
        assert found == (list(range(base + 1, 10)) if 9 - kept <= base else []), base
    assert kept * update.numel() < 4 * 9000 or kept == 1
    host.context.keep_record(UpdateRecord(record_of(12, "f" * 64, "d" * 64, {ME: 1}), update))
    assert len(host.context.records[0]) == 1, "the anchor before it came from elsewhere"
    host.protocol.fragments[0].move(12, "e" * 64, 0.0)
    assert host.context.records_since(0, 11) == [], "what is here now came from elsewhere too"


async def test_a_peer_that_always_comes_too_late_is_told() -> None:
    host = StubHost(ME)
    await host.anchors.load()
    for version in range(1, 7):
        shares = {OTHER: Share(version, 100 * version, 1, version)}
        await host.catch_up({version - 1: host.state(version, full(version), **shares)})
        assert (await host.exchange())[0] == 10
    assert host.notes.count("always_late") == 2


async def test_a_higher_number_moves_no_anchor() -> None:
    """Nor what is learned from it."""
    host, follower = StubHost(ME), StubHost(OTHER)
    await follower.anchors.load()
    await host.learn()
    await host.anchors.renumber(0, 5)
    here = host.protocol.fragments[0]
    assert (here.version, here.steps, here.digest) == (6, 0, follower.protocol.digests[0])
    assert wrong_record(Keys(OTHER), RUN, here.record) is None and here.record.head.author == ME
    header = StateHeader(fragment=0, digest=here.digest, record=here.record)
    await follower.anchors.adopt_state(FragmentState(header, host.replica.anchors[0].clone()))
    assert follower.protocol.versions == [6] and follower.protocol.steps == 0
    shares = {OTHER: Share(1, 10, 1, 7)}
    record = record_of(7, here.digest, here.digest, {}, shares=shares, author=ME)
    header = StateHeader(fragment=0, digest=here.digest, record=record, shares=shares)
    await follower.anchors.adopt_state(FragmentState(header, host.replica.anchors[0].clone()))
    assert follower.protocol.fragments[0].shares == shares, "of the same anchor, made in another way"
    assert await host.exchange() == (0, 7), "a contribution from the anchor that has the number 6 now"
    assert host.protocol.steps == 1


def offered(host: StubHost) -> tuple[Syncer, Contribution]:
    """The syncer here, and what another peer begins to contribute to it."""
    host.join()
    lease, syncer = Lease(0, ME, 1, 0, host.protocol.digests[0]), host.protocol.syncers[0]
    header = Exchange(0, 0, lease.digest, 1, 10, MANIFEST).header(lease)
    assert syncer.offer(OTHER, header).accepted
    return syncer, header


async def test_tokens_of_a_lost_half_may_be_applied_after_all() -> None:
    """What was learned in another history is not sent, and a history that has it nevertheless wins later."""
    host, theirs = StubHost(OTHER), full(3)
    await host.anchors.load()
    host.claimed(0, theirs)
    host.client.answers = {-1: host.state(0, theirs)}
    assert await host.exchange() == (10, 0)
    assert torch.equal(host.replica.anchors[0], theirs) and "another_history" in host.notes
    assert host.rounds.out_of_step(), "it begins anew where the others are"
    host.rounds.in_step()
    assert not host.rounds.out_of_step()
    won = host.state(5, full(4), **{ME: Share(1, 10, 1, 1), OTHER: Share(4, 40, 2, 5)})
    host.claimed(5, won.anchor)
    await host.catch_up({0: won})
    assert host.notes.count("applied_after_all") == 1
    assert host.own_tokens.take_lost() == -10


@pytest.mark.parametrize(("merged", "discarded"), [(1, 0), (0, 10)])
async def test_after_a_broken_stream_the_anchor_says_what_was_merged(
    merged: int, discarded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = StubHost(OTHER)
    await host.anchors.load()
    own = {ME: Share(1, 10, 1, 1)} if merged else {}
    state = host.state(2, full(3), **{OTHER: Share(2, 20, 1, 2)}, **own)

    async def breaks(context: Context, lease: Lease, header: Contribution) -> Answered:
        await host.anchors.adopt_state(state)
        raise ConnectionResetError

    monkeypatch.setattr(CONTRIBUTE, breaks)
    assert await host.exchange() == (discarded, 2)


# -- what is interrupted, and what changes while something is awaited -------------------------------------------------


async def test_a_cancelled_exchange_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters move on once it is cancelled, and what was captured is released."""
    sent: list[float] = []

    async def slowly(context: Context, lease: Lease, header: Contribution) -> Answered:
        for part in context.replica.payload_chunks(0, context.replica.captured(0)):
            sent.append(float(part.view(torch.float32)[0]))
            await asyncio.sleep(0)
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(CONTRIBUTE, slowly)
    with small_pieces(chunk=2):
        host = StubHost(OTHER, sync_every=2, overlap=1)
    await host.learn()
    await host.rounds.send({0: (1, 10)})
    await until(lambda: sent)
    host.parameters["w"].sub_(41.0)
    await host.rounds.cancel()
    assert asyncio.all_tasks() == {asyncio.current_task()} and host.rounds.flying == []
    assert sent == [1.0] * len(sent) and len(sent) < len(host.replica.chunks[0])


async def test_a_moving_anchor_arrives_though_its_exchange_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The update is applied, in a thread. 2. Ctrl+C cancels the exchange. 3. A checkpoint is written: the version
    and the digest that it names are those of the anchor in it.
    """
    host, target = StubHost(OTHER), full(3)
    record, apply = host.record(1, target), Slow(host.replica.apply_update_)

    async def answer(context: Context, lease: Lease, header: Contribution) -> Answered:
        return Answered(Verdict(accepted=True), [record])

    monkeypatch.setattr(host.replica, "apply_update_", apply)
    monkeypatch.setattr(CONTRIBUTE, answer)
    await host.rounds.send({0: (1, 10)})
    await until(apply.began.is_set)
    cancelling = asyncio.ensure_future(host.rounds.cancel())
    await asyncio.sleep(0)
    assert not cancelling.done()
    apply.go_on.set()
    await cancelling
    saved = await host.anchors.snapshot(copies=True)
    assert list(saved.versions) == [1] and torch.equal(saved.anchors[0], target)
    assert host.protocol.digests == host.replica.digests()


def quorum_host() -> StubHost:
    return StubHost(ME, quorum=1, staleness_limit=4)


async def test_what_comes_while_a_version_closes_is_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    host = quorum_host()
    await host.learn()
    merge = Slow(host.replica.aggregates[0].merge)
    monkeypatch.setattr(host.replica.aggregates[0], "merge", merge)
    syncer, header = offered(host)
    exchanging = asyncio.ensure_future(host.exchange())
    await until(merge.began.is_set)
    assert host.protocol.merging(0), "the quorum is there"
    payload, line = torch.full((24,), 0, dtype=torch.uint8), line_of(OTHER, 0, header.base_digest, 10)
    keeping = asyncio.ensure_future(keep(host.context, syncer, header, payload, line))
    await turns(100)
    assert not keeping.done()
    merge.go_on.set()
    assert await keeping == 1 and await exchanging == (0, 1)
    await host.context.tasks.until(lambda: host.protocol.versions[0] == 2)
    assert host.protocol.fragments[0].merged() == {ME: 0, OTHER: 1}
    assert torch.equal(host.replica.anchors[0], torch.arange(6.0) - 1.0)
    assert threading.main_thread() not in merge.threads


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_nothing_moves_under_a_checkpoint_that_is_written() -> None:
    """A syncer that saves for long goes on without itself; the version it makes must not be in the checkpoint."""
    host = StubHost(ME)
    await host.anchors.load()
    saved = await host.anchors.snapshot(copies=False)
    assert saved.anchors[0] is host.replica.anchors[0], "no memory for copies"
    master, state = saved.outer[0]
    live = [saved.anchors[0], master, *state.vectors]
    before = [vector.clone() for vector in live]
    host.parameters["w"].sub_(1.0)
    exchanging = asyncio.ensure_future(host.exchange())
    await until(lambda: host.protocol.merging(0))
    await host.anchors.show()  # evaluating the anchors meanwhile is no problem
    served = (await copy_state(host.context, 0)).anchor
    await turns(100)
    assert all(map(torch.equal, before, live)) and torch.equal(served, before[0])
    host.anchors.end_snapshot()
    assert await exchanging == (0, 1)
    assert not torch.equal(before[0], host.replica.anchors[0])
