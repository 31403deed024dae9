"""`scripts/reproduce`: every arm is a valid run, arms that ended are not run again, orders are judged from losses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from diloco.config import compose
from tests.support.places import SCRIPTS
from tests.support.scripts import script_module

SCRIPT = SCRIPTS / "reproduce"


@pytest.fixture(scope="module")
def reproduce() -> ModuleType:
    return script_module("reproduce")


@pytest.mark.parametrize("size", ["150m", "tiny"])
def test_all_arms_of_a_table_see_the_same_tokens_but_the_worker_alone(reproduce: ModuleType, size: str) -> None:
    common = reproduce.SIZES[size]
    tokens = []
    for arm in reproduce.arms_of(common, common.steps).values():
        config = compose([*common.overrides, *arm.overrides])
        steps = arm.rounds * config.outer.sync_every
        assert config.budget.outer_steps == arm.rounds and config.inner.warmup_steps < steps
        tokens.append(config.local.peers * steps * config.inner.batch_size * config.data.sequence_length)
    assert tokens[0] * common.peers == tokens[1]
    assert all(abs(other / tokens[1] - 1) < 0.04 for other in tokens[1:]), "a round fewer at most"


def test_an_order_is_judged_once_all_its_arms_have_ended(reproduce: ModuleType) -> None:
    arms = reproduce.arms_of(reproduce.SIZES["tiny"], 8)
    worker, batch, updates, diloco, *_ = arms

    def order(losses: dict[str, float]) -> str:
        found: dict[str, Any] = {n: {"tokens": {"applied": 1}, "eval": {"loss": loss}} for n, loss in losses.items()}
        [line] = [line for line in reproduce.table(arms, found, "tiny", []) if line.startswith("| DiLoCo, table 2")]
        return str(line.split(" | ")[1].removesuffix(" |"))

    losses = {worker: 4.0, batch: 3.0, diloco: 2.5}
    assert order(losses) == "3 of 4 arms so far"
    assert order({**losses, updates: 2.0}) == "the same"
    assert order({**losses, updates: 2.7}) == f"{diloco} < {updates} < {batch} < {worker}"


@pytest.mark.slow
def test_an_arm_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--dir", str(tmp_path), "--only", "DiLoCo, 2"]
    first = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "== DiLoCo, 2 peers" in first.stdout and "| 1 of 4 arms so far |" in first.stdout
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "==" not in again.stdout and again.stdout == first.stdout[first.stdout.index("| arm") :]


def test_an_arm_is_interrupted_when_the_time_is_over(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted `diloco` ends by itself, and is waited for."""
    asleep, popen = ["sleep", "600"], subprocess.Popen  # an interpreter that starts may lose a signal
    monkeypatch.setattr(reproduce.subprocess, "Popen", lambda command, **more: popen(asleep, **more))
    code = reproduce.train(reproduce.SIZES["tiny"], reproduce.Arm("", (), 1), tmp_path, [], time.monotonic())
    assert code == -signal.SIGINT


def test_what_is_no_override_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--dir", str(tmp_path), "--stepz=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--stepz=4: expected an override such as data=text" in done.stderr
