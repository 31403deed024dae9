"""Peers for tests: nodes in threads of this process, and commands in processes of their own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from diloco.attach.node_thread import NodeThread
from diloco.config import OuterConfig, SwarmConfig, compose
from diloco.core.members import Members
from diloco.outer.digest import anchor_digest, digest_of
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.position import Position
from diloco.swarm.node.runtime import EventLoopThread
from diloco.train.run import run
from tests.harness.chaos.peers import marked
from tests.support import warm
from tests.support.places import ROOT

# far more than anything here takes on a slow and busy machine; what reaches it hangs
DEADLINE_S = 300.0
NETWORK = SwarmConfig.model_fields.keys() - {"identity_path"}
SMOKE = ("experiment=smoke", "swarm.heartbeat_s=0.2")

T = TypeVar("T")
_held: list[socket.socket] = []


def dead_port() -> int:
    """A port on which nobody listens, as long as this process lives: it is bound here."""
    _held.append(socket.socket())
    _held[-1].bind(("127.0.0.1", 0))
    return int(_held[-1].getsockname()[1])


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], T], what: str) -> T:
    """The first true value of `condition`; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.02)
    return value


def together(*jobs: Callable[[], T]) -> list[T]:
    """Results of jobs that run at the same time, each in a thread; the first failure is raised."""
    futures: list[Future[T]] = [Future() for _ in jobs]

    def work(future: Future[T], job: Callable[[], T]) -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    for pair in zip(futures, jobs, strict=True):
        threading.Thread(target=work, args=pair, daemon=True).start()
    for future in as_completed(futures, DEADLINE_S):
        future.result()
    return [future.result() for future in futures]


# -- nodes in threads ------------------------------------------------------------------------------


