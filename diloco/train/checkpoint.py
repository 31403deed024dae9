"""Checkpoints of all that a peer restores after its process has ended.

They are written at outer boundaries: anchors and their versions, outer states of the fragments
held, inner optimizer, random generators, position in the data, counters. Where the local parameters
are not the anchors (overlap, mixing, no barrier), a resumed peer continues from the anchors.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from diloco.attach.parameters import full_tensor, load_rows_
from diloco.attach.saved import Groups, flatten_own, flatten_swarm, restore_own, restore_swarm
from diloco.attach.swarm import Attachment, Saved
from diloco.config import Config
from diloco.config.address import host_of, reachability
from diloco.data import BatchStream
from diloco.errors import CheckpointError, ConfigError
from diloco.messages.snapshot import PhaseSeconds
from diloco.rundir.checkpoint import BackgroundWriter, CheckpointStore, copied
from diloco.rundir.files import check_same_run, write_atomic
from diloco.train.data_parallel import DataParallel

Sync = Attachment | DataParallel
FOLLOW_EVERY_S = 10.0


def identity_path(config: Config, name: str) -> Path:
    """Return the path of this peer's key: with the run, so that a resumed peer is the same peer."""
    given = config.swarm.identity_path
    return Path(given) if given is not None else config.run.dir / "identities" / f"{name}.key"


class AddressFile:
    """`run.dir/address`, by which others join: with this machine's IP as it is, until `close`.

    A peer that itself finds the swarm by that file does not write it. An address that is not this
    machine's own, such as that of a router, stays as it was announced.
    """

    def __init__(self, config: Config) -> None:
        self._path, self._address = config.run.dir / "address", ""
        named = (Path(peer[1:]) for peer in config.swarm.initial_peers if peer.startswith("@"))
        self._is_named = any(path.absolute() == self._path.absolute() for path in named)
        self._closed = threading.Event()

    def write(self, address: str) -> None:
        """Write the address, and again whenever this machine has another IP."""
        if not address or self._is_named:
            return
        self._address = address
        write_atomic(self._path, address + "\n")
        if reachability(address) != "loopback" and _has_ip(host_of(address)):
            threading.Thread(target=self._keep, daemon=True).start()

    def follow(self) -> None:
        """Replace the IP if this machine has lost it; without a network it stays."""
        host = host_of(self._address)
        if not _has_ip(host) and (present := _outgoing_ip(host)) is not None:
            moved = self._address.replace(host, present, 1)
            with suppress(ConfigError):  # a full disk; the next look writes it
                write_atomic(self._path, moved + "\n")
                self._address = moved

    def _keep(self) -> None:
        while not self._closed.wait(FOLLOW_EVERY_S):
            self.follow()

    def close(self) -> None:
        self._closed.set()


def _has_ip(host: str) -> bool:
    """Return True if an interface of this machine has the IP."""
    with suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _outgoing_ip(host: str) -> str | None:
    """Return the IP of this machine, of the family of `host`, towards other networks; None if there
    is no way to any. Nothing is sent."""
    elsewhere = "2001:db8::1" if ":" in host else "192.0.2.1"  # of documentation
    with suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))
        return str(probe.getsockname()[0])
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def checkpoints_name(config: Config) -> str:
    """Return the name of this peer's checkpoint directory; rank 0's for data parallel."""
    return "rank0" if config.outer.method == "data_parallel" else config.run.name or "peer"


