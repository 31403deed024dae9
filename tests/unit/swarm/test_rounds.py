"""The conversations of a node with a stub in place of the network: what moves anchors when things do not fit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.digest import digest_of
from diloco.protocol.exchange import Exchange
from diloco.protocol.fragment import Busy, Lease
from diloco.protocol.heads import wrong_record
from diloco.protocol.messages.bulk import Contribution, StateHeader, Verdict
from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.numbers import MAX_COUNT
from diloco.protocol.shares import Share
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.contribution import Answered, fold_whole
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.parts import copy_state
from diloco.testing.fuzz.crowd import small_pieces
from tests.support.certificates import MANIFEST, RUN, Keys, line_of, record_of
from tests.support.stub_host import ME, OTHER, StubHost, run


def test_a_record_that_does_not_follow_the_anchor_here_is_replaced_by_the_state() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        target = torch.full((6,), 3.0)
        host.client.answers = {0: [host.record(1, target, before="f" * 64)], -1: host.state(1, target)}
        await host.anchors.catch_up(0, [OTHER])
        assert host.client.asked == [0, -1]
        assert torch.equal(host.replica.anchors[0], target) and host.protocol.versions == [1]

    run(scene)


def test_an_heir_that_gets_the_anchor_it_has_and_no_outer_state_goes_on() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        state = host.state(1, torch.full((6,), 3.0))
        await host.anchors.adopt_state(state)
        host.protocol.fragments[0].busy = Busy.INHERITING
        host.client.answers = {1: state}
        await host.anchors.catch_up(0, [OTHER], outer=True)
        assert host.protocol.fragments[0].busy is Busy.NO

    run(scene)


def three(host: StubHost) -> list[UpdateRecord]:
    """Records in a row, to anchors that are ones, twos and threes."""
    anchors = [host.replica.anchors[0].clone(), *(torch.full((6,), float(value)) for value in (1, 2, 3))]
    return [
        host.record(version, anchor, before=digest_of(anchors[version - 1]))
        for version, anchor in enumerate(anchors[1:], 1)
    ]


def test_records_in_a_row_are_applied_one_by_one_without_those_that_came_meanwhile() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        records = three(host)
        await host.anchors.adopt_record(records[0])
        assert await host.anchors.adopt_records(records)
        assert host.protocol.versions == [3] and torch.equal(host.replica.anchors[0], torch.full((6,), 3.0))
        assert host.protocol.accounts.shares(0)[OTHER].contributions == 3
        assert not await host.anchors.adopt_records(records), "all of them are here"
        host.client.answers = {3: records}
        await host.anchors.catch_up(0, [OTHER])
        assert host.protocol.versions == [3] and "fetch_failed" not in host.notes

    run(scene)


def test_records_with_a_gap_change_nothing_after_it() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        first, _, third = three(host)
        with pytest.raises(PayloadError, match="a record to version 3 of fragment 0 does not follow version 1"):
            await host.anchors.adopt_records([first, third])
        with pytest.raises(PayloadError, match="a record to version 1 does not follow version 1"):
            await host.anchors.adopt_records([host.record(1, torch.zeros(6), before="f" * 64)])
        assert host.protocol.versions == [1] and host.protocol.digests == host.replica.digests()

    run(scene)


@pytest.mark.parametrize(("codec", "kept"), [("fp32", 1), ("fp16", 1), ("int8", 3), ("e3m0", 7)])
def test_as_many_records_are_kept_as_are_smaller_than_the_state(codec: str, kept: int) -> None:
    async def scene() -> None:
        host = StubHost(ME, numel=9000, codec_down=codec)
        digests = [host.protocol.digests[0], *(f"{number:064x}" for number in range(9))]
        update = torch.zeros(host.replica.update_nbytes(0), dtype=torch.uint8)
        for version, (before, digest) in enumerate(pairwise(digests), 1):
            header = record_of(version, before, digest, {ME: 1})
            host.context.keep_record(UpdateRecord(header, update))
            host.protocol.fragments[0].move(version, digest, 0.0)
        for base in range(-1, 10):
            found = [record.header.version for record in host.context.records_since(0, base)]
            assert found == (list(range(base + 1, 10)) if 9 - kept <= base else []), base
        assert kept * update.numel() < 4 * 9000 or kept == 1
        host.context.keep_record(UpdateRecord(record_of(12, "f" * 64, "d" * 64, {ME: 1}), update))
        assert len(host.context.records[0]) == 1, "the anchor before it came from elsewhere"
        host.protocol.fragments[0].move(12, "e" * 64, 0.0)
        assert host.context.records_since(0, 11) == [], "what is here now came from elsewhere too"

    run(scene)


def test_a_peer_that_always_comes_too_late_is_told() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        for version in range(1, 7):
            shares = {OTHER: Share(version, 100 * version, 1, version)}
            host.client.answers = {version - 1: host.state(version, torch.full((6,), float(version)), **shares)}
            await host.anchors.catch_up(0, [OTHER])
            assert (await host.exchange())[0] == 10
        assert host.notes.count("always_late") == 2

    run(scene)


def test_an_update_that_leads_elsewhere_is_healed_before_anything_goes_on() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        target = torch.full((6,), 3.0)
        record = host.record(1, target)
        record.update[0] ^= 1
        host.client.answers = {0: [record], -1: host.state(1, target)}
        await host.anchors.catch_up(0, [OTHER])
        assert "digest_mismatch" in host.notes and host.protocol.heals == 1
        assert host.protocol.digests == [digest_of(target)] == host.replica.digests()

    run(scene)


def test_a_donor_that_cannot_be_reached_is_asked_once_and_the_next_one_then() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        host.client.answers = {0: ConnectionError("gone")}
        await host.anchors.catch_up(0, [OTHER, "third"])
        assert host.client.asked == [0, 0] and host.notes.count("fetch_failed") == 2

    run(scene)


def test_a_higher_number_moves_neither_the_anchor_nor_what_is_learned_from_it() -> None:
    async def scene() -> None:
        host, follower = StubHost(ME), StubHost(OTHER)
        for one in (host, follower):
            await one.anchors.load()
        host.parameters["w"].sub_(1.0)
        await host.anchors.renumber(0, 5)
        here = host.protocol.fragments[0]
        assert (here.version, here.steps, here.digest) == (6, 0, follower.protocol.digests[0])
        assert wrong_record(Keys(OTHER), RUN, here.record) is None and here.record.head.author == ME
        header = StateHeader(fragment=0, digest=here.digest, record=here.record, outer=False)
        await follower.anchors.adopt_state(FragmentState(header, host.replica.anchors[0].clone()))
        assert follower.protocol.versions == [6] and follower.protocol.steps == 0
        shares = {OTHER: Share(1, 10, 1, 7)}
        record = record_of(7, here.digest, here.digest, {}, shares=shares, author=ME)
        header = StateHeader(fragment=0, digest=here.digest, record=record, shares=shares, outer=False)
        await follower.anchors.adopt_state(FragmentState(header, host.replica.anchors[0].clone()))
        assert follower.protocol.fragments[0].shares == shares, "of the same anchor, made in another way"
        assert await host.exchange() == (0, 7), "a contribution from the anchor that has the number 6 now"
        assert host.protocol.steps == 1

    run(scene)


def test_what_was_learned_from_an_anchor_that_was_replaced_is_discarded() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        host.client.answers = {0: host.state(1, torch.full((6,), 3.0), **{OTHER: Share(1, 10, 1, 1)})}
        await host.anchors.catch_up(0, [OTHER])
        assert await host.exchange() == (10, 1)
        assert torch.equal(host.replica.anchors[0], torch.full((6,), 3.0))
        assert torch.equal(host.replica.held[0].master, host.replica.anchors[0])
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        assert await host.exchange() == (0, 2)
        assert host.replica.anchors[0].unique().tolist() == [2.0]

    run(scene)


def test_an_own_contribution_that_was_left_out_counts_as_discarded() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        lease = Lease(0, ME, 1, 0, host.protocol.digests[0])
        header = Exchange(0, 0, host.protocol.digests[0], 1, 10, MANIFEST).header(lease)
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        syncer = host.protocol.syncers[0]
        assert syncer.offer(OTHER, header).accepted
        host.replica.held[0].fold(0, host.replica.encode(0, 0), 1.0)
        syncer.folded(OTHER)
        exchanging = asyncio.ensure_future(host.exchange())
        syncer.wants = lambda peer, chunk, base: False  # type: ignore[method-assign]  # closed before the first chunk
        while not syncer._offers.get(ME):
            await asyncio.sleep(0)
        host.protocol.state = "done"  # so that it is not waited for
        host.do(host.protocol.arrived(OTHER, 0, host.now(), line_of(OTHER, 0, lease.digest)))
        assert await exchanging == (10, 1)

    run(scene)


def test_of_two_histories_the_syncer_goes_on_from_more_work_under_a_number_above_both() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        for version, tokens, skipped, goes_on, number, steps in [
            (5, 50, 0, True, 5, 5),
            (2, 100, 0, True, 6, 2),
            (9, 60, 0, False, 10, 2),
            (9, 100, 0, False, 10, 2),
            (9, 110, MAX_COUNT, True, 11, 0),
        ]:
            shares = {OTHER: Share(version, tokens, 1, version)}
            state = host.state(version, torch.full((6,), float(100 * version + tokens)), skipped, **shares)
            await host.anchors.adopt_state(state)
            host.do(host.protocol.tick(host.now()))
            assert torch.equal(host.replica.anchors[0], state.anchor) == goes_on
            await host.context.tasks.until(lambda number=number: host.protocol.versions == [number])
            assert host.protocol.steps == steps
            lease = host.protocol.leases.get(0)
            assert lease is not None and (lease.version, lease.steps) == (number, steps)

    run(scene)


def test_an_anchor_that_is_being_merged_is_not_replaced_meanwhile() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        async with host.context.locks[0].writing():  # the merge has to wait for this
            exchanging = asyncio.ensure_future(host.exchange())
            while not host.protocol.merging(0):
                await asyncio.sleep(0)
            host.client.answers = {0: host.state(1, torch.full((6,), 9.0)), -1: host.state(1, torch.full((6,), 9.0))}
            catching_up = asyncio.ensure_future(host.anchors.catch_up(0, [OTHER]))
        await catching_up
        await exchanging
        assert host.protocol.steps == 1
        assert torch.equal(host.replica.anchors[0], torch.arange(6.0) - 1)

    run(scene)


def test_what_was_learned_in_another_history_is_not_sent_and_the_anchor_is_replaced() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        await host.anchors.load()
        theirs = torch.full((6,), 3.0)
        claim = Claim(fragment=0, term=2, version=0, digest=digest_of(theirs))  # made after a split
        host.do(host.protocol.heard(OTHER, claim, host.now()))
        host.client.answers = {-1: host.state(0, theirs)}
        assert await host.exchange() == (10, 0)
        assert torch.equal(host.replica.anchors[0], theirs) and "another_history" in host.notes
        assert host.rounds.out_of_step(), "it begins anew where the others are"
        host.rounds.in_step()
        assert not host.rounds.out_of_step()

    run(scene)


def test_what_was_learned_in_another_history_and_is_in_the_adopted_anchor_is_not_discarded() -> None:
    """A thread of this peer, syncer until now, has merged it meanwhile."""

    async def scene() -> None:
        host = StubHost(OTHER)
        await host.anchors.load()
        theirs = torch.full((6,), 3.0)
        host.do(host.protocol.heard(OTHER, Claim(fragment=0, term=2, version=0, digest=digest_of(theirs)), host.now()))
        won = host.state(1, torch.full((6,), 4.0), **{ME: Share(1, 10, 1, 1)})
        host.client.answers = {-1: won}
        assert await host.exchange() == (0, 1)

    run(scene)


def test_a_fetch_that_fails_is_not_tried_again_because_something_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is an event itself: two flights that fail would wake each other without end."""

    async def refused(context: Context, lease: Lease, header: Contribution) -> Answered:
        return Answered(Verdict(accepted=False, reason="late", late=True, version=5, term=1), None)

    async def scene() -> None:
        host = StubHost(OTHER)
        await host.anchors.load()
        news = Published(fragment=0, term=1, version=5, digest="5" * 64, contributors=[], applied_tokens=0)
        host.do(host.protocol.heard(OTHER, news, host.now()))
        status = host.hello(claims=False).status.model_copy(update={"versions": [5]})
        host.do(host.protocol.heard(OTHER, status, host.now()))
        host.client.answers = {0: ConnectionError("nobody has it")}
        exchanging = asyncio.ensure_future(host.exchange())
        while "fetch_failed" not in host.notes:
            await asyncio.sleep(0)
        asked = len(host.client.asked)
        for _ in range(100):
            host.context.tasks.notify()
            await asyncio.sleep(0)
        assert len(host.client.asked) == asked
        exchanging.cancel()
        await host.rounds.cancel()

    monkeypatch.setattr("diloco.swarm.node.rounds.contribute", refused)
    run(scene)