def seeded(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Normal random parameters of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@dataclass
class Trainee:
    """A node with parameters, driven by the test; there is one once it was started."""

    options: NodeOptions
    replica: Replica
    parameters: dict[str, Tensor]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    runtime: EventLoopThread = field(default_factory=EventLoopThread)
    view: NodeThread = field(init=False)

    @property
    def node(self) -> Node:
        return self.view.node

    @property
    def address(self) -> str:
        return self.node.addresses[0]

    @property
    def peer_id(self) -> str:
        return self.node.core.facts.me

    @property
    def digest(self) -> str:
        return anchor_digest([digest_of(anchor) for anchor in self.replica.anchors])

    @property
    def versions(self) -> list[int]:
        """By fragment, the number of the head whose anchor is here."""
        return [f.tip.head.number for f in self.node.core.facts.fragments]

    @property
    def members(self) -> Members:
        """The other peers that it is connected to."""
        return self.node.core.facts.members

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all events of a kind."""
        return [fields for one, fields in list(self.events) if one == kind]

    def start(self) -> Self:
        hear = lambda kind, fields: self.events.append((kind, dict(fields)))  # noqa: E731
        self.view = NodeThread.open(self.runtime, self.options, self.replica, hear)
        return self

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the node."""
        return self.runtime.call(work)

    def begin(self) -> Position:
        return self.call(self.node.begin())

    def round(self, step: Mapping[str, Tensor] | float, tokens: int = 100) -> Position:
        """An inner "step" that subtracts `step` from the parameters, and the exchange."""
        for name, parameter in self.parameters.items():
            parameter.sub_(step if isinstance(step, float) else step[name])

        async def exchange() -> Position:
            position, steps, _ = self.node.place()
            for step in range(position, steps):
                part = tokens * (step + 1) // steps - tokens * step // steps
                outcome = await self.node.after_step(part)
            assert outcome.exchanged and outcome.stopped_by < 0, "interrupted"
            return outcome

        return self.call(exchange())

    def leave(self, finished: bool) -> None:
        self.call(self.node.leave(finished))

    def close(self) -> None:
        if hasattr(self, "view"):
            self.view.close()
        self.runtime.close()

    def authors(self) -> list[int]:
        """Fragments of which this peer has made the newest version."""
        fragments = self.node.core.facts.fragments
        return [f.index for f in fragments if f.tip.head.author == self.peer_id]


def begin_together(*peers: Trainee, authors: Sequence[Trainee] = ()) -> None:
    """All of them begin, and the authors (default: all) hear of each that it trains.

    A round of these tests takes no time. An author that had not heard yet of a peer that trains
    would make the first version without that one.
    """
    together(*(peer.begin for peer in peers))

    def all_hear_all() -> bool:
        pairs = ((a.members.get(b.peer_id), a is b) for a, b in product(authors or peers, peers))
        return all(same or (member and member.status.trains) for member, same in pairs)

    eventually(all_hear_all, "the authors to hear of everybody")


class Crowd:
    """The nodes of one swarm; they differ in what they are made of and agree on what the run is."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]], **outer: Any):
        self.directory, self.shapes, self.members = directory, shapes, list[Trainee]()
        exact = {"codec_up": "fp32", "codec_down": "fp32", "lr": 0.7, "momentum": 0.9}
        rounds = {"method": "diloco", "sync_every": 10, "fragments": 4, "momentum_warmup": 0}
        self.outer: dict[str, Any] = {**rounds, **exact, **outer}

    def peer(self, *initial_peers: str, seed: int = 0, **options: Any) -> Trainee:
        """A peer that is not started yet."""
        name, parameters = f"p{len(self.members)}", seeded(self.shapes, seed)
        numels = {key: value.numel() for key, value in parameters.items()}
        fragments = partition(numels, self.outer["fragments"])
        replica = Replica(parameters, fragments, OuterConfig(**self.outer))
        network: dict[str, Any] = {"initial_peers": initial_peers, "heartbeat_s": 0.2}
        network |= {key: options.pop(key) for key in sorted(NETWORK & options.keys())}
        run, key = RunSpec("crowd", "0" * 64, "{}"), self.directory / f"{name}.key"
        # a copy is not checked: the node has to complain
        settings = SwarmConfig().model_copy(update=network)
        chosen = NodeOptions(run, settings, options.pop("identity_path", key), name, **options)
        self.members.append(Trainee(chosen, replica, parameters))
        return self.members[-1]

    def start(self, count: int, **options: Any) -> list[Trainee]:
        """That many peers, started, agreed, and heard by each other to train."""
        first = self.peer(min_peers=count, **options).start()
        others = [self.peer(first.address, min_peers=count, **options) for _ in range(count - 1)]
        together(*(other.start for other in others))
        peers = [first, *others]
        begin_together(*peers)
        return peers

    def finish(self, *peers: Trainee) -> None:
        """All of them are done at the same time and leave."""
        together(*(lambda peer=peer: peer.leave(True) for peer in peers))

    def close(self) -> None:
        together(*(peer.close for peer in self.members))


# -- commands in processes -------------------------------------------------------------------------


@dataclass
class Command:
    """A command in a session of its own, with everything it starts marked in the environment."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    mark: str = field(repr=False)

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    @property
    def said(self) -> str:
        """All that it has written so far."""
        return f"{self.stdout}\n{self.stderr}"

    def sees(self, condition: Callable[[], T], what: str) -> T:
        """The first true value of `condition`; fails when the command ends without one."""

        def either() -> T:
            alive, value = self.process.poll() is None, condition()
            assert alive or value, f"it ended before {what}\n{self.said}"
            return value

        return eventually(either, what)

    def says(self, pattern: str) -> str:
        """The first match of the pattern's group in what it writes."""
        found = self.sees(lambda: re.search(pattern, self.said, re.M), pattern)
        assert found is not None
        return found[1]

    def address(self) -> str:
        """The one that it has printed."""
        return self.says(r"(/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)(?=['\n])")

    def reaches(self, version: int, run_dir: Path, *peers: str) -> None:
        """Returns when these peers, or any, have logged a step of that version."""

        def reached() -> bool:
            lines = json_lines(run_dir / "metrics.jsonl")
            seen = {line["peer"] for line in lines if line["version"] >= version}
            return bool(seen) and seen >= {*peers}

        self.sees(reached, f"outer step {version}")

    def wait(self) -> int:
        """Exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs\n{self.said}") from None

    def interrupt(self) -> Self:
        """Itself, when it has ended well after Ctrl+C."""
        self.process.send_signal(signal.SIGINT)
        return self.done()

    def done(self, code: int = 0) -> Self:
        """Itself, when it has ended with this exit code."""
        assert self.wait() == code, self.said
        return self

    def family(self, word: str = "") -> list[int]:
        """Ids of all living processes that descend from this command, and have that word among
        their arguments."""
        found = warm.marked(self.mark)
        for process in marked(warm.MARK, self.mark):
            with suppress(OSError):  # it has ended
                found[process] = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return sorted(process for process, words in found.items() if word in ("", *words))

    def kill(self) -> None:
        """SIGKILL to everything that it started, until nothing is left."""

        def dead() -> bool:
            for process in (family := self.family()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return not family

        eventually(dead, "killed processes to end")
        self.process.wait()


@contextmanager
def command(
    *arguments: str,
    directory: Path,
    stdin: int = subprocess.DEVNULL,
    modules: Path = ROOT,
    start: Callable[..., subprocess.Popen[bytes]] = warm.Popen,
) -> Iterator[Command]:
    """`python ARGUMENTS` with its output in files of `directory`; nothing of it outlives this
    context. An argument may be several words.

    It finds what is in `modules` first. `start=subprocess.Popen` is for tests of how a process
    starts.
    """
    mark, words = uuid.uuid4().hex, [sys.executable, *" ".join(arguments).split()]
    out, err = directory / f"{mark}.out", directory / f"{mark}.err"
    own = {warm.MARK: mark, "PYTHONPATH": f"{modules}:{ROOT}", "OMP_NUM_THREADS": "1"}
    where = {"cwd": directory, "env": os.environ | own | {"COLUMNS": "400"}}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        process = start(words, **where, **files, start_new_session=True)
    started = Command(process, out, err, mark)
    try:
        yield started
    finally:
        started.kill()
        if process.stdin is not None:
            process.stdin.close()


def typed_as(words: Sequence[str]) -> Callable[..., subprocess.Popen[bytes]]:
    """A `start` of `command` that runs these words as they are, in a process that is not warm."""
    return lambda _, **where: subprocess.Popen(words, **where)


def diloco(*arguments: str, directory: Path) -> Command:
    """`diloco ARGUMENTS` run to its end."""
    with command("-m", "diloco", *arguments, directory=directory) as started:
        started.wait()
    return started


def program(code: str, *arguments: str, directory: Path) -> Command:
    """Python code, written to a file of `directory` and run to its good end."""
    (directory / "program.py").write_text(code)
    with command("program.py", *arguments, directory=directory) as started:
        return started.done()


def train_here(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The summary of `diloco train`, alone in this process. An override may be several words."""
    run(compose([*" ".join(overrides).split(), f"run.dir={run_dir}"]), lambda message: None)
    return summary_of(run_dir)


def summary_of(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind that a run has written."""
    return [event for event in json_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; none while it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
