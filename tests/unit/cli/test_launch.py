"""`diloco launch`: what it writes is valid for its engine, quotes everything, and a SLURM task really trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from diloco.cli.commands.swarm import launch as command_line
from diloco.cli.engines import ENGINES
from diloco.cli.launch import run as launch
from diloco.cli.main import main
from diloco.config import Start, compose, launch_files
from diloco.train.host import Host
from tests.support.command_line import Typed
from tests.support.peers import eventually
from tests.support.places import ROOT
from tests.support.slurm import PEER, task, written

pytestmark = pytest.mark.slow

ID = "QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"
GPU = {"sky": ("--gpu", "H100")}


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a real one takes hivemind, and seconds."""

    def own_id(path: Path) -> str:
        path.write_bytes(b"key")
        path.chmod(0o600)
        return ID

    monkeypatch.setattr("diloco.swarm.wire.libp2p.own_id", own_id)


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def test_the_command_knows_the_engines_that_have_templates() -> None:
    [choice] = [parameter.type for parameter in command_line.params if parameter.name == "engine"]
    folders = {path.name for path in launch_files().iterdir() if path.is_dir()}
    assert set(choice.choices) == folders == ENGINES.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_writes_what_its_dry_run_prints(engine: str, tmp_path: Path, typed: Typed) -> None:
    out = tmp_path / "out"
    arguments = ["launch", engine, "experiment=smoke", "outer.lr=0.5", "--peers", "2", "--out", str(out)]
    shown = typed(*arguments, *GPU.get(engine, ()), "--dry-run")
    assert not list(tmp_path.iterdir())
    typed(*arguments, *GPU.get(engine, ()))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")], "nothing else is left"
    for path in out.iterdir():
        if path.is_file() and path.name != "host.key":
            assert f"# {path}\n{path.read_text().replace(ID, 'PEER_ID')}" in shown
    config = compose(base=out / "config.yaml")
    assert config.outer.lr == 0.5 and config.swarm.listen == ("/ip4/0.0.0.0/tcp/0",)
    assert engine == "slurm" or stat.S_IMODE((out / "host.key").stat().st_mode) == 0o600


