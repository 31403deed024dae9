"""`diloco join`: from an address to a peer that trains.

1. connect: call the addresses, and if no peer answers, those that this user's peers remember.
2. manifest: fetch the run's settings, check wire version and clock; import the rest meanwhile.
3. machine: choose device and threads, and the part of a batch that fits its memory. Then ask, if
   the run needs more than this package.
4. data, state, first contribution: as any peer, by `diloco.train.run`; then its live table.

Under torchrun, rank 0 takes the first three, and gives the others its configuration.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Collection
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli import Command, Options, configured, guest_arguments, split_address
from diloco.errors import ConfigError, SwarmError
from diloco.text import counted, human_bytes, human_count, plain

if TYPE_CHECKING:
    from diloco.config import Config
    from diloco.config.address import Address
    from diloco.dashboard.live import LiveView
    from diloco.rundir.reporting import Listener
    from diloco.swarm.client.ask import SwarmInfo


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--yes", is_flag=True, help="Agree to what the run needs; for scripts.")
@configured
def join(address: str | None, yes: bool, options: Options) -> int:
    """Join a swarm as a volunteer.

    \b
    diloco join /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco join @link.txt
    diloco join -
    diloco join ADDRESS train.device=cpu train.threads=4 swarm.upload_limit=8Mbit

    Nothing but the ADDRESS is needed; - reads it from stdin. The run's settings come from the
    swarm; device, precision, threads and how much of a batch is computed at a time from a look at
    this machine. A run that fetches a model or text from elsewhere is shown first, and joined if
    you agree. Ctrl+C leaves cleanly at any time, and the same command comes back.
    """
    if options.cfg:
        options.compose()
    if address is None or split_address(address, options)[0] is None:
        raise ConfigError("join needs the ADDRESS of a peer, as it prints it")
    swarm, given = guest_arguments(address, options)
    config = options.compose(given)
    from rich.console import Console

    from diloco.dashboard.live import LiveView, print_warnings

    print_warnings()
    console = Console()
    view = LiveView(console, [], None, "")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        with ExitStack() as stack:
            if rank == 0:
                stack.enter_context(view)
                config = _prepare(config, swarm, options.keys, yes, ranks, view, stack)
            if ranks > 1:
                config = _from_rank_0(config, rank)
            from diloco.train.run import run

            if rank > 0:
                return run(config, lambda message: None).exit
            task = f"{config.model.name} on {config.data.source}"
            view.title = f"{config.run.id}: {task}, as peer {config.run.name}"
            summary = run(config, _shown(view))
    except KeyboardInterrupt:  # the training loop handles later ones
        console.print("stopped before this peer took part", highlight=False)
        return 0
    done = f"{summary.result()}, {human_count(summary.peers[0].tokens)} tokens from this peer"
    console.print(f"{config.run.id}: {done}; {config.run.dir}", highlight=False)
    return summary.exit


def _shown(view: LiveView) -> Listener:
    """Return a listener that shows reports, and the merge of the first contribution."""
    from diloco.rundir.reporting import PeerStatus, Ready, Report, Stage

    arrived, discarded = False, 0

    def listen(message: Report) -> None:
        nonlocal arrived, discarded
        if isinstance(message, Ready) and not message.advice:
            return  # a volunteer need not invite others
        if isinstance(message, Stage):
            is_state = message.stage == "state"
            done = f"{human_bytes(message.received)} {'received' if is_state else 'tokenised'}"
            view.stage(message.stage, done if is_state or message.wanted else "")
        elif isinstance(message, PeerStatus) and message.figures and not arrived:
            if message.state not in ("", "starting", "waiting"):
                lost, discarded = message.figures.discarded > discarded, message.figures.discarded
                arrived = message.exchanged and not lost
                step = f"in outer step {message.version}"
                view.stage("first contribution", step if arrived else "")
                if arrived:
                    view.stage("")
        view.update(message)

    return listen


def _prepare(
    config: Config,
    address: Address,
    typed: Collection[str],
    yes: bool,
    ranks: int,
    view: LiveView,
    stack: ExitStack,
) -> Config:
    """Check swarm, run and machine, and ask the user, before anything large is fetched."""
    view.stage("connect", "loading libraries")
    from diloco.swarm.client.ask import check_clock, parse_manifest
    from diloco.swarm.wire.gate import observer_gate
    from diloco.train.machine import inspect_machine
    from diloco.train.start_files import base_bytes, fetch_start_files
    from diloco.volunteer import peer as volunteer

    directory = stack.enter_context(volunteer.lock_peer_directory(config.swarm.identity_path))
    imports = threading.Thread(target=_import_the_rest, daemon=True)
    imports.start()
    info = _find(config, address, directory.identity, view)
    manifest, warning = parse_manifest(info.manifest_text), check_clock(info)
    on = f"{manifest.model.name} on {manifest.data.source}, {manifest.outer.method}"
    view.stage("manifest", f"{manifest.run.id}: {on}")
    peers = info.addresses or list(address.peers)
    config = volunteer.volunteer_config(config, manifest, typed, directory, peers)
    view.stage("machine", "loading libraries")
    imports.join()  # transformers cannot be imported by two threads at a time
    machine = inspect_machine(config.train.device, config.train.threads)
    need, micro_batch = volunteer.fit_to_machine(config, machine, len(info.peers) + 1, ranks)
    name = machine.name if ranks == 1 else f"{ranks} x {machine.name}"
    if ranks == 1:
        config = volunteer.with_settings(config, {"train.threads": machine.threads})
    batch_size = config.inner.batch_size
    text = f"{name}, {counted(machine.threads, 'thread')}, batch of {batch_size}"
    text += f" in parts of {micro_batch}" if micro_batch * ranks < batch_size else ""
    if directory.number:
        text += f", peer {directory.number + 1} of this machine (the first one runs)"
    view.stage("machine", text)
    if warning is not None:
        click.echo(f"diloco: warning: {warning}", err=True)
    used_bytes = need.device_bytes + need.main_bytes + micro_batch * need.sequence_bytes
    gate = observer_gate(config.run.id, config.swarm.token, config.swarm.key_path)
    donors = config.swarm.donors
    base = base_bytes(config, donors, gate, directory.identity)
    with view.paused():
        _ask(config, _terms(config, need.parameters, used_bytes, name, base), yes)
    volunteer.move_aside(config)

    def show(done: int, total: int) -> None:
        view.stage("base", f"{human_bytes(done)} of {human_bytes(total)}")

    return fetch_start_files(config, donors, gate, directory.identity, show)


def _from_rank_0(config: Config, rank: int) -> Config:
    """Send rank 0's configuration to the other ranks of a torchrun job."""
    from diloco.attach.ranks import said_by_rank_0

    if rank == 0:
        said_by_rank_0(config.model_dump_json())
        return config
    values = json.loads(said_by_rank_0(None))
    # the token is a secret, so it is not sent: each rank has it from its command line
    values["swarm"]["token"] = config.swarm.token
    return config.model_validate(values)


