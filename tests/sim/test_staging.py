"""Copies that run beside training change no bit of what is sent or loaded, and wait for what they have to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.local import Local
from diloco.outer.lossy import LOSSY
from diloco.outer.replica import Replica
from diloco.outer.staging import staging_of, train_on_current_stream
from diloco.protocol.fragment import Lease
from diloco.protocol.messages.bulk import Contribution
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.contribution import Answered
from diloco.swarm.node.runtime import NodeThread
from diloco.testing.fuzz.crowd import small_pieces
from diloco.train.island import Island
from diloco.train.swarm_link import SwarmLink
from tests.support.stub_device import LazyDevice
from tests.support.stub_host import OTHER, StubHost, run

SHAPES = {"embed": (7, 5), "narrow": (6,), "turned": (4, 5), "scale": (), "head": (5, 7)}
NUMELS = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        return OuterConfig(
            method="diloco", sync_every=4, fragments=self.fragments, codec_up=self.codec_up, codec_down="fp32",
            momentum=0.0, error_feedback=self.error_feedback if self.codec_up != "fp32" else 0.0, overlap=1,
            mixing=self.mixing,
        )  # fmt: skip

    def parameters(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        made["narrow"], made["turned"] = made["narrow"].to(self.dtype), made["turned"].t().contiguous().t()
        return {name: parameter.requires_grad_() for name, parameter in made.items()}

    def replica(self, local: Callable[[dict[str, Tensor]], Local]) -> Replica:
        return Replica(local(self.parameters()), partition(NUMELS, self.fragments), self.settings())


CASES = st.builds(
    Case, st.integers(0, 2**31), st.integers(1, 3), st.sampled_from([*CODECS, *LOSSY]),
    st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.5]), st.sampled_from(DTYPES),
    st.sampled_from([8, 20, CHUNK]),
)  # fmt: skip


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
    """What is sent in three rounds, and what residuals and parameters are after each; without a device, on the CPU.

    With one, training goes on and the anchor moves while a payload is made; without, both come after it.
    """
    replica, found = case.replica(Local if device is None else device.local), list[Tensor]()
    train = (lambda step: step()) if device is None else device.training.put
    for round_ in range(3):
        train(partial(inner_step, replica, round_))
        for fragment in range(case.fragments):
            go_on = partial(inner_step, replica, 100 + round_)
            moves = partial(move, replica, fragment, round_)
            if device is None:
                replica.capture(fragment)
                moves()
            else:
                assert (
                    replica.local.can_copy(replica.fragments[fragment])
                    and replica.copy_local(fragment)
                    and replica.is_taken(fragment)
                )
                train(go_on)
                device.on_wait = once(moves)
                replica.capture(fragment)
            found.append(replica.captured(fragment))
            if device is None:
                train(go_on)
            replica.release_capture(fragment)
            assert not replica.is_taken(fragment) and not replica.capturing
            replica.load_local_([fragment], case.mixing)
        if device is not None:
            device.finish()
        found += [*replica.residuals.values(), *replica.local.tensors.values()]
        found = [one.detach().clone() for one in found]
    return found


def once(work: Callable[[], None]) -> Callable[[str], None]:
    """Do it as soon as the first copy from the device is waited for."""
    left = [work]
    return lambda stream: left.pop()() if left and stream == "side" else None


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@settings(max_examples=30)
@given(case=CASES)
def test_copies_beside_training_send_and_load_the_same_bits(case: Case) -> None:
    with small_pieces(chunk=case.chunk):
        assert equal(rounds(case, LazyDevice()), rounds(case))


def test_what_is_handed_to_other_ranks_is_on_the_device() -> None:
    device = LazyDevice()
    values = torch.arange(5.0)
    sent = device.staging.sent(values)
    values.zero_()
    device.finish()
    assert sent.tolist() == [0, 1, 2, 3, 4] and device.vectors == [5]


class FakeStream:
    """In place of `torch.Stream`, where there is none: it says what it is asked for, and copies at once."""

    def __init__(self, device: torch.device, name: str = "side") -> None:
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


def test_the_node_copies_in_the_stream_in_which_training_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device, sides = torch.device("cuda", 7), list[FakeStream]()
    current = {name: FakeStream(device, name) for name in ("training", "node")}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[threading.current_thread().name])
    monkeypatch.setattr(torch, "Stream", lambda device: sides.append(FakeStream(device)) or sides[-1])
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr("diloco.outer.staging._training", {})
    monkeypatch.setattr("diloco.outer.staging._buffer", lambda pinned: torch.empty(CHUNK))
    staging = staging_of.__wrapped__(device)
    staging.empty = lambda numel, dtype: torch.empty(numel, dtype=dtype)
    parameters = {"w": torch.ones(3, requires_grad=True)}
    replica = Replica(Local(parameters, lambda _: staging), partition({"w": 3}, 1), Case(codec_up="fp32").settings())

    def in_thread(name: str, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()

    def exchange() -> None:
        assert replica.copy_local(0)
        replica.anchors[0].fill_(3.0)
        replica.capture(0)
        replica.release_capture(0)
        replica.load_local_([0])

    in_thread("node", exchange)
    assert current["node"].log == ["copy"] * 2 and sides[0].log == ["after node", "copy"]
    in_thread("training", lambda: train_on_current_stream(torch.device("cuda", 7)))
    in_thread("node", exchange)
    assert current["training"].log == current["node"].log == ["copy"] * 2, "a clone and a write in each"
    assert sides[0].log == ["after node", "copy", "after training", "copy"] and len(sides) == 1
    assert parameters["w"].tolist() == [3.0] * 3
    train_on_current_stream(torch.device("cpu"))


def test_the_node_is_told_the_stream_before_each_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[torch.device]()
    monkeypatch.setattr("diloco.train.swarm_link.train_on_current_stream", told.append)
    link = SwarmLink(Island(torch.device("cpu")), NodeThread(), PhaseTimer())
    link.share({"w": torch.zeros(2, device="meta"), "v": torch.zeros(3, device="meta")}, ())
    assert link.move(lambda node: node.load_anchors()) is None and told == [torch.device("meta")]
    link.show_anchors()
    assert len(told) == 2


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("case", [Case(), Case(mixing=0.5, dtype=torch.bfloat16), Case(chunk=CHUNK)])
def test_an_accelerator_sends_what_the_cpu_sends(case: Case) -> None:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")

    def there(parameters: dict[str, Tensor]) -> Local:
        return Local({name: values.to(device) for name, values in parameters.items()})

    with small_pieces(chunk=case.chunk):
        here, on_device = case.replica(Local), case.replica(there)
        assert on_device.local.can_copy(on_device.fragments[0])
        for version in range(3):
            for replica in (here, on_device):
                inner_step(replica, version)
                assert not replica.local.can_copy(replica.fragments[0]) or replica.copy_local(0)
                replica.capture(0)
                inner_step(replica, 100)
            assert torch.equal(here.captured(0), on_device.captured(0))
            for replica in (here, on_device):
                move(replica, 0, version)
                replica.release_capture(0)
                replica.load_local_([0], case.mixing)
            for name, values in here.local.tensors.items():
                assert torch.equal(values, on_device.local.tensors[name].cpu())


# -- in a node --------------------------------------------------------------------------------------------------------


class Sending:
    """A node that sends what a device has, over which a test has power; `OTHER` is the syncer and never answers.

    Attributes:
        sent: the payloads that it got. go_on: the thread that encodes waits for this after the first copy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **outer: Any) -> None:
        self.device, self.sent = LazyDevice(), list[Tensor]()
        with small_pieces(chunk=2):
            self.host = StubHost(OTHER, device=self.device, **{"sync_every": 4, "overlap": 1, **outer})
        self.replica, self.rounds = self.host.replica, self.host.rounds
        self.began, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr("diloco.swarm.node.rounds.contribute", self._contribute)

    async def _contribute(self, context: Context, lease: Lease, header: Contribution) -> Answered:
        self.sent.append(self.replica.captured(lease.fragment).view(torch.float32).clone())
        self.host.context.tasks.notify()
        await asyncio.sleep(3600)
        raise AssertionError

    def wait(self, stream: str) -> None:
        self.began.set()
        assert self.go_on.wait(300)

    def learn(self, step: float) -> None:
        self.device.training.put(lambda: self.host.parameters["w"].sub_(step))

    async def send(self, *fragments: int) -> None:
        await self.rounds.send(dict.fromkeys(fragments or (0,), (1, 10)))

    async def until_copied(self) -> None:
        """Until the thread that encodes has the first copy."""
        while not self.began.is_set():
            await asyncio.sleep(0)

    async def until_sent(self) -> None:
        """Until all has been sent, of parameters that were one higher before an inner step."""
        await self.host.context.tasks.until(lambda: sum(map(len, self.sent)) == 6)
        assert torch.cat(self.sent).tolist() == [1.0] * 6


