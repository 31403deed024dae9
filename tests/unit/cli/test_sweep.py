"""Sweeps: which members there are, that nothing starts when one is wrong, and what happens to those that end badly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from diloco.cli import members
from diloco.config import Start, compose
from diloco.config.multirun import hydra_multirun
from diloco.config.sweeps import Axis, grid, parse_axes, plan_sweep
from tests.support.command_line import Typed
from tests.support.peers import eventually
from tests.support.sweeps import SMOKE, outcome, states, sweep

# Stands for diloco: writes what it was asked into the run directory, and ends as run.seed says.
STAND_IN = """
import json, os, pathlib, signal, sys, time
settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
place = pathlib.Path(settings["run.dir"])
with (place / "calls").open("a") as calls:
    calls.write(" ".join([sys.argv[1], *sys.argv[2:]]) + "\\n")
(place / "group").write_text(os.environ["WANDB_RUN_GROUP"])
seed = int(settings["run.seed"])
print("seed", seed)
code = {3: 3, 4: 4}.get(seed, 0)
stopped = []
if seed in (8, 9):
    signal.signal(signal.SIGINT, (lambda *_: stopped.append(1)) if seed == 8 else signal.SIG_IGN)
if seed in (8, 9, 20, 21):
    (place / "waits").touch()
    while not stopped and (seed < 10 or len(list(place.parent.glob("*/waits"))) < 2):
        time.sleep(0.01)
if code != 3:
    loss = 2.0 + seed / 100
    content = {"exit": code, "eval": {"loss": loss, "perplexity": 7.0}, "wall_s": 1.0, "peers": []}
    (place / "summary.json").write_text(json.dumps(content))
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(members, "PROGRAM", (sys.executable, "-S", str(program)))
    monkeypatch.chdir(tmp_path)


def calls(name: str) -> list[str]:
    return (Path("s") / name / "calls").read_text().splitlines()


@contextmanager
def signalled(name: str, *numbers: int) -> Iterator[None]:
    """Once this member waits, this process gets the signals."""

    def watch() -> None:
        eventually((Path("s") / name / "waits").exists, name, timeout_s=240)
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join()


def test_several_values_are_axes_and_the_rest_is_left_alone() -> None:
    arguments = ["experiment=smoke", "outer.lr=0.5,0.7", "run.seed=range(1,4)", "data.path=~/a b", "x", "a=[1,2]"]
    axes = [Axis("outer.lr", "0.5,0.7", ("0.5", "0.7")), Axis("run.seed", "range(1,4)", ("1", "2", "3"))]
    assert parse_axes(arguments) == ["experiment=smoke", *axes, "data.path=~/a b", "x", "a=[1,2]"]


def test_the_grammar_is_that_of_hydra() -> None:
    for argument, values in {
        "model=tiny,14m": ("tiny", "14m"),
        "model=choice(tiny,14m)": ("tiny", "14m"),
        "model=glob(1*)": ("14m", "150m", "1b"),
        "sim.step_s=[1,2],[3]": ("[1,2]", "[3]"),
        "budget.tokens=null,100": ("null", "100"),
        "+outer.lr=range(0.5,1,0.25)": ("0.5", "0.75"),
    }.items():
        [axis] = parse_axes([argument])
        assert isinstance(axis, Axis) and axis.values == values


