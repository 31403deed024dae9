"""`diloco train` and `diloco host`: one peer, watched; one that trains, and one that only makes versions."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from rich.console import Console

from diloco.cli.table import LiveView, hear_warnings, say_who_can_join
from diloco.config import Config
from diloco.errors import on_signals
from diloco.rundir.reporting import Message, Ready, json_lines
from diloco.train.host import Host
from diloco.train.run import run

__all__ = ["host", "train"]


def train(config: Config) -> int:
    """Train as one peer; returns the exit code."""
    if config.run.report:
        return run(config, json_lines).exit
    hear_warnings()
    console = Console()
    name = config.run.name or "peer"
    title = f"{config.run.id}: {config.model.name} on {config.data.source}, {config.outer.method}"
    with LiveView(console, [name], config.budget.outer_steps, title) as view:

        def show(message: Message) -> None:
            if isinstance(message, Ready):  # an error before that stands alone, in one line
                say_who_can_join(console, config)
            view.update(message)

        summary = run(config, show)
    loss = summary.eval.loss
    held_out = f", held-out loss {loss:.3f} nats per token" if loss is not None else ""
    if summary.peers:  # rank 0 speaks for the peer
        console.print(f"{config.run.dir}: outer step {summary.outer_steps}{held_out}", highlight=False)
    return summary.exit


def host(config: Config, until_done: bool) -> int:
    """Hold fragments until Ctrl+C, or until the run is over; returns the exit code."""
    hear_warnings()
    console = Console()
    name = config.run.name or "host"
    stop = threading.Event()
    with (
        on_signals(lambda *_: stop.set()),
        Host(config, name) as host,
        LiveView(console, [name], host.manifest.budget.outer_steps, f"{host.manifest.run.id}: host") as view,
    ):
        say_who_can_join(console, config)
        node, first = host.node, not config.swarm.initial_peers
        addresses, advice = tuple(node.addresses), node.advice or ""
        view.update(Ready(name, time.time(), host.address, addresses, first, config.joining_command, advice))
        while not stop.wait(0.5) and not (until_done and host.is_over()):
            view.update(replace(host.status(), peer=name, time=time.time()))
    return 0
