"""`diloco local`: several peers on this machine, each a process of its own, over the real network
stack.

1. Every peer is `python -m diloco.train` with the same configuration and a name, a shard and a log
   of its own.
2. The first starts the swarm and writes its address into the run directory, where the others wait
   for it.
3. Their JSON lines become the live table; their summaries become summary.json.
4. They take the accelerators of this machine in turn.

The first Ctrl+C makes each peer leave cleanly, or kills it if it is not ready and has nothing to
lose; the second kills all. A peer's standard input is a pipe from here: if this process is killed,
the pipe closes and the peer leaves by itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

import click

from diloco.cli.options import Command, Options, configured
from diloco.cli.sweep import sweepable
from diloco.errors import DilocoError, SwarmError, UnsavedError, on_signals

if TYPE_CHECKING:
    from rich.console import Console

    from diloco.cli.table import LiveView
    from diloco.config import Config
    from diloco.rundir.reporting import Report
    from diloco.rundir.summary import Summary

LINGERING_S = 5.0


@click.command(cls=Command)
@configured
@sweepable
def local(options: Options) -> int:
    """Train with several peers on this machine.

    \b
    diloco local experiment=quickstart
    diloco local local.peers=2 model=tiny outer.sync_every=50 run.dir=runs/mine
    diloco local experiment=quickstart outer=data_parallel run.dir=runs/baseline
    diloco local data=text data.path=notes/ budget.tokens=5000000 budget.outer_steps=null

    The peers talk over the real network stack. Running it again with the same run.dir resumes the
    run.
    """
    return run(options.compose(starts=True))


def run(config: Config) -> int:
    """Start the peers, show them, gather what they leave; returns the exit code."""
    from diloco.rundir.files import check_same_run, exclusive, prepare_run_directory

    prepare_run_directory(config.run.dir)
    with exclusive(config.run.dir):
        # Before config.yaml is replaced; each peer checks its own checkpoint again.
        manifest = config.run.dir / "manifest.json"
        if manifest.is_file() and any((config.run.dir / "checkpoints").glob("*/step-*")):
            config = check_same_run(config, manifest.read_text("utf-8"))
        return _run(config)


def _run(config: Config) -> int:
    from rich.console import Console

    from diloco.cli.table import LiveView, say_who_can_join
    from diloco.rundir.files import write_atomic

    began_at = time.monotonic()
    (config.run.dir / "address").unlink(missing_ok=True)
    base = config.run.dir / "config.yaml"
    write_atomic(base, config.to_yaml())
    names = [f"p{index}" for index in range(config.local.peers)]
    title = (
        f"{config.run.id}: {len(names)} peers, {config.model.name} on {config.data.source},"
        f" {config.outer.method}"
    )
    console = Console()
    say_who_can_join(console, config)
    words: Words = queue.Queue()
    with contextlib.ExitStack() as stack:
        children: list[Child] = []
        # first, or a peer would miss an early Ctrl+C
        stop = stack.enter_context(_forwarding(children))
        for index in range(len(names)):
            arguments, environment = _peer(config, base, index, names)
            log = config.run.dir / "logs" / f"{names[index]}.log"
            children.append(
                stack.enter_context(_started(names[index], arguments, log, environment, words))
            )
            if stop:
                children[-1].stop()
                break
        with LiveView(console, names, config.budget.outer_steps, title) as view:
            culprit = _follow(children, words, view, stop)
        return _conclude(
            config, children, culprit, bool(stop), time.monotonic() - began_at, console
        )


def _conclude(
    config: Config,
    children: list[Child],
    culprit: Child | None,
    stopped: bool,
    wall_s: float,
    console: Console,
) -> int:
    from diloco.rundir.plot import plot_losses
    from diloco.rundir.summary import merge_peer_summaries, write_contributions, write_summary

    run_dir = config.run.dir
    summaries = [child.summary for child in children if child.summary is not None]
    # Ctrl+C while a peer still starts has nothing to lose.
    failed = (
        c
        for c in children
        if c.process.returncode > 0 and c.summary is None and (c.ready or not stopped)
    )
    complaint = culprit or next(failed, None)
    code = 0 if complaint is None else complaint.error().exit_code
    if not summaries and complaint is None and not stopped:
        raise SwarmError(
            f"every peer was killed; run the same command again to go on from {run_dir}/checkpoints"
        )
    if any(summary.outer_steps for summary in summaries):
        run_id, manifest_hash, mode = config.run.id, config.manifest().hash(), config.outer.method
        summary = merge_peer_summaries(
            summaries,
            run_id=run_id,
            manifest_hash=manifest_hash,
            mode=mode,
            wall_s=wall_s,
            exit=code,
        )
        write_summary(run_dir / "summary.json", summary)
        if summary.contributions:
            write_contributions(run_dir / "contributions.csv", summary.contributions)
        plot_losses(
            run_dir / "metrics.jsonl", run_dir / "loss.png", f"{config.run.id}: {config.model.name}"
        )
        _tell_result(config, summary, stopped, console)
    elif complaint is None:
        console.print("stopped before the first outer step", highlight=False)
    if complaint is not None:
        raise complaint.error()
    return code


def _tell_result(config: Config, summary: Summary, stopped: bool, console: Console) -> None:
    digests = {peer.anchor_digest for peer in summary.peers}
    same = (
        "equal anchors on all peers" if len(digests) == 1 else f"{len(digests)} different anchors"
    )
    if config.outer.method == "data_parallel":
        same = "data parallel"
    elif stopped:
        same = "every peer's checkpoint written"
    result = f"{summary.result(config.budget.outer_steps)}, {same}, {summary.wall_s:.0f} s"
    console.print(f"{'stopped at ' if stopped else ''}{result}", highlight=False)
    console.print(
        f"{config.run.dir}: summary.json, loss.png" + ("" if stopped else ", model/"),
        highlight=False,
    )
    if stopped:
        console.print("run the same command again to go on", highlight=False)


def _peer(
    config: Config, base: Path, index: int, names: list[str]
) -> tuple[list[str], dict[str, str]]:
    """What python is given to start a peer, and variables of its environment."""
    name, count = names[index], len(names)
    threads = config.train.threads or max(1, (os.cpu_count() or 1) // count)
    overrides = [f"run.name={name}", "run.report=true", f"run.lead={str(index == 0).lower()}"]
    overrides += [f"data.shard={index}", f"data.shards={count}", f"train.threads={threads}"]
    if config.local.step_delay_s:
        overrides.append(f"train.step_delay_s={config.local.step_delay_s[index]}")
    environment = {"LOCAL_RANK": str(index)}  # by which peers take the devices in turn
    if config.outer.method == "data_parallel":
        # By these torch.distributed's processes find each other; torchrun would set the same.
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
        environment |= {
            "RANK": str(index),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        overrides += _shared_device(config, index, count)
    else:
        overrides.append(f"swarm.min_peers={max(config.swarm.min_peers, count)}")
        if index > 0 and not config.swarm.initial_peers:
            overrides.append(f"swarm.initial_peers=['@{(config.run.dir / 'address').absolute()}']")
    return ["-m", "diloco.train", "--config", str(base), *overrides], environment


def _shared_device(config: Config, index: int, count: int) -> list[str]:
    """In data parallel, which device a process takes where there are fewer devices than
    processes."""
    if config.train.device == "cpu" or ":" in config.train.device:
        return []
    # torch takes seconds, and only this needs it
    from diloco.attach.devices import count_devices, place

    kind, there = count_devices()
    return [f"train.device={place(kind, index % there)}"] if 0 < there < count else []


@functools.cache  # the peers of one run share it
def _port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- processes -------------------------------------------------------------------------------------


@dataclass
class Child:
    """One peer process and what it said."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    log_start: int  # bytes that earlier sessions wrote
    ready: bool = False
    # it or another one trains: ranks of data parallel say nothing of themselves
    begun: bool = False
    summary: Summary | None = None

    def stop(self) -> None:
        """Make it leave, or end it at once if it is not ready: then it may wait for others, and
        hears no signal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if self.ready or self.begun else signal.SIGKILL)

    def complaint(self) -> str | None:
        """The one-line error that the peer ended with."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        found = [line for line in lines if line.startswith("diloco: error: ")]
        return (
            found[-1].removeprefix("diloco: error: ") if found else (lines[-1] if lines else None)
        )

    def error(self) -> DilocoError:
        """That error, with the exit code; of one that was killed, which says nothing itself, what
        happened."""
        if (code := self.process.returncode) < 0:
            name = signal.Signals(-code).name
            return SwarmError(
                f"{self.name} was killed ({name}) before training began; out of memory?"
                " local.peers=N"
            )
        error = DilocoError(f"{self.name}: {self.complaint()} (log: {self.log})")
        error.exit_code = code
        return error


