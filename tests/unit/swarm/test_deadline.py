"""A deadline ends what is awaited, tells its cancellation from others', and takes no turn of the loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from diloco.sim.virtual_time import virtual_time
from diloco.swarm.wire.deadline import within


async def answer(after_s: float) -> str:
    await asyncio.sleep(after_s)
    return "here"


def test_what_is_in_time_is_returned() -> None:
    with virtual_time() as loop:
        assert loop.run_until_complete(within(2.0, answer(1.0))) == "here"
        assert loop.run_until_complete(within(None, answer(99.0))) == "here"
        assert loop.time() == pytest.approx(100.0)


def test_what_is_late_is_cancelled_and_the_task_goes_on() -> None:
    ended = []

    async def late() -> None:
        try:
            await asyncio.sleep(5.0)
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def story() -> str:
        with pytest.raises(asyncio.TimeoutError):
            await within(2.0, late())
        return await answer(1.0)

    with virtual_time() as loop:
        assert loop.run_until_complete(story()) == "here"
        assert ended == [pytest.approx(2.0)] and loop.time() == pytest.approx(3.0)


def test_a_deadline_inside_a_deadline_ends_first() -> None:
    async def story() -> float:
        with pytest.raises(asyncio.TimeoutError):
            await within(9.0, within(1.0, answer(5.0)))
        return asyncio.get_running_loop().time()

    with virtual_time() as loop:
        assert loop.run_until_complete(story()) == pytest.approx(1.0)


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def story() -> None:
        task = asyncio.ensure_future(within(9.0, answer(5.0)))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with virtual_time() as loop:
        loop.run_until_complete(story())
        assert loop.time() == pytest.approx(1.0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
def test_a_cancellation_at_the_very_deadline_is_not_taken_for_the_deadline() -> None:
    async def story() -> None:
        task = asyncio.ensure_future(within(1.0, answer(5.0)))
        await asyncio.sleep(0)  # its timer is set
        asyncio.get_running_loop().call_at(asyncio.get_running_loop().time() + 1.0, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    with virtual_time() as loop:
        loop.run_until_complete(story())


def test_it_takes_no_turn_of_the_loop() -> None:
    """Tasks that take the same number of steps finish in the order in which they began, with a deadline or without."""
    order: list[str] = []

    async def step(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        order.append(name)

    async def story() -> None:
        await asyncio.gather(within(9.0, step("first")), step("second"), within(9.0, step("third")))

    with virtual_time() as loop:
        loop.run_until_complete(story())
    assert order == ["first", "second", "third"]
