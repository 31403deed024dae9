"""`diloco join` on several accelerators: one peer on each, or one peer on all, in processes that this one watches.

A peer on all is what torchrun starts: it begins again from its checkpoint when one of its processes dies.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from diloco.cli.children import Child, Words, follow, forwarding, started
from diloco.cli.table import LiveView
from diloco.config import Config
from diloco.fit.volunteer import PeerDirectory, lock_peer_directory, move_aside, with_settings
from diloco.fit.whole import Layout
from diloco.rundir.files import prepare_run_directory, write_atomic
from diloco.rundir.summary import merge_peer_summaries
from diloco.text import human_count
from diloco.train.devices import only

__all__ = ["train_on_all"]

RESTARTS = 3  # of an island; a machine that loses more processes than that is broken


def train_on_all(config: Config, layout: Layout, typed: Collection[str], stack: ExitStack, console: Console) -> int:
    """Train with this layout, until the run is over or Ctrl+C; returns the exit code.

    `config` is that of the first peer, whose directory is locked already; further peers get directories of their own.
    Raises `DilocoError` with what a peer says that fails while none has taken part.
    """
    configs = [config]
    for _ in range(layout.peers - 1):
        directory = stack.enter_context(lock_peer_directory())
        configs.append(_for_another(config, directory, typed))
        move_aside(configs[-1])
    words: Words = queue.Queue()
    children: list[Child] = []
    stop = stack.enter_context(forwarding(children))
    for number, one in enumerate(configs):
        arguments, environment = _command(one, layout, number)
        log = one.run.dir / "logs" / f"{one.run.name}.log"
        children.append(stack.enter_context(started(str(one.run.name), arguments, log, environment, words)))
        if stop:
            children[-1].stop()
            break
    title = f"{config.run.id}: {config.model.name} on {config.data.source}; {layout.text}"
    with LiveView(console, [child.name for child in children], config.budget.outer_steps, title) as view:
        follow(children, words, view)
    return _conclude(config, children, bool(stop), console)


def _for_another(config: Config, directory: PeerDirectory, typed: Collection[str]) -> Config:
    """The configuration of a further peer on this machine, with a key and a directory of its own."""
    place = config.run.dir / directory.name if "run.dir" in typed else directory.path / "runs" / config.run.id
    own = {"run.name": directory.name, "run.dir": place, "swarm.identity_path": str(directory.identity)}
    return with_settings(config, own)


def _command(config: Config, layout: Layout, number: int) -> tuple[list[str], dict[str, str]]:
    """What python is given to start a peer, and variables of its environment."""
    first, ranks = layout.devices[number], layout.split.ranks
    device = first.setting if ranks == 1 else first.kind
    config = with_settings(config, {"run.report": True, "train.device": device})
    prepare_run_directory(config.run.dir)
    base = config.run.dir / "config.yaml"
    write_atomic(base, config.to_yaml())
    peer = ["-m", "diloco.train", "--config", str(base), *_token(config, config.run.dir / "token")]
    if ranks == 1:
        return peer, {}
    torchrun = ["-m", "torch.distributed.run", "--standalone"]  # which binds a port and then tells the ranks
    torchrun += [f"--nproc-per-node={ranks}", f"--max-restarts={RESTARTS}"]
    return [*torchrun, *peer], only(layout.devices)


def _token(config: Config, file: Path) -> list[str]:
    """The setting for an invitation, which is a secret: other users of this machine see what a command is given."""
    token = config.swarm.token
    if token is None or token.startswith("@"):
        return []
    with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
        opened.write(token + "\n")
    return [f"swarm.token='@{file.absolute()}'"]


def _conclude(config: Config, children: list[Child], stopped: bool, console: Console) -> int:
    """One line about all peers of this machine; the first failure is the exit code, or the error if nobody trained."""
    summaries = [child.summary for child in children if child.summary is not None]
    failed = [child for child in children if child.exit and not (stopped and not child.ready)]
    if not summaries:
        if failed:
            raise failed[0].error()
        console.print("stopped before this machine took part", highlight=False)
        return 0
    code = 0 if not failed else max(failed[0].exit, 1)
    run_id, manifest_hash, mode = config.run.id, config.manifest().hash(), config.outer.method
    summary = merge_peer_summaries(
        summaries, run_id=run_id, manifest_hash=manifest_hash, mode=mode, wall_s=0.0, exit=code
    )
    tokens = sum(peer.tokens for peer in summary.peers)
    who = "this peer" if len(children) == 1 else f"{len(children)} peers of this machine"
    loss = "" if summary.eval.loss is None else f", held-out loss {summary.eval.loss:.3f} nats per token"
    console.print(
        f"{run_id}: outer step {summary.outer_steps}, {human_count(tokens)} tokens from {who}{loss}; {config.run.dir}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return code
