"""Checkpoints that are written while training goes on."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.ranks import RankGroup
from diloco.config import Config, compose
from diloco.errors import CheckpointError
from diloco.rundir.checkpoint import CheckpointStore
from diloco.train.checkpoint import RunCheckpoints
from diloco.train.data_parallel import DataParallel
from diloco.train.loop import Trainer
from diloco.train.reporter import Reporter


class Disk:
    """A disk that writes only while `open` is set, and fails while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.full = threading.Event(), False
        save = CheckpointStore.save

        def slowly(store: CheckpointStore, step: int, tensors: Any, state: Any) -> Path:
            assert self.open.wait(60)
            if self.full:
                raise CheckpointError("run.dir: no space")
            return save(store, step, tensors, state)

        monkeypatch.setattr(CheckpointStore, "save", slowly)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.open.set()


class Scene:
    """A training loop without a swarm that stands at a boundary, and what it says."""

    def __init__(self, config: Config) -> None:
        self.model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(self.model.parameters())
        ranks, self.session = RankGroup(torch.device("cpu")), RunCheckpoints(config)
        self.events = list[tuple[str, Any]]()
        phases: Any = SimpleNamespace(seconds=lambda: self.session.seconds)
        self.sync = DataParallel(self.model, optimizer, ranks, 1, phases)
        log: Any = SimpleNamespace(event=lambda kind, **fields: self.events.append((kind, fields)))
        log.metric = lambda **_: None
        self.position = {"next": 0}
        stream: Any = SimpleNamespace(state=lambda: self.position)
        report = Reporter(config, ranks, self.sync, phases, log, lambda message: None)
        rest: Any = optimizer, stream, torch.zeros(1), self.sync, self.session, report
        self.trainer = Trainer(config, ranks, self.model, self.model, *rest)

    def reach(self, version: int) -> None:
        """The parameters are the number of the version from now on."""
        self.sync.version = self.position["next"] = version
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(version)

    def step(self, version: int, background: bool = True) -> None:
        self.reach(version)
        self.trainer.save(background)

    def boundary(self, version: int) -> None:
        self.reach(version)
        self.trainer._outer_step()


def found(config: Config) -> tuple[int, float, int]:
    """Version, value of all parameters, and position in the data of the newest checkpoint."""
    checkpoint = CheckpointStore(config.run.dir / "checkpoints" / "peer", 2).load_latest()
    assert checkpoint is not None
    [value] = torch.cat([one.flatten() for one in checkpoint.tensors["anchor"].values()]).unique()
    return checkpoint.step, float(value), checkpoint.state["stream"]["next"]


def config_of(tmp_path: Path, *typed: str) -> Config:
    return compose(["experiment=smoke", f"run.dir={tmp_path}", "run.lead=false", *typed])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


def test_a_checkpoint_is_of_the_boundary_at_which_it_began(config: Config, disk: Disk) -> None:
    scene = Scene(config)
    scene.step(1)
    with torch.no_grad():
        scene.model.weight.fill_(5.0)  # training goes on
    scene.position["next"] = 5
    disk.open.set()
    assert scene.session.written() is None
    assert found(config) == (1, 1.0, 1)


def test_a_boundary_that_was_left_out_is_made_up_for(tmp_path: Path, disk: Disk) -> None:
    scene = Scene(config_of(tmp_path, "checkpoint.every=10", "budget.outer_steps=100"))
    for version in (9, 10, 19, 20, 21):
        scene.boundary(version)
    assert scene.events == [("checkpoint_skipped", {"version": version}) for version in (20, 21)]
    disk.open.set()
    scene.session._writer._threads.submit(int).result()  # the disk has caught up
    for version, newest in ((22, 22), (29, 22), (30, 30)):
        scene.boundary(version)
        assert scene.session.written() is None
        assert found(scene.trainer.config) == (newest, float(newest), newest)


def test_a_checkpoint_that_could_not_be_written_is_told(config: Config, disk: Disk) -> None:
    scene, disk.full = Scene(config), True
    disk.open.set()
    scene.step(1)
    scene.session._writer._threads.shutdown(wait=True)
    disk.full = False
    scene.step(1, background=False)  # the same boundary: the one who leaves tries again
    assert [kind for kind, _ in scene.events] == ["checkpoint_failed"]
    assert "no space" in scene.events[0][1]["why"]
    assert found(config) == (1, 1.0, 1)


def test_an_error_that_is_ours_is_not_hidden(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(config)
    monkeypatch.setattr(CheckpointStore, "save", lambda *_: 1 / 0)
    scene.step(1)
    with pytest.raises(ZeroDivisionError):
        scene.session.written()
