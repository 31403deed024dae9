"""This user's worker: its directory, and how it is begun and ended.

    $XDG_DATA_HOME/diloco/worker/  worker.json       what it was told, and its state
                                   address           whom it joins, if no @FILE was named
                                   log, log.1        of its peer and its own, at most 4 MB each
                                   stop              while there: nobody begins it again
                                   lock/, peer-lock/ locked by its supervisor, and by its peer
                                   diloco/peer-0/    key and runs of its peer (`peer`)
                                   cache/            with --disk: what its peer downloads

Only this user can read it: an address may be an invitation. It is a service of systemd where this
user has that, which comes back after a reboot, else a process. macOS has no systemd, and no figures
of power and CPU that `machine` reads; on Windows use WSL2.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diloco.atomic import replace_file
from diloco.errors import ConfigError, SwarmError
from diloco.rundir.files import data_home, in_use, write_atomic
from diloco.volunteer.rules import LEAVING_S, State

EVERY_S = 0.1  # between looks at another process
SLOW_S = 60.0  # what a supervisor needs beside its peer: to be imported, to end
# What of the environment a peer needs after a reboot, too. Secrets such as HF_TOKEN are not kept.
KEPT = re.compile(
    r"(CUDA|HIP|ROCR|LD|MKL|OMP|TORCH|PYTHON)_?\w*|(HF|XDG)_\w*HOME|PATH|LANG|(?i:\w+_proxy)"
)
UNIT = """[Unit]
Description=diloco worker
After=network-online.target
[Service]
ExecStart={command}
WorkingDirectory={cwd}
Restart=on-failure
RestartSec=10
KillMode=mixed
TimeoutStopSec={timeout_s:.0f}
[Install]
WantedBy=default.target
"""


@dataclass(frozen=True)
class Worker:
    """A worker, as its file tells.

    Attributes:
        command: arguments of Python, run in `cwd` with `environment`, that join the swarm.
        when, disk_bytes: as `diloco.volunteer.rules.decide` takes them.
        pid, peer_pid: processes of supervisor and peer, where their locks are held.
        began_at: when the last supervisor began, in unix seconds.
    """

    directory: Path
    command: tuple[str, ...] = ()
    when: str = ""
    disk_bytes: int | None = None
    cwd: str = "."
    environment: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    peer_pid: int = 0
    began_at: float = 0.0
    state: State = field(default_factory=State)

    @classmethod
    def read(cls, directory: Path | None = None) -> Worker:
        """Read the newest state, by default of this user's worker; `ConfigError` without one."""
        directory = directory or data_home() / "worker"
        try:
            saved: dict[str, Any] = json.loads((directory / "worker.json").read_bytes())
            state, command = State(**saved.pop("state")), tuple(saved.pop("command"))
            return cls(directory, state=state, command=command, **saved)
        except FileNotFoundError:
            text = "there is no worker yet; diloco start ADDRESS begins one"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{directory}/worker.json cannot be read ({error}); delete that directory"
        raise ConfigError(text)

    def write(self) -> None:
        """Replace the file; raises OSError."""
        saved = {**vars(self), "state": asdict(self.state)}
        del saved["directory"]
        replace_file(self.directory / "worker.json", json.dumps(saved, indent=2).encode(), 0o600)

    @property
    def address(self) -> str:
        """Return the address, or @FILE, that its peer joins."""
        return self.command[3]

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def runs(self) -> bool:
        """Return True while its supervisor runs."""
        return in_use(self.directory / "lock")

    @property
    def is_stopped(self) -> bool:
        """Return True if only its user begins it again."""
        return (self.directory / "stop").exists() or self.state.phase == "ended"

    def __str__(self) -> str:
        if not (self.runs or self.is_stopped):
            return "worker: gone, and nobody stopped it; diloco start begins it again"
        return f"worker: {self.state}"

    def begin(self) -> str:
        """Begin it in the background; return a line on what happens after a reboot.

        Raises `ConfigError` if it runs, and `SwarmError` if it does not begin.
        """
        if self.runs:
            raise ConfigError("the worker runs already; diloco logs shows it, diloco stop ends it")
        (self.directory / "stop").unlink(missing_ok=True)
        replace(self, state=self.state.resumed(time.time())).write()
        command = [sys.executable, "-m", "diloco.volunteer.supervisor", str(self.directory)]
        if _systemctl("show-environment"):
            line = self._as_service(command)
        else:
            line = f"after a reboot, of a crontab: @reboot {shlex.join(command)}"
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
            with self.log.open("ab") as log:
                process = subprocess.Popen(command, stdout=log, **streams, start_new_session=True)
                process.returncode = 0  # nobody here waits for it
        self._await(lambda: Worker.read(self.directory).began_at > self.began_at, "begin", SLOW_S)
        return line

    def end(self) -> Worker:
        """Let its peer leave the swarm, and end it; return it as it is then.

        Raises `SwarmError` if it does not end.
        """
        (self.directory / "stop").touch()
        unit = self._unit
        is_told = unit.exists() and _systemctl("disable", "--now", unit.name)
        unit.unlink(missing_ok=True)
        if self.runs and not is_told:
            signal_to(os.kill, Worker.read(self.directory).pid, signal.SIGTERM)
        self._await(lambda: not self.runs, "end", LEAVING_S + SLOW_S)
        self.end_orphan()
        return Worker.read(self.directory)

    def end_orphan(self) -> None:
        """End the peer of a supervisor that was killed, if there is one."""
        lock = self.directory / "peer-lock"
        if in_use(lock):
            peer = Worker.read(self.directory).peer_pid
            signal_to(os.kill, peer, signal.SIGTERM)
            with suppress(SwarmError):
                self._await(lambda: not in_use(lock), "end", LEAVING_S)
            signal_to(os.killpg, peer, signal.SIGKILL)

    def _await(self, condition: Callable[[], bool], what: str, most_s: float) -> None:
        deadline = time.monotonic() + most_s
        while not condition():
            if time.monotonic() > deadline:
                raise SwarmError(f"the worker does not {what} in {most_s:.0f} s; see {self.log}")
            time.sleep(EVERY_S)

    @property
    def _unit(self) -> Path:
        home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        name = re.sub(r"\W+", "-", str(self.directory)).strip("-")
        return Path(home, "systemd", "user", f"{name[-100:]}.service")

    def _as_service(self, command: list[str]) -> str:
        unit, words = self._unit, (re.sub(r'([\\"])', r"\\\1", word) for word in command)
        line = " ".join(f'"{word}"' for word in words).replace("$", "$$")
        settings = {"command": line, "cwd": self.cwd, "timeout_s": LEAVING_S + SLOW_S}
        settings |= {key: str(settings[key]).replace("%", "%%") for key in ("command", "cwd")}
        unit.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(unit, UNIT.format(**settings))
        if not (_systemctl("daemon-reload") and _systemctl("enable", "--now", unit.name)):
            raise SwarmError(f"systemd does not begin {unit}; systemctl --user status {unit.name}")
        return "after a reboot it comes back when you log in; loginctl enable-linger: without that"


def _systemctl(*arguments: str) -> bool:
    """Return True if `systemctl --user` did that."""
    with suppress(OSError):
        command = ["systemctl", "--user", *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def signal_to(send: Callable[[int, int], None], process: int, number: int) -> None:
    """Signal a process, or all that is left of its group; 0, of which nothing is known, to none."""
    with suppress(ProcessLookupError):
        if process > 0:
            send(process, number)
