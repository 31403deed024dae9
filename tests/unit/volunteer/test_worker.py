"""A worker's processes, with a peer that is a few lines of Python."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ConfigError
from diloco.volunteer import machine, rules, supervisor
from diloco.volunteer.supervisor import Supervisor
from diloco.volunteer.worker import Worker
from tests.support.command_line import Typed, typed
from tests.support.peers import eventually

__all__ = ["typed"]
ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
# Ends with each code in turn; then it makes a step, and leaves when it is asked to.
PEER = """
import os, signal, sys, time
from pathlib import Path
starts = Path("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
codes, number = sys.argv[1:], len(starts.read_text()) - 1
print("start", number, flush=True)
if number < len(codes):
    print("diloco: error: no luck", file=sys.stderr, flush=True)
    if codes[number] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(codes[number]))
run = Path(os.environ["XDG_DATA_HOME"], "diloco/peer-0/runs/r")
run.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: (Path("left").touch(), sys.exit(0)))
(run / "metrics.jsonl").write_text("{}")
while True:
    signal.pause()
"""


@pytest.fixture
def worker(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose peer follows `PEER`; no systemd is asked, and pauses are short."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(rules, "FIRST_PAUSE_S", 0.01)
    directory = own_home / "worker"
    directory.mkdir(parents=True)
    made = Worker(directory, ("-c", PEER), cwd=str(tmp_path))
    made.write()
    yield made
    made.end()


def trained(worker: Worker) -> bool:
    return machine.has_trained(worker.directory, 0.0)


def supervised(worker: Worker) -> Worker:
    """It runs in this process until its peer has made a step, or it has ended by itself."""
    supervised = Supervisor(worker)

    def stop() -> None:
        eventually(lambda: trained(worker) or not thread.is_alive(), "a step, or the end")
        supervised.end()

    thread = threading.current_thread()
    threading.Thread(target=stop).start()
    supervised.run()
    return Worker.read(worker.directory)


def test_a_peer_that_crashes_is_started_again_and_leaves_when_it_is_stopped(worker: Worker) -> None:
    crashing = replace(worker, command=(*worker.command, "1", "kill", "6", "4"))
    after = supervised(crashing)
    lines = [line[15:] for line in worker.log.read_text().splitlines()]
    assert [line for line in lines if line.startswith("start ")] == [
        f"start {number}" for number in range(5)
    ]
    assert "worker: waiting: its peer ended with -9 (no luck); again in 0 s (2 starts)" in lines
    assert lines[-1] == "worker: ended: stopped, its peer left the swarm (5 starts)"
    assert Path(after.cwd, "left").exists()
    assert (after.state.phase, after.state.joined, after.runs) == ("ended", True, False)


def test_a_command_that_cannot_be_run_ends_it_in_one_line(worker: Worker) -> None:
    lost = replace(worker, cwd="/nowhere/at/all")
    Supervisor(lost).run()
    state = Worker.read(worker.directory).state
    assert (state.phase, state.code) == ("ended", 2) and "/nowhere/at/all" in state.why


def test_the_log_is_bounded(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES", 10_000)
    talking = "print('x' * 999 + '\\n' * 2000); " + PEER
    supervised(replace(worker, command=("-c", talking)))
    logs = sorted(path.name for path in worker.directory.glob("log*"))
    assert logs == ["log", "log.1"]
    assert all((worker.directory / log).stat().st_size <= 11_000 for log in logs)


def test_cleaning_takes_checkpoints_and_caches_and_nothing_else(worker: Worker) -> None:
    run = worker.directory / "diloco" / "peer-0" / "runs" / "r"
    for path in (run / "checkpoints" / "a.before", run / "model", worker.directory / "cache" / "x"):
        path.mkdir(parents=True)
    cleaning = Supervisor(worker)
    cleaning._carry_out(rules.Action.CLEAN)
    cleaning._log.close()
    left = {path.name for path in worker.directory.rglob("*") if path.is_dir()}
    assert left == {"diloco", "peer-0", "runs", "r", "checkpoints", "model"}


@pytest.fixture
def begun(worker: Worker) -> Worker:
    """It runs in the background."""
    assert "crontab: @reboot " in worker.begin()
    eventually(lambda: trained(worker), "a step")
    return Worker.read(worker.directory)


def test_a_killed_supervisor_is_replaced_and_its_peer_ended(begun: Worker, typed: Typed) -> None:
    with pytest.raises(ConfigError, match="runs already"):
        begun.begin()
    os.kill(begun.pid, signal.SIGKILL)
    eventually(lambda: not begun.runs, "its end")
    assert str(begun) == "worker: gone, and nobody stopped it; diloco start begins it again"
    started = typed("start")
    assert "start 1" in started and started.endswith("worker: trains\n")
    again = Worker.read(begun.directory)
    assert again.peer_pid != begun.peer_pid and again.state.starts == 2
    assert Path(begun.cwd, "left").exists(), "there are no two peers of one worker"
    assert typed("stop") == "worker: ended: stopped, its peer left the swarm (2 starts)\n"
    supervisor.main(begun.directory)  # as cron would, after a reboot
    assert Worker.read(begun.directory).state.starts == 2, "what was stopped stays so"


SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$XDG_CONFIG_HOME/asked"
case "$2" in
  enable)
    exec > /dev/null 2>&1
    eval "$(sed -n 's/^ExecStart=//p' "$XDG_CONFIG_HOME/systemd/user/$4") &" ;;
  disable) kill $(grep -o '"pid": [0-9]*' "$XDG_DATA_HOME/diloco/worker/worker.json" | cut -c8-)
esac
"""