Words: TypeAlias = "queue.Queue[tuple[Child, Report | None]]"
"""What the peers say, in the order in which they say it; None when one has ended."""


@contextlib.contextmanager
def _started(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], words: Words
) -> Iterator[Child]:
    """Starts `python ARGUMENTS`, one peer, which never outlives this context."""
    log.parent.mkdir(exist_ok=True)
    with log.open("a", encoding="utf-8") as errors:
        log_start = log.stat().st_size
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env={**os.environ, **environment},
            # Ctrl+C in the terminal reaches this process only, which passes it on once
            start_new_session=True,
        )
    child = Child(name, process, log, log_start)
    assert process.stdout is not None
    listening = threading.Thread(target=_listen, args=(child, process.stdout, words), daemon=True)
    listening.start()
    threading.Thread(target=_wait, args=(child, listening, words), daemon=True).start()
    try:
        yield child
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _listen(child: Child, output: IO[str], words: Words) -> None:
    from diloco.rundir.reporting import read_report

    for line in output:
        if (message := read_report(line)) is not None:
            words.put((child, message))


def _wait(child: Child, listening: threading.Thread, words: Words) -> None:
    """Say that a peer has ended; what it has started may outlive it, and keep its output open."""
    child.process.wait()
    listening.join(LINGERING_S)
    words.put((child, None))


