"""A deadline ends what is awaited, tells its cancellation from others', and takes no turn of the loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.wire.deadline import within


async def answer(after_s: float) -> str:
    await asyncio.sleep(after_s)
    return "here"


async def test_what_is_in_time_is_returned(loop: VirtualLoop) -> None:
    assert await within(2.0, answer(1.0)) == "here"
    assert await within(None, answer(99.0)) == "here"
    assert loop.time() == pytest.approx(100.0)


async def test_what_is_late_is_cancelled_and_the_task_goes_on(loop: VirtualLoop) -> None:
    ended = []

    async def late() -> None:
        try:
            await asyncio.sleep(5.0)
        finally:
            ended.append(loop.time())

    with pytest.raises(asyncio.TimeoutError):
        await within(2.0, late())
    assert await answer(1.0) == "here"
    assert ended == [pytest.approx(2.0)] and loop.time() == pytest.approx(3.0)


async def test_a_deadline_inside_a_deadline_ends_first(loop: VirtualLoop) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await within(9.0, within(1.0, answer(5.0)))
    assert loop.time() == pytest.approx(1.0)


AT_IT = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")


@pytest.mark.parametrize("deadline_s", [9.0, pytest.param(1.0, marks=AT_IT)])
async def test_a_cancellation_from_elsewhere_stays_one(deadline_s: float, loop: VirtualLoop) -> None:
    task = asyncio.ensure_future(within(deadline_s, answer(5.0)))
    await asyncio.sleep(0)  # its timer is set
    loop.call_at(1.0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.time() == pytest.approx(1.0)


async def test_it_takes_no_turn_of_the_loop(loop: VirtualLoop) -> None:
    """Tasks that take the same number of steps finish in the order in which they began, with a deadline or without."""
    order: list[str] = []

    async def step(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        order.append(name)

    await asyncio.gather(within(9.0, step("first")), step("second"), within(9.0, step("third")))
    assert order == ["first", "second", "third"]