def test_it_is_a_service_where_systemd_serves_the_user(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    assert "loginctl enable-linger" in worker.begin()
    [unit] = (tmp_path / "systemd" / "user").iterdir()
    assert f'"{worker.directory}"' in unit.read_text() and "KillMode=mixed" in unit.read_text()
    eventually(lambda: trained(worker), "a step")
    assert worker.end().state.why == "stopped, its peer left the swarm"
    name, asked = unit.name, (tmp_path / "asked").read_text().splitlines()
    assert asked[1:] == [
        "--user daemon-reload",
        f"--user enable --now {name}",
        f"--user disable --now {name}",
    ]
    assert not unit.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--when", "idle"], "start needs the ADDRESS of a peer, as it prints it, before settings"),
        (
            ["train.device=cpu"],
            "start needs the ADDRESS of a peer, as it prints it, before settings",
        ),
        ([ADDRESS, "--disk", "20"], "--disk=20 is no size; write it like 20GB"),
        ([ADDRESS, "--disk", "20Gbit"], "--disk=20Gbit is no size; write it like 20GB"),
        ([ADDRESS, "--when", "never"], "--when=never is no time to train; write idle"),
        ([ADDRESS, "outer.lr=1"], "outer.lr belongs to the run and comes from the swarm"),
        ([ADDRESS, "train.device=moon"], "train.device=moon"),
        ([ADDRESS, "run.dir=x"], "run.dir: a worker has a directory of its own"),
        (["127.0.0.1:80"], "it is HOST:PORT; write /ip4/127.0.0.1/tcp/80"),
    ],
)
def test_what_join_would_refuse_is_refused_and_nothing_is_written(
    arguments: list[str], text: str, own_home: Path, typed: Typed
) -> None:
    assert text in typed.refused("start", *arguments)
    assert not own_home.exists()


@pytest.mark.parametrize("command", ["start", "stop", "logs"])
def test_without_a_worker_a_line_says_how_to_begin_one(
    command: str, own_home: Path, typed: Typed
) -> None:
    assert "there is no worker yet; diloco start ADDRESS begins one" in typed.refused(command)


def test_an_invitation_is_for_this_user_only(
    worker: Worker, tmp_path: Path, monkeypatch: Any, typed: Typed
) -> None:
    """The command that other users see names a file."""
    monkeypatch.setattr(Worker, "begin", lambda self: self.log.touch() or "begun")
    monkeypatch.setattr("diloco.volunteer.machine.has_trained", lambda *_: True)
    key = str(tmp_path / "run.key")
    typed("keygen", key)
    link = typed("invite", "--key", key, "--run", "r", ADDRESS).split()[-1]
    typed("start", link, "train.device=cpu")
    file = worker.directory / "address"
    assert Worker.read(worker.directory).command[2:] == ("join", f"@{file}", "train.device=cpu")
    assert file.read_text() == f"{link}\n"
    for path in (file, worker.directory / "worker.json"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, True),  # a desktop computer
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery"}}, True),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery"}}, False),
        ({"usb": {"type": "USB", "online": "1"}, "BAT0": {"type": "Battery"}}, True),
        ({"BAT0": {"type": "Battery"}}, False),
        ({"mouse": {"type": "Battery", "scope": "Device"}}, True),
    ],
)
def test_power_is_what_linux_says(
    supplies: dict[str, dict[str, str]], expected: bool, tmp_path: Path
) -> None:
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    assert machine.plugged_in(tmp_path) is expected
    assert machine.plugged_in(tmp_path / "nowhere") is None


def test_others_are_what_is_busy_without_this_process_and_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ended = 0.0, os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("diloco.volunteer.machine.time.monotonic", lambda: now)
    monkeypatch.setattr("diloco.volunteer.machine.os.times", lambda: (0.0,) * 5)

    def ticks(busy: int, idle: int, peer: int) -> None:
        (tmp_path / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1\n")
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "stat").write_text(f"7 (a ) b) R 1 7 7 0 0 0 0 0 0 0 {peer} 0 0 0 0\n")

    ticks(0, 0, 0)
    quiet = machine.Quiet(tmp_path)
    now = 15.0
    ticks(10 * ended, 10 * ended, 9 * ended)
    assert quiet.measure(7) == 15.0, "the peer is busy"
    now = 30.0
    ticks(20 * ended, 20 * ended, 9 * ended)
    assert quiet.measure(7) == 0.0, "somebody else is"
    assert machine.Quiet(tmp_path / "nowhere").measure(7) is None
