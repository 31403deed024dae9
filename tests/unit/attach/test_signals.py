"""A signal ends a peer as it ends the program, but after a goodbye."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from diloco import signals
from diloco.attach.swarm import Swarm
from diloco.signals import watch
from tests.support.loops import Direct, LastFlight


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    # nohup ignores one of them
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    interrupt = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == interrupt and not signals._watchers
    left = [signal.signal(number, handler) for number, handler in zip(numbers, before, strict=True)]
    assert left[1:] == [signal.SIG_DFL] * 2


@pytest.fixture
def ended(monkeypatch: MonkeyPatch) -> list[int]:
    """With what the process would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr("diloco.signals.os._exit", codes.append)
    return codes


def test_a_second_signal_of_its_kind_ends_at_once(ended: list[int], monkeypatch: Any) -> None:
    """Schedulers send the same one twice, and another before it."""
    heard: list[int] = []
    now = 0.0
    monkeypatch.setattr("diloco.signals.time.monotonic", lambda: now)
    end = watch(heard.append, over=(signal.SIGINT,))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert heard == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT] and not ended
    now = 3.0
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert ended == [143, 5]
    end()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_program_stays() -> None:
    """One that is there, one that comes later, and one over which a trainer's peer listens, which
    comes first."""
    heard: list[str] = []

    def own(number: int, frame: object) -> None:
        heard.append("own")

    def told(number: int) -> None:
        heard.append("told")

    signal.signal(signal.SIGTERM, own)
    end = watch(told)
    signal.raise_signal(signal.SIGTERM)
    end()
    end = watch(told, over=(signal.SIGTERM,))
    signal.raise_signal(signal.SIGTERM)
    end()
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["own", "own", "told", "own"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end = watch(told)
    signal.signal(signal.SIGTERM, own)
    end()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(told, over=(signal.SIGTERM,))()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_other_threads_and_processes_hear_nothing() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        end = watch(lambda number: None)
        found.append(signal.getsignal(signal.SIGTERM))
        end()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
    end = watch(lambda number: None)
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    end()


class Loop:
    """A program around a swarm that is none."""

    def __init__(self, directory: Path, monkeypatch: MonkeyPatch) -> None:
        self.node = LastFlight()
        monkeypatch.setattr("diloco.attach.swarm.EventLoopThread", lambda: Direct(self.node))
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.swarm = Swarm(run_id="run", sync_every=4, identity=directory / "key", quiet=True)

    def attach(self, **settings: Any) -> Any:
        return self.swarm.attach(self.model, self.optimizer, **settings)

    def step(self) -> None:
        self.model(torch.ones(2)).sum().backward()
        self.optimizer.step()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_loop_ends_with_a_goodbye(number: int, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """After the step under way or the next one, where its block ends, and while it waits for
    others; never in the middle of the program's own code."""
    loop = Loop(tmp_path, monkeypatch)
    for steps in (0, 1):
        reached = list[str]()
        with pytest.raises(SystemExit) as caught, loop.swarm, loop.attach():
            signal.raise_signal(number)
            reached.append("own code")
            for _ in range(steps):
                loop.step()
                reached.append("another step")
        assert caught.value.code == 128 + number and reached == ["own code"]
        assert loop.node.said.index("leave") < loop.node.said.index("close")

    loop = Loop(tmp_path, monkeypatch)
    stepped = loop.model.weight.detach().clone()

    def in_step(*_: Any) -> None:
        signal.raise_signal(number)

    loop.optimizer.register_step_pre_hook(in_step)
    with pytest.raises(SystemExit):
        loop.attach().open()
        loop.step()
    assert "leave" in loop.node.said and not torch.equal(loop.model.weight, stepped)

    loop = Loop(tmp_path, monkeypatch)

    async def begin(*_: Any) -> None:
        signal.raise_signal(number)

    loop.node.begin = begin  # type: ignore[assignment, method-assign]
    with pytest.raises(SystemExit), loop.swarm, loop.attach():
        pytest.fail("it trains")
    assert "leave" in loop.node.said


def test_a_signal_leaves_a_checkpoint_of_the_last_exchange(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    loop, saved = Loop(tmp_path, monkeypatch), []
    save = lambda self, sync, run, state: saved.append(state)  # noqa: E731
    monkeypatch.setattr("diloco.attach.saved.LoopCheckpoints.save", save)
    for by_hand in (True, False):
        with pytest.raises(SystemExit), loop.swarm, loop.attach(checkpoints=tmp_path) as sync:
            if by_hand:
                loop.swarm.save(seen=3)
            else:
                sync.version += 1
            signal.raise_signal(signal.SIGTERM)
    assert saved == [{"seen": 3}, {"seen": 3}]
