"""The tensors of a node: what moves an anchor, what does not, and what a checkpoint holds
meanwhile."""

import asyncio

import torch

from diloco.core.events import Apply, Merge
from diloco.core.history import state_of
from diloco.messages.heads import Head
from diloco.outer.digest import part_digests
from diloco.swarm.rpc.updates import Update
from tests.support.alone import Alone, alone
from tests.support.core import OTHER, D
from tests.support.coroutines import turns


def applying(node: Alone, anchor: torch.Tensor, limit: float = 1e9, state: str = "") -> Apply:
    """An update of another author to an anchor; with the float codecs it carries the values
    themselves."""
    tip, replica = node.core.facts.control.tip, node.replica
    update = torch.empty(replica.updates[0].nbytes, dtype=torch.uint8)
    replica.down.encode_update(anchor, replica.anchors[0], update)
    book, before = tip.book, tip.head
    state, number = state or state_of(book, part_digests(anchor)), before.number + 1
    head = Head(0, number, before.id, OTHER, OTHER, (), 1, before.work + 10, D, state)
    return Apply(0, head, book, Update.of(update), limit, 0)


def test_an_update_moves_the_anchor_only_to_what_its_head_says() -> None:
    async def scene(node: Alone) -> None:
        anchors, before = node.anchors, node.replica.anchors[0].clone()
        target = before + 3.0
        outcome = await anchors._apply(applying(node, target, state="f" * 64))
        assert (outcome.why, outcome.damaged) == ("digest", False), "its author was wrong"
        outcome = await anchors._apply(applying(node, target, limit=7.0))
        assert outcome.why == "far" and torch.equal(node.replica.anchors[0], before)
        outcome = await anchors._apply(applying(node, target, limit=7.5))
        assert outcome.why == "" and outcome.parts == part_digests(target)
        assert torch.equal(node.replica.anchors[0], target)
        node.replica.anchors[0][0] += 1.0
        outcome = await anchors._apply(applying(node, target + 1.0, state="f" * 64))
        assert (outcome.why, outcome.damaged) == ("digest", True), "the anchor here was"

    alone(scene)


def test_nothing_moves_under_a_checkpoint_that_is_written() -> None:
    """An author that saves for long goes on without itself; the version it makes must not be in the
    checkpoint."""

    async def scene(node: Alone) -> None:
        await node.learn()
        saved = await node.anchors.snapshot(copies=False)
        assert saved.anchors[0] is node.replica.anchors[0], "no memory for copies"
        master, state = saved.outer[0]
        live = [saved.anchors[0], master, *state.vectors]
        before = [vector.clone() for vector in live]
        learning = asyncio.ensure_future(node.learn())
        await turns(100)
        await node.anchors.show()  # evaluating the anchors meanwhile is no problem
        part = await node.anchors.read_part(0, node.core.facts.control.tip.head.id, 0)
        assert part is not None and torch.equal(part, before[0])
        assert all(map(torch.equal, before, live)) and not learning.done()
        node.anchors.end_snapshot()
        await learning
        assert node.clock() == (2, 20) and not torch.equal(before[0], node.replica.anchors[0])

    alone(scene)


def test_a_version_that_the_core_drops_is_not_in_the_next_one() -> None:
    async def scene(node: Alone) -> None:
        merge, facts = node.anchors.merge, node.core.facts

        async def dropped(action: Merge) -> None:
            facts.control.round.merge = None  # as if another peer were the author by then
            node.anchors.merge = merge  # type: ignore[method-assign]
            await merge(action)

        node.anchors.merge = dropped  # type: ignore[method-assign]
        await node.learn()
        assert facts.control.tip.head.number == 1
        assert torch.equal(node.replica.anchors[0], torch.arange(6.0) - 1.0)

    alone(scene)


def test_a_checkpoint_holds_nothing_of_a_version_that_is_not_applied() -> None:

    async def scene(node: Alone) -> None:
        apply, saved = node.anchors.apply, []

        async def after_a_checkpoint(action: Apply) -> None:
            saved.append(await node.anchors.snapshot(copies=True))
            await apply(action)

        node.anchors.apply = after_a_checkpoint  # type: ignore[method-assign]
        await node.learn()
        assert torch.equal(saved[0].outer[0][0], saved[0].anchors[0])
        assert torch.equal(saved[0].anchors[0], torch.arange(6.0)), "not applied yet"

    alone(scene)


def test_the_bound_of_an_update_is_equal_on_all_machines() -> None:
    async def scene(node: Alone) -> None:
        arithmetic = node.core.facts.arithmetic
        limit, reach = arithmetic.bounds(3, 4, 0, 1, 2.0, (0.1, 0.2, 0.3))
        assert limit > 0 and all(float(f"{one:.6g}") == one for one in reach)

    alone(scene, momentum=0.5)
