"""`diloco host`: a peer that holds fragments and trains nothing."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import replace

from rich.console import Console

from diloco.cli.notice import say_who_can_join
from diloco.cli.table import LiveView
from diloco.config import Config
from diloco.rundir.reporting import Ready
from diloco.train.host import Host

__all__ = ["run"]


def run(config: Config) -> int:
    """Holds fragments until Ctrl+C; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="diloco: %(message)s")
    console = Console()
    name = config.run.name or "host"
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            Host(config, name) as host,
            LiveView(console, [name], host.manifest.budget.outer_steps, f"{host.manifest.run.id}: host") as view,
        ):
            say_who_can_join(console, config, host.manifest.run.key)
            node, first = host.node, not config.swarm.initial_peers
            addresses, advice = tuple(node.addresses), node.advice or ""
            view.update(Ready(name, time.time(), host.address, addresses, first, config.joining_command, advice))
            while not stop.wait(0.5):
                view.update(replace(host.status(), peer=name, time=time.time()))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
