"""Virtual time: jumps, order, deadlocks, owners, and threads in lockstep with it."""

import asyncio
import os
import signal
import threading
from asyncio import sleep
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.sim.lockstep import Killed, Lockstep
from diloco.sim.virtual_time import (
    POLL_EVERY,
    RESOLUTION_S,
    DeadlockError,
    VirtualLoop,
    virtual_time,
)


def starts(loop: VirtualLoop, owner: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task of this owner."""
    with loop.owned_by(owner):
        return loop.create_task(work)


async def at_times(loop: VirtualLoop, *happenings: tuple[float, Callable[[], object]]) -> None:
    """Let each happen at its second of the simulation; ends a while after the last."""
    for second, happens in happenings:
        loop.at(second, happens)
    await sleep(happenings[-1][0] + 100.0 - loop.seconds)


@given(st.lists(st.floats(0, 1e8), max_size=20))
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        await sleep(delay)
        woken.append((delay, asyncio.get_running_loop().time()))

    async def all_of_them() -> None:
        await asyncio.gather(*map(sleeper, delays))

    with virtual_time() as loop:
        loop.run_until_complete(all_of_them())
    assert [delay for delay, _ in woken] == pytest.approx(sorted(delays), abs=2 * RESOLUTION_S)
    assert all(at == pytest.approx(delay, abs=2 * RESOLUTION_S) for delay, at in woken)


def test_a_deadlock_names_who_waits(loop: VirtualLoop) -> None:
    async def waits_for_nobody() -> None:
        await sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"at 2.500 s .*waits_for_nobody"):
        loop.run_until_complete(waits_for_nobody())


async def test_an_owner_is_killed_with_all_that_it_started(loop: VirtualLoop) -> None:
    ended: list[str] = []

    async def lives(name: str) -> None:
        try:
            await sleep(10)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            ended.append(f"{name} killed")
            raise

    async def parent(name: str) -> None:
        child = asyncio.ensure_future(lives(f"child of {name}"))
        await sleep(0)
        await asyncio.gather(lives(name), child)

    tasks = [starts(loop, owner, parent(owner)) for owner in ("a", "b")]
    await at_times(loop, (1, lambda: loop.kill("a")))
    assert all(task.done() for task in tasks)
    assert sorted(ended) == ["a killed", "b done", "child of a killed", "child of b done"]


@pytest.mark.parametrize("busy", [True, False])
async def test_signals_still_come_in(loop: VirtualLoop, busy: bool) -> None:
    came, turns = asyncio.Event(), 0
    loop.add_signal_handler(signal.SIGUSR1, came.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    while busy and not came.is_set():
        turns += 1
        await sleep(0)
    await came.wait()
    loop.remove_signal_handler(signal.SIGUSR1)
    assert turns < 2 * POLL_EVERY


async def test_work_of_a_thread_is_done_here(loop: VirtualLoop) -> None:
    assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
    assert loop.time() == 0.0
    with pytest.raises(ValueError, match="invalid literal"):
        await asyncio.to_thread(int, "x")
    loop.executor_s = partial(next, iter([2.0, 1.0]))
    assert await asyncio.to_thread(lambda: loop.seconds) == pytest.approx(2.0)
    assert loop.seconds == pytest.approx(3.0)


async def test_what_waited_for_a_frozen_owner_runs_in_its_order(loop: VirtualLoop) -> None:
    said: list[tuple[str, float]] = []
    loop.executor_s = lambda: 1.0

    async def says(name: str, at: float) -> None:
        await sleep(at)
        await sleep(0)
        said.append((name, round(loop.seconds, 3)))

    starts(loop, "a", asyncio.to_thread(lambda: said.append(("thread", round(loop.seconds, 3)))))
    for name, second in (("a3", 3.0), ("a1", 1.0), ("a2", 2.0), ("a6", 6.0), ("b2", 2.0)):
        starts(loop, name[0], says(name, second))
    await at_times(loop, (0.5, lambda: loop.freeze("a")), (5.0, lambda: loop.thaw("a")))
    late = [(name, 5.0) for name in ("thread", "a1", "a2", "a3")]
    assert said == [("b2", 2.0), *late, ("a6", 6.0)]


async def test_an_owner_reads_and_sleeps_by_its_own_clock(loop: VirtualLoop) -> None:
    """What the simulation does at a second knows no owner's clock."""
    seen: dict[str | None, tuple[float, float]] = {}

    def look() -> None:
        seen[loop.owner] = loop.seconds, loop.time()

    async def sleeps() -> None:
        loop.at(7.0, look)
        await sleep(10.0)
        look()

    loop.set_clock("fast", 2.0, 1000.0)
    for name in ("fast", "true"):
        starts(loop, name, sleeps())
    await at_times(loop, (20.0, lambda: None))
    expected = {"fast": (5.0, 1010.0), None: (7.0, 7.0), "true": (10.0, 10.0)}
    assert seen == {owner: pytest.approx(times) for owner, times in expected.items()}
    assert loop.time() == loop.seconds


async def test_a_killed_thread_unwinds_and_gets_nothing_more(loop: VirtualLoop) -> None:
    seen: list[str] = []

    def trainer() -> None:
        for what in ("killed", "and again"):
            with pytest.raises(Killed):
                step.call(sleep(100))
            seen.append(what)
        raise Killed

    step = Lockstep(trainer, "one")
    task = asyncio.ensure_future(step.run())
    await sleep(5)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and seen == ["killed", "and again"]
    assert loop.time() == pytest.approx(5)
    assert not any(thread.name == "one" for thread in threading.enumerate())
