"""Batches made before their turn: the same ones, from the same units, with the same position, and
no thread is left."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco import data
from diloco.attach.ranks import RankGroup
from diloco.config import compose
from diloco.data.numbered import NumberedStream
from diloco.data.prefetch import AHEAD, Prefetched
from diloco.errors import DataError
from diloco.ranges import NONE, difference, union
from diloco.swarm.node.leases import LeasedData
from diloco.train.run import _stream
from tests.support.data import config, hub_directory, numbered, rows_of

PATIENCE_S = 120


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "diloco-data"]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return data.load(config("hub", name=str(hub_directory(tmp_path_factory.mktemp("hub")))), seed=3)


@pytest.mark.parametrize("kind", ["numbered", "hub", "hub rows"])
def test_batches_and_positions_are_those_of_the_stream(kind: str, streamed: Any) -> None:
    """So a run goes on with the next sequence, and not behind what was made."""

    def make() -> Any:
        if kind == "numbered":
            return NumberedStream(numbered(17), 3, 5, 1, 3)
        given = {"shard": 0, "shards": 2} if kind == "hub" else {"rows": (1, 2)}
        return streamed.batches(2, **given)

    plain = make()
    with closing(Prefetched(make())) as stream, closing(Prefetched(make())) as resumed:
        assert stream.state() == plain.state()
        for _ in range(12):
            assert torch.equal(next(stream), next(plain))
            # Which lengths of files are known is no part of a position.
            assert {**stream.state(), "lengths": []} == {**plain.state(), "lengths": []}
        wait_for(lambda: ready(stream) == AHEAD)
        resumed.restore(json.loads(json.dumps(stream.state())))
        assert rows_of(resumed, 9) == rows_of(stream, 9) == rows_of(plain, 9)


def ready(stream: Prefetched) -> int:
    """How many batches are made and wait."""
    return sum(batch.done() for batch in stream._foreseen.values())


def wait_for(condition: Any) -> None:
    tick, patience = threading.Event(), PATIENCE_S * 100
    while not condition() and (patience := patience - 1):
        tick.wait(0.01)
    assert condition()


class Recorded:
    """A stream of batch numbers that notes what is made, and may be made to wait or to fail."""

    def __init__(self, fails_at: int = 99, waits_at: int = 99) -> None:
        self.planned, self.made = 0, list[int]()
        self.fails_at, self.waits_at, self.may_go_on = fails_at, waits_at, threading.Event()

    def plan(self) -> int:
        self.planned += 1
        return self.planned

    def ahead(self, batches: int) -> list[int]:
        return [self.planned + 1 + batch for batch in range(batches)]

    def make(self, plan: int) -> Tensor:
        self.made.append(plan)
        if plan == self.waits_at:
            self.may_go_on.wait(PATIENCE_S)
        if plan == self.fails_at:
            raise DataError(f"no batch {plan}")
        return torch.full((1, 2), plan)

    def state(self) -> dict[str, Any]:
        return {"planned": self.planned}


def test_an_error_is_raised_when_its_batch_is_due() -> None:
    with closing(Prefetched(Recorded(fails_at=3))) as stream:
        assert int(next(stream)[0, 0]) == 1
        wait_for(lambda: ready(stream) == AHEAD)
        assert int(next(stream)[0, 0]) == 2
        with pytest.raises(DataError, match=r"^no batch 3$"):
            next(stream)


def test_closing_does_not_wait_for_what_nobody_will_train_on() -> None:
    source = Recorded(waits_at=2)
    stream = Prefetched(source, depth=4)
    next(stream)
    wait_for(lambda: source.made == [1, 2])
    closing_ = threading.Thread(target=stream.close)
    closing_.start()
    wait_for(lambda: stream._worker is None)
    source.may_go_on.set()
    closing_.join()
    stream.close()
    assert source.made == [1, 2]
    assert int(next(stream)[0, 0]) == 2
    stream.close()


def test_for_a_gpu_batches_lie_in_pinned_memory_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(Tensor, "pin_memory", lambda batch: batch + 1000)
    with closing(Prefetched(Recorded(), torch.device("cuda:1"))) as stream:
        assert [int(next(stream)[0, 0]) for _ in range(3)] == [1001, 1002, 1003]
    assert devices == [torch.device("cuda:1")]
    with closing(Prefetched(Recorded(), torch.device("cpu"))) as stream:
        assert int(next(stream)[0, 0]) == 1


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), shards=st.sampled_from([1, 2]))
@example(sizes=[1, 2, 4, 1], shards=1)
@example(sizes=[4, 3, 2, 1], shards=1)
@settings(max_examples=30)
def test_all_ranks_have_the_batch_of_one_process(sizes: list[int], shards: int) -> None:
    array, batch = numbered(29), math.lcm(*sizes)
    whole = NumberedStream(array, batch, 5, 0, shards)
    for size in sizes:
        ranks = [NumberedStream(array, batch, 5, 0, shards, (rank, size)) for rank in range(size)]
        for rank in ranks:
            rank.restore(whole.state())
        for _ in range(2):
            one, parts = next(whole), [next(rank) for rank in ranks]
            for rank, part in enumerate(parts):
                assert torch.equal(part, one[rank::size])
            assert all(rank.state() == whole.state() for rank in ranks)


def leased(data_: LeasedData, size: int = 4) -> Prefetched:
    return Prefetched(NumberedStream(numbered(500), size, 0, 7, 1, leases=data_), depth=3)


KINDS = st.sampled_from(["grant", "train", "train", "trained"])


@given(st.lists(st.tuples(KINDS, st.integers(0, 40), st.integers(1, 9)), max_size=25))
@settings(max_examples=30)
def test_with_any_grants_the_batches_are_those_made_in_turn(steps: list[Any]) -> None:
    both, granted = (LeasedData(), LeasedData()), NONE
    with closing(leased(both[0])) as ahead:
        plain = NumberedStream(numbered(500), 4, 0, 7, 1, leases=both[1])
        for what, start, size in steps:
            match what:
                case "grant":
                    granted = union(granted, ((start, start + size),))
                    for units in both:
                        units.set_queue(granted)
                case "train":
                    assert torch.equal(next(ahead), next(plain))
                case "trained":
                    one, other = (units.trained() for units in both)
                    assert one == other
                    granted = difference(granted, one)
            assert both[0].ahead(1000) == both[1].ahead(1000)
            assert ahead.state() == plain.state()


def test_a_run_whose_data_is_cut_leases_no_units() -> None:
    asked, ranks = (
        Mock(),
        RankGroup(torch.device("cpu"), 0, 2),
    )
    _stream(compose(["experiment=smoke", "data.shard=7", "data.shards=9"]), asked, ranks, asked)
    assert asked.method_calls == [call.batches(ANY, shard=7, shards=9, rows=(0, 2))]
