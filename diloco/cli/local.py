"""`diloco local`: several peers on this machine, each a process of its own, over the real network stack.

1. Every peer is `python -m diloco.train` with the same configuration and a name, a shard and a log of its own.
2. The first starts the swarm and writes its address into the run directory, where the others wait for it.
3. Their JSON lines become the live table (`children.py`); their summaries become summary.json.
4. They take the accelerators of this machine in turn.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from diloco.cli.children import Child, Words, follow, forwarding, free_port, started
from diloco.cli.table import LiveView, say_who_can_join
from diloco.config import Config
from diloco.errors import SwarmError
from diloco.rundir.files import check_same_run, exclusive, prepare_run_directory, write_atomic
from diloco.rundir.plot import plot_losses
from diloco.rundir.summary import Summary, merge_peer_summaries, write_contributions, write_summary

__all__ = ["run"]


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
    words: Words = queue.Queue()
    with contextlib.ExitStack() as stack:
        children: list[Child] = []
        stop = stack.enter_context(forwarding(children))  # first, or a peer would miss an early Ctrl+C
        for index in range(len(names)):
            children.append(stack.enter_context(_peer(config, base, index, names, words)))
            if stop:
                children[-1].stop()
                break
        with LiveView(console, names, config.budget.outer_steps, title) as view:
            follow(children, words, view)
        return _conclude(config, children, bool(stop), time.monotonic() - began_at, console)


def _conclude(config: Config, children: list[Child], stopped: bool, wall_s: float, console: Console) -> int:
    run_dir = config.run.dir
    summaries = [child.summary for child in children if child.summary is not None]
    # Ctrl+C while a peer still starts has nothing to lose.
    failed = [c for c in children if c.exit > 0 and not (stopped and not c.ready)]
    complaint = next((child for child in failed if child.summary is None), None)
    code = 0 if complaint is None else complaint.exit
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
        raise complaint.error()
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
def _peer(config: Config, base: Path, index: int, names: list[str], words: Words) -> Iterator[Child]:
    """Starts one peer process, which never outlives this context."""
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
        environment |= {"RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        overrides += _shared_device(config, index, count)
    else:
        overrides.append(f"swarm.min_peers={max(config.swarm.min_peers, count)}")
        if index > 0 and not config.swarm.initial_peers:
            overrides.append(f"swarm.initial_peers=['@{(config.run.dir / 'address').absolute()}']")
    arguments = ["-m", "diloco.train", "--config", str(base), *overrides]
    with started(name, arguments, config.run.dir / "logs" / f"{name}.log", environment, words) as child:
        yield child


def _shared_device(config: Config, index: int, count: int) -> list[str]:
    """In data parallel, which device a process takes where there are fewer devices than processes."""
    if config.train.device == "cpu" or ":" in config.train.device:
        return []
    from diloco.train.devices import counted, place  # torch takes seconds, and only this needs it

    kind, there = counted()
    return [f"train.device={place(kind, index % there)}"] if 0 < there < count else []


_port = functools.cache(free_port)  # the peers of one run share it
