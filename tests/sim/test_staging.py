"""Copies that run beside training change no bit of what is sent or loaded, and wait for what they
have to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from diloco.config import OuterConfig
from diloco.core.events import Apply
from diloco.core.fragment import Moving
from diloco.core.history import state_of
from diloco.messages.heads import Head
from diloco.outer.codecs import CODECS
from diloco.outer.digest import part_digests
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.local import Local, Staging, staging_of, train_on_current_stream
from diloco.outer.replica import Replica
from diloco.swarm.rpc.updates import Update
from tests.harness.fuzz.virtual import small_pieces
from tests.support.alone import Alone
from tests.support.core import ME, OTHER, D
from tests.support.coroutines import turns, until
from tests.support.loops import Direct, LastFlight, attached, made

SHAPES = {"embed": (7, 5), "narrow": (6,), "turned": (4, 5), "scale": (), "head": (5, 7)}
NUMELS = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LazyStream:
    """Work that is done in order, as late as possible: when somebody waits for a place behind it.

    Copies find what their source holds then.
    """

    def __init__(self, name: str, device: LazyDevice) -> None:
        self.name, self.device, self.done = name, device, 0
        self.work: list[Callable[[], object]] = []

    def put(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def copy_(self, to: Tensor, source: Tensor) -> None:
        self.put(lambda: to.copy_(source))

    def record(self) -> LazyPlace:
        return LazyPlace(self, len(self.work))

    def wait(self, event: LazyPlace) -> None:
        self.put(lambda: event.stream.run(event.at))

    @torch.no_grad()
    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


@dataclass
class LazyPlace:
    stream: LazyStream
    at: int

    def synchronize(self) -> None:
        self.stream.device.on_wait(self.stream.name)
        self.stream.run(self.at)


class LazyDevice:
    """A device that keeps up with nothing, made of tensors in main memory.

    Attributes:
        training: the stream in which a test puts the inner steps.
        on_wait: called with the stream's name when this process is about to wait for it.
        vectors: elements that copies on the device had, one after another.
    """

    def __init__(self) -> None:
        self.training, self.side = LazyStream("training", self), LazyStream("side", self)
        self.on_wait: Callable[[str], object] = lambda name: None
        self.vectors: list[int] = []
        pinned = lambda: torch.full((CHUNK,), torch.nan)  # noqa: E731
        self.staging = Staging(self.training, self.side, self._empty, pinned)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.vectors.append(numel)
        return torch.full((numel,), -1.0, dtype=dtype)

    def local(self, parameters: dict[str, Tensor]) -> Local:
        """Parameters as if they were on the device."""
        return Local(parameters, lambda _: self.staging)

    def finish(self) -> None:
        """Do all that was put into the streams."""
        for stream in (self.side, self.training):
            stream.run(len(stream.work))


class Case(NamedTuple):
    """One way to train."""

    seed: int = 0
    fragments: int = 2
    codec_up: str = "int8"
    error_feedback: float = 0.0
    mixing: float = 0.0
    dtype: torch.dtype = torch.float32  # of some parameters
    chunk: int = 8

    def settings(self) -> OuterConfig:
        plain = {"method": "diloco", "sync_every": 4, "overlap": 1, "momentum": 0.0}
        feedback = self.error_feedback if self.codec_up != "fp32" else 0.0
        ways = {"codec_up": self.codec_up, "codec_down": "fp32", "error_feedback": feedback}
        return OuterConfig(**plain, **ways, fragments=self.fragments, mixing=self.mixing)

    def parameters(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        made["narrow"] = made["narrow"].to(self.dtype)
        made["turned"] = made["turned"].t().contiguous().t()
        return {name: parameter.requires_grad_() for name, parameter in made.items()}

    def replica(self, local: Callable[[dict[str, Tensor]], Local]) -> Replica:
        return Replica(local(self.parameters()), partition(NUMELS, self.fragments), self.settings())


CHOICES = ([*CODECS], [0.0, 0.9, 1.0], [0.0, 0.5], DTYPES, [8, 20, CHUNK])
CASES = st.builds(Case, st.integers(0, 2**31), st.integers(1, 3), *map(st.sampled_from, CHOICES))


@torch.no_grad()
def inner_step(replica: Replica, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in replica.local.tensors.values():
        parameter.sub_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 16)


def move(replica: Replica, fragment: int, seed: int) -> None:
    """The anchor moves by what others have sent."""
    replica.keep_base(fragment)
    anchor = replica.anchors[fragment]
    anchor.add_(torch.randn(anchor.shape, generator=torch.Generator().manual_seed(seed)) / 8)


def rounds(case: Case, device: LazyDevice | None = None) -> list[Tensor]:
    """What is sent in three rounds, and what residuals and parameters are after each.

    With a device, training goes on and the anchor moves while a payload is made; on the CPU both
    come after it.
    """
    replica, found = case.replica(device.local if device else Local), list[Tensor]()
    train = device.training.put if device else lambda step: step()
    for round_ in range(3):
        train(partial(inner_step, replica, round_))
        for fragment in range(case.fragments):
            go_on = partial(inner_step, replica, 100 + round_)
            moves = partial(move, replica, fragment, round_)
            if device:
                assert replica.local.can_copy(replica.fragments[fragment])
                assert replica.copy_local(fragment)
                train(go_on)
                device.on_wait = once(moves)
            found.append(replica.capture(fragment))
            if not device:
                moves()
                train(go_on)
            assert not replica.capturing
            replica.load_local_([fragment], case.mixing)
        if device:
            device.finish()
        found += [*replica.residuals.values(), *replica.local.tensors.values()]
        found = [one.detach().clone() for one in found]
    return found


def once(work: Callable[[], None]) -> Callable[[str], None]:
    """Do it as soon as the first copy from the device is waited for."""
    left = [work]
    return lambda stream: left.pop()() if left and stream == "side" else None


@settings(max_examples=30)
@given(case=CASES)
def test_copies_beside_training_send_and_load_the_same_bits(case: Case) -> None:
    with small_pieces(chunk=case.chunk):
        pairs = zip(rounds(case, LazyDevice()), rounds(case), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_what_is_handed_to_other_ranks_is_on_the_device() -> None:
    device = LazyDevice()
    values = torch.arange(5.0)
    sent = device.staging.sent(values)
    values.zero_()
    device.finish()
    assert sent.tolist() == [0, 1, 2, 3, 4] and device.vectors == [5]


class FakeStream:
    """In place of `torch.Stream`: it says what it is asked for, and copies at once."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device, self.name, self.log = device, name, list[str]()

    def __enter__(self) -> None:
        self.log.append("copy")

    def __exit__(self, *_: object) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"after {event.of}")


