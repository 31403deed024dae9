"""`diloco local` with peers that are no peers: what it does when one of them ends before any
trains."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import diloco.train.__main__ as train
from diloco.cli import forked, local
from diloco.config import compose
from diloco.errors import ConfigError, DilocoError
from tests.support.places import ROOT

ENDS = [
    ("import os; os.kill(os.getpid(), 9)", 3, " was killed (SIGKILL) before training began"),
    ("import os; os.write(2, b'why'); os.abort()", 3, " was killed (SIGABRT, see "),
    ("import sys; sys.exit('diloco: error: data.path: wrong')", 1, ": data.path: wrong (log: "),
    ("import no_module", 1, ": ModuleNotFoundError: No module named 'no_module' (log: "),
    ('print(\'{"t": "ready"}\', flush=True); raise SystemExit(4)', 4, ": None (log: "),
]
NAMES = ["killed", "aborted", "refused", "broken", "ready"]


def run_fails(tmp_path: Path, code: int, said: str) -> None:
    with pytest.raises(DilocoError) as raised:
        local.run(compose(["experiment=smoke", "local.peers=3", f"run.dir={tmp_path}/run"]))
    assert str(raised.value).startswith("p2") and said in str(raised.value)
    assert raised.value.exit_code == code


def all_have_ended(started: list[Any]) -> None:
    """No peer outlives a run that fails."""
    assert len(started) == 3 and all(process.poll() is not None for process in started)
    for process in started:
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize(("ends", "code", "said"), ENDS, ids=NAMES)
def test_a_peer_that_ends_before_any_trains_is_named_at_once(
    ends: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others would wait for it."""

    def peer(config: Any, base: Path, index: int, names: Any) -> tuple[list[str], dict[str, str]]:
        return ["-c", ends if index == 2 else "import time; time.sleep(1000)"], {}

    started: list[Any] = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(forked, "import_once", lambda config: None)
    monkeypatch.setattr(local, "_peer", peer)
    monkeypatch.setattr(subprocess, "Popen", Kept)
    run_fails(tmp_path, code, said)
    all_have_ended(started)


linux = pytest.mark.skipif(sys.platform != "linux", reason="peers are forked on Linux")


@linux
@pytest.mark.parametrize(("ends", "code", "said"), ENDS, ids=NAMES)
def test_a_forked_peer_ends_as_one_that_was_started(
    ends: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def peer(arguments: list[str]) -> int:
        exec(ends if "run.name=p2" in arguments else "import time; time.sleep(1000)")
        return 0

    started, fork = [], forked.fork

    def kept(*given: Any) -> forked.Forked:
        started.append(fork(*given))
        return started[-1]

    monkeypatch.setattr(forked, "import_once", lambda config: set())
    monkeypatch.setattr(forked, "fork", kept)
    monkeypatch.setattr(train, "peer", peer)
    run_fails(tmp_path, code, said)
    all_have_ended(started)


def forked_once(
    tmp_path: Path, main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> tuple[forked.Forked, Path]:
    monkeypatch.setattr(train, "peer", main)
    log = tmp_path / "log"
    with log.open("a") as errors:
        environment = {"LOCAL_RANK": "7", "PATH": os.environ["PATH"]}
        command = ["-m", "diloco.train", "run.name=p7"]
        return forked.fork(command, errors, environment, set()), log


@linux
def test_a_forked_peer_is_seen_as_one_that_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Arguments, environment, streams, files, signals and the session are its own; what the parent
    is to delete at its end is not."""
    folder = TemporaryDirectory()
    held = (tmp_path / "held").open("w")

    def main(arguments: list[str]) -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            assert signal.getsignal(number) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert arguments == ["run.name=p7"] == sys.argv[1:] and os.getsid(0) == os.getpid()
        assert dict(os.environ).keys() == {"LOCAL_RANK", "PATH"}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(held.fileno())
        print(input(), flush=True)
        print("in the log", file=sys.stderr)
        os.read(0, 1)
        raise ConfigError("that is enough")

    monkeypatch.setattr(sys, "argv", [])
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        child, log = forked_once(tmp_path, main, monkeypatch)
        child.stdin.write("a line\n")
        child.stdin.flush()
        assert child.stdout.readline() == "a line\n"
        place = Path(f"/proc/{child.pid}")
        words = [sys.executable, "-m", "diloco.train", "run.name=p7", ""]
        assert (place / "cmdline").read_text().split("\0") == words
        assert (place / "environ").read_text().startswith("LOCAL_RANK=7\0PATH=")
        assert child.poll() is None
        child.stdin.close()
        assert child.wait() == child.poll() == 2
        assert log.read_text() == "in the log\ndiloco: error: that is enough\n"
        assert Path(folder.name).is_dir()
    finally:
        signal.signal(signal.SIGUSR1, before)
        held.close()
        folder.cleanup()
        child.stdout.close()


@linux
def test_a_forked_peer_hears_signals_and_a_dead_one_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def main(arguments: list[str]) -> int:
        print("here", flush=True)
        time.sleep(1000)
        return 0

    for number, code in ((signal.SIGINT, 5), (signal.SIGTERM, -15), (signal.SIGKILL, -9)):
        child, _ = forked_once(tmp_path, main, monkeypatch)
        assert child.stdout.readline() == "here\n"
        child.send_signal(number)
        assert child.wait() == code
        child.kill()
        child.stdin.close()
        child.stdout.close()


CONFIG = """
import gc, os, sys
from diloco.cli.forked import import_once
from diloco.config import compose
config = compose(["experiment=smoke", *sys.argv[1:]])
config.run.dir.mkdir(parents=True)
gc.collect = lambda: os.write(2, b"noise of an import")
"""
IMPORTED = """
print("torch" in sys.modules, import_once(config), "torch" in sys.modules)
print("transformers.models.gpt2.modeling_gpt2" in sys.modules)
"""
COMPUTED = """
import torch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # OpenMP has threads now
print(import_once(config))
"""


def printed(program: str, tmp_path: Path, *settings: str) -> tuple[str, str]:
    """What a new process says on its two streams."""
    command = [sys.executable, "-c", CONFIG + program, f"run.dir={tmp_path}/run", *settings]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return shown.stdout, shown.stderr


@linux
def test_peers_are_forked_from_a_process_that_has_imported_their_model(tmp_path: Path) -> None:
    told = printed(IMPORTED, tmp_path, "model.model_type=gpt2")
    assert told == ("False set() True\nTrue\n", "")
    assert (tmp_path / "run/logs/p0.log").read_text().endswith("noise of an import")


@linux
@pytest.mark.parametrize(
    ("program", "setting"),
    [
        (COMPUTED, "run.id=any"),
        ("print(import_once(config))", "outer=data_parallel"),
        ("print(import_once(config))", "train.device=cuda"),
        ("print(import_once(config))", "run.code=tests/support/ping.py"),
    ],
    ids=["computed", "ranks", "device", "code"],
)
def test_no_peer_is_forked_where_it_could_not_compute(
    program: str, setting: str, tmp_path: Path
) -> None:
    assert printed(program, tmp_path, setting)[0] == "None\n"
