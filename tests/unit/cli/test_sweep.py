"""Sweeps: which members there are, that nothing starts when one is wrong, and what happens to those
that end badly."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import sweep as command
from diloco.config import compose
from tests.support.command_line import Typed, exit_code
from tests.support.peers import eventually

SMOKE = "experiment=smoke"
# Stands for diloco: writes what it was asked into the run directory, and ends as run.seed says.
STAND_IN = """
import json, os, pathlib, signal, sys, time
settings = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
place = pathlib.Path(settings["run.dir"].strip("'"))
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
    monkeypatch.setattr(command, "PROGRAM", (sys.executable, "-S", str(program)))
    monkeypatch.chdir(tmp_path)


def sweep(*arguments: str) -> int:
    return exit_code("sweep", "local", SMOKE, *arguments, "--dir", "s")


def calls(name: str) -> list[str]:
    return (Path("s") / name / "calls").read_text().splitlines()


def records(place: str = "s") -> dict[str, Any]:
    files = sorted(Path(place).glob("*/member.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def exits(place: str = "s") -> dict[str, int | None]:
    return {name: record["exit"] for name, record in records(place).items()}


@contextmanager
def signalled(name: str, *numbers: int) -> Iterator[None]:
    """Once this member waits, this process gets the signals."""

    def watch() -> None:
        eventually((Path("s") / name / "waits").exists, name)
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("outer.lr=0.5,-1", "outer.lr=-1 is out of range; expected a number > 0 and <= 10"),
        ("outer.sync_every=8,4 outer.overlap=1,5", "outer.overlap=5 is not less than outer.sync_e"),
        ("model=glob(z*)", "model=glob(z*) matches nothing; expected a pattern for a group"),
        ("run.seed=range(3,1)", "there are no members; check the ends of each range"),
        ("run.dir=a,b", "run.dir=a,b: each member has a directory of its own; set --dir"),
        ("outer.lr=interval(0.1,1)", "has no end of values; list them, such as outer.lr=A,B"),
        ("run.seed=1,2 hydra.sweep.dir=x", "hydra.sweep.dir has no effect; drop it (diloco sweep"),
        ("run.seed=1,2 --cfg job", "--cfg=job shows one configuration"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(line: str, complaint: str, typed: Typed) -> None:
    assert complaint in typed.refused("sweep", "local", SMOKE, *line.split(), "--dir", "s")
    assert not list(Path("s").glob("*/*"))


def test_every_member_runs_in_a_directory_of_its_own(typed: Typed) -> None:
    shown = typed("sweep", "local", SMOKE, "run.seed=1,2", "outer.lr=0.5,0.7", "--dir", "s")
    assert exits() == dict.fromkeys("0123", 0)
    place = Path("s").absolute() / "2"
    own = f"run.id=smoke-2 run.dir='{place}'"
    assert calls("2") == [f"local {SMOKE} run.seed=2 outer.lr=0.5 {own}"]
    assert (place / "output.log").read_text() == "seed 2\n" and (place / "group").read_text() == "s"
    assert "3 run.seed=2 outer.lr=0.7: done, held-out 2.020" in shown
    last = [line for line in shown.splitlines() if line.startswith("outer.lr=")][-1]
    assert " ".join(last.split()).startswith("outer.lr=0.7 2 2.0150 ± 0.0071 ")
    assert len(list(Path("s").glob("loss-by-*.png"))) == 3


def test_the_default_directory_has_the_name_of_the_run(typed: Typed) -> None:
    typed("local", "--multirun", SMOKE, "run.seed=1,2")
    assert exits("runs/smoke-sweep") == {"0": 0, "1": 0}
    typed("simulate", SMOKE, "run.seed=1", "--multirun", "run.dir=here")
    assert exits("here") == {"0": 0}


def test_what_ends_badly_stops_no_other_and_is_run_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep("run.seed=3,4,5") == 3
    ended = {"0": 3, "1": 4, "2": 0}
    assert exits() == ended
    captured = capsys.readouterr()
    said = f"1 of 3 members failed; see {Path('s').absolute()}/0/output.log"
    assert captured.err.splitlines()[-1] == f"diloco: error: {said}"
    assert "1 run.seed=4: diverged" in captured.out
    assert sweep("run.seed=3,4,5", "--jobs", "2") == 3
    assert [len(calls(name)) for name in ended] == [2, 1, 1] and exits() == ended
    assert "2 of 3 members have ended before" in capsys.readouterr().out
    divergence = exit_code("sweep", "local", SMOKE, "run.seed=4", "--dir", "t")
    assert divergence == 0, "alone it is a result"


def test_a_directory_with_other_settings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("run.seed=1,2") == 0
    assert sweep("run.seed=1,3") == 2
    assert "s/1 holds a run with other settings; choose another --dir" in capsys.readouterr().err


def test_jobs_run_at_the_same_time_and_share_the_cores() -> None:
    # each waits for the other
    assert sweep("run.seed=20,21", "train.threads=null", "--jobs", "2") == 0
    assert exits() == {"0": 0, "1": 0}
    assert f"train.threads={max(1, (os.cpu_count() or 1) // (2 * 2))}" in calls("0")[0]


def test_ctrl_c_lets_the_members_leave(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command goes on later."""
    with signalled("0", signal.SIGINT):
        assert sweep("run.seed=8,1") == 0
    assert exits() == {"0": None}
    assert "stopped; the same command runs what is not done in " in capsys.readouterr().out
    Path("s/0/waits").unlink()
    with signalled("0", signal.SIGINT):
        assert sweep("run.seed=8,1") == 0
    assert len(calls("0")) == 2


def test_a_second_ctrl_c_kills() -> None:
    # two pending signals of one kind would be one
    with signalled("0", signal.SIGINT, signal.SIGTERM):
        assert sweep("run.seed=9,1") == 0
    assert exits() == {"0": None}


def test_a_sweep_takes_files_of_one_s_own(typed: Typed) -> None:
    Path("configs/experiment").mkdir(parents=True)
    page = "# @package _global_\nhydra: {sweeper: {params: {run.seed: '1,2'}}}\n"
    Path("configs/experiment/seeds.yaml").write_text(page)
    text = ["data=text", "data.path=~/a b"]
    Path("base.yaml").write_text(compose([SMOKE, "outer.lr=0.9", *text]).to_yaml())
    line = "sweep train experiment=seeds inner.lr=0.1 --config base.yaml --dir s"
    typed(*line.split())
    ours = "train --config base.yaml experiment=seeds inner.lr=0.1 run.seed=2 run.id=smoke-1 run."
    assert calls("1")[0].startswith(ours)
    typed("sweep", "train", "experiment=[smoke,seeds]", *text, "--dir", "t", "--dry-run")
