"""What whoever starts a peer should know before anything else: whether strangers can join."""

from __future__ import annotations

from rich.console import Console

from diloco.config import Config

__all__ = ["say_who_can_join"]


def say_who_can_join(console: Console, config: Config, run_key: str | None) -> None:
    """One line: red for a run that is open to the network, quiet for one that is not, none without a swarm."""
    if config.outer.method != "diloco":
        return
    if run_key is not None:
        console.print(f"closed run: invited peers only, by key {run_key[:16]}", style="dim", highlight=False)
    elif config.only_here:
        console.print("open run, on this machine only", style="dim", highlight=False)
    else:
        console.print(
            "open run: anyone who can reach this peer can join, read the model and change it; "
            "to close a run, start it with a key: diloco keygen run.key, then swarm.key_path=run.key",
            style="bold red",
            highlight=False,
        )
