"""`diloco local`: several peers on this machine, each a process of its own, over the real network stack.

1. Every peer is `python -m diloco.train` with the same configuration and a name, a shard and a log of its own.
2. The first starts the swarm and writes its address into the run directory, where the others wait for it.
3. Their JSON lines become the live table; their summaries become summary.json.

The first Ctrl+C makes each peer leave cleanly, the second kills them. A peer's standard input is a pipe from here: if
this process is killed, the pipe closes and the peer leaves by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from diloco.cli.table import LiveView, say_who_can_join
from diloco.config import Config
from diloco.errors import DilocoError, SwarmError, UnsavedError, on_signals
from diloco.rundir.files import check_same_run, exclusive, prepare_run_directory, write_atomic
from diloco.rundir.plot import plot_losses
from diloco.rundir.reporting import Finished, Message, Ready, Status, read_message
from diloco.rundir.summary import Summary, merge_peer_summaries, write_contributions, write_summary

__all__ = ["run"]


@dataclass
class _Child:
    """One peer process and what it said."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    log_start: int  # bytes that earlier sessions wrote
    spoke: bool = False
    ready: bool = False
    summary: Summary | None = None

    def complaint(self) -> str | None:
        """The one-line error that the peer ended with."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        found = [line for line in lines if line.startswith("diloco: error: ")]
        return found[-1].removeprefix("diloco: error: ") if found else (lines[-1] if lines else None)


def run(config: Config) -> int:
    """Start the peers, show them, gather what they leave; returns the exit code."""
    prepare_run_directory(config.run.dir)
    with exclusive(config.run.dir):
        # Before config.yaml is replaced; each peer checks its own checkpoint again.
        manifest = config.run.dir / "manifest.json"
        if manifest.is_file() and any((config.run.dir / "checkpoints").glob("*/step-*")):
            check_same_run(config, manifest.read_text())
        return _run(config)


def _run(config: Config) -> int:
    began_at = time.monotonic()
    (config.run.dir / "address").unlink(missing_ok=True)
    base = config.run.dir / "config.yaml"
    write_atomic(base, config.to_yaml())
    names = [f"p{index}" for index in range(config.local.peers)]
    title = f"{config.run.id}: {len(names)} peers, {config.model.name} on {config.data.source}, {config.outer.method}"
    console = Console()
    say_who_can_join(console, config, config.run.key)
    said: queue.Queue[tuple[_Child, Message | None]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        children: list[_Child] = []
        stop = stack.enter_context(_signals(children))  # first, or a peer would miss an early Ctrl+C
        for index in range(len(names)):
            children.append(stack.enter_context(_peer(config, base, index, names, said)))
            if stop:
                children[-1].process.send_signal(signal.SIGINT)
                break
        with LiveView(console, names, config.budget.outer_steps, title) as view:
            _follow(children, said, view, stop)
        return _conclude(config, children, bool(stop), time.monotonic() - began_at, console)


def _follow(
    children: list[_Child], said: queue.Queue[tuple[_Child, Message | None]], view: LiveView, stop: Sequence[int]
) -> None:
    """Show what the peers say until all have ended; a peer that fails before it trains ends the others.

    A peer that says its first words after Ctrl+C is told again: an interpreter that starts may lose a signal.
    """
    running = {child.name for child in children}
    while running:
        child, message = said.get()
        if message is not None:
            if stop and not child.spoke:
                child.process.send_signal(signal.SIGINT)
            child.spoke = True
            child.ready = child.ready or isinstance(message, Ready)
            if isinstance(message, Finished):
                child.summary = message.summary
            view.update(message)
            continue
        running.discard(child.name)
        code = child.process.wait()
        if code == 0:
            continue
        state = "killed" if code < 0 else "failed"
        view.update(Status(child.name, state=state))
        view.note(f"{child.name} {state}: {child.complaint() if code > 0 else signal.Signals(-code).name}")
        if code > 0 and not child.ready:
            for other in children:
                other.process.terminate()


def _conclude(config: Config, children: list[_Child], stopped: bool, wall_s: float, console: Console) -> int:
    run_dir = config.run.dir
    summaries = [child.summary for child in children if child.summary is not None]
    # Ctrl+C while a peer still starts has nothing to lose.
    failed = [c for c in children if c.process.returncode > 0 and not (stopped and not c.ready)]
    complaint = next((child for child in failed if child.summary is None), None)
    code = 0 if complaint is None else complaint.process.returncode
    if not summaries and complaint is None and not stopped:
        raise SwarmError(f"every peer was killed; run the same command again to go on from {run_dir}/checkpoints")
    if any(summary.outer_steps for summary in summaries):
        run_id, manifest_hash, mode = config.run.id, config.manifest().hash(), config.outer.method
        summary = merge_peer_summaries(
            summaries, run_id=run_id, manifest_hash=manifest_hash, mode=mode, wall_s=wall_s, exit=code
        )
        write_summary(run_dir / "summary.json", summary)
        if summary.contributions:
            write_contributions(run_dir / "contributions.csv", summary.contributions)
        plot_losses(run_dir / "metrics.jsonl", run_dir / "loss.png", f"{config.run.id}: {config.model.name}")
        _tell_result(config, summary, stopped, console)
    elif complaint is None:
        console.print("stopped before the first outer step", highlight=False)
    if complaint is not None:
        error = DilocoError(f"{complaint.name}: {complaint.complaint()} (log: {complaint.log})")
        error.exit_code = code
        raise error
    return code


def _tell_result(config: Config, summary: Summary, stopped: bool, console: Console) -> None:
    digests = {peer.anchor_digest for peer in summary.peers}
    same = "equal anchors on all peers" if len(digests) == 1 else f"{len(digests)} different anchors"
    if config.outer.method == "data_parallel":
        same = "data parallel"
    elif stopped:
        same = "every peer's checkpoint written"
    loss = "" if summary.eval.loss is None else f"held-out loss {summary.eval.loss:.3f} nats per token, "
    limit = config.budget.outer_steps
    at = f"outer step {summary.outer_steps}" + (f" of {limit}" if limit else "")
    console.print(f"{'stopped at ' if stopped else ''}{at}: {loss}{same}, {summary.wall_s:.0f} s", highlight=False)
    console.print(f"{config.run.dir}: summary.json, loss.png" + ("" if stopped else ", model/"), highlight=False)
    if stopped:
        console.print("run the same command again to go on", highlight=False)


@contextlib.contextmanager
def _peer(
    config: Config, base: Path, index: int, names: list[str], said: queue.Queue[tuple[_Child, Message | None]]
) -> Iterator[_Child]:
    """Starts one peer process, which never outlives this context."""
    name, count = names[index], len(names)
    log = config.run.dir / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    threads = config.train.threads or max(1, (os.cpu_count() or 1) // count)
    overrides = [f"run.name={name}", "run.report=true", f"run.lead={str(index == 0).lower()}"]
    overrides += [f"data.shard={index}", f"data.shards={count}", f"train.threads={threads}"]
    if config.local.step_delay_s:
        overrides.append(f"train.step_delay_s={config.local.step_delay_s[index]}")
    environment = dict(os.environ)
    if config.outer.method == "data_parallel":
        # By these torch.distributed's processes find each other; torchrun would set the same.
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count)}
    else:
        overrides.append(f"swarm.min_peers={max(config.swarm.min_peers, count)}")
        if index > 0 and not config.swarm.initial_peers:
            overrides.append(f"swarm.initial_peers=['@{(config.run.dir / 'address').absolute()}']")
    with log.open("a") as errors:
        log_start = log.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco.train", "--config", str(base), *overrides],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl+C in the terminal reaches this process only, which passes it on once
        )
    child = _Child(name, process, log, log_start)
    assert process.stdout is not None
    threading.Thread(target=_listen, args=(child, process.stdout, said), daemon=True).start()
    try:
        yield child
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _listen(child: _Child, output: IO[str], said: queue.Queue[tuple[_Child, Message | None]]) -> None:
    for line in output:
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            message = read_message(content) if isinstance(content, dict) else None
            if message is not None:
                said.put((child, message))
    said.put((child, None))


@functools.cache  # the peers of one run share it
def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _signals(children: list[_Child]) -> Iterator[list[int]]:
    """Ctrl+C or SIGTERM once: all leave cleanly. Twice: all are killed."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGINT if len(received) == 1 else signal.SIGKILL)
        if len(received) > 1:
            os._exit(UnsavedError.exit_code)

    with on_signals(stop):
        yield received