def test_tokens_of_a_history_that_lost_are_discarded_once() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        for version in (1, 2):
            host.parameters["w"].sub_(1.0)
            assert await host.exchange() == (0, version)
            await host.anchors.load()
        # It has this peer's contribution from version 0, not the one from 1.
        won = host.state(5, torch.full((6,), 3.0), **{ME: Share(1, 10, 1, 1), OTHER: Share(4, 40, 2, 5)})
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        claim = Claim(fragment=0, term=2, version=5, digest=won.header.digest)
        host.do(host.protocol.heard(OTHER, claim, host.now()))
        host.client.answers = {2: won}
        await host.anchors.catch_up(0, [OTHER])
        assert host.notes.count("discarded") == 1
        assert await host.exchange() == (10 + 10, 5), "the lost one, and one that is too late"
        assert host.own_tokens.take_lost() == 0

    run(scene)


def test_tokens_of_an_exchange_that_is_over_and_not_taken_are_discarded_when_another_history_wins() -> None:
    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        await host.rounds.send({0: (1, 10)})
        await host.context.tasks.until(lambda: host.rounds.arrived([0]))
        won = host.state(5, torch.full((6,), 3.0))
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        host.do(host.protocol.heard(OTHER, Claim(fragment=0, term=2, version=5, digest=won.header.digest), host.now()))
        host.client.answers = {1: won}
        await host.anchors.catch_up(0, [OTHER])
        assert host.rounds.take([0])[0] == 10
        assert host.own_tokens.applied == {}

    run(scene)