class FakeEvent:
    def __init__(self, device: torch.device, blocking: bool) -> None:
        self.of = ""

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        assert self.of


def test_the_node_copies_in_the_stream_in_which_training_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 7)
    side, *streams = (FakeStream(device, name) for name in ("side", "training", "node"))
    current, made = {one.name: one for one in streams}, [side]
    here = lambda _: current[threading.current_thread().name]  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_stream", here)
    monkeypatch.setattr(torch, "Stream", lambda device: made.pop())
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr("diloco.outer.local._training", {})
    staging = staging_of.__wrapped__(device)
    staging.empty = lambda numel, dtype: torch.empty(numel, dtype=dtype)
    staging._pinned = lambda: torch.empty(CHUNK)
    parameters = {"w": torch.ones(3, requires_grad=True)}
    settings = Case(codec_up="fp32").settings()
    replica = Replica(Local(parameters, lambda _: staging), partition({"w": 3}, 1), settings)

    def in_thread(name: str, work: Callable[[], object]) -> None:
        (thread := threading.Thread(target=work, name=name)).start()
        thread.join()

    def exchange() -> None:
        assert replica.copy_local(0)
        replica.anchors[0].fill_(3.0)
        replica.capture(0)
        replica.load_local_([0])

    in_thread("node", exchange)
    assert current["node"].log == ["copy"] * 2 and side.log == ["after node", "copy"]
    in_thread("training", lambda: train_on_current_stream(device))
    in_thread("node", exchange)
    assert current["training"].log == current["node"].log == ["copy"] * 2  # a clone and a write
    assert side.log == ["after node", "copy", "after training", "copy"]
    assert parameters["w"].tolist() == [3.0] * 3
    train_on_current_stream(torch.device("cpu"))


def test_the_node_is_told_the_stream_before_each_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[torch.device]()
    monkeypatch.setattr("diloco.attach.attachment.train_on_current_stream", told.append)
    sync = attached(made(runtime=Direct(LastFlight())))
    with sync:
        told.clear()
        sync._optimizer.step()
    assert told[0] == torch.device("cpu")


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("case", [Case(mixing=0.5, dtype=torch.bfloat16), Case(chunk=CHUNK)])
def test_an_accelerator_sends_what_the_cpu_sends(case: Case) -> None:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")

    def there(parameters: dict[str, Tensor]) -> Local:
        return Local({name: values.to(device) for name, values in parameters.items()})

    with small_pieces(chunk=case.chunk):
        here, on_device = case.replica(Local), case.replica(there)
        assert on_device.local.can_copy(on_device.fragments[0])
        for version in range(3):
            payloads = []
            for replica in (here, on_device):
                inner_step(replica, version)
                assert not replica.local.can_copy(replica.fragments[0]) or replica.copy_local(0)
                payloads.append(replica.capture(0))
                inner_step(replica, 100)
            assert torch.equal(*payloads)
            for replica in (here, on_device):
                move(replica, 0, version)
                replica.load_local_([0], case.mixing)
            for name, values in here.local.tensors.items():
                assert torch.equal(values, on_device.local.tensors[name].cpu())