PAGES = (ROOT / "diloco" / "docs" / "cluster.md").read_text() + (ROOT / "README.md").read_text()
EXAMPLES = sorted(set(re.findall(r"^ *diloco launch ([^#\n]*)", PAGES + str(command_line.help), re.M)))


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_accepted(example: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed("launch", *[word for word in shlex.split(example) if word not in ("--submit", "--dry-run")], "--dry-run")
    assert not list(tmp_path.iterdir())


def test_settings_of_one_peer_do_not_travel_unless_typed(tmp_path: Path) -> None:
    base, listen = tmp_path / "config.yaml", "/ip4/127.0.0.1/tcp/0"
    theirs = ["run.name=a", "data.shard=0", "data.shards=2", f"swarm.initial_peers=[/ip4/127.0.0.1/tcp/1/p2p/{ID}]"]
    base.write_text(compose(["experiment=smoke", "outer.lr=0.5", *theirs]).to_yaml())
    options = {"peers": 2, "gpus": 1}
    assert launch("slurm", [f"swarm.listen=[{listen}]"], Start(base=base), tmp_path / "out", False, False, options) == 0
    config = compose(base=tmp_path / "out" / "config.yaml")
    assert config.outer.lr == 0.5 and not config.swarm.initial_peers and config.swarm.listen == (listen,)
    assert config.run.name is config.data.shard is config.data.shards is None


@pytest.mark.parametrize("engine", ENGINES)
def test_what_comes_next_is_printed_or_done(
    engine: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, said = tmp_path / "tools" / ENGINES[engine].program, tmp_path / "said"
    program.parent.mkdir()
    for name in (program.name, "bash"):
        program.with_name(name).write_text(f'#!/bin/sh\necho {name} "$@" >> {said}\nexit ${{CODE:-0}}\n')
        program.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    arguments = ["launch", engine, "experiment=smoke", *GPU.get(engine, ()), "--out"]
    _, before, *commands = typed(*arguments, str(tmp_path / "first")).splitlines()
    assert before == "to start it:" and commands and not said.exists()
    typed(*arguments, str(tmp_path / "first2"), "--submit")
    assert said.read_text().replace("first2", "first").splitlines() == commands
    monkeypatch.setenv("CODE", "7")
    typed(*arguments, str(tmp_path / "third"), "--submit", code=2)
    assert " ended with 7; its lines above say why" in typed.err


def test_without_the_scheduler_nothing_is_written(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "out"
    hint = "; ".join(f"sbatch {out}/{role}.sbatch" for role in ("host", "peers"))
    expected = f"sbatch is not in PATH; drop --submit, and type this where it is: {hint}"
    said = typed.refused("launch", "slurm", "experiment=smoke", "--out", str(out), "--submit")
    assert said == f"diloco: error: {expected}\n" and not list(tmp_path.iterdir())


REFUSED = [
    ("slurm outer.lrr=1", "outer.lrr is not a setting; did you mean outer.lr?"),
    ("slurm sim.loss=0.1", "sim.loss=0.1 has no effect with diloco train, which runs in real time"),
    ("slurm run.name=a", "run.name has no effect with diloco launch, which gives each peer its own; drop it"),
    ("slurm local.peers=8", "local.peers has no effect with diloco launch, which starts them elsewhere; set --peers"),
    ("slurm outer=data_parallel", "outer.method=data_parallel has no swarm that could be launched"),
    ("slurm --peers 0", "Invalid value for '--peers': 0 is not in the range 1<=x<=1000"),
    ("slurm --image a", "--image has no effect with launch slurm; drop it (it is for kubernetes, compose)"),
    ("compose --sbatch time=1", "--sbatch has no effect with launch compose; drop it (it is for slurm)"),
    ("compose run.dir=runs/a", "run.dir has no effect with diloco launch compose, whose machines do not see"),
    ("compose --image 'a b'", "--image='a b' cannot be used; write it like registry/diloco:cuda"),
    ("compose --image 'a$b'", "--image='a$b' cannot be used; write it like registry/diloco:cuda"),
    ("slurm --sbatch 'time=1\nrm'", "--sbatch='time=1\\nrm' cannot be used; write it like partition=gpu"),
    ("slurm --gpu H100 --gpus 0", "--gpu=H100 has no effect with --gpus 0; drop one"),
    ("slurm --gpu H100 --gpu A100", "--gpu=A100 is a second kind, and SLURM takes one; drop it"),
    ("sky", "--gpu is missing, and SkyPilot wants a kind: --gpu H100"),
    ('slurm "run.dir=it\\\'s"', "holds a character that a batch script cannot carry; choose another"),
    ("slurm --submit --dry-run", "--submit and --dry-run exclude each other; drop one"),
    ("fargate", "'fargate' is not one of 'slurm', 'sky', 'kubernetes', 'compose'"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line[:30] for line, _ in REFUSED])
def test_what_cannot_work_is_refused_and_writes_nothing(line: str, said: str, tmp_path: Path, typed: Typed) -> None:
    assert said in typed.refused("launch", *shlex.split(line), "experiment=smoke", "--out", str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_files_that_peers_need_and_nobody_copies_are_named(typed: Typed) -> None:
    for engine, copied in (("kubernetes", False), ("slurm", True)):
        typed("launch", engine, "experiment=smoke", "data=text", "data.path=notes/", "--dry-run")
        said = "diloco: warning: data.path is not copied; it has to be there on every machine\n"
        assert typed.err == ("" if copied else said)


def test_files_of_somebody_are_not_overwritten(tmp_path: Path, typed: Typed) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    not_empty = "is not empty; name another directory, or remove it"
    below = "cannot be written: File exists; name another directory"
    for place, said in ((tmp_path, not_empty), (mine, not_empty), (mine / "below", below)):
        complaint = typed.refused("launch", "compose", "experiment=smoke", "--out", str(place))
        assert f"--out={place} " in complaint and said in complaint
    assert list(tmp_path.iterdir()) == [mine] and mine.read_text() == "precious"


def test_names_of_machines_are_labels(tmp_path: Path) -> None:
    for run_id, name in {"My_Run.7": "my-run-7", "7b": "run-7b", "a" * 64: "a" * 40, "0_": "run-0"}.items():
        service, jobset = documents(written("kubernetes", tmp_path / name, f"run.id={run_id}")["jobset.yaml"])
        assert (service["metadata"]["name"], jobset["metadata"]["name"]) == (f"{name}-host", name)


def test_a_host_ends_with_the_budget_when_nobody_trains() -> None:
    for steps, states, over in (
        (0, [], False),  # nobody has come yet
        (0, ["training"], False),
        (3, [], True),
        (3, ["training"], False),  # it has not heard of the last version
        (2, ["done"], False),
        (2, ["leaving"], False),
    ):
        members = [SimpleNamespace(trains=True, status=SimpleNamespace(state=state)) for state in states]
        everybody = SimpleNamespace(all=lambda members=members: [SimpleNamespace(trains=False), *members])
        protocol = SimpleNamespace(members=everybody, fragments=[SimpleNamespace(steps=steps)], applied_tokens=0)
        host = object.__new__(Host)
        host.manifest, host._used_up = compose(["experiment=smoke"]).manifest(), False
        host.node = SimpleNamespace(protocol=protocol)  # type: ignore[assignment]
        assert host.is_over() is over
        members.clear()
        assert host.is_over() is (over or steps == 3 or "done" in states), "what a peer has said still counts"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_scripts_are_bash_and_hold_any_directory(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / 'a $(touch broken) `b` "%j" & {c}'
    odd.mkdir()
    monkeypatch.chdir(odd)
    options = ("partition=gpu", "comment=two words; rm -rf")
    files = written("slurm", odd / "out", "run.dir=runs/x", gpus=gpus, sbatch=options, gpu=("H100",) if gpus else ())
    for name, log in (("host.sbatch", "host.log"), ("peers.sbatch", "peer-%a.log")):
        directives = [shlex.split(line) for line in re.findall(r"^#SBATCH (.*)$", files[name], re.M)]
        assert all(len(words) == 1 for words in directives)
        settings = dict(words[0].removeprefix("--").split("=", 1) for words in directives if "=" in words[0])
        assert settings["comment"] == "two words; rm -rf" and settings["chdir"] == str(odd)
        assert settings["output"] == str(odd / "out").replace("%", "%%") + f"/{log}"
        assert settings.get("gres") == (f"gpu:H100:{gpus}" if gpus and name == "peers.sbatch" else None)
        places = "".join(line for line in files[name].splitlines(True) if re.match("(out|run_dir)=", line))
        shown = subprocess.run(["bash", "-c", f'{places}printf "%s|%s" "$out" "$run_dir"'], capture_output=True)
        assert shown.stdout.decode() == f"{odd}/out|{odd}/runs/x"
        subprocess.run(["bash", "-n", odd / "out" / name], check=True)
    assert [path.name for path in odd.iterdir()] == ["out"]
    assert ("torch.distributed.run --standalone --nproc-per-node=8 " in files["peers.sbatch"]) == (gpus > 1)


def ended(command: list[Any], environment: dict[str, str], log: Path, *signals: tuple[str, int]) -> int:
    """The exit code of a script, which gets each of these signals when its peer has said the word before it."""
    with log.open("w") as file:
        shell = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        for word, number in signals:
            eventually(lambda word=word: word in log.read_text(), f"the peer {word}")
            shell.send_signal(number)
        return shell.wait(60)


@pytest.mark.parametrize(
    ("codes", "signals", "ends_with", "tries", "queued"),
    [
        ("0", [], 0, 1, False),
        ("2", [], 2, 1, False),
        ("kill", [], 137, 1, False),
        ("3 3 0", [], 0, 3, False),  # the host was not there yet
        ("3 notice", [("trains", signal.SIGUSR1)], 0, 2, True),
        ("notice", [("trains", signal.SIGUSR1)], 0, 1, True),
        ("slow", [("trains", signal.SIGUSR1), ("leaves", signal.SIGTERM)], 0, 1, True),  # still there at the limit
        ("fails", [("trains", signal.SIGUSR1)], 4, 1, False),  # and it would fail again
        ("notice", [("trains", signal.SIGTERM)], 0, 1, False),  # SLURM queues it again itself, or the user ended it
    ],
)
def test_a_task_is_queued_again_only_when_its_time_is_over(
    codes: str, signals: list[tuple[str, int]], ends_with: int, tries: int, queued: bool, tmp_path: Path
) -> None:
    script, environment = task(tmp_path)
    log, again = tmp_path / "log", tmp_path / "queued"
    assert ended(["bash", script], environment | {"CODES": codes}, log, *signals) == ends_with, log.read_text()
    assert (tmp_path / "tried").read_text() == "x" * tries
    assert (again.read_text() if again.exists() else "") == ("requeue 41_7\n" if queued else "")


def test_a_task_that_never_finds_the_host_names_it(tmp_path: Path) -> None:
    script, environment = task(tmp_path, patience_s=0)
    done = subprocess.run(["bash", script], env=environment | {"CODES": "3"}, capture_output=True, text=True)
    place, log = tmp_path / "run" / "host" / "address", tmp_path / "out" / "host.log"
    assert done.returncode == 3 and (tmp_path / "tried").read_text() == "x"
    said = f"diloco: error: peer-7 found no swarm at {place} for SECONDS s; {log} says why\n"
    assert re.fullmatch(re.escape(said).replace("SECONDS", r"\d+"), done.stderr)  # a slow machine takes more than 0


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_kubernetes_takes_every_object(gpus: int, tmp_path: Path) -> None:
    files = written("kubernetes", tmp_path / "out", gpus=gpus, peers=3)
    service, jobset = documents(files["jobset.yaml"])
    host, peer = jobset["spec"]["replicatedJobs"]
    assert (host["replicas"], peer["replicas"]) == (1, 3)
    specs = [one["template"]["spec"]["template"]["spec"] for one in (host, peer)]
    for spec in specs:
        [container] = spec["containers"]
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volume["name"] for volume in spec["volumes"])
        assert spec["securityContext"]["runAsNonRoot"] and spec["terminationGracePeriodSeconds"] >= 120
        assert "/launch/again.sh" in [*container.get("command", []), *container["args"]] and "again.sh" in files
    limits = specs[1]["containers"][0].get("resources")
    assert limits == ({"limits": {"nvidia.com/gpu": gpus}} if gpus else None)
    address = f"/dns4/{service['metadata']['name']}/tcp/4100/p2p/{ID}"
    assert f"swarm.initial_peers=[{address}]" in specs[1]["containers"][0]["args"]
    assert service["spec"]["selector"]["jobset.sigs.k8s.io/jobset-name"] == jobset["metadata"]["name"]
    [kustomization] = documents(files["kustomization.yaml"])
    generators = kustomization["configMapGenerator"] + kustomization["secretGenerator"]
    named = [one for generator in generators for one in generator["files"]]
    assert set(named + kustomization["resources"]) <= {path.name for path in (tmp_path / "out").iterdir()}
    assert specs[0]["volumes"][1]["configMap"]["name"] == generators[0]["name"] == generators[1]["name"]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("codes", "signals", "ends_with"), [("0", [], 0), ("3", [], 3), ("notice", [("trains", signal.SIGTERM)], 143)]
)
def test_a_peer_that_had_to_leave_has_failed(
    shell: str, codes: str, signals: list[tuple[str, int]], ends_with: int, tmp_path: Path
) -> None:
    (tmp_path / "peer.py").write_text(PEER.replace("SIGUSR1", "SIGTERM"))
    environment = {**os.environ, "TRIED": str(tmp_path / "tried"), "CODES": codes}
    command = [shell, launch_files() / "again.sh", sys.executable, "-S", tmp_path / "peer.py"]
    assert ended(command, environment, tmp_path / "log", *signals) == ends_with


# The keys of the compose specification, and the instructions of a Dockerfile, that are used.
SERVICE = "image entrypoint command environment user init restart stop_grace_period volumes depends_on shm_size deploy"
DOCKER = "ARG FROM RUN ENV WORKDIR COPY USER VOLUME EXPOSE HEALTHCHECK ENTRYPOINT CMD"


@pytest.mark.parametrize("gpus", [0, 2])
def test_compose_has_peers_that_share_no_accelerator(gpus: int, tmp_path: Path) -> None:
    [content] = documents(written("compose", tmp_path / "out", gpus=gpus, peers=3)["compose.yaml"])
    services = content["services"]
    assert set(services) == {"host", "peer-0", "peer-1", "peer-2"} and content["name"] == "smoke"
    used: list[str] = []
    for name, service in services.items():
        assert service.keys() <= set(SERVICE.split()) and service["image"] == f"diloco:{'cuda' if gpus else 'cpu'}"
        for volume in service["volumes"]:
            assert (tmp_path / "out" / volume["source"]).exists() and volume["type"] == "bind"
        if name != "host":
            assert f"run.dir=/data/{name}" in service["command"] and service["depends_on"] == ["host"]
            assert f"swarm.initial_peers=[/dns4/host/tcp/4100/p2p/{ID}]" in service["command"]
            assert service["entrypoint"][0] == ("torchrun" if gpus else "diloco")
            for device in service["deploy"]["resources"]["reservations"]["devices"] if gpus else []:
                used += device["device_ids"]
    assert used == ([str(number) for number in range(6)] if gpus else [])


def test_the_words_of_containers_are_arguments_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("train", "host"):
        monkeypatch.setattr(f"diloco.cli.peer.{name}", lambda config, **options: calls.append(config) or 0)
    [content] = documents(written("compose", tmp_path / "out", gpus=0)["compose.yaml"])
    for service in content["services"].values():
        words = [*service.get("entrypoint", ["diloco"])[1:], *service["command"]]
        with pytest.raises(SystemExit) as caught:
            main([word.replace("/launch/", f"{tmp_path}/out/") for word in words])
        assert caught.value.code == 0
    assert [config.run.name for config in calls] == ["host", "peer-0", "peer-1"]
    assert calls[0].swarm.announce == ("/dns4/host/tcp/4100",) and calls[0].run.dir == Path("/data/host")


def test_the_image_has_an_ordinary_user_and_copies_what_exists() -> None:
    text = (launch_files() / "Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line and not line.startswith("#")]
    steps = [tuple(line.split(maxsplit=1)) for line in lines]
    assert {step for step, _ in steps} <= set(DOCKER.split())
    stages = " ".join(step for step, _ in steps).split("FROM")
    assert len(stages) == 3 and "USER" in stages[2] and "HEALTHCHECK" in stages[2]
    assert [value for step, value in steps if step == "USER"] == ["diloco"]
    for step, value in steps:
        if step == "COPY" and not value.startswith("--from=build"):
            assert all((ROOT / source).exists() for source in value.split()[:-1]), value
        if step in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(value), list)
        if step == "RUN":
            subprocess.run(["bash", "-n", "-c", value], check=True)


@pytest.mark.parametrize("gpus", [0, 8])
def test_skypilot_gets_an_address_and_every_variable(gpus: int, tmp_path: Path) -> None:
    """With accelerators the package is a name, and without a wheel, which is brought along."""
    kinds, wheel = ("H100", "A100") if gpus else (), tmp_path / "diloco-1-py3-none-any.whl"
    wheel.touch()
    install = 'a"b$c' if gpus else str(wheel)
    files = written("sky", tmp_path / "it is", gpus=gpus, gpu=kinds, install=install)
    subprocess.run(["bash", "-n", tmp_path / "it is" / "submit.sh"], check=True)
    for name, accelerators in (("host.yaml", None), ("peer.yaml", dict.fromkeys(kinds, 8) if gpus else None)):
        [task] = documents(files[name])
        subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
        variables = set(re.findall(r"\$([A-Z_]+)", task["setup"] + task["run"])) - {"HOME"}
        assert variables == task["envs"].keys() and all(Path(one).exists() for one in task["file_mounts"].values())
        assert task["file_mounts"].get(task["envs"]["DILOCO"], task["envs"]["DILOCO"]) == install
        assert task["resources"].get("accelerators") == accelerators
    assert task["envs"]["HOST_ID"] == ID and task["envs"]["HOST_IP"] is None
