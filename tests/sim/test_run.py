"""Whole runs in virtual time: equal anchors, the same again with the same seed, failures, and the
real swarm."""

import asyncio
import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from diloco.config import BudgetConfig, Config, InnerConfig, compose
from diloco.core.facts import Facts
from diloco.core.rules import learning
from diloco.errors import ConfigError, SwarmError
from diloco.outer.optimizer import OuterOptimizer, OuterStep
from diloco.sim import run
from diloco.swarm.node import node
from diloco.swarm.node.recorder import Recorder
from diloco.train import loop
from tests.support.peers import events, json_lines
from tests.support.simulated import SMALL, digests, simulated
from tests.support.slow import slow


def test_four_peers_end_with_one_anchor_and_a_run_directory(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "sim.step_s=[1,1.5,2,3]")
    assert len(digests(outcome)) == 1 and None not in digests(outcome)
    # the slowest peer's steps; nothing else takes time
    seconds = [peer.seconds for peer in outcome.summary.peers]
    assert outcome.virtual_s == pytest.approx(2 * 4 * 3.0)
    assert [one.compute for one in seconds] == pytest.approx([8, 12, 16, 24])
    assert [one.total for one in seconds] == pytest.approx([24] * 4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["virtual_s"] == outcome.virtual_s
    assert summary["outer_steps"] == 2 and summary["eval"]["loss"] == outcome.summary.eval.loss
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"config.yaml", "manifest.json", "loss.png"}
    held_out = [line for line in json_lines(tmp_path / "metrics.jsonl") if "eval_loss" in line]
    assert [(line["version"], line["time"]) for line in held_out] == [(0, 0), (1, 12), (2, 24)]


def test_what_the_model_writes_is_told_once_per_version_and_changes_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    told: list[tuple[int, list[tuple[str, str]]]] = []
    monkeypatch.setattr(Recorder, "add_samples", lambda _, *sample: told.append(sample))
    prompts = ("eval.prompts=['def ',x]", "eval.prompt_tokens=5")
    plain = simulated(tmp_path / "plain", "local.peers=2")
    writing = simulated(tmp_path / "writing", "local.peers=2", *prompts)
    assert digests(plain) == digests(writing) and plain.virtual_s == writing.virtual_s
    lines = events(tmp_path / "writing", "sample")
    samples = [(one["version"], one["prompt"], one["text"]) for one in lines]
    assert [one[:2] for one in samples] == [*product(range(3), ("def ", "x"))]
    assert samples == [(version, *one) for version, written in told for one in written]


def test_the_same_seed_gives_the_same_run_to_the_last_event(tmp_path: Path) -> None:
    hard = ["sim.bandwidth=20kB", "sim.latency_s=0.05", "sim.loss=0.3"]
    hard.append("sim.events=[crash:2@6,join:2@9]")
    one, two = (simulated(tmp_path / name, *hard) for name in ("one", "two"))
    other = simulated(tmp_path / "other", *hard, "run.seed=1")
    assert digests(one) == digests(two)
    files = [(tmp_path / name / "events.jsonl").read_text() for name in ("one", "two")]
    assert files[0] == files[1]
    assert one.virtual_s == two.virtual_s != other.virtual_s
    assert any(events(tmp_path / name, "contribution_broke") for name in ("one", "other"))
    assert events(tmp_path / "one", "lost") and len(digests(one)) == 1


def accounts(run_dir: Path) -> list[dict[str, Any]]:
    """What the first peer wrote of each of its outer steps."""
    lines = json_lines(run_dir / "metrics.jsonl")
    return [line for line in lines if "live" in line and line["peer"] == "p0"]


