"""Every way of taking outer steps: real processes over hivemind, the simulator, and the small twins
of the papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config import choices, compose
from diloco.sim.run import simulate
from tests.support.presets import RUNS, SMALL, name_of
from tests.support.simulated import digests


def test_every_outer_preset_is_tried() -> None:
    assert {*SMALL, "data_parallel"} == set(choices()["outer"])


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_it_runs_in_the_simulator_to_one_anchor(run: tuple[str, ...], tmp_path: Path) -> None:
    peers = ["local.peers=3", "sim.step_s=[1,1.3,2.1]", "sim.latency_s=0.05"]
    config = compose(["experiment=smoke", *run, *peers, f"run.dir={tmp_path}"])
    outcome = simulate(config, lambda message: None)
    spent = outcome.summary.tokens
    assert len(digests(outcome)) == 1 and outcome.summary.eval.loss is not None
    assert spent.processed == spent.applied + spent.discarded + spent.in_flight
    assert spent.applied > 0 and spent.in_flight >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in choices()["experiment"] if one.endswith("-mini")])
def test_the_small_twin_of_a_paper_learns(name: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = [f"model.config.{key}={value}" for key, value in shape.items()]
    budget = "budget.tokens=9000 inner.batch_size=2 inner.lr=0.01 inner.warmup_steps=2"
    swarm = "outer.fragments=2 local.peers=2 data.sequence_length=32"
    settings = [f"experiment={name}", *model, *budget.split(), *swarm.split()]
    outcome = simulate(compose([*settings, f"run.dir={tmp_path}"]), lambda message: None)
    assert len(digests(outcome)) == 1
    assert outcome.summary.eval.loss is not None and outcome.summary.eval.loss < 4.8, (
        "5.55 is a guess"
    )