def _follow(
    children: list[Child], words: Words, view: LiveView, stop: Sequence[int]
) -> Child | None:
    """Show what the peers say until all have ended.

    A peer that fails or is killed before any trains ends the others, which would wait for it; it is
    returned.
    """
    from diloco.rundir.reporting import Finished, PeerStatus, Ready

    running, culprit = {child.name for child in children}, None
    while running:
        child, message = words.get()
        if message is not None:
            child.ready |= isinstance(message, Ready)
            if isinstance(message, PeerStatus) and message.state == "training":
                for one in children:
                    one.begun = True
            if isinstance(message, Finished):
                child.summary = message.summary
            view.update(message)
            continue
        running.discard(child.name)
        if (code := child.process.wait()) == 0:
            continue
        state = "killed" if code < 0 else "failed"
        view.update(PeerStatus(child.name, state=state))
        view.note(
            f"{child.name} {state}: {child.complaint() if code > 0 else signal.Signals(-code).name}"
        )
        if not (child.begun or culprit or stop):
            culprit = child
            for other in children:
                other.stop()
    return culprit


@contextlib.contextmanager
def _forwarding(children: list[Child]) -> Iterator[list[int]]:
    """Passes Ctrl+C on, or notice that the machine will be taken away; yields the signals that
    came."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        killing = received.count(signal.SIGINT) > 1
        for child in children:
            if killing:
                child.process.kill()
            elif len(received) == 1:
                child.stop()
        if killing:
            os._exit(UnsavedError.exit_code)

    with on_signals(stop):
        yield received
