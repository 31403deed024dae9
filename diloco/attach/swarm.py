"""DiLoCo attached to anybody's training loop.

    swarm = Swarm(run_id="mine", address=ADDRESS, sync_every=100)
    with swarm, swarm.attach(model, optimizer):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()  # every sync_every-th step ends in an exchange
            optimizer.zero_grad()

`diloco train` is such a loop and uses nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from diloco.attach import devices
from diloco.attach.arguments import PeerArguments, as_typed, check_names, network_of, outer_of
from diloco.attach.attachment import Attachment
from diloco.attach.data_shard import ActivePeers, ReadPosition, of_rank0, shard
from diloco.attach.optimizer import kind_of, unwrap_optimizer
from diloco.attach.parameters import TrainedParams, unwrap_model
from diloco.attach.program import Program, check_not_spawned
from diloco.attach.ranks import RankGroup
from diloco.attach.saved import LoopCheckpoints, PeerState
from diloco.attach.schedulers import Schedulers, is_attached, swarm_steps
from diloco.config import Config, Manifest, OuterConfig, SwarmConfig
from diloco.config.files import fragments_of
from diloco.errors import CheckpointError, ConfigError
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.runtime import EventLoopThread, Runtime
from diloco.swarm.node.saved import Saved
from diloco.text import expanded

__all__ = ["Attachment", "Saved", "Swarm"]

_attached: WeakValueDictionary[tuple[str, int], Swarm] = WeakValueDictionary()  # by run and thread


class Swarm:
    """A peer's membership in a run: whom it joins, who it is, and what the run is.

    It says on stderr how others join, for whom it waits, who comes and goes, and its end.

    Args:
        run_id: name of the run; peers of another run are refused.
        address: multiaddr of any peer of the swarm, or several; None or [] starts a new swarm.
        sync_every: inner steps from one exchange to the next; required without a preset.
        outer: settings of the outer step: a dictionary, `OuterConfig`, or a preset, which is a file
            of `configs/outer` such as "async".
        network: settings `swarm.` of this peer: a dictionary or `SwarmConfig`.
        identity: file with this peer's private key, made when it is missing; None is a new one in
            each process.
        name: how this peer is called in tables and logs.
        key: public key (hex) of a closed or public run; None is that of `token` or `key_path`, and
            without either everybody who reaches this peer can join.
        manifest: the run-owned settings; peers with another one are refused. The default is made of
            `run_id`, the outer settings, the class of the model, the shapes of its trained
            parameters, and its frozen values.
        quiet: write nothing to stderr.
        on_event: called with kind and fields of what happens in the swarm (default: log, stderr).
        on_ready: called with this peer's address, before it waits for others (default: stderr).
        runtime: where the swarm node runs (default: a thread of its own).
        settings: any setting of `outer` or `network` by its name (`diloco train --cfg help`), such
            as lr, momentum, fragments, codec_up, codec_down; rounds (exchanges that are planned,
            max_steps / sync_every, over which the outer momentum rises; the greatest of all peers
            counts); listen, announce, reachable, min_peers, upload_limit, inner_state, token,
            key_path, admit.

    Raises `ConfigError` for settings that cannot be. `attach` raises `JoinError`, a `SwarmError`,
    when nobody is at the address, or the run there is another one. A program that does not catch
    these ends with one line of text. Peers that vanish later are no error: the exchange goes on
    without them.

    Attributes:
        state: what `save` was given last, at first by the checkpoint that this peer goes on from.
    """

    def __init__(
        self,
        *,
        run_id: str,
        address: str | Sequence[str] | None = None,
        sync_every: int | None = None,
        outer: str | Mapping[str, Any] | OuterConfig | None = None,
        network: Mapping[str, Any] | SwarmConfig | None = None,
        identity: str | Path | None = None,
        name: str = "peer",
        key: str | None = None,
        manifest: Manifest | None = None,
        quiet: bool = False,
        on_event: Callable[[str, dict[str, object]], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
        runtime: Runtime | None = None,
        **settings: Any,
    ) -> None:
        check_names(settings, Swarm)
        of_network = {key: settings.pop(key) for key in SwarmConfig.model_fields if key in settings}
        if sync_every is not None:
            settings["sync_every"] = sync_every
        self.outer, self._fragments_by_size = outer_of(outer, settings)
        given = network_of(address, network, of_network)
        self._peer = PeerArguments(run_id, given, identity, name, key, manifest, runtime)
        self._program = Program(self._peer, quiet, on_event, on_ready)
        self._held = ExitStack()  # released by `close`
        self._checkpoints: LoopCheckpoints | None = None
        self._saved_version = 0
        self.attachment: Attachment | None = None
        self.state: dict[str, Any] = {}

    @classmethod
    def of(cls, config: Config, manifest: Manifest, *, sequences: str = "", **own: Any) -> Swarm:
        """Make a peer of a manifest's run, with the settings `swarm.` of a configuration.

        `sequences` names the training sequences, if they have numbers which all peers share; `own`
        are other arguments of `Swarm`.
        """
        own |= {"manifest": manifest, "outer": manifest.outer, "network": config.swarm}
        swarm = cls(run_id=manifest.run.id, quiet=True, **own)
        swarm._peer.sequences = sequences
        if swarm._peer.runtime is None:  # a simulation always starts from the beginning
            swarm._peer.use_files(config)
        return swarm

    def __repr__(self) -> str:
        return f"Swarm({self._program})"

    def open(self) -> Swarm:
        """Enter without a `with` block; `close` ends it."""
        return self.__enter__()

    def close(self) -> None:
        """End everything; an attached model leaves the swarm. Can be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._held.pop_all() as stack:
            stack.callback(self._peer.close)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close)
            if self.attachment is not None:
                stack.callback(self.attachment.close, kind)

    # -- in another library's trainer --------------------------------------------------------------

    def in_trainer(
        self,
        lock: AbstractContextManager[object],
        active: ActivePeers | None,
        steps: float,
        **own: Any,
    ) -> None:
        """Run inside another library's trainer for so many steps; `close` releases `lock`."""
        self._take_over()
        self._peer.outer_steps = int(steps) // self.outer.sync_every if steps < math.inf else 0
        self._held.enter_context(lock)
        self._program.set_trainer(active, **own)

    def say(self, text: str) -> None:
        """Write a line to stderr from rank 0."""
        self._program.say(text)

    def _take_over(self) -> None:
        """Detach this thread's earlier peer of the run, unless this peer joins through it."""
        before = _attached.get(key := (self._peer.run_id, threading.get_ident()))
        if before is not None and before.attachment is not None and self._peer.typed:
            node = before.attachment.node
            if before is self or node is None or node.address not in self.network.initial_peers:
                before.__exit__(RuntimeError, None, None)
        _attached[key] = self

    # -- a model -----------------------------------------------------------------------------------

    @devices.default_modes
    def attach(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        schedulers: Iterable[Any] = (),
        checkpoints: str | Path | None = None,
        ranks: RankGroup | None = None,
        saved: Saved | PeerState | None = None,
        phases: PhaseTimer | None = None,
    ) -> Attachment:
        """Keep a model in step with the swarm while the returned context is open.

        On entry the parameters become the swarm's. After every `sync_every`-th `optimizer.step()`
        the pseudo-gradient is exchanged (in fp32), gradients are freed to make room, and the
        parameters become the new anchor. On exit the peer leaves. Raises `ConfigError` for
        parameters that no outer step can carry, an optimizer of other parameters, one that goes
        back to a copy that it keeps, and for DeepSpeed and FSDP1; `CheckpointError` for a
        checkpoint that cannot be used.

        Args:
            model, optimizer: as in any loop, also as DistributedDataParallel, torch.compile or
                Accelerate have wrapped them. Several are lists, in the same order at all peers; a
                step of the swarm is one of each optimizer, or more of some. Frozen parameters must
                be equal on all peers; buffers are each peer's own.
            schedulers: learning rate schedulers that are stepped once per optimizer step. Before
                each step they are brought to the swarm's inner step; stepping them in the loop as
                well does no harm.
            checkpoints: directory of this peer's checkpoints (`save`), and of its key, unless
                `identity` says another. If there is one, the peer goes on from it: model,
                optimizer, random generators, `state`, its part of the swarm.
            ranks: the torchrun job that this process is a rank of (default: its process group, or
                this process alone).
            saved: where to go on without `checkpoints` (default: the model as it is, version 0).
            phases: where wall time is accounted.
        """
        check_not_spawned()
        self._take_over()
        model, optimizer = unwrap_model(model), unwrap_optimizer(optimizer)
        if self._checkpoints is not None:
            self._checkpoints.close()
        if is_attached(optimizer):
            raise ConfigError(
                f"optimizer={kind_of(optimizer)} is attached to a swarm already; use one callback"
                " or one attach"
            )
        peer, program = self._peer, self._program
        runtime = peer.runtime or EventLoopThread()
        options, parameters = None, TrainedParams(model)
        if self._fragments_by_size:
            fragments = fragments_of(sum(parameters.numels.values()))
            self.outer = self.outer.model_copy(update={"fragments": fragments})
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        ranks = ranks or RankGroup.from_process_group(device)
        followed = Schedulers(schedulers, ranks.size)
        with ExitStack() as stack:
            if checkpoints is not None:
                self._checkpoints = LoopCheckpoints(expanded(checkpoints), model, optimizer, ranks)
                stack.callback(self._checkpoints.close)
                saved = self._load(self._checkpoints, followed)
            parameters.check_start(kind_of(optimizer), optimizer.param_groups, program.on_event)
            if ranks.is_rank0:
                with as_typed(peer.typed):
                    state = saved.saved if isinstance(saved, PeerState) else saved
                    options = self.options(parameters, state, model, device=ranks.device_name)
                if isinstance(saved, PeerState):
                    where = "the checkpoint" if checkpoints is None else f"{checkpoints=!s}"
                    saved.check_same_run(options.run, where)
            stack.pop_all()
        settle = partial(devices.synchronize, device)
        phases = phases or PhaseTimer(clock=runtime.clock, settle=settle)
        sync = self.attachment = Attachment(
            parameters, optimizer, self.outer, options, ranks, phases, runtime, program, followed
        )
        program.attached(sync, self._save_last, self._note if checkpoints is None else None)
        if isinstance(saved, PeerState):
            saved.apply(sync)
            if saved.seed is not None:
                self.seed = saved.seed
        return sync

    def _load(self, checkpoints: LoopCheckpoints, schedulers: Schedulers) -> PeerState | None:
        """Load the newest checkpoint, if there is one."""
        self._peer.put_key_into(checkpoints.directory)
        if (restored := checkpoints.load(schedulers)) is None:
            return None
        state, self.state = restored
        self._saved_version = state.saved.steps
        return state

    @devices.default_modes
    def save(self, **state: Any) -> Path | None:
        """All ranks: write a checkpoint, with `state` as JSON; return its path on rank 0.

        A peer resumes at the last exchange before it. Raises `ConfigError` without
        `attach(checkpoints=...)`, and `CheckpointError` when it cannot be written: the older ones
        are good then.
        """
        if self._checkpoints is None or self.attachment is None:
            remedy = "name a directory with attach(checkpoints=...)"
            raise ConfigError(f"Swarm.save: no place for checkpoints; {remedy}")
        saved = self._checkpoints.save(self.attachment, self.run, state)
        self.state, self._saved_version = state, self.attachment.version
        self._note()
        return saved

    def _save_last(self) -> None:
        """Save before a signal ends the program, if no checkpoint has the last exchange."""
        sync = self.attachment
        if self._checkpoints is not None and sync and sync.version > self._saved_version:
            try:
                self.save(**self.state)
            except CheckpointError as error:
                self.say(str(error))

    def options(
        self,
        parameters: Mapping[str, Tensor],
        saved: Saved | None = None,
        model: nn.Module | None = None,
        trains: bool = True,
        device: str = "",
    ) -> NodeOptions:
        """Make the options of a node, also for a program that runs one without `attach`."""
        on_event = self._program.on_event
        return self._peer.options(self.outer, parameters, model, saved, trains, device, on_event)

    # -- data and figures for a training loop ------------------------------------------------------

    @property
    def network(self) -> SwarmConfig:
        """The settings `swarm.`; after `attach`, with the addresses of the last session."""
        return self._peer.network

    @property
    def run(self) -> RunSpec | None:
        """The run's identity on the wire; None on ranks > 0, and before a model is attached."""
        return self._peer.run

    @property
    def address(self) -> str:
        """The address with which others join, or ""; `ConfigError` before `attach`."""
        if self.attachment is None:
            raise ConfigError("Swarm.address: a peer has none before attach(...)")
        return "" if self.attachment.node is None else self.attachment.node.address

    @property
    def steps(self) -> int:
        """Inner steps of the swarm: H for each outer step, plus this peer's since the last one."""
        return 0 if self.attachment is None else swarm_steps(self.attachment, self.outer.sync_every)

    @cached_property
    def seed(self) -> int:
        """A seed of this peer's session (32 bits).

        It follows from the peer's `identity` and the swarm's inner step at which the session
        begins: after a restart other data is drawn with it. All ranks ask together.
        """
        return self._seed(True)

    def _seed(self, is_session: bool) -> int:
        begin = self._position.steps if self.attachment is None else self.steps
        return of_rank0(lambda: self._peer.seed(begin if is_session else 0), self._position.ranks())

    @cached_property
    def _position(self) -> ReadPosition:
        file = self._peer.position_file()
        return ReadPosition(file, lambda: self.attachment.ranks if self.attachment else None)

    def _note(self) -> None:
        """Note the read position: the rows up to here are in the swarm, or in a checkpoint."""
        if "_position" in vars(self):
            self._position.note(self.steps)

    def shard(self, dataset: Any, *, index: int | None = None, of: int | None = None) -> Any:
        """The data of this peer: other peers have the same data in another order, or other items.

        A dataset with a length comes in an order of the peer's own, from the first row on that it
        has not read; one of the library datasets stays one, in another order in each session. Of a
        stream each item belongs to one of the peers that are attached when it is reached, also in
        workers of a DataLoader, if all peers have equally many. With `index` and `of` it is a fixed
        part of any dataset. Raises `ConfigError` for a mapping; for an array of tokens, and a
        stream on several ranks, without `index` and `of`.
        """
        return shard(dataset, self._seed, self._active_peers, index, of, self._position)

    def _active_peers(self) -> ActivePeers:
        if RankGroup.rank_and_size()[1] > 1:
            raise ConfigError(
                "shard: ranks cannot share a stream, only rank 0 knows who is there; give index, of"
            )
        self._program.active = self._program.active or ActivePeers()
        return self._program.active

    def figures(self) -> dict[str, float]:
        """This peer's part in the swarm, for the logs of the training loop.

        Empty without a swarm, and on ranks > 0.
        """
        sync = self.attachment
        if sync is None or sync.node is None:
            return {}
        seconds, (sent, received) = sync.phases.seconds(), sync.node.traffic
        return {
            "diloco/peers": sync.node.num_peers,
            "diloco/round": sync.version,
            "diloco/bytes_sent": sent,
            "diloco/bytes_received": received,
            "diloco/wait_share": seconds.wait / max(sum(astuple(seconds)), 1e-9),
            "diloco/tokens_discarded": sync.discarded_tokens,
        }
