"""Runs side by side: names by what differs, numbers from whatever is left of a run, curves."""

import csv
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import diloco
from diloco.config import compose
from diloco.errors import ConfigError
from diloco.messages.snapshot import PhaseSeconds, Tokens
from diloco.rundir.compare import Point, compare, read_run
from diloco.rundir.summary import Evaluation, PeerSummary, Summary, write_summary
from tests.support.command_line import Typed

composed = lru_cache(maxsize=32)(lambda *overrides: compose(overrides))
LOSSES = (5.0, 4.0, 3.0)  # at versions 0, 1 and 2, ten seconds and 100 tokens apart


def make(
    place: Path,
    *overrides: str,
    losses: Sequence[float] = LOSSES,
    exit: int = 0,
    began: float = 1000.0,
) -> Path:
    """A run directory as a run leaves it."""
    place.mkdir(parents=True)
    config = composed("experiment=smoke", *overrides)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": place})})
    (place / "config.yaml").write_text(config.to_yaml())
    lines = []
    for step, loss in enumerate(losses):
        line = {"time": began + 10 * step, "peer": "p0", "version": step, "inner_step": 4 * step}
        line |= {"bytes_sent": 1000 * step, "tokens": 100 * step}
        lines += [{**line, "loss": loss + 0.1}, {**line, "eval_loss": loss}]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    spent = [PhaseSeconds(compute=9, wait=wait) for wait in (1, 9)]
    peers = [
        PeerSummary(
            peer_id=f"Qm{index}",
            name=f"p{index}",
            steps=8,
            anchor_digest="d",
            tokens=100,
            bytes_sent=1000,
            bytes_received=1000,
            seconds=seconds,
        )
        for index, seconds in enumerate(spent)
    ]
    ends = (len(losses) - 1, Tokens(200, 200), Evaluation(losses[-1]))
    summary = Summary("smoke", "h", "diloco", 21.5, *ends, peers, 0, 0, exit)
    write_summary(place / "summary.json", summary)
    return place


def change(place: Path, **fields: Any) -> None:
    """Changes the summary of a run."""
    file = place / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def table(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_finished_run_is_known_whole(tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "a"))
    assert (run.loss, run.tokens, run.wall_s, run.virtual_s, run.exit) == (3.0, 200, 21.5, None, 0)
    assert run.perplexity == pytest.approx(20.0855, abs=1e-4) and run.bytes_sent == 2000
    assert run.utilization == pytest.approx((0.9 + 0.5) / 2)
    assert run.curve == [Point(i, 5.0 - i, 100.0 * i, 10.0 * i, 1000.0 * i) for i in range(3)]
    line = [(6.0, 0.0), (4.5, 5.0), (4.0, 10.0), (3.25, 17.5), (2.9, None)]
    assert [(loss, run.time_to_loss(loss)) for loss, _ in line] == line
    place = make(tmp_path / "simulated", began=5.0)
    change(place, virtual_s=25.0)
    run = read_run(place)
    assert run.virtual_s == 25.0 and [point.time_s for point in run.curve] == [5.0, 15.0, 25.0]


