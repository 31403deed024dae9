"""`diloco local`: several peers on this machine, each a process, over the real network stack.

Every peer runs `python -m diloco.train` with the same configuration, and with its own name, shard
and log. Where that is safe, it is a fork of this process, which has imported the modules already.
The first starts the swarm and writes its address into the run directory, where the others wait for
it. Their JSON lines become the live table; their summaries become summary.json.

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
from typing import TYPE_CHECKING, TypeAlias

import click

from diloco.cli import Command, Options, configured
from diloco.cli.sweep import sweepable
from diloco.errors import DilocoError, SwarmError, UnsavedError
from diloco.signals import on_signals

if TYPE_CHECKING:
    from rich.console import Console

    from diloco.cli.forked import Forked
    from diloco.config import Config
    from diloco.dashboard.live import LiveView
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
    return run(options.compose(starts=True, together=True))


def run(config: Config) -> int:
    """Run the peers, show their state, and collect their results; return the exit code."""
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

    from diloco.dashboard.live import LiveView, print_who_can_join
    from diloco.rundir.files import write_atomic

    began_at, run_dir = time.monotonic(), config.run.dir
    (run_dir / "address").unlink(missing_ok=True)
    base = run_dir / "config.yaml"
    write_atomic(base, config.to_yaml())
    names = [f"p{index}" for index in range(config.local.peers)]
    what = f"{config.model.name} on {config.data.source}, {config.outer.method}"
    console = Console()
    print_who_can_join(console, config)
    from diloco.cli.forked import import_once

    try:
        with on_signals(_interrupted):
            files = import_once(config)
    except KeyboardInterrupt:
        console.print("stopped before the first outer step", highlight=False)
        return 0
    messages: Reports = queue.Queue()
    with contextlib.ExitStack() as stack:
        peers: list[LocalPeer] = []
        # first, so that an early Ctrl+C reaches all peers
        stop = stack.enter_context(_forwarding(peers))
        for index, name in enumerate(names):
            arguments, environment = _peer(config, base, index, names)
            log = run_dir / "logs" / f"{name}.log"
            process = _started(name, arguments, log, environment, files)
            peers.append(stack.enter_context(process))
            if stop:
                peers[-1].stop()
                break
        for peer in peers:  # after the last fork, which copies no thread
            peer.hear(messages)
        title = f"{config.run.id}: {len(names)} peers, {what}"
        with LiveView(console, names, config.budget.outer_steps, title) as view:
            culprit = _follow(peers, messages, view, stop)
        # A peer that Ctrl+C ended before it was ready has lost nothing.
        failed = (peer for peer in peers if peer.has_failed() and (peer.ready or not stop))
        culprit = culprit or next(failed, None)
        summaries = [peer.summary for peer in peers if peer.summary is not None]
        if not summaries and culprit is None and not stop:
            again = f"run the same command again to go on from {run_dir}/checkpoints"
            raise SwarmError(f"every peer was killed; {again}")
        error = None if culprit is None else culprit.error()
        if any(summary.outer_steps for summary in summaries):
            summary = _gather(config, summaries, time.monotonic() - began_at, error)
            _print_result(config, summary, bool(stop), console)
        elif error is None:
            console.print("stopped before the first outer step", highlight=False)
    if error is not None:
        raise error
    return 0


def _gather(
    config: Config, summaries: Sequence[Summary], wall_s: float, error: DilocoError | None
) -> Summary:
    """Write the results of all peers: summary.json, contributions.csv and loss.png."""
    from diloco.rundir.plot import plot_losses
    from diloco.rundir.summary import merge_peer_summaries, write_contributions, write_summary

    run_dir = config.run.dir
    summary = merge_peer_summaries(
        summaries,
        run_id=config.run.id,
        manifest_hash=config.manifest().hash(),
        mode=config.outer.method,
        wall_s=wall_s,
        exit=0 if error is None else error.exit_code,
    )
    write_summary(run_dir / "summary.json", summary)
    if summary.contributions:
        write_contributions(run_dir / "contributions.csv", summary.contributions)
    title = f"{config.run.id}: {config.model.name}"
    plot_losses(run_dir / "metrics.jsonl", run_dir / "loss.png", title)
    return summary


def _print_result(config: Config, summary: Summary, stopped: bool, console: Console) -> None:
    digests = {peer.anchor_digest for peer in summary.peers}
    state = "equal anchors on all peers"
    if config.outer.method == "data_parallel":
        state = "data parallel"
    elif stopped:
        state = "every peer's checkpoint written"
    elif len(digests) > 1:
        state = f"{len(digests)} different anchors"
    result = f"{summary.result(config.budget.outer_steps)}, {state}, {summary.wall_s:.0f} s"
    files = "summary.json, loss.png" if stopped else "summary.json, loss.png, model/"
    console.print(f"{'stopped at ' if stopped else ''}{result}", highlight=False)
    console.print(f"{config.run.dir}: {files}", highlight=False)
    if stopped:
        console.print("run the same command again to go on", highlight=False)


def _peer(
    config: Config, base: Path, index: int, names: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of python that start a peer, and its environment variables."""
    count = len(names)
    threads = config.train.threads or max(1, (os.cpu_count() or 1) // count)
    overrides = [f"run.name={names[index]}", "run.report=true", f"run.lead={index == 0}".lower()]
    overrides += [f"data.shard={index}", f"data.shards={count}", f"train.threads={threads}"]
    if config.local.step_delay_s:
        overrides.append(f"train.step_delay_s={config.local.step_delay_s[index]}")
    environment = {"LOCAL_RANK": str(index)}  # so that peers take the devices in turn
    if config.outer.method == "data_parallel":
        # The variables that torchrun would set, for torch.distributed.
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
        size = str(count)
        environment |= {"RANK": str(index), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        overrides += _shared_device(config, index, count)
    else:
        overrides.append(f"swarm.min_peers={max(config.swarm.min_peers, count)}")
        if index > 0 and not config.swarm.donors:
            overrides.append(f"swarm.initial_peers=['@{(config.run.dir / 'address').absolute()}']")
    return ["-m", "diloco.train", "--config", str(base), *overrides], environment


def _shared_device(config: Config, index: int, count: int) -> list[str]:
    """Override the device in data parallel, if there are fewer devices than processes."""
    if config.train.device == "cpu" or ":" in config.train.device:
        return []
    # importing torch takes seconds, and only this needs it
    from diloco.attach.devices import count_devices, place

    kind, there = count_devices()
    return [f"train.device={place(kind, index % there)}"] if 0 < there < count else []


@functools.cache  # the peers of one run share it
def _port() -> int:
    """Find a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- processes ------------------------------------------------------------------------------------


@dataclass
class LocalPeer:
    """One peer process and its reports."""

    name: str
    process: subprocess.Popen[str] | Forked
    log: Path
    log_start: int  # size of the log before this session, bytes
    ready: bool = False
    begun: bool = False  # True once any peer trains, as only rank 0 of data parallel reports
    summary: Summary | None = None

    def hear(self, reports: Reports) -> None:
        """Read its reports, and wait for its end, in threads."""
        listening = threading.Thread(target=_listen, args=(self, reports), daemon=True)
        listening.start()
        threading.Thread(target=_wait, args=(self, listening, reports), daemon=True).start()

    def stop(self) -> None:
        """Make it leave, or kill it if it is not ready: then it waits, and handles no signal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if self.ready or self.begun else signal.SIGKILL)

    def has_failed(self) -> bool:
        """Return True if it ended by itself with an error, and without a summary."""
        return self.process.returncode > 0 and self.summary is None

    def last_words(self) -> str | None:
        """The signal that killed it, or the one-line error that it ended with."""
        if (code := self.process.returncode) < 0:
            name, has_said = signal.Signals(-code).name, self.log.stat().st_size > self.log_start
            return f"{name}, see {self.log}" if has_said else name
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        begin = "diloco: error: "
        errors = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
        return next(reversed(errors or lines), None)

    def error(self) -> DilocoError:
        """Return its error, with its exit code."""
        words = self.last_words()
        if self.process.returncode < 0:
            killed = f"{self.name} was killed ({words}) before training began"
            return SwarmError(f"{killed}; out of memory? local.peers=N")
        error = DilocoError(f"{self.name}: {words} (log: {self.log})")
        error.exit_code = self.process.returncode
        return error


# Reports of the peers in the order of their arrival; None when a peer has ended.
Reports: TypeAlias = "queue.Queue[tuple[LocalPeer, Report | None]]"


@contextlib.contextmanager
def _started(
    name: str,
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str],
    files: set[int] | None,
) -> Iterator[LocalPeer]:
    """Start `python ARGUMENTS`, one peer, which never outlives this context. It is forked if there
    are `files`, those of `import_once`."""
    log.parent.mkdir(exist_ok=True)
    environment = {**os.environ, **environment}
    process: subprocess.Popen[str] | Forked
    with log.open("a", encoding="utf-8") as errors:
        log_start = log.stat().st_size
        if files is not None:
            from diloco.cli.forked import fork

            process = fork(arguments, errors, environment, files)
        else:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=environment,
                start_new_session=True,  # Ctrl+C reaches this process only, which passes it on once
            )
    try:
        yield LocalPeer(name, process, log, log_start)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _listen(peer: LocalPeer, reports: Reports) -> None:
    from diloco.rundir.reporting import read_report

    assert peer.process.stdout is not None
    for line in peer.process.stdout:
        if (message := read_report(line)) is not None:
            reports.put((peer, message))


