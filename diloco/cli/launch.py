"""`diloco launch`: writes, and submits, what starts one host and N peers elsewhere.

1. The settings are composed and checked as by `diloco train`, and the options by what the engine takes.
2. All files are made in memory: the configuration, the identity of the host where peers must know it beforehand, and
   the templates of the engine (`engines.py`). They appear in the directory together, or not at all.
3. What to type next is printed, or run (`--submit`).

Peers need no rendezvous: each is one process, or one torchrun job, that is told the address of the host.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from diloco import __version__
from diloco.cli.engines import ENGINES, HOST_KEY, Job, render
from diloco.config import Config, Start, compose, refuse_ignored
from diloco.errors import ConfigError

__all__ = ["run"]

CONFIG = "config.yaml"
LONGEST_NAME = 40  # Kubernetes allows 63 letters, of which it takes some itself
ANY_ADDRESS = "/ip4/0.0.0.0/tcp/0"
PORT = 4100
PLACEHOLDER = "PEER_ID"  # of a host whose identity is not made yet
OWN = "which gives each peer its own"
GIVEN = (  # settings that are not for the user to give, why, and what to do instead
    ("run.name run.lead run.report data.shard data.shards swarm.identity_path", OWN, "drop it"),
    ("swarm.initial_peers", OWN, "drop it, or start the peers with diloco train"),
    ("swarm.announce", OWN, "drop it, or name the port of the host with --port"),
    ("swarm.token", OWN, "drop it; in a closed run the owner's peers have swarm.key_path"),
    ("local.peers", "which starts them elsewhere", "set --peers"),
)
CLEAN = (  # what --config may hold of another peer
    *("run.name=null", "run.lead=true", "run.report=false", "data.shard=null", "data.shards=null"),
    *("swarm.identity_path=null", "swarm.initial_peers=[]", "swarm.announce=[]", "swarm.token=null"),
)
FORMS = {
    "image": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}"), "registry/diloco:cuda"),
    "gpu": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"), "H100"),
    "sbatch": (re.compile(r"[a-z][a-z-]*(=.+)?"), "partition=gpu"),
    "install": (re.compile(r".+"), "diloco-VERSION-py3-none-any.whl"),
}


@dataclass(frozen=True)
class Options:
    """The options of the command. None or () is an option that was not typed; the others every engine takes."""

    peers: int = 4
    gpus: int = 1
    gpu: tuple[str, ...] = ()
    port: int | None = None
    image: str | None = None
    install: str | None = None
    sbatch: tuple[str, ...] = ()


def run(
    engine: str,
    overrides: Sequence[str],
    start: Start,
    out: Path | None,
    submit: bool,
    dry_run: bool,
    options: Mapping[str, Any],
) -> int:
    """Write the files, and say or do what follows; returns the exit code. `options` are those of `Options`, by name.

    Raises ConfigError, before anything is written, for settings, options or a directory that cannot be used, and with
    `submit` if the engine's program is missing. Raises it also if that program fails; the files are there then.
    """
    if submit and dry_run:
        raise ConfigError("--submit and --dry-run exclude each other; drop one")
    config, asked = _config(overrides, start), Options(**options)
    out = (out or Path("runs") / f"{config.run.id}-launch").absolute()
    _check(engine, config, overrides, out, asked)
    job, kind = _job(engine, config, out, asked), ENGINES[engine]
    if not kind.shares_files:
        for key in _local_files(config):
            click.echo(f"diloco: warning: {key} is not copied; it has to be there on every machine", err=True)
    if submit and shutil.which(kind.program) is None:
        commands = "; ".join(map(shlex.join, kind.commands(job)))
        raise ConfigError(f"{kind.program} is not in PATH; drop --submit, and type this where it is: {commands}")
    if dry_run:
        for name, text in _files(engine, job, config).items():
            click.echo(f"# {out / name}\n{text}")
        return 0
    _write(engine, job, config)
    click.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if not submit:
        click.echo("\n".join(["to start it:", *map(shlex.join, kind.commands(job))]))
        return 0
    for command in kind.commands(job):
        click.echo(shlex.join(command))
        code = subprocess.run(command).returncode
        if code:
            raise ConfigError(f"{shlex.join(command)} ended with {code}; its lines above say why, the files are there")
    return 0


def _config(overrides: Sequence[str], start: Start) -> Config:
    """The configuration of every peer. Where nobody typed where they listen, others can connect to them."""
    typed = _typed(overrides)
    for keys, why, remedy in GIVEN:
        for key in keys.split():
            if key in typed:
                raise ConfigError(f"{key} has no effect with diloco launch, {why}; {remedy}")
    config = compose([*overrides, *CLEAN], start)
    refuse_ignored(config, "train", overrides, start)
    if config.outer.method == "data_parallel":
        raise ConfigError("outer.method=data_parallel has no swarm that could be launched; choose another outer")
    if config.only_here and not {"swarm", "swarm.listen"} & typed:
        config = compose([*overrides, *CLEAN, f"swarm.listen=[{ANY_ADDRESS}]"], start)
    for doubt in config.warnings():
        click.echo(f"diloco: warning: {doubt}", err=True)
    return config


def _local_files(config: Config) -> Iterator[str]:
    """Settings that name files of a machine."""
    data, model = config.data, config.model
    named = {"data.path": data.path, "data.paths": data.paths, "model.path": model.path if not model.revision else None}
    yield from (key for key, value in named.items() if value)


def _typed(overrides: Sequence[str]) -> set[str]:
    return {override.lstrip("+").partition("=")[0] for override in overrides}


def _check(engine: str, config: Config, overrides: Sequence[str], out: Path, asked: Options) -> None:
    """Raises ConfigError for options and directories that the engine cannot use."""
    kind = ENGINES[engine]
    for name in sorted({name for one in ENGINES.values() for name in one.options} - set(kind.options)):
        if getattr(asked, name) not in (None, ()):
            takers = ", ".join(other for other, one in ENGINES.items() if name in one.options)
            raise ConfigError(f"--{name} has no effect with launch {engine}; drop it (it is for {takers})")
    for name, (pattern, example) in FORMS.items():
        found = getattr(asked, name)
        for value in [found] if isinstance(found, str) else found or ():
            if pattern.fullmatch(value) is None or not value.isprintable():
                raise ConfigError(f"--{name}={value[:80]!r} cannot be used; write it like {example}")
    _check_gpus(engine, asked)
    if not kind.shares_files:
        for key in sorted({"run.dir", "swarm.key_path"} & _typed(overrides)):
            why = "whose machines do not see the files of this one"
            raise ConfigError(f"{key} has no effect with diloco launch {engine}, {why}; drop it, or launch slurm")
    for key, path in (("--out", out), ("run.dir", config.run.dir.absolute())):
        if not str(path).isprintable() or set(str(path)) & set("'\\"):
            raise ConfigError(f"{key}={str(path)!r} holds a character that a batch script cannot carry; choose another")


def _check_gpus(engine: str, asked: Options) -> None:
    if asked.gpu and not asked.gpus:
        raise ConfigError(f"--gpu={asked.gpu[0]} has no effect with --gpus 0; drop one")
    if engine == "sky" and asked.gpus and not asked.gpu:
        raise ConfigError("--gpu is missing, and SkyPilot wants a kind: --gpu H100, or several of which it takes any")
    if engine == "slurm" and len(asked.gpu) > 1:
        raise ConfigError(f"--gpu={asked.gpu[1]} is a second kind, and SLURM takes one; drop it")


def _job(engine: str, config: Config, out: Path, asked: Options) -> Job:
    requirement, wheel = asked.install or f"diloco=={__version__}", ""
    if Path(requirement).is_file():
        wheel = str(Path(requirement).absolute())
        requirement = f"/tmp/{Path(wheel).name}"
    return Job(
        run_id=config.run.id,
        name=_machine_name(config.run.id),
        out=out,
        run_dir=config.run.dir.absolute(),
        peers=asked.peers,
        gpus=asked.gpus,
        kinds=asked.gpu,
        port=asked.port or (0 if ENGINES[engine].shares_files else PORT),
        image=asked.image or f"diloco:{'cuda' if asked.gpus else 'cpu'}",
        requirement=requirement,
        wheel=wheel,
        sbatch=asked.sbatch,
        user=f"{os.getuid()}:{os.getgid()}",
    )


def _machine_name(run_id: str) -> str:
    """The run's id as a DNS label, which names of machines and objects are."""
    label = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


def _files(engine: str, job: Job, config: Config, host_id: str = PLACEHOLDER) -> dict[str, str]:
    return {CONFIG: config.to_yaml(), **render(engine, replace(job, host_id=host_id))}


def _write(engine: str, job: Job, config: Config) -> None:
    """All files in one step; ConfigError, and nothing is left, if that cannot be."""
    try:
        if job.out.exists() and (not job.out.is_dir() or any(job.out.iterdir())):
            raise ConfigError(f"--out={job.out} is not empty; name another directory, or remove it")
        job.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{job.out.name}-", dir=job.out.parent) as scratch:
            place = Path(scratch, "files")
            place.mkdir()
            host_id = ""
            if ENGINES[engine].makes_identity:
                from diloco.swarm.wire.libp2p import own_id  # it takes seconds

                host_id = own_id(place / HOST_KEY)
            for name, text in _files(engine, job, config, host_id).items():
                (place / name).write_text(text, encoding="utf-8")
            if engine == "compose":
                (place / "data").mkdir()
            place.rename(job.out)
    except OSError as error:
        raise ConfigError(f"--out={job.out} cannot be written: {error.strerror}; name another directory") from None
