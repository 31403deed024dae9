"""`diloco train`: one peer, watched."""

from __future__ import annotations

import logging

from rich.console import Console

from diloco.cli.notice import say_who_can_join
from diloco.cli.table import LiveView
from diloco.config import Config
from diloco.rundir.reporting import Ready, Said, json_lines, read_message
from diloco.train.run import run as train

__all__ = ["run"]


def run(config: Config) -> int:
    """Train as one peer; returns the exit code."""
    if config.run.report:
        return train(config, json_lines).exit
    logging.basicConfig(level=logging.WARNING, format="diloco: %(message)s")
    console = Console()
    name = config.run.name or "peer"
    title = f"{config.run.id}: {config.model.name} on {config.data.source}, {config.outer.method}"
    with LiveView(console, [name], config.budget.outer_steps, title) as view:

        def show(said: Said) -> None:
            if isinstance(read_message(said), Ready):  # an error before that stands alone, in one line
                say_who_can_join(console, config, config.run.key)
            view.update(said)

        summary = train(config, show)
    loss = summary.eval.loss
    console.print(
        f"{config.run.dir}: outer step {summary.outer_steps}"
        + (f", held-out loss {loss:.3f} nats per token" if loss is not None else ""),
        highlight=False,
    )
    return summary.exit