class RunCheckpoints:
    """One peer's checkpoints in a run directory; a corrupt one is skipped for the one before it.

    Raises `CheckpointError` for those of another run (more differs than the budget).

    Attributes:
        saved_version: outer step of the checkpoint that this peer goes on from, then of the newest;
            -1 without one.
        skipped: which newer checkpoints could not be used, and why.
        seconds, traffic: wall time per phase, and bytes sent and received, up to that checkpoint.
        loss_scale: what `LossScale` goes on from; empty without fp16. Set it before `save`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        directory = config.run.dir / "checkpoints" / checkpoints_name(config)
        self.store = CheckpointStore(directory, config.checkpoint.keep)
        self._writer = BackgroundWriter(self.store)
        checkpoint = self._checkpoint = self.store.load_latest()
        self.saved_version = self._intact_version = -1
        self.skipped: list[str] = []
        self.seconds = PhaseSeconds()
        self.traffic: tuple[int, ...] = (0, 0)
        self.loss_scale: Sequence[float] = ()
        if checkpoint is None:
            return
        self.config = check_same_run(config, checkpoint.state["manifest"])
        self.saved_version = self._intact_version = checkpoint.step
        self.skipped = checkpoint.skipped
        self.seconds = PhaseSeconds(**checkpoint.state["seconds"])
        self.traffic = tuple(checkpoint.state["traffic"])
        self.loss_scale = checkpoint.state.get("loss_scale", ())

    def swarm(self) -> Saved | None:
        """Return the saved swarm side; call it before `restore`."""
        checkpoint = self._checkpoint
        return None if checkpoint is None else restore_swarm(checkpoint.tensors, checkpoint.state)

    def restore(
        self, sync: Sync, model: nn.Module, optimizer: Optimizer, stream: BatchStream
    ) -> None:
        """Restore everything but the swarm's part, before `sync` is entered; close the files."""
        if self._checkpoint is None:
            return
        state, tensors = self._checkpoint.state, self._checkpoint.tensors
        self._checkpoint = None
        sync.steps, sync.tokens, sync.discarded_tokens = state["counters"]
        # the data that is in the model
        stream.restore({**state["stream"], "merged": state.get("merged")})
        restore_own(optimizer, tensors, state)
        if isinstance(sync, DataParallel):
            sync.version, sync.applied_tokens = state["version"], state["applied_tokens"]
            # it may have ended within a cycle
            sync.inner_step = sync.steps - sync.version * sync.target_steps
            for name, parameter in model.named_parameters():
                load_rows_(parameter, tensors["anchor"][name])

    def save(
        self,
        sync: Sync,
        model: nn.Module,
        optimizer: Optimizer,
        stream: BatchStream,
        seconds: PhaseSeconds,
        traffic: Sequence[int],
        is_rank0: bool = True,
        background: bool = False,
    ) -> None:
        """All ranks: rank 0 writes a checkpoint of the last outer boundary, unless there is one.

        In the `background` it is written from copies; call `written` before the next one. In data
        parallel it is a checkpoint of the last inner step.
        """
        if sync.version == self.saved_version:
            return
        with ExitStack() as stack:
            if isinstance(sync, DataParallel):
                values = model.named_parameters()
                parameters = {name: full_tensor(value.detach()) for name, value in values}
                swarm: Groups = {"anchor": parameters, "outer": {}, "residual": {}}
                swarm_json = {"version": sync.version, "applied_tokens": sync.applied_tokens}
            elif is_rank0:
                swarm, swarm_json = flatten_swarm(stack.enter_context(sync.checkpointing()))
            own, own_json = flatten_own(optimizer)
            if not is_rank0:
                return
            state: dict[str, Any] = {
                "manifest": self.config.manifest().to_json(),
                **swarm_json,
                **own_json,
                "counters": [sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens],
                "stream": stream.state(),
                "seconds": asdict(seconds),
                "traffic": list(traffic),
                "loss_scale": list(self.loss_scale),
            }
            tensors = {**swarm, **own}
            if background:
                self._writer.begin(sync.version, copied(tensors), state)
            else:
                self.store.save(sync.version, tensors, state)
                self._intact_version = sync.version
            self.saved_version = sync.version

    @property
    def writing(self) -> bool:
        """True while a checkpoint is being written in the background."""
        return self._writer.busy

    def written(self) -> CheckpointError | None:
        """Wait until nothing is being written; return the last write's error, once."""
        error = self._writer.result()
        if error is None:
            self._intact_version = self.saved_version
        else:
            self.saved_version = self._intact_version
        return error
