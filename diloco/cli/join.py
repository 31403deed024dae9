"""`diloco join`: from an address to a peer that trains.

1. connect: call the addresses, and if no peer answers, the addresses that this user's peers remember of the run.
2. manifest: fetch the run's settings, check wire version and clock; import torch's slower half meanwhile.
3. machine: choose device and threads, and the part of a batch that fits its memory. Then ask, if the run needs more
   than this package.
4. data, state, first contribution: as any peer, by `diloco.train.run`; then its live table.

Under torchrun, rank 0 takes the first three, and gives the others its configuration.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli.options import Command, Options, configured, guest, keys, split_address
from diloco.errors import ConfigError, SwarmError
from diloco.text import counted, human_bytes, human_count, plain

if TYPE_CHECKING:
    from rich.console import Console

    from diloco.cli.table import LiveView
    from diloco.config import Config
    from diloco.config.address import Address
    from diloco.rundir.reporting import Message, Status
    from diloco.swarm.client.ask import SwarmInfo

__all__ = ["join"]


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--yes", is_flag=True, help="Join also if the run needs more than this package; for scripts.")
@configured
def join(address: str | None, yes: bool, options: Options) -> int:
    """Join a swarm as a volunteer.

    \b
    diloco join /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco join @link.txt
    diloco join -
    diloco join ADDRESS train.device=cpu train.threads=4 swarm.upload_limit=1e6

    Nothing but the ADDRESS is needed; - reads it from stdin. The run's settings come from the swarm; device, precision,
    threads and how much of a batch is computed at a time from a look at this machine. A run that fetches a model or
    text from elsewhere is shown first, and joined if you agree. Ctrl+C leaves cleanly at any time, and the same command
    comes back.
    """
    if options.cfg:
        options.compose()
    if address is None or split_address(address, options)[0] is None:
        raise ConfigError("join needs the ADDRESS of a peer, as it prints it")
    found, given = guest(address, options)
    config, typed = options.compose(given), keys(options)
    from rich.console import Console

    from diloco.cli.table import hear_warnings
    from diloco.swarm.client.watch import stub_hivemind_packages

    hear_warnings()
    console = Console()
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    try:
        with ExitStack() as stack:
            stub_hivemind_packages(["hivemind"])
            steps = stack.enter_context(Steps(console))
            if rank == 0:
                config = _prepare(config, found, typed, yes, ranks, steps, stack)
            if ranks > 1:
                config = _of_rank_0(config, rank)
            if rank == 0:
                return _train(config, steps, stack, console)
            from diloco.train.run import run as train

            return train(config, lambda message: None).exit
    except KeyboardInterrupt:  # from here on the training loop listens for it
        console.print("stopped before this peer took part", highlight=False)
        return 0


class Steps:
    """Says how far joining is, as a context manager: what is under way on a terminal, and a line when it is over.

    [  1.2s] manifest: quickstart, tiny on stdlib
    """

    def __init__(self, console: Console) -> None:
        self.console, self.name, self._text = console, "", ""
        self._began_at, self._status = time.monotonic(), console.status("")

    def __enter__(self) -> Steps:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def go_to(self, name: str) -> None:
        """Ends the step under way and begins another; with "" there is none."""
        if name == self.name:
            return
        if self.name:
            text, passed_s = f": {self._text}" if self._text else "", time.monotonic() - self._began_at
            line = f"[{passed_s:5.1f}s] {self.name}{text}"
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
        self.name = name
        self.show("")

    def show(self, text: str) -> None:
        """Sets the text of the step under way."""
        from rich.markup import escape

        self._text = plain(text)
        self._status.update(escape(f"{self.name}: {self._text}" if self._text else self.name))

    def agreed(self, question: str) -> bool:
        """The answer of the user."""
        self._status.stop()
        answer = click.confirm(question, default=False)
        self._status.start()
        return answer


def _prepare(
    config: Config, address: Address, typed: Collection[str], yes: bool, ranks: int, steps: Steps, stack: ExitStack
) -> Config:
    """Checks everything that can be wrong, and asks, before anything big is fetched."""
    steps.go_to("connect")
    steps.show("loading libraries")
    from diloco.cli import volunteer
    from diloco.swarm.client.ask import check_clock, parse_manifest
    from diloco.train.hardware import inspect_machine

    directory = stack.enter_context(volunteer.lock_peer_directory(config.swarm.identity_path))
    imports = threading.Thread(target=_import_the_rest, daemon=True)
    imports.start()
    found = _look(config, address, directory.identity, steps)
    steps.go_to("manifest")
    manifest = parse_manifest(found.manifest_text)
    warning = check_clock(found)
    seeds = found.addresses or list(address.peers)
    volunteer.remember_addresses(manifest, found.addresses)
    steps.show(f"{manifest.run.id}: {manifest.model.name} on {manifest.data.source}, {manifest.outer.method}")
    config = volunteer.volunteer_config(config, manifest, typed, directory, seeds)
    steps.go_to("machine")
    steps.show("loading libraries")
    imports.join()  # transformers cannot be imported by two threads at a time
    machine = inspect_machine(config.train.device, config.train.threads)
    need, micro_batch = volunteer.fit_to_machine(config, machine, len(found.peers) + 1, ranks)
    if ranks == 1:
        config = volunteer.with_settings(config, {"train.threads": machine.threads})
    name = machine.name if ranks == 1 else f"{ranks} x {machine.name}"
    batch_size = config.inner.batch_size
    parts = f" in parts of {micro_batch}" if micro_batch * ranks < batch_size else ""
    second = f", peer {directory.number + 1} of this machine (the first one runs)" if directory.number else ""
    steps.show(f"{name}, {counted(machine.threads, 'thread')}, batch of {batch_size}{parts}{second}")
    if warning is not None:
        Console(stderr=True).print(f"diloco: warning: {warning}", highlight=False, soft_wrap=True)
    used_bytes = need.device_bytes + need.main_bytes + micro_batch * need.sequence_bytes
    _ask(config, _terms(config, need.parameters, used_bytes, name), yes, steps)
    volunteer.move_aside(config)
    from diloco.swarm.wire.gate import observer_gate
    from diloco.train.start_files import fetch  # the small files that the run starts from, from its peers

    gate = observer_gate(config.run.id, config.swarm.token, config.swarm.key_path)
    return fetch(config, found.addresses or config.swarm.initial_peers, gate, Path(config.swarm.identity_path or ""))


def _of_rank_0(config: Config, rank: int) -> Config:
    """Rank 0's configuration, on every rank of a torchrun job."""
    from diloco.attach.ranks import said_by_rank_0

    if rank == 0:
        said_by_rank_0(config.model_dump_json())
        return config
    values = json.loads(said_by_rank_0(None))
    values["swarm"]["token"] = config.swarm.token  # a secret, which this rank has from its own command line
    return Config.model_validate(values)