def test_an_unfinished_run_shows_what_is_left_of_it(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    (place / "summary.json").unlink()
    run = read_run(place)
    assert (run.loss, run.tokens) == (3.0, 200)
    assert (run.wall_s, run.bytes_sent, run.exit) == (None, None, None)
    assert (run.curve[-1].bytes_sent, run.curve[-1].time_s) == (2000.0, 20.0)
    failed_at_once = tmp_path / "sweep" / "0-lr9"
    failed_at_once.mkdir(parents=True)
    member = {"overrides": ["experiment=smoke", "outer.lr=9"], "exit": 3}
    (failed_at_once / "config.yaml").write_text(compose(member["overrides"]).to_yaml())
    (failed_at_once / "member.json").write_text(json.dumps(member))
    whole, failed = compare(tmp_path / "sweep", make(tmp_path / "other")).arms
    assert (failed.name, failed.mean()) == ("outer.lr=9", None)
    assert (failed.runs[0].exit, failed.runs[0].curve) == (3, [])
    assert whole.name == "outer.lr=0.75"


def test_a_sweep_stands_for_its_members_and_must_have_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is no directory; give the run\.dir of a run"):
        diloco.compare(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no run"):
        compare(tmp_path)
    first, second = make(tmp_path / "0-a"), make(tmp_path / "1-b")
    (tmp_path / "notes").mkdir()
    found = [run.directory for run in compare(second, tmp_path).runs]
    assert found == [second, first], "each counts once"


def names(tmp_path: Path, *overrides: Sequence[str]) -> list[str]:
    rows = compare(*[make(tmp_path / f"r{i}", *one) for i, one in enumerate(overrides)]).rows()
    return [row["name"] for row in rows]


@pytest.mark.slow
def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    seed, other = ["run.seed=1"], ["run.seed=1", "run.id=other"]
    two = names(tmp_path / "a", ["outer.lr=0.5", *seed], ["outer.lr=0.75", *other])
    assert two == ["outer.lr=0.5", "outer.lr=0.75"]
    smaller = ["model.name=b", "model.config.num_hidden_layers=1"]
    models = names(tmp_path / "c", ["model.name=a"], smaller)
    assert models == ["model.name=a", "model.name=b"]


@pytest.mark.slow
def test_runs_of_one_setting_are_told_apart_by_directory(tmp_path: Path) -> None:
    assert names(tmp_path, [], []) == ["r0", "r1"]
    three = names(tmp_path / "x", ["outer.lr=0.7"], [], [])
    assert three == ["outer.lr=0.7", "r1", "r2"]
    seeds = {"a-0": 0, "a-1": 1, "b-0": 0}
    places = [make(tmp_path / name, f"run.seed={seed}") for name, seed in seeds.items()]
    arms = sorted((arm.name, len(arm.runs)) for arm in compare(*places).arms)
    assert arms == [("a-0", 2), ("b-0", 1)], "a seed that was run twice is no second seed"


def test_the_table_has_a_line_per_run(tmp_path: Path, typed: Typed) -> None:
    make(tmp_path / "a", "outer.lr=0.5")
    make(tmp_path / "b", "outer.lr=0.75", losses=(5.0, 3.5), exit=4)
    assert table(typed("compare", str(tmp_path), "--loss", "4.5")) == [
        "run held-out perplexity tokens virtual wall sent busy to 4.5000 exit",
        "outer.lr=0.5 3.0000 20.09 200 - 21.5 s 2.0 kB 70.0% 5.0 s 0",
        "outer.lr=0.75 3.5000 33.12 200 - 21.5 s 2.0 kB 70.0% 3.3 s 4 diverged",
        f"{tmp_path}: loss-by-tokens.png, loss-by-time.png, loss-by-bytes.png",
    ]
    runs = [str(tmp_path / one) for one in "ab"]
    content = json.loads(typed("compare", *runs, "--json", "--out", str(tmp_path / "c")))
    assert content["loss"] == 3.0, "of those that finished"
    numbers = [(run["name"], run["time_to_loss_s"]) for run in content["runs"]]
    assert numbers == [("outer.lr=0.5", 20.0), ("outer.lr=0.75", None)]
    pictures = list((tmp_path / "c").glob("loss-by-*.png"))
    assert len(pictures) == 3 and all(one.read_bytes().startswith(b"\x89PNG") for one in pictures)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two settings and three seeds, in which one of six runs diverged."""
    place = tmp_path_factory.mktemp("seeds")
    for number, (lr, seed) in enumerate((lr, seed) for lr in (0.9, 0.5) for seed in range(3)):
        diverged = (lr, seed) == (0.9, 2)
        losses = (5.0, 4.0, 9.0 if diverged else lr + 2 + seed / 10)
        overrides, exit = (f"outer.lr={lr}", f"run.seed={seed}"), 4 if diverged else 0
        make(place / f"{number}-lr{lr}_seed{seed}", *overrides, losses=losses, exit=exit)
    return place


@pytest.mark.slow
def test_seeds_are_one_row_and_the_lowest_loss_comes_first(
    seeds: Path, tmp_path: Path, typed: Typed
) -> None:
    file, places = tmp_path / "table.csv", sorted(map(str, seeds.iterdir()))
    same = "200 - 21.5 s 2.0 kB 70.0%"
    assert table(typed("compare", *places, "--csv", str(file)))[:3] == [
        "run seeds held-out perplexity tokens virtual wall sent busy to 3.0000 exit",
        f"outer.lr=0.5 3 2.6000 ± 0.1000 13.51 ± 1.35 {same} 17.2 s 0",
        f"outer.lr=0.9 3 2.9500 ± 0.0707 19.13 ± 1.35 {same} 19.5 s 1 of 3: 4 diverged",
    ]
    first, *others = csv.DictReader(file.read_text().splitlines())
    assert list(first)[:5] == ["arm", "name", "directory", "run.seed", "outer.lr"]
    assert len(others) == 5
    begin = {"arm": "outer.lr=0.5", "outer.lr": "0.5", "run.seed": "0", "loss": "2.5"}
    assert first.items() >= begin.items()
    whole = diloco.compare(seeds)
    one, two = whole.arms
    assert (one.name, two.name) == ("outer.lr=0.5", "outer.lr=0.9")
    assert (one.mean("loss"), one.spread("loss")) == pytest.approx((2.6, 0.1))
    assert two.spread("virtual_s") is None
    arms = json.loads(typed("compare", *places, "--json"))["arms"]
    assert [arm["name"] for arm in arms] == [one.name, two.name]
    assert arms[0]["seeds"] == [0, 1, 2] and arms[0]["spread"] == pytest.approx(0.1)


def test_runs_are_held_against_data_parallel_seed_by_seed(tmp_path: Path, typed: Typed) -> None:
    ends = {"muon": (3.3, 2.2), "outer=data_parallel": (3.0, 2.0)}
    ends["inner.lr=0.1 outer=data_parallel"] = 4.0, 3.0
    for arm, losses in ends.items():
        for seed, loss in enumerate(losses):
            settings = ["inner=muon"] if arm == "muon" else arm.split()
            make(tmp_path / f"{arm}-{seed}", *settings, f"run.seed={seed}", losses=(5.0, loss))
    make(tmp_path / "other", "outer=data_parallel", "data.sequence_length=16", losses=(5.0, 1.0))
    broken = make(tmp_path / "broken", "outer=data_parallel", "run.seed=7")
    (broken / "summary.json").unlink()
    (broken / "metrics.jsonl").unlink()
    gaps = compare(tmp_path).gaps
    assert [(gap.name, gap.seeds) for gap in gaps] == [("muon-0", (0, 1))]
    assert gaps[0].percent == pytest.approx((10.0, 10.0)) and gaps[0].spread == pytest.approx(0.0)
    places = [str(place) for place in tmp_path.iterdir()]  # of several nothing is drawn
    assert "muon-0: held-out loss +10.0 ± 0.0 % over data parallel " in typed("compare", *places)
    [gap] = json.loads(typed("compare", *places, "--json"))["gaps"]
    assert gap["percent"] == pytest.approx([10.0, 10.0]) and gap["mean"] == pytest.approx(10.0)


def test_the_best_baseline_at_the_same_tokens_counts(tmp_path: Path) -> None:
    make(tmp_path / "a", "inner=muon", losses=(5.0, 3.0))
    make(tmp_path / "b", "inner=muon", "outer=data_parallel", losses=(5.0, 2.5))
    baseline = make(tmp_path / "c", "outer=data_parallel", losses=(5.0, 2.0))
    [gap] = compare(tmp_path).gaps
    assert (gap.percent, gap.spread) == ((pytest.approx(50.0),), None)
    tokens = json.loads((baseline / "summary.json").read_text())["tokens"]
    change(baseline, tokens={**tokens, "applied": 300})
    [gap] = compare(tmp_path).gaps
    assert gap.percent == (pytest.approx(20.0),), "the other saw more tokens"
