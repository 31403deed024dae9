"""Runs side by side: names by what differs, numbers from whatever is left of a run, curves and their pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import diloco
from diloco.cli.compare import show
from diloco.errors import ConfigError
from diloco.rundir.arms import Arm, arms_of, plot_arms
from diloco.rundir.compare import Point, Run, find_runs, read_runs, time_to_loss, worst_loss
from diloco.rundir.comparison import comparison_of
from diloco.rundir.gaps import find_gaps, gap_so_far
from tests.support.exit_codes import exit_code
from tests.support.run_directories import make

# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_known_whole(tmp_path: Path) -> None:
    [run] = read_runs([make(tmp_path / "a")])
    assert (run.loss, run.tokens, run.wall_s, run.virtual_s, run.exit) == (3.0, 200, 21.5, None, 0)
    assert run.perplexity == pytest.approx(20.0855, abs=1e-4)
    assert run.bytes_sent == 2000
    assert run.utilization == pytest.approx((0.9 + 0.5) / 2)
    assert run.curve == [
        Point(0, 5.0, 0.0, 0.0, 0.0),
        Point(1, 4.0, 100.0, 10.0, 1000.0),
        Point(2, 3.0, 200.0, 20.0, 2000.0),
    ]


def test_bytes_of_the_log_count_for_more_than_a_share_by_version(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["bytes_sent"] = 7 * line["version"]
    lines.insert(3, {**lines[2], "peer": "p1", "bytes_sent": 100})
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [point.bytes_sent for point in read_runs([place])[0].curve] == [0.0, 107.0, 114.0]


def test_virtual_time_begins_with_the_run(tmp_path: Path) -> None:
    place = make(tmp_path / "a", began=5.0)
    summary = json.loads((place / "summary.json").read_text())
    (place / "summary.json").write_text(json.dumps({**summary, "virtual_s": 25.0}))
    [run] = read_runs([place])
    assert run.virtual_s == 25.0
    assert [point.time_s for point in run.curve] == [5.0, 15.0, 25.0]


def test_a_resumed_run_counts_what_it_said_last(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    with (place / "metrics.jsonl").open("a") as log:
        log.write('{"time": 1050, "peer": "p0", "version": 1, "tokens": 100, "eval_loss": 3.9}\n{"time": 10')
    assert [point.loss for point in read_runs([place])[0].curve] == [5.0, 3.9, 3.0]


@pytest.mark.parametrize(
    ("loss", "seconds"), [(6.0, 0.0), (5.0, 0.0), (4.5, 5.0), (4.0, 10.0), (3.25, 17.5), (3.0, 20.0), (2.9, None)]
)
def test_the_time_to_a_loss_lies_on_the_line_between_two_evaluations(
    loss: float, seconds: float | None, tmp_path: Path
) -> None:
    assert time_to_loss(read_runs([make(tmp_path / "a")])[0], loss) == seconds


def test_the_worst_loss_is_one_that_every_finished_run_reached(tmp_path: Path) -> None:
    places = [
        make(tmp_path / "a"),
        make(tmp_path / "b", losses=(5.0, 3.5)),
        make(tmp_path / "c", losses=(5.0,), exit=4),
    ]
    runs = read_runs(places)
    assert worst_loss(runs) == 3.5
    assert worst_loss(runs[2:]) == 5.0
    assert worst_loss([]) is None


# --- What is left of a run --------------------------------------------------------------------------------------------


def test_an_unfinished_run_shows_what_it_has_logged(tmp_path: Path) -> None:
    place = make(tmp_path / "a")
    (place / "summary.json").unlink()
    [run] = read_runs([place])
    assert (run.loss, run.tokens, run.wall_s, run.bytes_sent, run.exit) == (3.0, 200, None, None, None)
    assert run.curve[-1].bytes_sent is None and run.curve[-1].time_s == 20.0


def test_a_member_that_failed_at_once_is_known_by_its_sweep(tmp_path: Path) -> None:
    (tmp_path / "0-lr9").mkdir()
    member = {"name": "0-lr9", "overrides": ["experiment=smoke", "outer.lr=9"], "exit": 3}
    (tmp_path / "0-lr9" / "member.json").write_text(json.dumps(member))
    failed, whole = read_runs([*find_runs([tmp_path]), make(tmp_path / "other")])
    assert (failed.name, failed.exit, failed.loss, failed.curve) == ("outer.lr=9", 3, None, [])
    assert whole.name == "outer.lr=0.75"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["eval", "tokens", "peers", "wall_s", "exit", "outer_steps", "virtual_s"]), json_values
    ),
    st.lists(
        st.dictionaries(st.sampled_from(["time", "peer", "version", "tokens", "eval_loss", "bytes_sent"]), json_values)
    ),
)
def test_files_with_anything_in_them_still_make_a_table(
    tmp_path_factory: pytest.TempPathFactory, summary: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    place = tmp_path_factory.mktemp("run")
    (place / "config.yaml").write_text("nonsense: [")
    (place / "summary.json").write_text(json.dumps(summary))
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    show(comparison_of(read_runs([place])), Console(file=io.StringIO()))


def test_places_without_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is no directory; give the run\.dir of a run"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="holds no run"):
        find_runs([tmp_path])


def test_a_sweep_stands_for_its_members_and_each_run_counts_once(tmp_path: Path) -> None:
    first, second = make(tmp_path / "0-a"), make(tmp_path / "1-b")
    (tmp_path / "notes").mkdir()
    assert find_runs([second, tmp_path]) == [second, first]


# --- Names ------------------------------------------------------------------------------------------------------------


def names(tmp_path: Path, *overrides: Sequence[str]) -> list[str]:
    return [run.name for run in read_runs([make(tmp_path / f"r{i}", *one) for i, one in enumerate(overrides)])]


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    assert names(tmp_path, ["outer.lr=0.5", "run.seed=1"], ["outer.lr=0.75", "run.seed=1", "run.id=other"]) == [
        "outer.lr=0.5",
        "outer.lr=0.75",
    ]
    tmp_path /= "both"
    assert names(tmp_path, ["outer.lr=0.5"], ["inner.lr=0.01", "outer.lr=0.75"]) == [
        "inner.lr=0.003 outer.lr=0.5",
        "inner.lr=0.01 outer.lr=0.75",
    ]


def test_a_model_is_named_by_its_name(tmp_path: Path) -> None:
    assert names(tmp_path, ["model.name=a"], ["model.name=b", "model.config.num_hidden_layers=1"]) == [
        "model.name=a",
        "model.name=b",
    ]


def test_runs_of_one_setting_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    assert names(tmp_path, [], []) == ["r0", "r1"]
    assert names(tmp_path / "x", ["outer.lr=0.7"], [], []) == [
        "outer.lr=0.7", "outer.lr=0.75 (r1)", "outer.lr=0.75 (r2)",
    ]  # fmt: skip
    same = [make(tmp_path / side / "same") for side in ("left", "right")]
    assert [run.name for run in read_runs(same)] == [str(place) for place in same]


# --- Pictures and the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 12])
def test_there_is_a_curve_per_axis(tmp_path: Path, count: int) -> None:
    curve = [Point(version, 5.0 - version, 100.0 * version, None, None) for version in range(3)]
    arms = [Arm(f"run $x_{index}$", (Run(tmp_path / str(index), {}, curve),)) for index in range(count)]
    pictures = plot_arms(arms, tmp_path)
    assert [picture.name for picture in pictures] == ["loss-by-tokens.png", "loss-by-time.png", "loss-by-bytes.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_table_has_a_line_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", "outer.lr=0.5")
    make(tmp_path / "b", "outer.lr=0.75", losses=(5.0, 3.5), exit=4)
    assert exit_code("compare", str(tmp_path), "--loss", "4.5") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run held-out perplexity tokens virtual wall sent busy to 4.5000 exit",
        "outer.lr=0.5 3.0000 20.09 200 - 21.5 s 2.0 kB 70.0% 5.0 s 0",
        "outer.lr=0.75 3.5000 33.12 200 - 21.5 s 2.0 kB 70.0% 3.3 s 4 diverged",
        f"{tmp_path}: loss-by-tokens.png, loss-by-time.png, loss-by-bytes.png",
    ]


def seeds(place: Path) -> None:
    """A sweep of two settings and three seeds, in which one of six runs diverged."""
    for number, (lr, seed) in enumerate((lr, seed) for lr in (0.9, 0.5) for seed in range(3)):
        diverged = (lr, seed) == (0.9, 2)
        losses = (5.0, 4.0, 9.0 if diverged else lr + 2 + seed / 10)
        overrides = (f"outer.lr={lr}", f"run.seed={seed}")
        make(place / f"{number}-lr{lr}_seed{seed}", *overrides, losses=losses, exit=4 if diverged else 0)


def test_seeds_are_one_row_with_their_mean_and_spread_and_the_lowest_loss_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds(tmp_path)
    assert exit_code("compare", str(tmp_path)) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run seeds held-out perplexity tokens virtual wall sent busy to 3.0000 exit",
        "outer.lr=0.5 3 2.6000 ± 0.1000 13.51 ± 1.35 200 - 21.5 s 2.0 kB 70.0% 17.2 s 0",
        "outer.lr=0.9 3 2.9500 ± 0.0707 19.13 ± 1.35 200 - 21.5 s 2.0 kB 70.0% 19.5 s 1 of 3: 4 diverged",
        f"{tmp_path}: loss-by-tokens.png, loss-by-time.png, loss-by-bytes.png",
    ]
    assert exit_code("compare", str(tmp_path), "--json") == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert [(arm["name"], arm["seeds"]) for arm in arms] == [("outer.lr=0.5", [0, 1, 2]), ("outer.lr=0.9", [0, 1, 2])]
    assert arms[0]["spread"] == pytest.approx(0.1) and arms[0]["runs"][0] == "run.seed=0 outer.lr=0.5"


def test_an_arm_is_drawn_as_the_mean_of_its_seeds_with_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    seeds(tmp_path)
    first, second = arms_of(read_runs(find_runs([tmp_path])))
    assert [(round(point.loss, 6), point.tokens, round(spread, 6)) for point, spread in first.curve()] == [
        (5.0, 0, 0.0), (4.0, 100, 0.0), (2.6, 200, 0.1),
    ]  # fmt: skip
    assert [round(point.loss, 6) for point, _ in second.curve()] == [5.0, 4.0, 2.95], "without the one that diverged"
    bands, labels = list[Any](), list[Any]()
    monkeypatch.setattr(Axes, "fill_between", lambda _, x, low, high, **more: bands.append((x, low, high)))
    monkeypatch.setattr(Axes, "plot", lambda _, x, y, *form, label, **more: labels.append(label))
    plot_arms([first, second], tmp_path, ["tokens"])
    assert labels == ["outer.lr=0.5, 3 seeds", "outer.lr=0.9, 2 seeds"] and len(bands) == 2
    assert bands[0] == ([0, 100, 200], [5.0, 4.0, pytest.approx(2.5)], [5.0, 4.0, pytest.approx(2.7)])


def test_a_csv_has_a_line_per_run_and_notebooks_have_the_same(tmp_path: Path) -> None:
    seeds(tmp_path / "sweep")
    file = tmp_path / "table.csv"
    assert exit_code("compare", str(tmp_path / "sweep"), "--csv", str(file), "--loss", "2.75") == 0
    first, *others = csv.DictReader(file.read_text().splitlines())
    assert len(others) == 5
    assert list(first) == [
        "arm", "name", "directory", "run.seed", "outer.lr", "loss", "perplexity", "tokens", "virtual_s", "wall_s",
        "bytes_sent", "utilization", "exit", "time_to_loss_s",
    ]  # fmt: skip
    assert (first["arm"], first["outer.lr"], first["run.seed"], first["loss"]) == ("outer.lr=0.5", "0.5", "0", "2.5")
    found = diloco.compare(tmp_path / "sweep")
    assert found.arms[0].name == "outer.lr=0.5" and found.arms[0].mean("loss") == pytest.approx(2.6)
    assert found.arms[0].spread("loss") == pytest.approx(0.1) and found.arms[1].spread("virtual_s") is None
    assert [str(row["time_to_loss_s"] or "") for row in found.rows(2.75)] == [first["time_to_loss_s"], *(
        other["time_to_loss_s"] for other in others
    )]  # fmt: skip
    assert [one.name for one in found.plot(str(tmp_path / "new"), ["tokens"])] == ["loss-by-tokens.png"]
    with pytest.raises(ConfigError, match=r"nowhere is no directory; give the run\.dir of a run"):
        diloco.compare("nowhere")


def test_a_seed_that_was_run_twice_is_no_second_seed(tmp_path: Path) -> None:
    places = [make(tmp_path / name, f"run.seed={seed}") for name, seed in (("a-0", 0), ("a-1", 1), ("b-0", 0))]
    arms = arms_of(read_runs(places))
    assert sorted((arm.name, len(arm.runs)) for arm in arms) == [("a", 2), ("b-0", 1)]


def test_runs_are_held_against_data_parallel_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {"muon": (3.3, 2.2), "outer=data_parallel": (3.0, 2.0), "inner.lr=0.1 outer=data_parallel": (4.0, 3.0)}
    for arm, losses in ends.items():
        for seed, loss in enumerate(losses):
            settings = ["inner=muon"] if arm == "muon" else arm.split()
            make(tmp_path / f"{arm}-{seed}", *settings, f"run.seed={seed}", losses=(5.0, loss))
    make(tmp_path / "other", "outer=data_parallel", "data.sequence_length=16", losses=(5.0, 1.0))
    broken = make(tmp_path / "broken", "outer=data_parallel", "run.seed=7")
    (broken / "summary.json").unlink()
    (broken / "metrics.jsonl").unlink()
    gaps = find_gaps(read_runs(find_runs([tmp_path])))
    assert [(gap.name, gap.seeds) for gap in gaps] == [("muon", (0, 1))]
    assert gaps[0].percent == pytest.approx((10.0, 10.0)) and gaps[0].spread == pytest.approx(0.0)
    assert exit_code("compare", str(tmp_path)) == 0
    assert "muon: held-out loss +10.0 ± 0.0 % over data parallel " in capsys.readouterr().out
    assert exit_code("compare", str(tmp_path), "--json") == 0
    [gap] = json.loads(capsys.readouterr().out)["gaps"]
    assert gap["percent"] == pytest.approx([10.0, 10.0]) and gap["mean"] == pytest.approx(10.0)


def test_a_run_has_two_gaps_where_the_best_baseline_has_another_inner_optimizer(tmp_path: Path) -> None:
    make(tmp_path / "a", "inner=muon", losses=(5.0, 3.0))
    make(tmp_path / "b", "inner=muon", "outer=data_parallel", losses=(5.0, 2.5))
    make(tmp_path / "c", "outer=data_parallel", losses=(5.0, 2.0))
    gaps = find_gaps(read_runs(find_runs([tmp_path])))
    assert [gap.percent for gap in gaps] == [(pytest.approx(50.0),), (pytest.approx(20.0),)]
    assert [gap.spread for gap in gaps] == [None, None]


def test_runs_of_other_tokens_are_not_held_against_each_other(tmp_path: Path) -> None:
    make(tmp_path / "a")
    place = make(tmp_path / "b", "outer=data_parallel")
    summary = json.loads((place / "summary.json").read_text())
    (place / "summary.json").write_text(json.dumps({**summary, "tokens": {**summary["tokens"], "applied": 300}}))
    assert find_gaps(read_runs(find_runs([tmp_path]))) == []


def test_a_run_under_way_is_held_against_the_baseline_at_its_tokens(tmp_path: Path) -> None:
    run, baseline = read_runs([make(tmp_path / "a", losses=(5.0, 3.0)), make(tmp_path / "b", "outer=data_parallel")])
    assert gap_so_far(run, [run, baseline]) == pytest.approx(-25.0)  # 3.0 over 4.0 after 100 tokens
    assert gap_so_far(run, [run]) is None
    ahead, _ = read_runs([make(tmp_path / "c", losses=(5.0, 4.0, 3.0, 2.0)), tmp_path / "b"])
    assert gap_so_far(ahead, [baseline]) is None, "the baseline has not come so far"


def test_a_table_is_as_wide_as_it_needs_to_be_where_nobody_looks(tmp_path: Path) -> None:
    file = io.StringIO()
    runs = [Run(tmp_path / ("x" * 150), {})]
    show(comparison_of(runs), Console(file=file, width=40, _environ={}))
    assert "x" * 150 in file.getvalue()


def test_json_has_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [make(tmp_path / "a"), make(tmp_path / "b", "outer.lr=0.7", losses=(5.0, 3.5))]
    assert exit_code("compare", *map(str, places), "--json", "--out", str(tmp_path / "out")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["loss"] == 3.5
    assert [(run["name"], run["time_to_loss_s"]) for run in content["runs"]] == [
        ("outer.lr=0.75", 15.0), ("outer.lr=0.7", 10.0),
    ]  # fmt: skip
    assert len(list((tmp_path / "out").glob("*.png"))) == 3


@pytest.mark.parametrize("arguments", [(), ("nowhere",), (".", "--loss", "nan")])
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code("compare", *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
