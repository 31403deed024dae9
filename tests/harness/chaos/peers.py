"""The processes of a swarm, and what is done to them.

Every peer is `python -m diloco.train` with a run directory of its own. Its standard input is a pipe
from here, so that it leaves by itself if this process is killed; whatever it starts carries a mark
in its environment, by which it is found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.chaos.schedule import ScheduledFault
from tests.harness.links.links import Loopback

MARK = "DILOCO_CHAOS"
START_S = 180.0  # imports of several processes on a busy machine
END_S = 180.0
GONE_S = 15.0  # a daemon notices that its peer is dead
LOOK_S = 0.1


class ChaosError(RuntimeError):
    """The swarm did not do what it must; one line."""


@dataclass(frozen=True)
class Happened:
    """A fault and when it was done; or why it was not."""

    fault: ScheduledFault
    time: float
    skipped: str | None = None


@dataclass
class PeerProcess:
    """One process of a peer, from its start to its end."""

    peer: int
    directory: Path
    number: int
    started_at: float
    mark: str
    process: subprocess.Popen[bytes] | None = None
    fate: str | None = None  # what was done to it: kill, term
    ended_at: float | None = None
    stopped: bool = False

    @property
    def out(self) -> Path:
        return self.directory / f"session-{self.number}.out"

    @property
    def err(self) -> Path:
        return self.directory / f"session-{self.number}.err"

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
        return code

    def said(self, kind: str, state: str | None = None) -> list[dict[str, Any]]:
        """JSON lines of a kind that it has written so far."""
        whole = self.out.read_bytes().rpartition(b"\n")[0].splitlines()
        messages = [json.loads(line) for line in whole if line.startswith(b"{")]
        messages = [one for one in messages if one.get("t") == kind]
        return [one for one in messages if state in (None, one.get("state"))]

    @property
    def address(self) -> str | None:
        ready = self.said("ready")
        return str(ready[-1]["address"]) if ready else None

    @property
    def trains(self) -> bool:
        return bool(self.said("status", "training"))

    def complaint(self) -> str:
        lines = self.err.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no message"


class RealSwarm:
    """Starts peers, does to them what a schedule says, and leaves nothing behind."""

    def __init__(
        self, directory: Path, network: Loopback, overrides: Sequence[str], peers: int
    ) -> None:
        self.directory = directory
        self.network = network
        self.sessions: list[PeerProcess] = []
        self.happened: list[Happened] = []
        self._overrides = list(overrides)
        self._peers = peers
        self._mark = uuid.uuid4().hex
        self._newest: dict[int, PeerProcess] = {}

    # -- life --------------------------------------------------------------------------------------

    def begin(self) -> float:
        """Start all peers; returns when all train, and when that was."""
        all_meet = f"swarm.min_peers={self._peers}"
        first = self._start(0, [all_meet])
        self._wait(lambda: first.address is not None, START_S, "the first peer's address", [first])
        for peer in range(1, self._peers):
            self._start(peer, [all_meet, f"swarm.initial_peers=['{first.address}']"])
        train = "all peers to train"
        self._wait(lambda: all(one.trains for one in self.sessions), START_S, train, self.sessions)
        return time.time()

    def follow(self, faults: Sequence[ScheduledFault], tell: Callable[[str], None]) -> None:
        """Do what the schedule says, for as long as anybody trains."""
        begun_at = time.monotonic()
        for fault in faults:
            while time.monotonic() < begun_at + fault.at:
                if not self.running():
                    over = f"the run was over before {fault.at:g}:{fault}"
                    raise ChaosError(f"{over}; give it more --minutes")
                time.sleep(LOOK_S / 4)
            at = time.time()
            try:
                skipped = self._do(fault)
            except OSError as error:
                skipped = str(error)
            self.happened.append(Happened(fault, at, skipped))
            tell(f"{fault.at:6.1f} s  {fault}" + (f"  skipped: {skipped}" if skipped else ""))

    def finish(self, patience_s: float) -> None:
        """Wait until every peer has ended by itself."""
        self._wait(lambda: not self.running(), patience_s + END_S, "the peers to end")
        for one in self.sessions:
            one.poll()

    def running(self) -> list[PeerProcess]:
        return [one for one in self._newest.values() if one.poll() is None]

    def leftovers(self, kill: bool = False) -> list[int]:
        """Processes that outlive the peers which started them."""
        deadline = time.monotonic() + GONE_S
        while (left := marked(MARK, self._mark)) and time.monotonic() < deadline:
            _signal(left if kill else [], signal.SIGKILL)
            time.sleep(LOOK_S)
        return left

    def close(self) -> None:
        """Kill what is left, peers first."""
        for one in self.sessions:
            if one.process is not None and one.process.poll() is None:
                one.process.kill()
        self.leftovers(kill=True)
        for one in self.sessions:
            if one.process is not None:
                one.process.wait()
                assert one.process.stdin is not None
                one.process.stdin.close()

    # -- faults ------------------------------------------------------------------------------------

    def _do(self, fault: ScheduledFault) -> str | None:
        network = self.network
        match fault.kind:
            case "join":
                return self._enter(max(self._newest) + 1)
            case "restart":
                return self._enter(fault.peers[0])
            case "partition" | "heal":
                network.partition(fault.groups)
            case "fast":
                network.fast(fault.peers[0])
            case "move":
                network.move(fault.peers[0])
            case "slow" | "delay" | "loss":
                network.worsen(fault.peers[0], fault.kind, fault.value)
            case _:
                return self._hit(fault.kind, self._newest[fault.peers[0]])
        return network.unshaped or None

    def _hit(self, kind: str, victim: PeerProcess) -> str | None:
        assert victim.process is not None
        if victim.poll() is not None:
            return f"p{victim.peer} has ended already"
        if kind in ("stop", "cont"):
            # The daemon too: a lid that closes freezes both.
            family = marked(MARK, victim.mark) or [victim.process.pid]
            _signal(family, signal.SIGSTOP if kind == "stop" else signal.SIGCONT)
            victim.stopped = kind == "stop"
            return None
        victim.fate = kind
        victim.process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        if kind == "kill":
            victim.process.wait()
            victim.poll()
            if victim.stopped:
                _signal(marked(MARK, victim.mark), signal.SIGCONT)
        return None

    def _enter(self, peer: int) -> str | None:
        others = [one for one in self.running() if not one.stopped and one.fate is None]
        callable_ = [one for one in others if not self.network.is_home(one.peer)]
        addresses = [one.address for one in callable_ if one.address is not None]
        before = self._newest.get(peer)
        if before is not None and before.poll() is None:
            return f"p{peer} still runs"
        if not addresses and not (others and before):
            return "nobody is there to join"
        joins = [f"swarm.initial_peers={addresses[:3]}"]
        self._start(peer, joins if addresses else [f"swarm.min_peers={self._peers}"])
        return None

    def _start(self, peer: int, overrides: Sequence[str]) -> PeerProcess:
        self.network.add(peer)
        directory = self.directory / f"p{peer}"
        directory.mkdir(parents=True, exist_ok=True)
        number = sum(one.peer == peer for one in self.sessions)
        session = PeerProcess(peer, directory, number, time.time(), f"{self._mark}-{peer}-{number}")
        listen = f"swarm.listen={self.network.listen(peer)}"
        command = [*self.network.command(peer), sys.executable, "-m", "diloco.train"]
        command += [*self._overrides, f"run.dir={directory}", f"run.name=p{peer}"]
        with session.out.open("wb") as out, session.err.open("wb") as err:
            session.process = subprocess.Popen(
                [*command, "run.report=true", listen, *overrides],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env={**os.environ, MARK: session.mark},
                # Ctrl+C in the terminal is for this process, which ends them all
                start_new_session=True,
            )
        self.sessions.append(session)
        self._newest[peer] = session
        return session

    def _wait(
        self,
        condition: Callable[[], bool],
        patience_s: float,
        what: str,
        vital: Sequence[PeerProcess] = (),
    ) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            for one in vital:
                if one.poll() is not None:
                    raise ChaosError(f"p{one.peer} ended with {one.poll()}: {one.complaint()}")
            if time.monotonic() > deadline:
                late = ", ".join(f"p{one.peer}" for one in self.running()) or "nobody"
                raise ChaosError(f"waited {patience_s:.0f} s for {what}; still running: {late}")
            time.sleep(LOOK_S)


def marked(key: str, mark: str) -> list[int]:
    """Ids of living processes whose environment has this value, or one that begins with it."""
    wanted, found = re.compile(rb"(^|\0)" + f"{key}={mark}".encode() + rb"[-\0]"), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted.search((place / "environ").read_bytes()):
                found.append(int(place.name))
    return found


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