def test_tokens_that_this_half_left_out_are_applied_when_the_half_that_merged_them_won() -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        await host.anchors.load()
        theirs = torch.full((6,), 3.0)
        claim = Claim(fragment=0, term=2, version=0, digest=digest_of(theirs))
        host.do(host.protocol.heard(OTHER, claim, host.now()))
        host.client.answers = {-1: host.state(0, theirs)}
        assert await host.exchange() == (10, 0)
        won = host.state(5, torch.full((6,), 4.0), **{ME: Share(1, 10, 1, 1), OTHER: Share(4, 40, 2, 5)})
        host.do(host.protocol.heard(OTHER, Claim(fragment=0, term=2, version=5, digest=won.header.digest), host.now()))
        host.client.answers = {0: won}
        await host.anchors.catch_up(0, [OTHER])
        assert host.notes.count("applied_after_all") == 1
        assert host.own_tokens.take_lost() == -10

    run(scene)


@pytest.mark.parametrize(("merged", "discarded"), [(1, 0), (0, 10)])
def test_after_a_broken_stream_the_anchor_says_whether_the_contribution_was_merged(
    merged: int, discarded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        host = StubHost(OTHER)
        await host.anchors.load()
        own = {ME: Share(1, 10, 1, 1)} if merged else {}
        state = host.state(2, torch.full((6,), 3.0), **{OTHER: Share(2, 20, 1, 2)}, **own)

        async def breaks(context: Context, lease: Lease, header: Contribution) -> Answered:
            await host.anchors.adopt_state(state)
            raise ConnectionResetError

        monkeypatch.setattr("diloco.swarm.node.rounds.contribute", breaks)
        assert await host.exchange() == (discarded, 2)

    run(scene)


# -- what is interrupted, and what changes while something is awaited -------------------------------------------------


def tasks_left() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


def test_an_exchange_that_is_cancelled_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters move on once it is cancelled, and what was captured is released."""
    sent: list[float] = []

    async def slowly(context: Context, lease: Lease, header: Contribution) -> Answered:
        for chunk in range(len(context.replica.chunks[0])):
            sent.append(float(context.replica.encode(0, chunk).view(torch.float32)[0]))
            await asyncio.sleep(0)
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr("diloco.swarm.node.rounds.contribute", slowly)

    async def scene() -> None:
        with small_pieces(chunk=2):
            host = StubHost(OTHER, overlap=1)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        await host.rounds.send({0: (1, 10)})
        while not sent:
            await asyncio.sleep(0)
        host.parameters["w"].sub_(41.0)
        await host.rounds.cancel()
        assert tasks_left() == set() and host.rounds.flying == []
        assert sent == [1.0] * len(sent) and len(sent) < len(host.replica.chunks[0])

    run(scene)


def test_an_exchange_that_never_ran_releases_what_was_captured() -> None:
    async def scene() -> None:
        host = StubHost(OTHER, overlap=1)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        await host.rounds.send({0: (1, 10)})
        await host.rounds.cancel()
        host.parameters["w"].sub_(1.0)
        assert float(host.replica.encode(0, 0).view(torch.float32)[0]) == 2.0, "as the parameters are now"

    run(scene)


def test_an_anchor_that_is_being_moved_arrives_though_the_exchange_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. The update is applied, in a thread. 2. Ctrl+C cancels the exchange. 3. A checkpoint is written: the version
    and the digest that it names are those of the anchor in it.
    """

    async def scene() -> None:
        host = StubHost(OTHER)
        target, go_on, began = torch.full((6,), 3.0), threading.Event(), threading.Event()
        record, apply = host.record(1, target), host.replica.apply_update_

        def slowly(*arguments: Any) -> str:
            began.set()
            go_on.wait(10)
            return apply(*arguments)

        async def answer(context: Context, lease: Lease, header: Contribution) -> Answered:
            return Answered(Verdict(accepted=True), [record])

        monkeypatch.setattr(host.replica, "apply_update_", slowly)
        monkeypatch.setattr("diloco.swarm.node.rounds.contribute", answer)
        await host.rounds.send({0: (1, 10)})
        while not began.is_set():
            await asyncio.sleep(0)
        cancelling = asyncio.ensure_future(host.rounds.cancel())
        await asyncio.sleep(0)
        assert not cancelling.done()
        go_on.set()
        await cancelling
        saved = await host.anchors.snapshot(copies=True)
        assert list(saved.versions) == [1] and torch.equal(saved.anchors[0], target)
        assert host.protocol.digests == host.replica.digests()

    run(scene)


def test_a_lease_that_is_lost_between_two_own_chunks_leaves_the_rest_to_the_next_syncer() -> None:
    async def scene() -> None:
        with small_pieces(chunk=2):
            host = StubHost(ME)
        await host.anchors.load()
        host.parameters["w"].sub_(1.0)
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        await host.rounds.send({0: (1, 10)})
        syncer = host.protocol.syncers[0]
        while not syncer._offers or syncer._offers[ME].chunks == 0:
            await asyncio.sleep(0)
        assert syncer._offers[ME].chunks < len(host.replica.chunks[0])
        claim = Claim(fragment=0, term=2, version=0, digest=host.protocol.digests[0])
        hello = host.hello(claims=False).model_copy(update={"claims": [claim]})  # it was cut off until now
        host.do(host.protocol.connected(OTHER, hello, host.now()))
        assert 0 not in host.replica.held
        for _ in range(10):
            await asyncio.sleep(0)
        assert host.rounds.flying == [0] and not host.rounds.arrived([0]), "it goes on, and has not failed"
        assert "contribution_broke" in host.notes, "the next syncer is tried, which nobody can reach here"
        await host.rounds.cancel()

    run(scene)


def quorum_host() -> StubHost:
    return StubHost(ME, quorum=1, staleness_limit=4)


def test_a_version_that_closes_while_a_contribution_is_folded_in_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        host = quorum_host()
        await host.anchors.load()
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        go_on, began, threads = threading.Event(), threading.Event(), set[threading.Thread]()
        held, fold = host.replica.held[0], host.replica.held[0].fold

        def slowly(*arguments: Any) -> None:
            threads.add(threading.current_thread())
            began.set()
            go_on.wait(10)
            fold(*arguments)

        monkeypatch.setattr(held, "fold", slowly)
        syncer = host.protocol.syncers[0]
        header = Exchange(0, 0, host.protocol.digests[0], 1, 10, MANIFEST).header(
            Lease(0, ME, 1, 0, host.protocol.digests[0])
        )
        assert syncer.offer(OTHER, header).accepted
        host.parameters["w"].sub_(1.0)
        payloads = [host.replica.encode(0, 0)]

        async def arrive() -> int | None:
            async with host.context.locks[0].writing():
                return await fold_whole(host.context, syncer, OTHER, header, payloads)

        arriving = asyncio.ensure_future(arrive())
        while not began.is_set():
            await asyncio.sleep(0)
        host.do(host.protocol.tick(host.now()))
        assert host.protocol.merging(0), "the quorum is there"
        go_on.set()
        assert await arriving == 0
        await host.context.tasks.until(lambda: host.protocol.versions[0] == 1)
        assert host.protocol.accounts.merged(0) == {OTHER: 0}
        assert torch.equal(host.replica.anchors[0], torch.arange(6.0) - 1.0), "and it is in the version"
        assert threading.main_thread() not in threads

    run(scene)


def test_a_version_whose_contributions_were_forgotten_is_not_made() -> None:
    """An anchor of another history, of the same version, is adopted while the merge waits for the lock."""

    async def scene() -> None:
        host = quorum_host()
        await host.anchors.load()
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        syncer = host.protocol.syncers[0]
        lease = Lease(0, ME, 1, 0, host.protocol.digests[0])
        header = Exchange(0, 0, lease.digest, 1, 10, MANIFEST).header(lease)
        assert syncer.offer(OTHER, header).accepted
        host.parameters["w"].sub_(1.0)
        async with host.context.locks[0].writing():
            others = asyncio.all_tasks()
            await fold_whole(host.context, syncer, OTHER, header, [host.replica.encode(0, 0)])
            host.do(host.protocol.tick(host.now()))
            assert host.protocol.merging(0)
            merging = asyncio.all_tasks() - others
            await asyncio.sleep(0)  # it waits for the lock
            host.replica.anchors[0].fill_(7.0)
            host.anchors.moved(0, 0, host.replica.digest(0))
        assert await asyncio.wait(merging)
        assert host.protocol.versions[0] == 0 and not any(task.exception() for task in merging)
        assert torch.equal(host.replica.anchors[0], torch.full((6,), 7.0))

    run(scene)


def test_a_lease_that_is_lost_while_a_contribution_is_folded_in_takes_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        host = quorum_host()
        await host.anchors.load()
        host.do(host.protocol.connected(OTHER, host.hello(claims=False), host.now()))
        syncer, held = host.protocol.syncers[0], host.replica.held[0]
        fold, lost = held.fold, threading.Event()

        def slowly(*arguments: Any) -> None:
            lost.wait(10)
            fold(*arguments)

        monkeypatch.setattr(held, "fold", slowly)
        await host.rounds.send({0: (1, 10)})
        while not syncer._offers or not syncer._offers[ME].whole:
            await asyncio.sleep(0)
        claim = Claim(fragment=0, term=2, version=0, digest=host.protocol.digests[0])
        hello = host.hello(claims=False).model_copy(update={"claims": [claim]})  # it was cut off until now
        host.do(host.protocol.connected(OTHER, hello, host.now()))
        lost.set()
        while "contribution_broke" not in host.notes:
            await asyncio.sleep(0)
        assert not host.rounds.arrived([0]) and host.protocol.versions == [0]
        await host.rounds.cancel()

    run(scene)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_nothing_moves_under_a_checkpoint_that_is_being_written() -> None:
    """A syncer that saves for long goes on without itself; the version it makes must not be in the checkpoint."""

    async def scene() -> None:
        host = StubHost(ME)
        await host.anchors.load()
        saved = await host.anchors.snapshot(copies=False)
        assert saved.anchors[0] is host.replica.anchors[0], "no memory for copies"
        master, state = saved.outer[0]
        live = [saved.anchors[0], master, *state.vectors]
        before = [vector.clone() for vector in live]
        host.parameters["w"].sub_(1.0)
        exchanging = asyncio.ensure_future(host.exchange())
        while not host.protocol.merging(0):
            await asyncio.sleep(0)
        await host.anchors.show()  # evaluating the anchors meanwhile is no problem
        served = (await copy_state(host.context, 0)).anchor
        for _ in range(100):
            await asyncio.sleep(0)
        assert all(map(torch.equal, before, live)) and torch.equal(served, before[0])
        host.anchors.end_snapshot()
        assert await exchanging == (0, 1)
        assert not torch.equal(before[0], host.replica.anchors[0])

    run(scene)


def test_the_copies_of_a_checkpoint_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()

    def watched(tensors: Sequence[Tensor]) -> list[Tensor]:
        threads.add(threading.current_thread())
        return [tensor.clone() for tensor in tensors]

    monkeypatch.setattr("diloco.swarm.node.anchors._clones", watched)

    async def scene() -> None:
        host = StubHost(ME)
        saved = await host.anchors.snapshot(copies=True)
        assert torch.equal(saved.anchors[0], host.replica.anchors[0])
        assert threads and threading.main_thread() not in threads and not host.context.locks[0]._readers

    run(scene)