# -- the question -----------------------------------------------------------------------------------------------------


def _ask(config: Config, terms: list[str], yes: bool, steps: Steps) -> None:
    """Shows what will be fetched, trained and sent, and asks, if the run needs anything from outside this package.

    Raises `ConfigError` if there is nobody to ask, or if the answer is no.
    """
    from diloco.config.manifest import sources_of

    if not any(sources_of(config.manifest())):
        return
    for line in terms:
        steps.console.print(plain(line), soft_wrap=True, markup=False, highlight=False)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"run {config.run.id} needs more than this package, and there is no terminal to ask on; if you agree with "
            "the above, add --yes"
        )
    if not steps.agreed("Join this run?"):
        raise ConfigError("nothing was fetched, and this machine has not joined")


def _terms(config: Config, parameters: int, memory_bytes: float, device: str) -> list[str]:
    """What a volunteer has to know, in lines."""
    from diloco.config.manifest import sources_of

    manifest, own = config.manifest(), [*(config.data.path or ()), *chain(*config.data.paths.values())]
    needed = {
        source.what: f"{source.name} at {source.revision[:12]}, published by {source.name.partition('/')[0]}"
        if source.name is not None and source.revision is not None
        else f"a {source.what} of whoever started the run"
        for source in sources_of(manifest)
    }
    key = manifest.run.key
    owner = f"its owner has key {key[:16]}" if key else "anybody may have started it, and anybody may join"
    model = needed.get("model", f"{manifest.model.name}, random weights")
    weights = ", whose weights come from the run's peers" if manifest.model.weights is not None else ""
    files = ", whose files come from the run's peers" if manifest.data.tokenizer_files else ""
    data = f"YOUR files: {', '.join(own)}" if own else needed.get("data", "the standard library of Python")
    return [
        f"run        {manifest.run.id}: {owner}",
        f"model      {model}, {human_count(parameters)} parameters{weights}",
        f"data       {data}",
        f"tokenizer  {needed.get('tokenizer', 'bytes')}{files}",
        f"here       trains on {device}, in some {human_bytes(memory_bytes)} of memory; writes to {config.run.dir}",
        "sends      what it learns: parts of the text that it trained on can be read out of that",
    ]


