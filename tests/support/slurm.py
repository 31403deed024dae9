"""A SLURM cluster that is not there, and the tasks that are submitted to it."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.engines import ENGINES
from diloco.cli.launch import run as launch
from tests.support.peers import MARK, marked
from tests.support.places import ROOT


def written(engine: str, out: Path, *overrides: str, peers: int = 2, gpus: int = 1, **options: Any) -> dict[str, str]:
    """The text files of an engine, written by the command."""
    options |= {"peers": peers, "gpus": gpus}
    assert launch(engine, ["experiment=smoke", *overrides], None, out, False, False, options) == 0
    return {path.name: path.read_text() for path in out.iterdir() if path.is_file()}


# Stands for a peer: it ends with the next code of CODES; "notice" is 0 after SIGUSR1, "slow" after two.
PEER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
with open(os.environ["TRIED"], "a") as tried:
    tried.write("x")
codes = os.environ["CODES"].split()
code = codes[min(os.path.getsize(os.environ["TRIED"]), len(codes)) - 1]
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if not code.isdigit():
    print("trains", flush=True)
    signal.sigwait({signal.SIGUSR1})
if code == "slow":
    print("leaves", flush=True)
    signal.sigwait({signal.SIGUSR1})
os._exit(int({"notice": 0, "slow": 0, "fails": 4}.get(code, code)))
"""


def task(tmp_path: Path, patience_s: int = 3600) -> tuple[Path, dict[str, str]]:
    """The script of peers with a stand-in for Python, and the environment of task 7 of job 41."""
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {"python": f"#!{sys.executable} -S\n{PEER}", "sleep": "#!/bin/sh\n"}
    programs["scontrol"] = f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n'
    for name, program in programs.items():
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "slurm", replace(ENGINES["slurm"], python=(str(tools / "python"),)))
        patch.setattr("diloco.cli.engines.PATIENCE_S", patience_s)
        written("slurm", tmp_path / "out", f"run.dir={tmp_path}/run")
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "TRIED": f"{tmp_path}/tried"}
    return tmp_path / "out" / "peers.sbatch", {**environment, "SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "7"}


# Stands for a cluster: it reads the options of a batch script as sbatch does, and runs its tasks here.
SBATCH = """
import os, re, shlex, subprocess, sys
script = os.path.abspath(sys.argv[1])
lines = re.findall(r"^#SBATCH (.*)$", open(script).read(), re.M)
options = dict((word + "=").lstrip("-").split("=")[:2] for line in lines for word in shlex.split(line))
assert options["open-mode"] == "append" and options["signal"].startswith("B:USR1@")
first, _, last = options.get("array", "0").partition("-")
wanted = os.environ.get("ONLY")
for task in range(int(first), int(last or first) + 1):
    if wanted in (None, str(task)):
        log = options["output"].replace("%a", str(task)).replace("%%", "%")
        environment = {**os.environ, "SLURM_ARRAY_JOB_ID": script, "SLURM_ARRAY_TASK_ID": str(task)}
        shell = subprocess.Popen(
            ["bash", script], cwd=options["chdir"], env=environment, stdin=subprocess.DEVNULL,
            stdout=open(log, "a"), stderr=subprocess.STDOUT, start_new_session=True,
        )
        with open(os.environ["TASKS"], "a") as tasks:
            tasks.write(f"{os.path.basename(script)} {task} {shell.pid}\\n")
"""


SCONTROL = """
import os, sys
assert sys.argv[1] == "requeue"
script, _, task = sys.argv[2].rpartition("_")
os.environ["ONLY"] = task
os.execvp("sbatch", ["sbatch", script])
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file to which a scheduler, which is in PATH, writes `SCRIPT TASK PROCESS` for each task that it starts."""
    tools, tasks, mark = tmp_path / "tools", tmp_path / "tasks", uuid.uuid4().hex
    tools.mkdir()
    for name, program in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tools / name).write_text(f"#!{sys.executable}\n{program}")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "TASKS": f"{tasks}", MARK: mark, "OMP_NUM_THREADS": "1"}
    for name, value in {**environment, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield tasks
    for process in marked(mark):
        if process != os.getpid():
            os.kill(process, signal.SIGKILL)


def started(tasks: Path) -> list[tuple[str, int]]:
    """Script and process of every task so far."""
    lines = tasks.read_text().splitlines() if tasks.exists() else []
    return [(script, int(process)) for script, _, process in map(str.split, lines)]
