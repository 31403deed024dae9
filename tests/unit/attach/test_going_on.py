"""Where data go on after a restart."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from diloco.attach.swarm import Swarm
from tests.support.loops import Direct, LastFlight, made


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


Session = Callable[..., list[int]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """The rows that a peer reads in one session after another, of 40 with so many in each."""

    def play(data: Any, count: int, workers: int = 0, **part: int) -> list[int]:
        swarm = made(identity=tmp_path / "identity.key", quiet=True)
        loader = DataLoader(swarm.shard(data, **part), batch_size=4, num_workers=workers)
        rows: list[int] = []
        for batch in loader:
            rows += batch.tolist()
            if len(rows) == count:
                break
        swarm._note()
        return rows

    return play


@pytest.mark.parametrize("part", [{}, {"index": 0, "of": 1}], ids=["an order of its own", "part"])
@pytest.mark.parametrize("data", [list(range(40)), Stream()], ids=["rows", "stream"])
def test_the_next_session_goes_on_behind_the_rows_that_were_read(
    session: Session, data: Any, part: dict[str, int]
) -> None:
    first, second = session(data, 16, **part), session(data, 16, **part)
    assert sorted(first + second + session(data, 8, **part)) == list(range(40))
    whole = session(data, 40, **part)
    assert sorted(whole) == list(range(40)) and whole[:16] == first, "another pass"
    assert session(data, 40, **part) == whole, "after a whole pass it begins again"


def test_rows_that_workers_of_a_loader_read_count(session: Session) -> None:
    first = session(list(range(40)), 40, workers=1)
    assert session(list(range(40)), 4) == first[:4]
    assert session(list(range(40)), 4) == first[4:8]


def test_a_seed_is_of_one_session(tmp_path: Path) -> None:
    def seeds(steps: int) -> int:
        swarm = made(identity=tmp_path / "identity.key", quiet=True)
        seed = swarm.seed
        swarm._position.note(steps)
        return seed

    assert len({seeds(8), seeds(8), seeds(12), seeds(8)}) == 3


def test_a_dataset_of_the_library_comes_in_another_order_in_each_session(tmp_path: Path) -> None:
    from datasets import Dataset

    def order(swarm: Swarm) -> list[int]:
        return swarm.shard(Dataset.from_dict({"row": list(range(40))}))["row"][:]  # type: ignore[no-any-return]

    swarms = [made(identity=tmp_path / "identity.key", quiet=True) for _ in range(2)]
    first = order(swarms[0])
    swarms[0]._position.note(8)
    assert sorted(order(swarms[1])) == sorted(first) == list(range(40))
    assert order(swarms[1]) != first == order(swarms[0])


@pytest.mark.parametrize("damage", ["", "[]", '{"steps": 4', '{"steps": null, "rows": {}}'])
def test_half_a_position_is_none(tmp_path: Path, session: Session, damage: str) -> None:
    first = session(list(range(40)), 4)
    (tmp_path / "identity.key.position").write_text(damage)
    assert session(list(range(40)), 4) == first


def test_a_loop_without_checkpoints_goes_on_at_its_last_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.attach.swarm.EventLoopThread", lambda: Direct(LastFlight()))
    model, read = nn.Linear(1, 1), list[list[int]]()
    for _ in range(2):
        swarm = made(identity=tmp_path / "identity.key", quiet=True)  # an exchange in 4 steps
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with swarm, swarm.attach(model, optimizer):
            batches = iter(DataLoader(swarm.shard(list(range(40))), batch_size=2))
            read.append([])
            for _ in range(6):
                read[-1] += (batch := next(batches)).tolist()
                model(batch[:, None] / 40).sum().backward()
                optimizer.step()
    first, second = read
    assert second[:4] == first[8:], "the rows after the exchange are in nothing"
    assert not {*second} & {*first[:8]}


def test_a_loop_with_checkpoints_goes_on_where_it_saved(tmp_path: Path) -> None:
    def play() -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        swarm = Swarm(run_id="spot", sync_every=2, quiet=True)
        rows: list[int] = []
        with swarm, swarm.attach(model, optimizer, checkpoints=tmp_path) as sync:
            for batch in DataLoader(swarm.shard(list(range(40))), batch_size=4):
                rows += batch.tolist()
                model(batch[:, None] / 40).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if sync.steps % 4 == 2:
                    swarm.save()
                if len(rows) == 16:
                    return rows[:8]  # the rest was not saved
        return rows

    first, second = play(), play()
    assert not {*first} & {*second}
