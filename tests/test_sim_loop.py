"""Virtual time: jumps, order, deadlocks, owners, and threads in lockstep with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.sim.lockstep import Killed, Lockstep
from diloco.sim.virtual_time import RESOLUTION_S, DeadlockError, VirtualLoop, virtual_time


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with virtual_time() as made:
        yield made


def test_a_year_passes_at_once(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(365 * 86400))
    assert loop.time() == pytest.approx(365 * 86400)


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((delay, asyncio.get_running_loop().time()))

    async def all_of_them() -> None:
        await asyncio.gather(*map(sleeper, delays))

    with virtual_time() as loop:
        loop.run_until_complete(all_of_them())
    assert [delay for delay, _ in woken] == pytest.approx(sorted(delays), abs=2 * RESOLUTION_S)
    assert all(at == pytest.approx(delay, abs=2 * RESOLUTION_S) for delay, at in woken)


def test_time_limits_are_virtual(loop: VirtualLoop) -> None:
    async def waits() -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1000)
        return asyncio.get_running_loop().time()

    assert loop.run_until_complete(waits()) == pytest.approx(1000)


def test_work_of_a_thread_is_done_here_and_in_no_time(loop: VirtualLoop) -> None:
    async def asks() -> tuple[int, int, float]:
        there = await asyncio.to_thread(threading.get_ident)
        return there, threading.get_ident(), asyncio.get_running_loop().time()

    there, here, at = loop.run_until_complete(asks())
    assert (there, at) == (here, 0.0)

    async def fails() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        loop.run_until_complete(fails())


def test_a_deadlock_names_who_waits(loop: VirtualLoop) -> None:
    async def waits_for_nobody() -> None:
        await asyncio.sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"at 2.500 s .*waits_for_nobody"):
        loop.run_until_complete(waits_for_nobody())


def test_sets_of_tasks_have_the_order_of_their_making(loop: VirtualLoop) -> None:
    async def ordered() -> bool:
        tasks = [asyncio.ensure_future(asyncio.sleep(0)) for _ in range(50)]
        numbers = [hash(task) for task in tasks]
        await asyncio.wait(set(tasks))
        return numbers == sorted(numbers) and numbers[-1] - numbers[0] == 49

    assert loop.run_until_complete(ordered())


def test_an_owner_is_killed_with_all_that_it_started(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def lives(name: str) -> None:
        try:
            await asyncio.sleep(10)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            ended.append(f"{name} killed")
            raise

    async def parent(name: str) -> None:
        child = asyncio.ensure_future(lives(f"child of {name}"))
        await asyncio.sleep(0)
        await asyncio.gather(lives(name), child)

    async def story() -> None:
        tasks = []
        for owner in ("a", "b"):
            with loop.owned_by(owner):
                tasks.append(loop.create_task(parent(owner)))
        await asyncio.sleep(1)
        loop.kill("a")
        await asyncio.wait(tasks)

    loop.run_until_complete(story())
    assert sorted(ended) == ["a killed", "b done", "child of a killed", "child of b done"]


# -- lockstep ---------------------------------------------------------------------------------------------------------


def test_threads_take_turns_in_virtual_time(loop: VirtualLoop) -> None:
    said: list[tuple[str, float]] = []

    def trainer(name: str, step_s: float) -> str:
        for _ in range(3):
            steps[name].call(asyncio.sleep(step_s))
            said.append((name, loop.time()))
        return name.upper()

    steps = {
        name: Lockstep(lambda name=name, step_s=step_s: trainer(name, step_s), name)
        for name, step_s in {"slow": 3.0, "fast": 1.0}.items()
    }

    async def both() -> list[str]:
        return list(await asyncio.gather(*(step.run() for step in steps.values())))

    assert loop.run_until_complete(both()) == ["SLOW", "FAST"]
    assert said[:2] == [("fast", 1.0), ("fast", 2.0)]
    assert sorted(said[2:4]) == [("fast", 3.0), ("slow", 3.0)]
    assert said[4:] == [("slow", 6.0), ("slow", 9.0)]


def test_errors_cross_between_thread_and_loop(loop: VirtualLoop) -> None:
    async def fails() -> None:
        raise ValueError("in the loop")

    def trainer() -> None:
        with pytest.raises(ValueError, match="in the loop"):
            step.call(fails())
        raise KeyError("in the thread")

    step = Lockstep(trainer, "one")
    with pytest.raises(KeyError, match="in the thread"):
        loop.run_until_complete(step.run())


def test_a_killed_thread_unwinds_and_gets_nothing_more(loop: VirtualLoop) -> None:
    seen: list[str] = []

    def trainer() -> None:
        try:
            step.call(asyncio.sleep(100))
        except Killed:
            seen.append("killed")
            with pytest.raises(Killed):
                step.call(asyncio.sleep(1))
            seen.append("and again")
            raise

    step = Lockstep(trainer, "one")

    async def story() -> None:
        task = asyncio.ensure_future(step.run())
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    loop.run_until_complete(story())
    assert seen == ["killed", "and again"]
    assert loop.time() == pytest.approx(5)
    assert not any(thread.name == "one" for thread in threading.enumerate())
