"""A run that has ended goes on when it is started again with a greater budget, in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco.attach.inner_optimizer import inner_optimizer
from diloco.config import BudgetConfig, Config, InnerConfig, compose
from diloco.outer.optimizer import OuterOptimizer, OuterStep
from diloco.rundir.metrics import RunLog
from diloco.rundir.summary import PhaseTimer, Summary
from diloco.sim.peers import PacedStream
from diloco.sim.run import SimPeer, Simulation, _config_of
from diloco.sim.virtual_time import virtual_time
from diloco.train import loop
from diloco.train.checkpoint import RunCheckpoints
from diloco.train.loop import Trainer, learning_rate
from diloco.train.reporter import Reporter

SETTINGS = ("experiment=smoke", "local.peers=3", "outer.sync_every=2", "eval.every=0")


class Again(Simulation):
    """Peers with checkpoints, started in an order, each with settings of its own."""

    def __init__(self, loop: Any, configs: dict[int, Config]) -> None:
        super().__init__(loop, next(iter(configs.values())), lambda message: None)
        self.configs = configs
        self.rates: list[tuple[Any, float]] = []

    async def _timeline(self) -> None:
        for number, index in enumerate(self.configs):
            self._join(index, len(self.configs))
            if number == 0:
                await self._is_ready(self.peers[index])

    def _live(self, peer: SimPeer, min_peers: int) -> Summary:
        config = _config_of(self.configs[peer.index], peer.name, min_peers)
        session = RunCheckpoints(config)
        config = session.config
        with RunLog(config.run.dir, peer.name, clock=self.loop.time) as log:
            model, phases = copy.deepcopy(self.model), PhaseTimer(clock=self.loop.time)
            optimizer = inner_optimizer(model, config.inner)
            place = {"shard": peer.index, "shards": self.num_shards}
            batches = self.dataset.batches(config.inner.batch_size, **place)
            stream = PacedStream(batches, 1.0, 0.0, peer.name, peer.lockstep)
            given = {"ranks": self.ranks, "phases": phases, "saved": session.swarm()}
            peer.sync = sync = self._swarm(peer, config, log).attach(model, optimizer, **given)
            session.restore(sync, model, optimizer, stream)
            report = Reporter(config, self.ranks, sync, phases, log, lambda message: None)
            parts = (self.ranks, model, model, optimizer, stream, self.holdout, sync, session)
            trainer = Trainer(config, *parts, report)
            with sync:
                trainer.train()
                trainer.save()
            return report.summary(self.loop.time())


def played(run_dir: Path, budgets: dict[int, Sequence[str]]) -> list[Summary]:
    common = [*SETTINGS, f"run.dir={run_dir}"]
    configs = {index: compose([*common, *budget]) for index, budget in budgets.items()}
    with virtual_time() as time:
        simulation = Again(time, configs)
        time.run_until_complete(simulation.run())
    return simulation.summaries


@pytest.mark.parametrize("budget", ["outer_steps", "tokens"])
def test_a_budget_that_one_peer_raises_holds_for_all_from_their_first_step(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate and the outer momentum are those of the greater total, on all of them."""
    tokens = budget == "tokens"
    totals = (1152, 2304) if tokens else (3, 6)
    no_steps = ["budget.outer_steps=null"] * tokens
    before, after = ([*no_steps, f"budget.{budget}={total}"] for total in totals)
    played(tmp_path, dict.fromkeys(range(3), before))
    steps: list[tuple[int, int | None]] = []
    rates = OuterOptimizer.rates

    def seen(optimizer: OuterOptimizer, step: OuterStep) -> tuple[float, float]:
        steps.append((step.version, optimizer.settings.rounds))
        return rates(optimizer, step)

    def rate(clock: Any, inner: InnerConfig, budget: BudgetConfig, sync_every: int) -> float:
        budgets.append(budget)
        return learning_rate(clock, inner, budget, sync_every)

    budgets: list[BudgetConfig] = []
    monkeypatch.setattr(OuterOptimizer, "rates", seen)
    monkeypatch.setattr(loop, "learning_rate", rate)
    summaries = played(tmp_path, {2: before, 0: before, 1: after})
    assert [summary.outer_steps for summary in summaries] == [6, 6, 6]
    assert len({peer.anchor_digest for summary in summaries for peer in summary.peers}) == 1
    longer = compose([*SETTINGS, *after])
    assert {version for version, _ in steps} == {3, 4, 5}
    # Bounds of updates are those of a run without end.
    assert {rounds for _, rounds in steps} - {None} == {longer.outer.rounds} - {None}
    assert len(budgets) == 3 * 3 * 2 and set(budgets) == {longer.budget}