def test_a_grid_is_every_combination_with_the_last_axis_fastest() -> None:
    combinations = grid(parse_axes(["a=1,2", "b=0", "c=x,y"]))
    assert [" ".join(arguments) for arguments, _ in combinations] == [
        "a=1 b=0 c=x", "a=1 b=0 c=y", "a=2 b=0 c=x", "a=2 b=0 c=y",
    ]  # fmt: skip
    assert combinations[1][1] == (("a", "1"), ("c", "y"))
    assert grid(parse_axes(["b=0"])) == [(("b=0",), ())]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("outer.lrr=0.5,0.7", "outer.lrr is not a setting; did you mean outer.lr?"),
        ("outer.lr=0.5,-1", "outer.lr=-1 is out of range; expected a number > 0 and <= 10"),
        ("outer.sync_every=8,4 outer.overlap=1,5", "outer.overlap=5 is not less than the 4 inner steps"),
        ("model=tiny,huge", "model=huge is not a choice"),
        ("outer.lr=0.5,0.7 outer.lr=1", "outer.lr=0.5,0.7 is swept and given again; give outer.lr once"),
        ("model=glob(z*)", "model=glob(z*) matches nothing"),
        ("run.seed=range(3,1)", "run.seed=range(3,1) has no values"),
        ("run.dir=a,b", "run.dir=a,b: each member has a directory of its own; set --dir"),
        ("run.seed=range(0,20000)", "run.seed are 20000 members; at most 10000 are run"),
        ("outer.lr=interval(0.1,1)", "outer.lr=interval(0.1,1) is a range of numbers; list values, or choose"),
        ("run.seed=1,2 --sweeper optuna", "pip install 'diloco[sweep]'"),
        ("run.seed=1,2 --launcher submitit_slurm", "pip install 'diloco[sweep]'"),
        ("run.seed=1,2 --sweeper nothing", "nothing is a plugin of Hydra that is not installed: install"),
        ("run.seed=1,2 --cfg job", "--cfg=job shows one configuration"),
        ("run.seed=1,2 hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials is not a setting"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(
    line: str, complaint: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("diloco.config.compose"), "installed", lambda group: ["basic"])
    assert complaint in typed.refused("sweep", "local", SMOKE, *line.split(), "--dir", "s")
    assert not list(Path("s").glob("*/*"))


def test_a_dry_run_lists_the_members_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("run.seed=1,2", "outer.lr=0.5", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"pending  diloco local {SMOKE} run.seed={i + 1} outer.lr=0.5 run.id=smoke-{i} run.dir=s/{i}-seed{i + 1}"
        for i in (0, 1)
    ]
    assert not Path("s").exists()


def test_the_default_directory_has_the_name_of_the_run(typed: Typed) -> None:
    typed("local", "--multirun", SMOKE, "run.seed=1,2")
    assert set(states("runs/smoke-sweep")) == {"0-seed1", "1-seed2"}
    typed("simulate", SMOKE, "run.seed=1", "--multirun", "run.dir=here")
    assert set(states("here")) == {"0"}


@pytest.mark.parametrize("launcher", [(), ("--launcher", "basic")])
def test_every_member_runs_in_a_directory_of_its_own(
    launcher: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("run.seed=1,2", "outer.lr=0.5,0.7", *launcher) == 0
    assert list(states()) == ["0-seed1_lr0.5", "1-seed1_lr0.7", "2-seed2_lr0.5", "3-seed2_lr0.7"]
    assert list(states().values()) == ["done"] * 4
    assert f"local {SMOKE} run.seed=2 outer.lr=0.5" in calls("2-seed2_lr0.5")[0]
    if launcher:
        return
    assert calls("2-seed2_lr0.5") == [f"local {SMOKE} run.seed=2 outer.lr=0.5 run.id=smoke-2 run.dir=s/2-seed2_lr0.5"]
    assert (Path("s") / "2-seed2_lr0.5" / "output.log").read_text() == "seed 2\n"
    assert (Path("s") / "2-seed2_lr0.5" / "group").read_text() == "s"
    shown = capsys.readouterr().out
    assert "4/4 3-seed2_lr0.7 done, held-out 2.020" in shown
    last = [line for line in shown.splitlines() if line.startswith("outer.lr=")][-1]
    assert " ".join(last.split()).startswith("outer.lr=0.7 2 2.0150 ± 0.0071 7.00 ± 0.00 ")
    assert len(list(Path("s").glob("loss-by-*.png"))) == 3
    assert outcome()["members"][3]["result"]["eval"]["loss"] == 2.02


def test_what_ends_badly_stops_no_other_and_is_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("run.seed=3,4,5") == 3
    ended = {"0-seed3": "failed", "1-seed4": "diverged", "2-seed5": "done"}
    assert states() == ended and [member["exit"] for member in outcome()["members"]] == [3, 4, 0]
    captured = capsys.readouterr()
    said = "1 of 3 members failed, the first with exit code 3; see s/0-seed3/output.log"
    assert captured.err.splitlines()[-1] == f"diloco: error: {said}" and "4 diverged" in captured.out
    assert sweep("run.seed=3,4,5", "--jobs", "2") == 3
    assert [len(calls(name)) for name in ended] == [2, 1, 1] and states() == ended
    assert "2 of 3 members have ended before" in capsys.readouterr().out


def test_divergence_alone_is_a_result() -> None:
    assert sweep("run.seed=4,5") == 0


def test_a_directory_with_other_settings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    place = Path("s") / "0-seed1"
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(compose([SMOKE, "run.seed=1", "outer.lr=0.9"]).to_yaml())
    assert sweep("run.seed=1,2") == 2
    assert "s/0-seed1 holds a run with other settings; choose another --dir" in capsys.readouterr().err
    (place / "config.yaml").write_text(compose([SMOKE, "run.seed=1", "train.threads=3", "run.id=x"]).to_yaml())
    assert sweep("run.seed=1,2") == 0  # where it runs, and under which name, is not what it is


@pytest.mark.parametrize("launcher", [(), ("--launcher", "basic")])
def test_jobs_run_at_the_same_time_and_share_the_cores(launcher: tuple[str, ...]) -> None:
    assert sweep("run.seed=20,21", "train.threads=null", "--jobs", "2", *launcher) == 0  # each waits for the other
    assert list(states().values()) == ["done"] * 2
    threads = max(1, (os.cpu_count() or 1) // (2 * 2))
    assert launcher or f"train.threads={threads}" in calls("0-seed20")[0]


def test_ctrl_c_lets_the_members_leave(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command goes on later."""
    with signalled("0-seed8", signal.SIGINT):
        assert sweep("run.seed=8,1") == 0
    assert states() == {"0-seed8": "interrupted", "1-seed1": "pending"}
    assert "stopped with 2 of 2 members to go; the same command goes on" in capsys.readouterr().out
    assert not Path("s/1-seed1").exists()
    Path("s/0-seed8/waits").unlink()
    with signalled("0-seed8", signal.SIGINT):
        assert sweep("run.seed=8,1") == 0
    assert len(calls("0-seed8")) == 2


def test_a_second_ctrl_c_kills() -> None:
    with signalled("0-seed9", signal.SIGINT, signal.SIGTERM):  # two pending signals of one kind would be one
        assert sweep("run.seed=9,1") == 5
    assert states() == {"0-seed9": "interrupted", "1-seed1": "pending"}
    assert outcome()["members"][0]["exit"] == -signal.SIGKILL


def test_hydra_hands_over_the_values_and_leaves_the_command_line(tmp_path: Path) -> None:
    before, seen = list(sys.argv), []

    def task(number: int, chosen: tuple[tuple[str, str], ...]) -> float:
        seen.append((number, chosen))
        return 0.0

    parsed, plan = plan_sweep(["outer.lr=0.5,0.7", "model=tiny"], Start())
    hydra_multirun([axis for axis in parsed if isinstance(axis, Axis)], task, tmp_path / "it's", plan)
    assert seen == [(0, (("outer.lr", "0.5"),)), (1, (("outer.lr", "0.7"),))]
    assert sys.argv == before and "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ..declarative_base")  # of SQLAlchemy, for Optuna
def test_optuna_looks_for_several_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    """The result has our names."""
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "sweep.objective=[loss,wall_s]", "--jobs", "2")
    assert sweep("run.seed=1,5", "outer.lr=0.5,0.7", *optuna) == 0
    assert list(states().values()) == ["done"] * 2
    found = (Path("s") / "optimization_results.yaml").read_text()
    assert "run.seed: " in found and "outer.lr: " in found and "- 1.0" in found
    assert "what optuna found best by loss, wall_s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ..declarative_base")
@pytest.mark.parametrize(("seed", "code"), [(3, 3), (4, 0)])
@pytest.mark.parametrize("objective", ["loss", "[loss,wall_s]"])
def test_a_member_that_ends_badly_does_not_stop_optuna(seed: int, code: int, objective: str) -> None:
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", f"sweep.objective={objective}")
    assert sweep(f"run.seed={seed}", "outer.lr=0.5,0.7", *optuna) == code
    assert set(states().values()) == {"failed" if code else "diverged"}


OPTUNA = "hydra/sweeper=optuna sweep.objective=[loss,wall_s]"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (f"{OPTUNA} hydra.sweeper.direction=minimize", "hydra.sweeper.direction=minimize is for 1 objectives, and"),
        (f"{OPTUNA} hydra.sweeper.storage=sqlite:///o.db", "hydra.sweeper.storage=sqlite:///o.db needs SQLAlchemy be"),
        (f"{OPTUNA} hydra.run.dir=x", "hydra.run.dir=x has no effect in a sweep; set hydra.sweep.dir, or --dir"),
        (f"{OPTUNA} hydra.sweep.dir=x", "--dir=s and hydra.sweep.dir=x are one setting; drop one of them"),
        (f"{OPTUNA} sweep.jobs=1,2", "sweep.jobs=1,2 is said once for all members; give one value"),
        ("hydra/sweeper=basic sweep.objective=loss", "sweep.objective has no effect on every combination"),
    ],
)
def test_what_a_sweep_of_hydra_cannot_do_is_said_in_a_dry_run(
    line: str, complaint: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.config.multirun.version", lambda name: "2.1.9")
    said = typed.refused("sweep", "local", SMOKE, "run.seed=1,2", *line.split(), "--dir", "s", "--dry-run")
    assert said.startswith(f"diloco: error: {complaint}") and not Path("s").exists()


def test_one_page_holds_a_sweep_its_seeds_and_its_plot(typed: Typed) -> None:
    assert "s: sweep.json, loss-by-tokens.png" in typed("sweep", "experiment=lr-sweep", "--dir", "s")
    assert list(states()) == ["0-lr0.5_seed0", "1-lr0.5_seed1", "2-lr0.9_seed0", "3-lr0.9_seed1"]
    shown = "local experiment=lr-sweep outer.lr=0.9 run.seed=0 hydra.mode=RUN run.id=lr-2 run.dir=s/2-lr0.9_seed0"
    assert calls("2-lr0.9_seed0") == [shown]
    assert [picture.name for picture in Path("s").glob("*.png")] == ["loss-by-tokens.png"]


def test_the_mode_of_a_file_makes_a_command_a_sweep(typed: Typed) -> None:
    page = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {run.seed: '1,2'}}}\n"
    Path("configs/experiment").mkdir(parents=True)
    Path("configs/experiment/seeds.yaml").write_text(page)
    typed("local", "experiment=[smoke,seeds]")
    assert set(states("runs/smoke-sweep")) == {"0-seed1", "1-seed2"}