def _wait(peer: LocalPeer, listening: threading.Thread, reports: Reports) -> None:
    """Report that a peer has ended; its children may outlive it, and keep its output open."""
    peer.process.wait()
    listening.join(LINGERING_S)
    reports.put((peer, None))


def _follow(
    peers: list[LocalPeer], reports: Reports, view: LiveView, stop: Sequence[int]
) -> LocalPeer | None:
    """Show reports until all peers have ended; return the first that failed before training."""
    from diloco.rundir.reporting import Finished, PeerStatus, Ready

    running, culprit = {peer.name for peer in peers}, None
    while running:
        peer, message = reports.get()
        if message is not None:
            peer.ready |= isinstance(message, Ready)
            if isinstance(message, PeerStatus) and message.state == "training":
                for other in peers:
                    other.begun = True
            if isinstance(message, Finished):
                peer.summary = message.summary
            view.update(message)
            continue
        running.discard(peer.name)
        if (code := peer.process.wait()) == 0:
            continue
        state = "killed" if code < 0 else "failed"
        view.update(PeerStatus(peer.name, state=state))
        view.note(f"{peer.name} {state}: {peer.last_words()}")
        if not (peer.begun or culprit or stop):
            culprit = peer
            for other in peers:
                other.stop()
    return culprit


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _forwarding(peers: list[LocalPeer]) -> Iterator[list[int]]:
    """Pass Ctrl+C, or the signal at the end of a job, on to the peers; yield signals received."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        killing = received.count(signal.SIGINT) > 1
        for peer in peers:
            if killing:
                peer.process.kill()
            elif len(received) == 1:
                peer.stop()
        if killing:
            os._exit(UnsavedError.exit_code)

    with on_signals(stop):
        yield received
