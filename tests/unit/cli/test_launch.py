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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from diloco.cli.commands.swarm import launch as command_line
from diloco.cli.engines import ENGINES
from diloco.cli.launch import run as launch
from diloco.cli.main import main
from diloco.config import Start, compose, launch_files
from diloco.train.host import Host
from tests.support.exit_codes import exit_code as of_diloco
from tests.support.peers import eventually
from tests.support.places import ROOT
from tests.support.slurm import PEER, task, written

ID = "QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"


exit_code = partial(of_diloco, "launch")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a real one takes hivemind, and seconds."""

    def own_id(path: Path) -> str:
        path.write_bytes(b"key")
        path.chmod(0o600)
        return ID

    monkeypatch.setattr("diloco.swarm.wire.libp2p.own_id", own_id)


# -- every engine -----------------------------------------------------------------------------------------------------


def test_the_command_knows_the_engines_that_have_templates() -> None:
    [choice] = [parameter.type for parameter in command_line.params if parameter.name == "engine"]
    folders = {path.name for path in launch_files().iterdir() if path.is_dir()}
    assert set(choice.choices) == folders == ENGINES.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ENGINES)
def test_peers_get_the_settings_that_were_checked(engine: str, tmp_path: Path) -> None:
    options = {"gpu": ("H100",)} if engine == "sky" else {}
    written(engine, tmp_path / "out", "outer.lr=0.5", **options)
    config = compose(base=tmp_path / "out" / "config.yaml")
    assert config.outer.lr == 0.5 and config.swarm.listen == ("/ip4/0.0.0.0/tcp/0",)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")], "nothing else is left"
    if engine != "slurm":
        assert stat.S_IMODE((tmp_path / "out" / "host.key").stat().st_mode) == 0o600


PAGES = (ROOT / "diloco" / "docs" / "cluster.md").read_text() + (ROOT / "README.md").read_text()
EXAMPLES = sorted(set(re.findall(r"^ *diloco launch ([^#\n]*)", PAGES + str(command_line.help), re.M)))


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_accepted(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [word for word in shlex.split(example) if word not in ("--submit", "--dry-run")]
    assert exit_code(*arguments, "--dry-run") == 0 and not list(tmp_path.iterdir())


def test_settings_of_another_peer_do_not_travel_with_its_configuration(tmp_path: Path) -> None:
    base = tmp_path / "config.yaml"
    theirs = ["run.name=a", "data.shard=0", "data.shards=2", f"swarm.initial_peers=[/ip4/127.0.0.1/tcp/1/p2p/{ID}]"]
    base.write_text(compose(["experiment=smoke", "outer.lr=0.5", *theirs]).to_yaml())
    assert launch("compose", [], Start(base=base), tmp_path / "out", False, False, {}) == 0
    config = compose(base=tmp_path / "out" / "config.yaml")
    assert config.outer.lr == 0.5 and not config.swarm.initial_peers
    assert config.run.name is config.data.shard is config.data.shards is None


def test_where_a_peer_listens_is_what_was_typed(tmp_path: Path) -> None:
    written("slurm", tmp_path / "out", "swarm.listen=[/ip4/127.0.0.1/tcp/0]")
    assert compose(base=tmp_path / "out" / "config.yaml").swarm.listen == ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dry_run_prints_the_same_and_writes_nothing(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpu", "H100"] if engine == "sky" else []
    out = tmp_path / "out"
    arguments = [engine, "experiment=smoke", "--peers", "2", *options, "--out", str(out)]
    assert exit_code(*arguments, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert exit_code(*arguments) == 0
    for path in out.iterdir():
        if path.is_file() and path.name != "host.key":
            assert f"# {path}\n{path.read_text().replace(ID, 'PEER_ID')}" in shown


@pytest.mark.parametrize("engine", ENGINES)
def test_what_comes_next_is_printed_or_done(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, said = tmp_path / "tools" / ENGINES[engine].program, tmp_path / "said"
    program.parent.mkdir()
    for name in (program.name, "bash"):
        program.with_name(name).write_text(f'#!/bin/sh\necho {name} "$@" >> {said}\nexit ${{CODE:-0}}\n')
        program.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    arguments = [engine, "experiment=smoke", *(["--gpu", "H100"] if engine == "sky" else []), "--out"]
    assert exit_code(*arguments, str(tmp_path / "first")) == 0
    _, before, *commands = capsys.readouterr().out.splitlines()
    assert before == "to start it:" and commands and not said.exists()
    assert exit_code(*arguments, str(tmp_path / "first2"), "--submit") == 0
    assert said.read_text().replace("first2", "first").splitlines() == commands
    monkeypatch.setenv("CODE", "7")
    capsys.readouterr()
    assert exit_code(*arguments, str(tmp_path / "third"), "--submit") == 2
    assert " ended with 7; its lines above say why" in capsys.readouterr().err


def test_without_the_scheduler_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    out = tmp_path / "out"
    assert exit_code("slurm", "experiment=smoke", "--out", str(out), "--submit") == 2
    typed = "; ".join(f"sbatch {out}/{role}.sbatch" for role in ("host", "peers"))
    expected = f"sbatch is not in PATH; drop --submit, and type this where it is: {typed}"
    assert capsys.readouterr().err == f"diloco: error: {expected}\n"
    assert not list(tmp_path.iterdir())


REFUSED = [
    (["slurm", "outer.lrr=1"], "outer.lrr is not a setting; did you mean outer.lr?"),
    (["slurm", "sim.loss=0.1"], "sim.loss=0.1 has no effect with diloco train, which runs in real time"),
    (["slurm", "run.name=a"], "run.name has no effect with diloco launch, which gives each peer its own; drop it"),
    (
        ["slurm", "local.peers=8"],
        "local.peers has no effect with diloco launch, which starts them elsewhere; set --peers",
    ),
    (["slurm", "outer=data_parallel"], "outer.method=data_parallel has no swarm that could be launched"),
    (["slurm", "--peers", "0"], "Invalid value for '--peers': 0 is not in the range 1<=x<=1000"),
    (["slurm", "--image", "a"], "--image has no effect with launch slurm; drop it (it is for kubernetes, compose)"),
    (["compose", "--sbatch", "time=1"], "--sbatch has no effect with launch compose; drop it (it is for slurm)"),
    (["compose", "run.dir=runs/a"], "run.dir has no effect with diloco launch compose, whose machines do not see"),
    (["compose", "--image", "a b"], "--image='a b' cannot be used; write it like registry/diloco:cuda"),
    (["compose", "--image", "a$b"], "--image='a$b' cannot be used; write it like registry/diloco:cuda"),
    (["slurm", "--sbatch", "time=1\nrm"], "--sbatch='time=1\\nrm' cannot be used; write it like partition=gpu"),
    (["slurm", "--gpu", "H100", "--gpus", "0"], "--gpu=H100 has no effect with --gpus 0; drop one"),
    (["slurm", "--gpu", "H100", "--gpu", "A100"], "--gpu=A100 is a second kind, and SLURM takes one; drop it"),
    (["sky"], "--gpu is missing, and SkyPilot wants a kind: --gpu H100"),
    (["slurm", "run.dir=it\\'s"], "holds a character that a batch script cannot carry; choose another"),
    (["slurm", "--submit", "--dry-run"], "--submit and --dry-run exclude each other; drop one"),
    (["fargate"], "'fargate' is not one of 'slurm', 'sky', 'kubernetes', 'compose'"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(one)[:30] for one, _ in REFUSED])
def test_what_cannot_work_is_one_line_and_writes_nothing(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments, "experiment=smoke", "--out", str(tmp_path / "out")) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_files_that_peers_need_and_nobody_copies_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=smoke", "data=text", "data.path=notes/", "--dry-run"]
    assert exit_code("kubernetes", *arguments) == 0
    expected = "diloco: warning: data.path is not copied; it has to be there on every machine\n"
    assert capsys.readouterr().err == expected
    assert exit_code("slurm", *arguments) == 0
    assert capsys.readouterr().err == ""


def test_files_of_somebody_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    for place in (tmp_path, tmp_path / "mine"):
        assert exit_code("compose", "experiment=smoke", "--out", str(place)) == 2
        expected = f"--out={place} is not empty; name another directory, or remove it"
        assert capsys.readouterr().err == f"diloco: error: {expected}\n"
    assert exit_code("compose", "experiment=smoke", "--out", str(tmp_path / "mine" / "below")) == 2
    assert "cannot be written: File exists; name another directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "precious"


def test_names_of_machines_are_labels_whatever_the_run_is_called(tmp_path: Path) -> None:
    for run_id, name in {"My_Run.7": "my-run-7", "7b": "run-7b", "a" * 64: "a" * 40, "0_": "run-0"}.items():
        service, jobset = documents(written("kubernetes", tmp_path / name, f"run.id={run_id}")["jobset.yaml"])
        assert (service["metadata"]["name"], jobset["metadata"]["name"]) == (f"{name}-host", name)


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize(
    ("steps", "states", "over"),
    [
        (0, [], False),  # nobody has come yet
        (0, ["training"], False),
        (3, [], True),
        (3, ["training"], False),  # it has not heard of the last version
        (2, ["done"], False),
        (2, ["leaving"], False),
    ],
)
def test_a_host_ends_when_the_budget_is_used_up_and_nobody_trains(steps: int, states: list[str], over: bool) -> None:
    members = [SimpleNamespace(trains=True, status=SimpleNamespace(state=state)) for state in states]
    protocol = SimpleNamespace(
        members=SimpleNamespace(all=lambda: [SimpleNamespace(trains=False), *members]),
        fragments=[SimpleNamespace(steps=steps)],
        applied_tokens=0,
    )
    host = object.__new__(Host)
    host.manifest, host._used_up = compose(["experiment=smoke"]).manifest(), False
    host.node = SimpleNamespace(protocol=protocol)  # type: ignore[assignment]
    assert host.is_over() is over
    members.clear()
    assert host.is_over() is (over or steps == 3 or "done" in states), "what a peer has said still counts"


# -- SLURM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_scripts_are_bash_and_hold_any_directory(gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / 'a $(touch broken) `b` "%j" & {c}'
    odd.mkdir()
    monkeypatch.chdir(odd)
    options = ("partition=gpu", "comment=two words; rm -rf")
    files = written("slurm", odd / "out", "run.dir=runs/x", gpus=gpus, sbatch=options, gpu=("H100",) if gpus else ())
    for name in ("host.sbatch", "peers.sbatch"):
        directives = [shlex.split(line) for line in re.findall(r"^#SBATCH (.*)$", files[name], re.M)]
        assert all(len(words) == 1 for words in directives)
        settings = dict(words[0].removeprefix("--").split("=", 1) for words in directives if "=" in words[0])
        assert settings["comment"] == "two words; rm -rf" and settings["chdir"] == str(odd)
        log = {"host.sbatch": "host.log", "peers.sbatch": "peer-%a.log"}[name]
        assert settings["output"] == str(odd / "out").replace("%", "%%") + f"/{log}"
        assert settings.get("gres") == (f"gpu:H100:{gpus}" if gpus and name == "peers.sbatch" else None)
        places = "".join(line for line in files[name].splitlines(True) if re.match("(out|run_dir)=", line))
        shown = subprocess.run(["bash", "-c", f'{places}printf "%s|%s" "$out" "$run_dir"'], capture_output=True)
        assert shown.stdout.decode() == f"{odd}/out|{odd}/runs/x"
        subprocess.run(["bash", "-n", odd / "out" / name], check=True)
    assert [path.name for path in odd.iterdir()] == ["out"]
    assert ("torch.distributed.run --standalone --nproc-per-node=8 " in files["peers.sbatch"]) == (gpus > 1)


@pytest.mark.parametrize(
    ("codes", "number", "ends_with", "tries", "queued"),
    [
        ("0", None, 0, 1, False),
        ("2", None, 2, 1, False),
        ("kill", None, 137, 1, False),
        ("3 3 0", None, 0, 3, False),  # the host was not there yet
        ("3 notice", signal.SIGUSR1, 0, 2, True),
        ("notice", signal.SIGUSR1, 0, 1, True),
        ("slow", signal.SIGUSR1, 0, 1, True),
        ("fails", signal.SIGUSR1, 4, 1, False),  # and it would fail again
        ("notice", signal.SIGTERM, 0, 1, False),  # SLURM queues it again by itself, or the user has ended it
    ],
)
def test_a_task_goes_back_into_the_queue_when_its_time_is_over_and_only_then(
    codes: str, number: int | None, ends_with: int, tries: int, queued: bool, tmp_path: Path
) -> None:
    script, environment = task(tmp_path)
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(["bash", script], env=environment | {"CODES": codes}, stdout=log, stderr=log)
        if number is not None:
            eventually(lambda: "trains" in (tmp_path / "log").read_text(), "the peer")
            shell.send_signal(number)
        if codes == "slow":  # and is still there at the limit
            eventually(lambda: "leaves" in (tmp_path / "log").read_text(), "the peer")
            shell.send_signal(signal.SIGTERM)
        assert shell.wait(60) == ends_with, (tmp_path / "log").read_text()
    assert (tmp_path / "tried").read_text() == "x" * tries
    said = (tmp_path / "queued").read_text() if (tmp_path / "queued").exists() else ""
    assert said == ("requeue 41_7\n" if queued else "")


def test_a_task_that_never_finds_the_host_names_it(tmp_path: Path) -> None:
    script, environment = task(tmp_path, patience_s=0)
    done = subprocess.run(["bash", script], env=environment | {"CODES": "3"}, capture_output=True, text=True)
    place, log = tmp_path / "run" / "host" / "address", tmp_path / "out" / "host.log"
    assert done.returncode == 3 and (tmp_path / "tried").read_text() == "x"
    said = f"diloco: error: peer-7 found no swarm at {place} for SECONDS s; {log} says why\n"
    assert re.fullmatch(re.escape(said).replace("SECONDS", r"\d+"), done.stderr)  # a slow machine takes more than 0


# -- Kubernetes -------------------------------------------------------------------------------------------------------

strict = ConfigDict(extra="forbid", strict=True)


class SuccessPolicy(BaseModel):
    model_config = strict
    operator: str = Field(pattern="^(All|Any)$")
    targetReplicatedJobs: list[str]


class FailurePolicy(BaseModel):
    model_config = strict
    maxRestarts: int = Field(ge=0)


class Template(BaseModel):
    model_config = strict
    spec: dict[str, Any]  # of a Job, which kubernetes-validate checks


class ReplicatedJob(BaseModel):
    model_config = strict
    name: str
    replicas: int = Field(ge=1)
    template: Template


class JobSetSpec(BaseModel):
    model_config = strict
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


class JobSet(BaseModel):
    """The part of jobset.x-k8s.io/v1alpha2 that the template uses, by its names in the API."""

    model_config = strict
    apiVersion: str = Field(pattern="^jobset.x-k8s.io/v1alpha2$")
    kind: str = Field(pattern="^JobSet$")
    metadata: dict[str, Any]
    spec: JobSetSpec


def check_kubernetes(document: dict[str, Any]) -> None:
    """Raises for what Kubernetes 1.31 would refuse; unknown keys, too."""
    import kubernetes_validate

    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, "1.31", strict=True)
        return
    found = JobSet.model_validate(document)
    for one in found.spec.replicatedJobs:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one.name}, "spec": one.template.spec}
        kubernetes_validate.validate(job, "1.31", strict=True)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_kubernetes_takes_every_object(gpus: int, tmp_path: Path) -> None:
    files = written("kubernetes", tmp_path / "out", gpus=gpus, peers=3)
    service, jobset = documents(files["jobset.yaml"])
    for document in (service, jobset):
        check_kubernetes(document)
    host, peer = jobset["spec"]["replicatedJobs"]
    assert (host["replicas"], peer["replicas"]) == (1, 3)
    specs = [one["template"]["spec"]["template"]["spec"] for one in (host, peer)]
    for spec in specs:
        [container] = spec["containers"]
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volume["name"] for volume in spec["volumes"])
        assert spec["securityContext"]["runAsNonRoot"] and spec["terminationGracePeriodSeconds"] >= 120
    limits = specs[1]["containers"][0].get("resources")
    assert limits == ({"limits": {"nvidia.com/gpu": gpus}} if gpus else None)
    address = f"/dns4/{service['metadata']['name']}/tcp/4100/p2p/{ID}"
    assert f"swarm.initial_peers=[{address}]" in specs[1]["containers"][0]["args"]
    selected = service["spec"]["selector"]
    assert selected["jobset.sigs.k8s.io/jobset-name"] == jobset["metadata"]["name"]
    [kustomization] = documents(files["kustomization.yaml"])
    generators = kustomization["configMapGenerator"] + kustomization["secretGenerator"]
    named = [one for generator in generators for one in generator["files"]]
    assert set(named + kustomization["resources"]) <= {path.name for path in (tmp_path / "out").iterdir()}
    words = [[*one.get("command", []), *one["args"]] for spec in specs for one in spec["containers"]]
    assert all("/launch/again.sh" in one for one in words) and "again.sh" in files
    volumes = specs[0]["volumes"]
    assert volumes[1]["configMap"]["name"] == generators[0]["name"] == generators[1]["name"]


@pytest.mark.parametrize("broken", ["service", "pod", "jobset"])
def test_the_check_of_kubernetes_finds_a_misspelt_key(broken: str, tmp_path: Path) -> None:
    service, jobset = documents(written("kubernetes", tmp_path / "out")["jobset.yaml"])
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    place = {"service": service["spec"], "pod": pod, "jobset": jobset["spec"]}[broken]
    place["restartsPolicy"] = "OnFailure"
    with pytest.raises(Exception, match="restartsPolicy"):
        check_kubernetes(service if broken == "service" else jobset)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("codes", "number", "ends_with"), [("0", 0, 0), ("3", 0, 3), ("notice", signal.SIGTERM, 143)])
def test_a_peer_that_had_to_leave_has_failed(
    shell: str, codes: str, number: int, ends_with: int, tmp_path: Path
) -> None:
    (tmp_path / "peer.py").write_text(PEER.replace("SIGUSR1", "SIGTERM"))
    environment = {**os.environ, "TRIED": str(tmp_path / "tried"), "CODES": codes}
    command = [shell, str(launch_files() / "again.sh"), sys.executable, "-S", str(tmp_path / "peer.py")]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(command, env=environment, stdout=log)
        if number:
            eventually(lambda: "trains" in (tmp_path / "log").read_text(), "the peer")
            started.send_signal(number)
        assert started.wait(60) == ends_with


# -- compose, Dockerfile, SkyPilot ------------------------------------------------------------------------------------

SERVICE = {  # the keys of the compose specification that are used
    *("image", "entrypoint", "command", "environment", "user", "init", "restart", "stop_grace_period", "volumes"),
    *("depends_on", "shm_size", "deploy"),
}


@pytest.mark.parametrize("gpus", [0, 2])
def test_compose_has_a_host_and_peers_that_share_no_accelerator(gpus: int, tmp_path: Path) -> None:
    [content] = documents(written("compose", tmp_path / "out", gpus=gpus, peers=3)["compose.yaml"])
    services = content["services"]
    assert set(services) == {"host", "peer-0", "peer-1", "peer-2"} and content["name"] == "smoke"
    used: list[str] = []
    for name, service in services.items():
        assert service.keys() <= SERVICE and service["image"] == ("diloco:cuda" if gpus else "diloco:cpu")
        for volume in service["volumes"]:
            assert (tmp_path / "out" / volume["source"]).exists() and volume["type"] == "bind"
        if name != "host":
            assert f"run.dir=/data/{name}" in service["command"] and service["depends_on"] == ["host"]
            assert f"swarm.initial_peers=[/dns4/host/tcp/4100/p2p/{ID}]" in service["command"]
            assert service["entrypoint"][0] == ("torchrun" if gpus else "diloco")
        if gpus and name != "host":
            [device] = service["deploy"]["resources"]["reservations"]["devices"]
            used += device["device_ids"]
    assert used == ([str(number) for number in range(6)] if gpus else [])


def test_the_words_of_containers_are_arguments_that_the_commands_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("train", "host"):
        monkeypatch.setattr(f"diloco.cli.peer.{name}", lambda config, **options: calls.append(config) or 0)
    [content] = documents(written("compose", tmp_path / "out", gpus=0)["compose.yaml"])
    services = content["services"]
    for service in services.values():
        words = [*service.get("entrypoint", ["diloco"])[1:], *service["command"]]
        words = [word.replace("/launch/", f"{tmp_path}/out/") for word in words]
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
    assert [config.run.name for config in calls] == ["host", "peer-0", "peer-1"]
    assert calls[0].swarm.announce == ("/dns4/host/tcp/4100",) and calls[0].run.dir == Path("/data/host")


DOCKER = {
    "ARG",
    "FROM",
    "RUN",
    "ENV",
    "WORKDIR",
    "COPY",
    "USER",
    "VOLUME",
    "EXPOSE",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}


def test_the_image_runs_as_nobody_special_and_copies_what_is_there() -> None:
    text = (launch_files() / "Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line and not line.startswith("#")]
    steps = [tuple(line.split(maxsplit=1)) for line in lines]
    assert {step for step, _ in steps} <= DOCKER
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
def test_skypilot_gets_one_address_and_every_variable_of_its_scripts(gpus: int, tmp_path: Path) -> None:
    kinds = ("H100", "A100") if gpus else ()
    files = written("sky", tmp_path / "it is", gpus=gpus, gpu=kinds, install='a"b$c')
    subprocess.run(["bash", "-n", tmp_path / "it is" / "submit.sh"], check=True)
    for name in ("host.yaml", "peer.yaml"):
        [task] = documents(files[name])
        subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
        variables = set(re.findall(r"\$([A-Z_]+)", task["setup"] + task["run"])) - {"HOME"}
        assert variables == task["envs"].keys() and task["envs"]["DILOCO"] == 'a"b$c'
        assert all(Path(source).exists() for source in task["file_mounts"].values())
        assert task["resources"].get("accelerators") == (
            dict.fromkeys(kinds, 8) if gpus and name != "host.yaml" else None
        )
    assert task["envs"]["HOST_ID"] == ID and task["envs"]["HOST_IP"] is None


def test_skypilot_brings_a_wheel_along(tmp_path: Path) -> None:
    wheel = tmp_path / "diloco-1-py3-none-any.whl"
    wheel.touch()
    files = written("sky", tmp_path / "out", gpus=0, install=str(wheel))
    for name in ("host.yaml", "peer.yaml"):
        [task] = documents(files[name])
        assert task["file_mounts"][task["envs"]["DILOCO"]] == str(wheel)