def _ask(config: Config, terms: list[str], yes: bool) -> None:
    """Show the terms and ask, if the run needs more than this package; `ConfigError` for a no."""
    from diloco.config.manifest import sources_of

    if not any(sources_of(config.manifest())):
        return
    click.echo("\n".join(map(plain, terms)))
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"run {config.run.id} needs more than this package, and there is no terminal to ask on;"
            " if you agree with the above, add --yes"
        )
    if not click.confirm("Join this run?", default=False):
        raise ConfigError("nothing was fetched, and this machine has not joined")


def _terms(
    config: Config, parameters: int, memory_bytes: float, device: str, base: int = 0
) -> list[str]:
    """List what the run consists of, where it comes from and what it costs, a line each."""
    from diloco.config.manifest import sources_of

    manifest = config.manifest()
    own = ", ".join([*(config.data.path or ()), *chain(*config.data.paths.values())])
    needed = {}
    for source in sources_of(manifest):
        text = f"a {source.kind} of whoever started the run"
        if source.name is not None and source.revision is not None:
            owner = source.name.partition("/")[0]
            text = f"{source.name} at {source.revision[:12]}, published by {owner}"
        needed[source.kind] = text
    owner = "anybody may have started it, and anybody may join"
    if manifest.run.key:
        owner = f"its owner has key {manifest.run.key[:16]}"
    model = needed.get("model", f"{manifest.model.name}, random weights")
    model += f", {human_count(parameters)} parameters"
    if base:
        donors = "the run's peers" if manifest.model.path is None else "the hub or the run's peers"
        model += f", with a base of {human_bytes(base)} from {donors}"
    elif manifest.model.weights is not None and manifest.model.adapter == "none":
        model += ", whose weights come from the run's peers"
    tokenizer = needed.get("tokenizer", "bytes")
    if manifest.data.tokenizer_files:
        tokenizer += ", whose files come from the run's peers"
    data = f"YOUR files: {own}" if own else needed.get("data", "the standard library of Python")
    here = f"trains on {device}, in some {human_bytes(memory_bytes)} of memory"
    return [
        f"run        {manifest.run.id}: {owner}",
        f"model      {model}",
        f"data       {data}",
        f"tokenizer  {tokenizer}",
        f"here       {here}; writes to {config.run.dir}",
        "sends      what it learns: parts of the text that it trained on can be read out of that",
    ]


def _find(config: Config, address: Address, identity: Path, view: LiveView) -> SwarmInfo:
    """Inspect the swarm at the address, or at addresses that this user's peers remember."""
    from diloco.config.address import is_mailbox
    from diloco.swarm.client.ask import inspect_swarm
    from diloco.swarm.wire.gate import observer_gate
    from diloco.volunteer.peer import known_addresses

    gate = observer_gate(config.run.id, config.swarm.token, config.swarm.key_path)
    peers = address.peers
    view.stage("connect", f"calling {f'{len(peers)} peers' if len(peers) > 1 else peers[0]}")
    try:
        info = inspect_swarm(peers, identity, gate=gate)
    except SwarmError as error:
        others = [] if is_mailbox(peers[0]) else known_addresses(peers, identity)
        if "cannot be reached" not in str(error) or not others:
            raise
        more = f"{len(others)} more that were in this run before"
        view.stage("connect", f"nobody answers there; calling {more}")
        try:
            info = inspect_swarm(others, identity, gate=gate)
        except SwarmError:
            raise SwarmError(f"{error}; {more} do not answer either") from None
    silent = "".join(f"; {address}: {why}" for address, why in info.silent.items())
    view.stage("connect", f"{counted(len(info.peers), 'peer')} reached{silent}")
    return info


def _import_the_rest() -> None:
    """Import what training needs; an error here is raised again by training."""
    with suppress(Exception):
        importlib.import_module("diloco.train.run")
        library = importlib.import_module("diloco.model.files").transformers()
        library.AutoModelForCausalLM  # noqa: B018 (access imports it)
