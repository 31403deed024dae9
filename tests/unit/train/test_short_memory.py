"""Memory that runs out outside of the passes costs a restart, with half as many rows at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import compose
from diloco.errors import ConfigError
from diloco.rundir.reporting import Notice, Report
from diloco.train.loop import Trainer
from diloco.train.run import run
from tests.support.peers import SMOKE, events

ALONE = (SMOKE[0], "outer=data_parallel", "train.device=cpu", "inner.batch_size=4")


def short(monkeypatch: pytest.MonkeyPatch, *versions: int) -> None:
    """Memory runs out once after each of these outer steps."""
    left, outer_step = list(versions), Trainer._outer_step

    def full(trainer: Any) -> None:
        outer_step(trainer)
        if left and trainer.sync.version == left[0]:
            left.pop(0)
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Trainer, "_outer_step", full)


def test_a_peer_goes_on_from_a_checkpoint_with_half_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch, 1, 2)
    told: list[Report] = []
    config = compose([*ALONE, f"run.dir={tmp_path}", "checkpoint.every=0"])
    summary = run(config, told.append)
    assert summary.outer_steps == config.budget.outer_steps
    assert [event["sequences"] for event in events(tmp_path, "micro_batch")] == [2, 1]
    assert [event["version"] for event in events(tmp_path, "resume")] == [1, 2]
    assert sum(isinstance(it, Notice) and "memory is short" in it.text for it in told) == 2


def test_less_than_a_row_is_no_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, 1)
    with pytest.raises(ConfigError, match="not even one sequence fits"):
        run(compose([*ALONE, f"run.dir={tmp_path}", "train.micro_batch=1"]), lambda report: None)
