"""The way into a swarm and out of it: progress while the state arrives, and what Ctrl+C does."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from diloco.errors import UnsavedError, on_signals
from diloco.rundir.reporting import Message, Stage
from diloco.train.baseline import DataParallel
from diloco.train.island import Island
from diloco.train.session import Sync

__all__ = ["arriving", "signals"]

ARRIVAL_EVERY_S = 0.2
ARRIVING_BYTES = 12  # per parameter: the anchor, and the two moments of a donor


@contextmanager
def arriving(sync: Sync, model: nn.Module, tell: Callable[[Message], None]) -> Iterator[None]:
    """Says how much has come from the swarm, while its state is fetched."""
    if isinstance(sync, DataParallel):
        yield
        return
    arrived = threading.Event()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    wanted = ARRIVING_BYTES * trained

    def watch() -> None:
        while not arrived.wait(ARRIVAL_EVERY_S):
            if sync.node is not None:
                received = sync.node.traffic.bytes_received
                tell(Stage(stage="state", received=received, wanted=wanted))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        arrived.set()
        watcher.join()


@contextmanager
def signals(sync: Sync, island: Island) -> Iterator[None]:
    """Ctrl+C or SIGTERM once: leave cleanly, and rank 0 says so. Twice: end at once (the daemon ends with it)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(UnsavedError.exit_code)
        if island.leads:
            sys.stderr.write("diloco: leaving the swarm; once more ends at once\n")
        sync.interrupt()

    with on_signals(stop):
        yield
