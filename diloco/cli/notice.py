"""One line in the terminal that says which peers can join."""

from __future__ import annotations

from rich.console import Console

from diloco.config import Config
from diloco.rundir.reporting import who_can_join

__all__ = ["say_who_can_join"]


def say_who_can_join(console: Console, config: Config, run_key: str | None) -> None:
    """One line: red for a run that is open to the network, quiet for one that is not, none without a swarm."""
    notice = who_can_join(config, run_key)
    if notice is not None:
        text, is_warning = notice
        console.print(text, style="bold red" if is_warning else "dim", highlight=False)