def sends(**outer: Any) -> Callable[[Callable[[Sending], Awaitable[None]]], Callable[[pytest.MonkeyPatch], None]]:
    """Makes a test of what happens to a node that has learned something, and ends its exchange."""

    def test_of(happens: Callable[[Sending], Awaitable[None]]) -> Callable[[pytest.MonkeyPatch], None]:
        async def scene(monkeypatch: pytest.MonkeyPatch) -> None:
            sending = Sending(monkeypatch, **outer)
            await sending.host.anchors.load()
            sending.learn(1.0)
            sending.device.on_wait = sending.wait
            await happens(sending)
            await sending.rounds.cancel()
            assert not sending.replica.is_taken(0)

        return lambda monkeypatch: run(lambda: scene(monkeypatch))

    return test_of


@sends()
async def test_training_goes_on_while_the_payload_is_made(sending: Sending) -> None:
    """And the anchor stays."""
    host = sending.host
    await sending.send()
    assert sending.replica.capturing and sending.device.vectors == [6]
    sending.learn(41.0)
    target = torch.full((6,), 3.0)
    moving = asyncio.create_task(host.anchors.adopt_record(host.record(1, target)))
    await sending.until_copied()
    assert host.context.locks[0]._readers == 1 and host.protocol.versions == [0] and not sending.sent
    sending.go_on.set()
    await moving
    await sending.until_sent()
    assert torch.equal(host.replica.anchors[0], target) and not host.replica.capturing