# -- the swarm --------------------------------------------------------------------------------------------------------


def _look(config: Config, address: Address, identity: Path, steps: Steps) -> SwarmInfo:
    from diloco.cli.volunteer import known_addresses
    from diloco.swarm.client.ask import inspect_swarm
    from diloco.swarm.wire.gate import observer_gate

    gate = observer_gate(config.run.id, config.swarm.token, config.swarm.key_path)
    steps.show(f"calling {len(address.peers)} peers" if len(address.peers) > 1 else f"calling {address.peers[0]}")
    try:
        found = inspect_swarm(address.peers, identity, gate=gate)
    except SwarmError as error:
        others = known_addresses(address.peers)
        if "cannot be reached" not in str(error) or not others:
            raise
        steps.show(f"nobody answers there; calling {len(others)} more that were in this run before")
        try:
            found = inspect_swarm(others, identity, gate=gate)
        except SwarmError:
            raise SwarmError(f"{error}; {len(others)} more that were in this run before do not answer either") from None
    silent = "".join(f"; {one}: {why}" for one, why in found.silent.items())
    steps.show(f"{counted(len(found.peers), 'peer')} reached{silent}")
    return found


def _import_the_rest() -> None:
    """Imports what training needs, while the swarm is asked; training raises whatever fails here."""
    try:
        importlib.import_module("diloco.train.run")
        library = importlib.import_module("diloco.model.files").transformers()
        library.AutoModelForCausalLM  # noqa: B018 (access imports it)
    except Exception:
        return


def _train(config: Config, steps: Steps, stack: ExitStack, console: Console) -> int:
    from diloco.train.run import run as train

    assert config.run.name is not None
    title = f"{config.run.id}: {config.model.name} on {config.data.source}, as peer {config.run.name}"
    view = LiveView(console, [config.run.name], config.budget.outer_steps, title)
    summary = train(config, _Arrival(steps, view, stack))
    stack.close()  # or the table would stay below what follows
    [mine] = summary.peers
    loss = summary.eval.loss
    console.print(
        f"{config.run.id}: outer step {summary.outer_steps}, {human_count(mine.tokens)} tokens from this peer"
        + (f", held-out loss {loss:.3f} nats per token" if loss is not None else "")
        + f"; {config.run.dir}",
        highlight=False,
        soft_wrap=True,
    )
    return summary.exit


class _Arrival:
    """Shows the training loop's messages: as steps until the first contribution is merged, then as a table."""

    def __init__(self, steps: Steps, view: LiveView, stack: ExitStack) -> None:
        self._steps, self._view, self._stack = steps, view, stack
        self._discarded, self._arrived = 0, False

    def __call__(self, message: Message) -> None:
        from diloco.rundir.reporting import Ready, Stage, Status

        if isinstance(message, Ready) and not message.advice:
            return  # a guest need not invite others
        if isinstance(message, Stage) and not self._arrived:
            self._steps.go_to(message.stage)
            if message.stage == "state" or message.wanted:
                done = "received" if message.stage == "state" else "tokenised"
                self._steps.show(f"{human_bytes(message.received)} {done}")
        elif isinstance(message, Status) and not self._arrived:
            if message.state in ("training", "leaving", "done", "left"):
                self._contribute(message)
        else:
            self._view.update(message)

    def _contribute(self, message: Status) -> None:
        self._steps.go_to("first contribution")
        discarded = message.discarded or 0
        lost, self._discarded = discarded > self._discarded, discarded
        self._steps.show(f"inner step {message.inner_step or 0} of {max(message.target_steps or 0, 1)}")
        left = message.state != "training"
        if left or (message.exchanged and not lost):
            self._arrived = True
            self._steps.show("" if left else f"in outer step {message.version}")
            if not left:
                self._steps.go_to("")
            self._steps.__exit__()
            self._stack.enter_context(self._view)
            self._view.update(message)
