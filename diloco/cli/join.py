"""`diloco join`: from an address to a peer that trains.

1. connect: call the addresses, and if no peer answers, the addresses that this user's peers remember of the run.
2. manifest: fetch the run's settings, check wire version and clock; import torch's slower half meanwhile.
3. machine: choose device, precision, threads, and the part of a batch that fits its memory. With several accelerators
   choose how they take part (`fit/whole.py`). Then ask (`consent.py`).
4. data, state, first contribution: as any peer, by `diloco.train.run`; then its live table. With several accelerators
   the peers are processes of their own (`volunteers.py`).
"""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.cli.consent import consent, needs_consent
from diloco.cli.stages import Stages
from diloco.cli.table import LiveView, hear_warnings
from diloco.config import Config
from diloco.config.address import Address
from diloco.errors import ConfigError, SwarmError
from diloco.rundir.reporting import Happened, Ready, Said, Stage, Status, read_message
from diloco.swarm.visit.visitor import light_hivemind
from diloco.text import counted, human_bytes, human_count

if TYPE_CHECKING:  # these bring torch
    from diloco.fit.whole import Layout
    from diloco.swarm.visit.look import Found
    from diloco.train.planning import Link

__all__ = ["run"]

PROBE_BYTES = 2**20  # each way, where peers would share the link
STAGES = ["connect", "manifest", "machine", "data", "state", "first contribution"]


def run(config: Config, address: Address, typed: Collection[str], yes: bool) -> int:
    """Join the swarm at an address; `typed` are the keys that the user set. Returns the exit code.

    A run that needs more than this package is joined when the user agrees, with `yes` beforehand.
    """
    hear_warnings()
    console = Console()
    try:
        with ExitStack() as stack:
            stages = stack.enter_context(Stages(console, STAGES))
            stages.go_to("connect")
            stages.show("loading libraries")
            config, layout = _prepare(config, address, typed, yes, stages, stack)
            if layout is None:
                return _train(config, address, stages, stack, console)
            from diloco.cli.volunteers import train_on_all

            stages.advance()
            stages.close()  # the table of the peers follows
            return train_on_all(config, layout, typed, stack, console)
    except KeyboardInterrupt:  # from here on the training loop listens for it
        console.print("stopped before this peer took part", highlight=False)
        return 0


def _prepare(
    config: Config, address: Address, typed: Collection[str], yes: bool, stages: Stages, stack: ExitStack
) -> tuple[Config, Layout | None]:
    """Checks everything that can be wrong, and asks, before anything big is fetched.

    Returns a layout if there are several accelerators to train on.
    """
    light_hivemind(["hivemind"])
    from diloco.fit import volunteer
    from diloco.swarm.visit.look import check_clock, parse_manifest

    directory = stack.enter_context(volunteer.lock_peer_directory(config.swarm.identity_path))
    imports = threading.Thread(target=_import_the_rest, daemon=True)
    imports.start()
    found = _look(config, address, directory.identity, stages)
    stages.go_to("manifest")
    manifest = parse_manifest(found.manifest_text)
    warning = check_clock(found)
    seeds = found.addresses or list(address.peers)
    volunteer.remember_addresses(manifest, found.addresses)
    stages.show(f"{manifest.run.id}: {manifest.model.name} on {manifest.data.source}, {manifest.outer.method}")
    config = volunteer.volunteer_config(config, manifest, typed, directory, seeds)
    stages.go_to("machine")
    stages.show("loading libraries")
    imports.join()  # transformers cannot be imported by two threads at a time
    from diloco.fit.prospects import prospects_of
    from diloco.fit.whole import layout_of
    from diloco.train.machine import inspect_machine

    layout = layout_of(config, typed, len(found.peers), _link(found), found.paces)
    if layout is not None:
        stages.show(layout.text)
        config = layout.fit(config, typed)
        _warn(warning)
        _ask(config, layout.need.parameters, layout.nbytes, layout.text, yes, stages)
        volunteer.move_aside(config)
        return _with_files(config, found), layout
    machine = inspect_machine(config.train.device, config.train.threads)
    config, need = volunteer.fit_to_machine(config, machine, typed, len(found.peers) + 1)
    batch_size = config.inner.batch_size
    micro_batch = config.train.micro_batch or batch_size
    parts = f" in parts of {micro_batch}" if micro_batch < batch_size else ""
    second = f", peer {directory.number + 1} of this machine (the first one runs)" if directory.number else ""
    text = (
        f"{machine.name}, {counted(machine.threads, 'thread')}, {config.train.precision}, "
        f"batch of {batch_size}{parts}{second}"
    )
    stages.show(text)
    stages.show("; ".join([text, *prospects_of(config, micro_batch, found.paces)]))
    _warn(warning)
    used_bytes = need.device_bytes + need.main_bytes + micro_batch * need.sequence_bytes
    _ask(config, need.parameters, used_bytes, machine.name, yes, stages)
    volunteer.move_aside(config)
    return _with_files(config, found), None


def _ask(config: Config, parameters: int, used_bytes: float, machine: str, yes: bool, stages: Stages) -> None:
    if needs_consent(config):
        with stages.paused():
            consent(stages.console, config, parameters, used_bytes, machine, yes)


