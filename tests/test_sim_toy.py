"""Thousands of peers without a model: determinism, the algebra that can be checked by hand, churn, and bad settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_helpers import json_lines

from diloco.config import Config, compose
from diloco.errors import ConfigError, SwarmError
from diloco.sim.events import Event, parse, starters
from diloco.sim.run import simulate
from diloco.sim.toy import Toy


def config(*overrides: str, peers: int = 8, steps: int = 10) -> Config:
    """A small run, in a directory that nothing of it writes to."""
    base = ("sim.mode=toy", f"local.peers={peers}", f"budget.outer_steps={steps}", "outer.sync_every=6")
    return compose([*base, *overrides])


def ran(*overrides: str, **sizes: Any) -> Toy:
    toy = Toy(config(*overrides, **sizes))
    toy.run()
    return toy


METHODS = {
    "barrier": ["outer.fragments=3"],
    "staggered": ["outer.fragments=3", "outer.staggered=true", "outer.overlap=1", "outer.mixing=0.5"],
    "quorum": ["outer.quorum=3", "outer.grace_s=0.5", "outer.staleness_limit=5"],
    "async": ["outer.quorum=1", "outer.optimizer=delayed_nesterov", "outer.staleness_limit=100", "outer.dylu=true"],
}
SPEEDS = "sim.step_s=[1,1.1,1.2,1.3,1.4,1.5,1.6,1.7]"


@pytest.mark.parametrize("method", METHODS)
def test_the_same_settings_give_the_same_run_and_another_seed_another(method: str) -> None:
    arguments = (*METHODS[method], SPEEDS, "sim.latency_s=0.1", "sim.loss=0.1", "sim.events=[crash:3@20,join:3@30]")
    one, two, other = ran(*arguments), ran(*arguments), ran(*arguments, "run.seed=1")
    assert (one.digest(), one.log, one.now) == (two.digest(), two.log, two.now)
    assert one.digest() != other.digest()
    assert min(one.versions) >= 9


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_closer_to_the_optimum(method: str) -> None:
    toy = Toy(config(*METHODS[method], "outer.lr=0.4", "outer.momentum=0.5", SPEEDS, steps=60))
    before = toy.loss
    toy.run()
    assert toy.loss < 0.2 * before


def test_a_barrier_is_as_fast_as_its_slowest_peer_and_its_transfers() -> None:
    toy = ran(SPEEDS, "sim.latency_s=0.25")
    assert toy.now == pytest.approx(10 * (6 * 1.7 + 2 * 0.25))
    assert all(peer.steps == 60 for peer in toy.peers)
    assert toy.applied_tokens == 8 * 60 * toy.config.inner.batch_size * toy.config.data.sequence_length


def test_without_a_barrier_the_fast_ones_do_more() -> None:
    toy = ran(*METHODS["quorum"], SPEEDS, steps=40)
    steps = [peer.steps for peer in toy.peers]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.3 * steps[-1]


def test_the_overlap_hides_the_transfers() -> None:
    slow_link = "sim.latency_s=0.9"
    blocking = ran("outer.fragments=3", "outer.staggered=true", slow_link)
    hidden = ran(*METHODS["staggered"][:2], "outer.overlap=1", slow_link)  # a step takes 1 s, there and back 1.8 s
    # Nine cycles with three exchanges each, and the first exchange of the tenth, after two steps.
    assert blocking.now == pytest.approx(9 * (6 + 3 * 1.8) + 2 + 1.8)
    assert hidden.now == pytest.approx(9 * (6 + 3 * 0.8) + 2 + 1.8)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(METHODS)),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["crash", "leave"]), st.integers(1, 50)), max_size=5),
    st.booleans(),
)
def test_whoever_goes_the_others_go_on(method: str, ends: list[tuple[int, str, int]], back: bool) -> None:
    ends = [end for end in {end[0]: end for end in ends}.values() if end[0] > 0]
    events = [f"{kind}:{peer}@{at}" for peer, kind, at in ends] + [f"join:{end[0]}@60" for end in ends if back]
    toy = ran(*METHODS[method], SPEEDS, "sim.loss=0.05", f"sim.events=[{','.join(events)}]", steps=15)
    assert toy.versions[0] >= 15
    contributed = sum(peer.steps for peer in toy.peers) * toy.config.inner.batch_size * toy.config.data.sequence_length
    assert toy.applied_tokens + sum(peer.discarded_tokens for peer in toy.peers) <= contributed


def test_a_thousand_peers_take_seconds() -> None:
    toy = ran("sim.latency_s=0.1", peers=1000, steps=10)
    assert toy.versions == [10] and len(toy.peers) == 1000


def test_nobody_left_is_an_error() -> None:
    with pytest.raises(SwarmError, match=r"sim\.events: every peer crashed or left"):
        ran("sim.events=[crash:0@3,leave:1@4]", peers=2)


# -- events -----------------------------------------------------------------------------------------------------------


def test_events_are_sorted_and_say_who_is_there_at_the_start() -> None:
    planned = parse(["crash:1@20", "join:2@5.5", "join:1@30", "join:7@1"], peers=3)
    assert planned == [Event("join", 7, 1), Event("join", 2, 5.5), Event("crash", 1, 20), Event("join", 1, 30)]
    assert starters(planned, peers=3) == [0, 1]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["crash:5@1"], "sim.events: crash:5@1, but peer 5 is not there"),
        (["crash:1@1", "leave:1@2"], "sim.events: leave:1@2, but peer 1 is not there"),
        (["leave:1@2", "join:1@3", "join:1@4"], "sim.events: join:1@4, but peer 1 is there already"),
    ],
)
def test_what_cannot_happen_is_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(texts, peers=4)


def test_it_leaves_the_directory_of_a_run(tmp_path: Path) -> None:
    run_dir, heard = tmp_path / "run", []
    outcome = simulate(config(f"run.dir={run_dir}", "sim.events=[crash:3@20]"), heard.append)
    assert {path.name for path in run_dir.iterdir()} >= {"config.yaml", "manifest.json", "summary.json", "loss.png"}
    metrics = json_lines(run_dir / "metrics.jsonl")
    assert [line["version"] for line in metrics] == list(range(1, 11))
    assert metrics[-1]["time"] == outcome.virtual_s == 60.0
    assert {"time": 20.0, "peer": "swarm", "kind": "crash", "subject": "p3"} in json_lines(run_dir / "events.jsonl")
    assert [message["version"] for message in heard] == list(range(1, 11))
    assert outcome.summary.tokens.processed == outcome.summary.tokens.applied + outcome.summary.tokens.in_flight
