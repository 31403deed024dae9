"""The files of configs/launch that people copy: they can be read, and their commands make
configurations."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.command_line import exit_code
from tests.support.peers import eventually
from tests.support.places import ROOT

FOLDER = ROOT / "configs" / "launch"
ADDRESS = "/ip4/203.0.113.7/tcp/4100/p2p/QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"
# Stands for diloco and scontrol: it writes down its words, and ends with the next of CODES, or when
# it gets the signal.
PROGRAM = """
import os, signal, sys
signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
name = os.path.basename(sys.argv[0])
with open("said", "a+") as said:
    print(name, *sys.argv[1:], sep="\\0", file=said, flush=True)
    said.seek(0)
    codes = os.environ["CODES"].split()[: sum(line.startswith("diloco") for line in said)]
if name == "diloco" and codes[-1] == "waits":
    print("trains", flush=True)
    signal.sigwait(signals)
    codes = ["0"]
os._exit(int(codes[-1]))
"""


def ended(script: str, place: Path, codes: str, *signals: signal.Signals, **variables: str) -> int:
    """The exit code of a script that gets the signals while its peer trains."""
    tools = place / "diloco" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f'PATH="{tools}:$PATH"\n')
    for name in ("diloco", "scontrol"):
        (tools / name).write_text(f"#!{sys.executable} -S\n{PROGRAM}")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(place), "CODES": codes}
    with (place / "log").open("w") as log:
        streams = {"stdout": log, "stderr": log}
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=place, env=environment | variables, **streams
        )
        for number in signals:
            eventually(lambda: "trains" in (place / "log").read_text(), "the peer to train")
            shell.send_signal(number)
        return shell.wait(60)


def said(place: Path) -> list[list[str]]:
    return [line.split("\0") for line in (place / "said").read_text().splitlines()]


def composes(words: list[str]) -> None:
    """What follows `diloco` makes a configuration."""
    assert words[0] in ("host", "train") and exit_code(*words, "--cfg", "job") == 0


@pytest.mark.parametrize(
    ("task", "codes", "signals", "code", "tries"),
    [
        ("0", "0", [], 0, 1),
        ("7", "3 3 0", [], 0, 3),  # the host waits in the queue
        ("7", "2", [], 2, 1),
        ("7", "waits", [signal.SIGUSR1], 0, 1),
        (
            "7",
            "waits",
            [signal.SIGTERM],
            0,
            1,
        ),  # SLURM queues it again itself, or the user ended it
    ],
)
def test_a_task_of_slurm_is_queued_again_only_when_its_time_is_over(
    task: str, codes: str, signals: list[signal.Signals], code: int, tries: int, tmp_path: Path
) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": task}
    script = (FOLDER / "slurm.sbatch").read_text()
    assert ended(script, tmp_path, codes, *signals, **variables) == code
    commands = said(tmp_path)
    queued = [["scontrol", "requeue", "41_7"]] if signals == [signal.SIGUSR1] else []
    assert [words[0] for words in commands[:tries]] == ["diloco"] * tries
    assert commands[tries:] == queued
    composes(commands[0][1:])


def test_a_peer_of_skypilot_that_had_to_leave_has_failed(tmp_path: Path) -> None:
    run = yaml.safe_load((FOLDER / "sky.yaml").read_text())["run"]
    assert ended(run, tmp_path, "waits", signal.SIGTERM, PEER="1", ADDRESS=ADDRESS) == 143
    [words] = said(tmp_path)
    composes(words[1:])


def test_the_services_of_compose_are_one_host_and_peers_with_directories_of_their_own() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        composes(service["command"])
        assert {f"run.name={name}", f"run.dir=/data/{name}"} < set(service["command"])
    assert [service["command"][0] for service in services.values()] == ["host", "train", "train"]


def test_the_image_copies_what_exists() -> None:
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    sources = [source for line in copied for source in line]
    sent = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / one).exists() and f"!{one}" in sent for one in sources) and len(sources) > 3