@sends()
async def test_a_cancelled_exchange_leaves_nothing(sending: Sending) -> None:
    """It is cancelled while its payload is made."""
    await sending.send()
    cancelling = asyncio.create_task(sending.rounds.cancel())
    await sending.until_copied()
    assert not cancelling.done(), "the thread still reads the copy"
    sending.go_on.set()
    await cancelling
    assert not sending.sent and not sending.replica.is_taken(0) and sending.rounds.flying == []
    async with sending.host.context.locks[0].writing():
        pass
    await sending.send()
    await sending.until_sent()


@sends()
async def test_without_memory_for_a_copy_training_waits(sending: Sending) -> None:
    """Until the payload is made."""

    def no_memory(numel: int, dtype: torch.dtype) -> Tensor:
        raise torch.OutOfMemoryError

    sending.device.staging.empty = no_memory
    going = asyncio.create_task(sending.send())
    await sending.until_copied()
    assert not going.done()
    sending.go_on.set()
    await going
    sending.learn(41.0)
    await sending.until_sent()


@sends(codec_up="fp16", error_feedback=1.0)
async def test_a_checkpoint_has_the_residual_of_a_whole_payload(sending: Sending) -> None:
    sending.learn(2.0**-20)  # is lost
    await sending.send()
    saving = asyncio.create_task(sending.host.anchors.snapshot(copies=True))
    while not sending.host.context.tasks._waiting:  # nothing else waits there before the payload is made
        await asyncio.sleep(0)
    sending.go_on.set()
    saved = await saving
    assert saved.residuals[0].tolist() == [2.0**-20] * 6