def test_a_joiner_is_counted_in_and_a_leaver_hands_over(tmp_path: Path) -> None:
    moves = "sim.events=[join:4@2.5,leave:1@6.5]"
    outcome = simulated(tmp_path, "budget.outer_steps=4", moves, "sim.latency_s=0.01")
    peers = {peer.name: peer for peer in outcome.summary.peers}
    record = {row.name: row for row in outcome.summary.contributions}
    versions = {name: (row.first_version, row.last_version) for name, row in record.items()}
    assert versions == {**dict.fromkeys(("p0", "p2", "p3", "p4"), (1, 4)), "p1": (1, 2)}
    assert {name: row.outer_steps for name, row in record.items()}["p1"] == 2
    assert sum(row.tokens for row in record.values()) == outcome.summary.tokens.applied
    assert len({row.bytes // row.outer_steps for row in record.values()}) == 1, "payloads are equal"
    with (tmp_path / "contributions.csv").open() as file:
        written = {row["name"]: int(row["tokens"]) for row in csv.DictReader(file)}
    assert written == {name: row.tokens for name, row in record.items()}
    assert len({peers[name].anchor_digest for name in ("p0", "p2", "p3", "p4")}) == 1
    assert peers["p4"].steps < peers["p0"].steps
    assert {event["subject"] for event in events(tmp_path, "leave")} >= {"p1"}
    counted = [(line["live"], line["training"], line["merged"]) for line in accounts(tmp_path)]
    assert counted[0] == (5, 5, 5) and counted[-1] == (4, 4, 4)
    assert counted[1] == (4, 4, 5), "what the one that left had learned"


def test_nobody_waits_for_a_joiner_that_fetches_its_inner_state(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async def slow(*_: object) -> None:
        await asyncio.sleep(21.0)

    monkeypatch.setattr(node, "fetch_inner", slow)
    joins = ("sim.events=[join:4@5]", "sim.step_s=[1.0]")
    outcome = simulated(tmp_path, "budget.outer_steps=6", *joins)
    lines = accounts(tmp_path)
    assert [line["live"] for line in lines] == [4, *[5] * 5]
    assert {line["merged"] for line in lines} == {4}
    assert [line["time"] for line in lines] == pytest.approx([4, 8, 12, 16, 20, 24], abs=0.1)
    assert outcome.summary.outer_steps == 6


def test_a_thin_link_costs_utilization_and_moves_no_anchor(tmp_path: Path) -> None:
    wide, thin = simulated(tmp_path / "wide"), simulated(tmp_path / "thin", "sim.bandwidth=10kB")
    assert digests(wide) == digests(thin)
    assert all(peer.utilization == pytest.approx(1.0) for peer in wide.summary.peers)
    assert all(peer.utilization < 0.5 for peer in thin.summary.peers)
    longest = max(peer.bytes_sent for peer in thin.summary.peers) / 10000
    assert 8 + longest < thin.virtual_s < 8 + 4 * longest


def test_a_peer_sixteen_times_faster_is_merged_at_its_pace_without_a_barrier(
    tmp_path: Path,
) -> None:
    """Nobody waits for anybody, although all come in one moment each 4 seconds."""
    paces = ("outer=async", "sim.step_s=[1,1,1,0.0625]", "budget.outer_steps=60")
    outcome = simulated(tmp_path, *paces)
    assert outcome.summary.peers[3].steps >= 0.95 * 16 * outcome.virtual_s
    assert [peer.seconds.wait for peer in outcome.summary.peers] == [0.0] * 4


def test_a_budget_that_one_peer_raises_holds_for_all_from_their_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate and the outer momentum are those of the greater total, on all of them."""
    config_of, rates, learning_rate = run._config_of, OuterOptimizer.rates, loop.learning_rate
    steps, budgets = set[tuple[int, int | None]](), list[BudgetConfig]()

    def own(config: Config, name: str, min_peers: int) -> Config:
        longer = compose([*SMALL, "local.peers=3", "budget.outer_steps=4", f"run.dir={tmp_path}"])
        return config_of(longer if name == "p1" else config, name, min_peers)

    def seen(optimizer: OuterOptimizer, step: OuterStep) -> tuple[float, float]:
        steps.add((step.version, optimizer.settings.rounds))
        return rates(optimizer, step)

    def rate(clock: Any, inner: InnerConfig, budget: BudgetConfig, sync_every: int) -> float:
        budgets.append(budget)
        return learning_rate(clock, inner, budget, sync_every)

    monkeypatch.setattr(run, "_config_of", own)
    monkeypatch.setattr(OuterOptimizer, "rates", seen)
    monkeypatch.setattr(loop, "learning_rate", rate)
    outcome = simulated(tmp_path, "local.peers=3")
    assert outcome.summary.outer_steps == 4 and len(digests(outcome)) == 1
    assert {one for one in steps if one[1] is not None} == {(version, 4) for version in range(4)}
    assert len(budgets) == 3 * 4 * 4 and {budget.outer_steps for budget in budgets} == {4}


def test_a_run_that_holds_out_nothing_has_no_held_out_loss(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "data.holdout=0", "local.peers=1")
    assert outcome.summary.eval.loss is None
    assert "eval_loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    for message, *overrides in (
        (r"sim\.step_s has 2 values for 4 peers", "sim.step_s=[1,2]"),
        (r"outer\.method=data_parallel has no swarm", "outer=data_parallel"),
        # the first peer's start finds it
        ("as the model has 2 layers", "outer.fragments=3", "outer.pattern=strided"),
    ):
        with pytest.raises(ConfigError, match=message):
            simulated(tmp_path, *overrides)
    with pytest.raises(SwarmError, match="every peer crashed"):
        simulated(tmp_path, "sim.events=[crash:0@1,crash:1@1,crash:2@2,crash:3@3]")
    (tmp_path / "checkpoints/p0/step-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run with checkpoints; choose another"):
        simulated(tmp_path)


@pytest.mark.parametrize(("fragments", "sync_every", "joins_at"), [(4, 8, 17), slow(1, 16, 23)])
def test_a_joiner_that_begins_behind_the_others_gets_in_step(
    fragments: int, sync_every: int, joins_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the versions that the others make without it, and all that it learns from then on
    is merged."""
    position = learning.first_position
    asked = 0

    def behind(core: Facts) -> int:
        nonlocal asked
        asked += core.me == "p4"
        return 0 if core.me == "p4" and asked == 1 else position(core)

    monkeypatch.setattr(learning, "first_position", behind)
    cycle = (f"fragments={fragments}", f"sync_every={sync_every}", "staggered=true", "overlap=2")
    joins = (f"sim.events=[join:4@{joins_at}]", "sim.latency_s=0.01")
    outer = (f"outer.{one}" for one in cycle)
    simulated(tmp_path, *outer, "local.peers=3", "budget.outer_steps=6", *joins)
    kinds = ("discarded", "contribution_broke", "missing")
    assert asked and not any(events(tmp_path, kind) for kind in kinds)


@pytest.mark.parametrize("k", [1, 10, 100])
def test_the_same_run_ten_and_a_hundred_times_slower_merges_everybody(
    tmp_path: Path, k: int
) -> None:
    """Exchanges of a fifth of a second, of seconds, and of minutes, at a barrier."""
    times = [f"sim.step_s=[{0.05 * k},{0.06 * k}]", f"sim.latency_s={0.005 * k}"]
    options = ["local.peers=2", "outer.fragments=1", f"sim.bandwidth={200 / k}kB"]
    outcome = simulated(tmp_path, *times, *options, "budget.outer_steps=4")
    assert len(digests(outcome)) == 1
    merged = [line["merged"] for line in json_lines(tmp_path / "metrics.jsonl") if "merged" in line]
    assert merged == [2] * 8
    wrong = ("missed", "missing", "stuck", "takeover", "discarded", "lost")
    assert not [kind for kind in wrong if events(tmp_path, kind)]


def test_an_author_that_leaves_while_its_update_is_fetched_holds_up_nobody(tmp_path: Path) -> None:
    """Three peers went on waiting for each other, each after an update of its own."""
    thin = ["sim.step_s=[.5]", "sim.bandwidth=4kB", "sim.latency_s=.05", "outer.fragments=1"]
    outcome = simulated(tmp_path, *thin, "local.peers=4", "budget.outer_steps=3")
    assert len(digests(outcome)) == 1
    assert not events(tmp_path, "stuck") and not events(tmp_path, "missing")