def _with_files(config: Config, found: Found) -> Config:
    """The configuration with the small files that the run starts from, from its peers."""
    from diloco.swarm.wire.gate import watching
    from diloco.train.origin import fetch

    gate = watching(config.run.id, config.swarm.token, config.swarm.key_path)
    return fetch(config, found.addresses or config.swarm.initial_peers, gate, Path(config.swarm.identity_path or ""))


def _warn(warning: str | None) -> None:
    if warning is not None:
        Console(stderr=True).print(f"diloco: warning: {warning}", highlight=False, soft_wrap=True)


def _link(found: Found) -> Link | None:
    """This machine's link, as peers of the swarm have measured it with it."""
    from diloco.train.planning import Link

    rated = [peer for peer in found.peers if peer.up_bytes_per_s]
    if not rated:
        return None
    up = statistics.median(8 * (peer.up_bytes_per_s or 0) for peer in rated)
    return Link(up, statistics.median(peer.round_trip_s for peer in rated) / 2)


def _look(config: Config, address: Address, identity: Path, stages: Stages) -> Found:
    from diloco.fit.volunteer import known_addresses
    from diloco.fit.whole import has_several
    from diloco.swarm.visit.look import look
    from diloco.swarm.wire.gate import watching

    def connected(answered: int, silent: Mapping[str, str]) -> None:
        stages.show(f"{counted(answered, 'peer')} reached" + "".join(f"; {one}: {why}" for one, why in silent.items()))
        stages.go_to("manifest")

    gate = watching(config.run.id, config.swarm.token, config.swarm.key_path)
    stages.show(f"calling {len(address.peers)} peers" if len(address.peers) > 1 else f"calling {address.peers[0]}")
    measured = PROBE_BYTES if has_several(config.train.device) else 0
    try:
        return look(address.peers, identity, measured, connected, gate)
    except SwarmError as error:
        others = known_addresses(address.peers)
        if stages.name != "connect" or not others:
            raise
        stages.show(f"nobody answers there; calling {len(others)} more that were in this run before")
        try:
            return look(others, identity, measured, connected, gate)
        except SwarmError:
            raise SwarmError(f"{error}; {len(others)} more that were in this run before do not answer either") from None


def _import_the_rest() -> None:
    """Imports what training needs, while the swarm is asked; training raises whatever fails here."""
    try:
        importlib.import_module("diloco.train.run")
        library = importlib.import_module("diloco.model.files").transformers()
        library.AutoModelForCausalLM  # noqa: B018 (access imports it)
    except Exception:
        return


def _train(config: Config, address: Address, stages: Stages, stack: ExitStack, console: Console) -> int:
    from diloco.train.run import run as train

    assert config.run.name is not None
    title = f"{config.run.id}: {config.model.name} on {config.data.source}, as peer {config.run.name}"
    view = LiveView(console, [config.run.name], config.budget.outer_steps, title)
    summary = train(config, _Arrival(stages, view, stack, _called(address)))
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


def _gone(message: Happened) -> str:
    what = "left" if message.kind == "leave" else f"vanished ({message.why})"
    others = f"with {counted(message.live - 1, 'other peer')}" if message.live > 1 else "here alone"
    name = message.subject[-6:] if message.name in ("", "peer") else message.name
    return f"{name}, the peer that was called, {what}; training goes on {others}"


def _called(address: Address) -> frozenset[str]:
    """The ids of the peers that the user named."""
    with suppress(ConfigError):
        return frozenset(one.rpartition("/")[2] for one in address.resolved().peers)
    return frozenset()


class _Arrival:
    """Shows the training loop's messages: as stages until the first contribution is merged, then as a table.

    `called` are the ids of the peers that the user named: of them it says when they go, for the user may think that
    the run ends with them.
    """

    def __init__(self, stages: Stages, view: LiveView, stack: ExitStack, called: Collection[str] = ()) -> None:
        self._called = called
        self._stages = stages
        self._view = view
        self._stack = stack
        self._discarded = 0

    def __call__(self, said: Said) -> None:
        message = read_message(said)
        if message is None or (isinstance(message, Ready) and not message.advice):
            return  # a guest need not invite others
        if isinstance(message, Happened):
            if message.subject in self._called:
                self._view.note(_gone(message))
            return
        if self._stages.name is not None and isinstance(message, Stage):
            self._stages.go_to(message.stage)
            if message.stage == "state" or message.wanted:
                done = f"{human_bytes(message.received)} {'received' if message.stage == 'state' else 'tokenised'}"
                self._stages.show(done, message.received / max(message.wanted, 1))
        if self._stages.name is not None and isinstance(message, Status):
            if message.state in ("training", "leaving", "done", "left"):
                self._contribute(message)
            return
        self._view.update(message)

    def _contribute(self, message: Status) -> None:
        self._stages.go_to("first contribution")
        step, target = message.inner_step or 0, max(message.target_steps or 0, 1)
        discarded = message.discarded or 0
        lost, self._discarded = discarded > self._discarded, discarded
        self._stages.show(f"inner step {step} of {target}", step / target)
        left = message.state != "training"
        if left or (message.exchanged and not lost):
            self._stages.show("" if left else f"in outer step {message.version}")
            if not left:
                self._stages.advance()
            self._stages.close()
            self._stack.enter_context(self._view)
            self._view.update(message)
