"""What `diloco launch` writes for each engine: templates of `configs/launch/ENGINE`, filled in, and what to type next.

A template cannot forget to quote: whatever `{{ ... }}` says is a word of the shell in a script, and a JSON value, which
is YAML, elsewhere.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diloco.config import launch_files

__all__ = ["ENGINES", "HOST_KEY", "Engine", "Job", "render"]

HOST_KEY = "host.key"
PATIENCE_S = 3600  # of a SLURM task that finds no swarm
SCRIPTS = (".sbatch", ".sh")
NOTICE = ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",)  # torchrun passes these on to its ranks
RESTARTS = 3


@dataclass(frozen=True)
class Job:
    """What is launched: one host, and `peers` peers on `gpus` accelerators each, of one of the `kinds`.

    name: for names of machines. out: absolute directory of the written files. run_dir: where peers on a shared file
    system keep their runs. requirement: what pip installs there, of which `wheel` is the file here, if it is one.
    host_id: peer id of the host, where its identity is made beforehand.
    """

    run_id: str
    name: str
    out: Path
    run_dir: Path
    peers: int = 4
    gpus: int = 1
    kinds: tuple[str, ...] = ()
    port: int = 4100
    image: str = ""
    requirement: str = ""
    wheel: str = ""
    sbatch: tuple[str, ...] = ()
    user: str = ""
    host_id: str = ""


@dataclass(frozen=True)
class Engine:
    """What tells one engine from another.

    program: what its files are given to. commands: what to type, once the files are there, as lists of words.
    host_name: the name under which peers call the host, if it has one. python: the words that start Python there.
    options: those of `diloco launch` that it takes. shared: templates of `configs/launch` itself that it uses.
    """

    program: str
    commands: Callable[[Job], list[list[str]]]
    host_name: Callable[[Job], str] = lambda job: ""
    python: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def makes_identity(self) -> bool:
        """Whether the host has an identity before it starts, because peers learn its address from these files."""
        return "port" in self.options and not self.shares_files

    @property
    def shares_files(self) -> bool:
        """Whether all machines see the run directory of this one."""
        return "sbatch" in self.options


ENGINES = {
    "slurm": Engine(
        "sbatch",
        lambda job: [["sbatch", str(job.out / f"{role}.sbatch")] for role in ("host", "peers")],
        python=(sys.executable,),
        options=("gpu", "port", "sbatch"),
    ),
    "sky": Engine(
        "sky",
        lambda job: [["bash", str(job.out / "submit.sh")]],
        python=("python3",),
        options=("gpu", "port", "install"),
        shared=("again.sh",),
    ),
    "kubernetes": Engine(
        "kubectl",
        lambda job: [["kubectl", "apply", "-k", str(job.out)]],
        host_name=lambda job: f"{job.name}-host",
        options=("port", "image"),
        shared=("again.sh",),
    ),
    "compose": Engine(
        "docker",
        lambda job: [["docker", "compose", "--file", str(job.out / "compose.yaml"), "up", "--detach"]],
        host_name=lambda job: "host",
        options=("port", "image"),
    ),
}


def render(engine_name: str, job: Job) -> dict[str, str]:
    """The files of an engine by name, filled in."""
    engine, folder = ENGINES[engine_name], launch_files()
    values = _values(engine, job)
    files = {}
    own = (path for path in (folder / engine_name).iterdir() if path.is_file())
    for template in sorted([*own, *(folder / name for name in engine.shared)]):
        environment = Environment(
            loader=FileSystemLoader(template.parent),
            undefined=StrictUndefined,
            finalize=_shell_word if template.suffix in SCRIPTS else _yaml_value,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        files[template.name] = environment.get_template(template.name).render(values)
    return files


def _values(engine: Engine, job: Job) -> dict[str, Any]:
    """What a template may say beside the fields of `Job`; directories are text here."""
    place = f"/dns4/{engine.host_name(job)}/tcp/{job.port}" if engine.host_name(job) else ""
    kind = f"{job.kinds[0]}:" if job.kinds else ""
    return {
        **vars(job),
        "out": str(job.out),
        "run_dir": str(job.run_dir),
        "directory": str(Path.cwd()),
        "host_name": f"{job.name}-host",
        "place": place,
        "address": f"{place}/p2p/{job.host_id}",
        "python": list(engine.python),
        "train": _train(engine, job.gpus),
        "gres": f"gpu:{kind}{job.gpus}",
        "accelerators": {one: job.gpus for one in job.kinds},
        "patience_s": PATIENCE_S,
        "log_of": lambda path: path.replace("%", "%%"),  # SLURM fills in what follows a percent sign
    }


def _train(engine: Engine, gpus: int) -> list[str]:
    """The words that start a peer: one process, or one per accelerator of its machine."""
    if gpus <= 1:
        return [*engine.python, *(["-m"] if engine.python else []), "diloco", "train"]
    launcher = [*engine.python, "-m", "torch.distributed.run"] if engine.python else ["torchrun"]
    options = ["--standalone", f"--nproc-per-node={gpus}", f"--max-restarts={RESTARTS}", *NOTICE]
    return [*launcher, *options, "-m", "diloco.train"]


def _shell_word(value: Any) -> Any:
    if isinstance(value, str):
        return shlex.quote(value)
    return shlex.join(map(str, value)) if isinstance(value, Sequence) else value


def _yaml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