# -- in a node -------------------------------------------------------------------------------------


class Sending:
    """A node that sends what a device has, over which a test has power; nobody makes versions.

    Attributes:
        go_on: the thread that encodes waits for this after the first copy.
    """

    def __init__(self, node: Alone, device: LazyDevice) -> None:
        self.node, self.device, self.replica = node, device, node.replica
        self.began, self.go_on = threading.Event(), threading.Event()
        self.control = node.core.facts.control

    def wait(self, stream: str) -> None:
        self.began.set()
        assert self.go_on.wait(300)

    def learn(self, step: float) -> None:
        self.device.training.put(lambda: self.node.parameters["w"].sub_(step))

    async def send(self) -> None:
        """The exchange after a cycle."""
        for _ in range(4):
            position = await self.node.after_step(10)
        assert position.exchanged

    async def until_copied(self) -> None:
        """Until the thread that encodes has the first copy, and whoever waits for it does."""
        await until(self.began.is_set)
        await turns()

    async def until_sent(self) -> None:
        """Until all has been sent, of parameters that were one higher before an inner step."""
        await until(lambda: ME in self.control.pool)
        assert self.control.pool[ME].payload.view(torch.float32).tolist() == [1.0] * 6

    def moves(self, target: Tensor) -> Apply:
        """Another peer's version, to which the anchor is about to move."""
        tip = self.control.tip
        update = torch.empty(self.replica.updates[0].nbytes, dtype=torch.uint8)
        self.replica.down.encode_update(target, self.replica.anchors[0], update)
        book = replace(tip.book, recent=(tip.head.id,))
        made = state_of(book, part_digests(target))
        head = Head(0, 1, tip.head.id, OTHER, OTHER, (), 1, 10, D, made)
        self.control.inbox.moving = Moving(head, book, update, OTHER)
        return Apply(0, head, book, Update.of(update), 1e9, 0)


@asynccontextmanager
async def sends(**outer: Any) -> AsyncIterator[Sending]:
    """A node that has learned something; it closes well."""
    device = LazyDevice()
    with small_pieces(chunk=2):
        node = await Alone.made(local=device.local, **{"sync_every": 4, "overlap": 1, **outer})
        await node.begin()
        node.core.facts.shun(ME, 1e9)
        sending = Sending(node, device)
        sending.learn(1.0)
        device.on_wait = sending.wait
        device.vectors.clear()
        yield sending
        assert await node.context.tasks.close(60.0) == []
        assert not node.replica.capturing and not node.context.locks[0]._readers


async def test_training_goes_on_while_the_payload_is_made() -> None:
    """And the anchor stays."""
    async with sends() as sending:
        await sending.send()
        assert sending.replica.capturing and sending.device.vectors == [6]
        sending.learn(41.0)
        target = torch.full((6,), 3.0)
        moving = asyncio.create_task(sending.node.anchors.apply(sending.moves(target)))
        await sending.until_copied()
        assert sending.node.context.locks[0]._readers == 1
        assert sending.control.tip.head.number == 0 and not sending.control.pool
        sending.go_on.set()
        await moving
        await sending.until_sent()
        assert torch.equal(sending.replica.anchors[0], target) and not sending.replica.capturing


async def test_a_node_that_is_closed_while_a_payload_is_made_leaves_nothing() -> None:
    async with sends() as sending:
        await sending.send()
        closing = asyncio.create_task(sending.node.context.tasks.close(60.0))
        await sending.until_copied()
        assert not closing.done(), "the thread still reads the copy"
        sending.go_on.set()
        assert await closing == [] and not sending.control.pool


async def test_without_memory_for_a_copy_training_waits() -> None:
    """Until the payload is made."""

    def no_memory(numel: int, dtype: torch.dtype) -> Tensor:
        raise torch.OutOfMemoryError

    async with sends() as sending:
        sending.device.staging.empty = no_memory
        going = asyncio.create_task(sending.send())
        await sending.until_copied()
        assert not going.done()
        sending.go_on.set()
        await going
        sending.learn(41.0)
        await sending.until_sent()


async def test_a_checkpoint_has_the_residual_of_a_whole_payload() -> None:
    async with sends(codec_up="fp16", error_feedback=1.0) as sending:
        sending.learn(2.0**-20)  # is lost
        await sending.send()
        saving = asyncio.create_task(sending.node.anchors.snapshot(copies=True))
        # nothing else waits there before the payload is made
        await until(lambda: sending.node.context.tasks._waiting)
        sending.go_on.set()
        saved = await saving
        assert saved.residuals[0].tolist() == [2.0**-20] * 6
