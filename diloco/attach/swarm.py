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

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach import devices
from diloco.attach.arguments import as_typed, check_names, loop_spec, network_of, outer_of
from diloco.attach.attachment import Attachment
from diloco.attach.bootstrap_peers import PeerKey, called_again, remember
from diloco.attach.console_log import Callbacks, ConsoleLog
from diloco.attach.data_shard import ActivePeers, shard
from diloco.attach.parameters import TrainedParams, frozen_digest
from diloco.attach.ranks import RankGroup
from diloco.attach.saved import LoopCheckpoints, PeerState
from diloco.attach.schedulers import Schedulers, is_attached, swarm_steps
from diloco.attach.signals import watch
from diloco.attach.unwrap import class_name, kind_of, unwrap_model, unwrap_optimizer
from diloco.config import Config, Manifest, OuterConfig, SwarmConfig
from diloco.config.manifest import planned
from diloco.errors import CheckpointError, ConfigError
from diloco.rundir.files import files_of
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.recording import NAME
from diloco.swarm.node.runtime import NodeThread, Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import gate_for
from diloco.swarm.wire.identity import identity_number

__all__ = ["Attachment", "Saved", "Swarm"]

COME_BACK_S = 30.0  # in which the peer at the given address may come back, too
_attached: WeakValueDictionary[tuple[str, int], Swarm] = WeakValueDictionary()  # by run and thread


class Swarm:
    """A peer's membership in a run: whom it joins, who it is, and what the run is.

    It says on stderr how others join, for whom it waits, who comes and goes, and its end.

    Args:
        run_id: name of the run; peers of another run are refused.
        address: multiaddr of any peer of the swarm, or several; none, which may be "", starts a new
            swarm.
        sync_every: inner steps from one exchange to the next; required without a preset.
        preset: a file of `configs/outer`, such as "async"; its number of fragments may follow from
            the model's size.
        outer: settings of the outer step over those of the preset: a dictionary or `OuterConfig`; a
            text is a preset.
        network: settings `swarm.` of this peer: a dictionary or `SwarmConfig`.
        identity: file with this peer's private key, made when it is missing; None is a new identity
            in each process.
        name: how this peer is called in tables and logs.
        key: public key (hex) of a closed or public run; None is that of `token` or `key_path`, and
            without either everybody who reaches this peer can join.
        manifest: the run-owned settings; peers with another manifest are refused. The default is
            made of `run_id`, the outer settings, the class of the model, the shapes of its trained
            parameters, and its frozen values.
        quiet: write nothing to stderr.
        on_event: called with kind and fields of everything that happens in the swarm (default: the
            log, and stderr).
        on_ready: called with this peer's address once it listens, before it waits for others
            (default: stderr).
        runtime: where the swarm node runs (default: a thread of its own).
        settings: any setting of `outer` or `network` by its own name; `diloco train --cfg help`
            explains each. Such as lr, momentum, fragments, codec_up, codec_down; rounds (exchanges
            that are planned, max_steps / sync_every, over which the outer momentum rises; the
            greatest of all peers counts); listen, announce, reachable, min_peers, upload_limit,
            inner_state, token, key_path, admit.

    Raises `ConfigError` for settings that cannot be. `attach` raises `JoinError`, a `SwarmError`,
    when nobody is at the address, or the run there is another one. A program that does not catch
    these ends with one line of text. Peers that vanish later are no error: the exchange goes on
    without them.

    Attributes:
        state: what `save` was given last, at first in the checkpoint that this peer goes on from;
            empty without one.
    """

    def __init__(
        self,
        *,
        run_id: str,
        address: str | Sequence[str] | None = None,
        sync_every: int | None = None,
        preset: str | None = None,
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
        every = {} if sync_every is None else {"sync_every": sync_every}
        of_network = {
            name: settings.pop(name) for name in list(settings) if name in SwarmConfig.model_fields
        }
        self._resolved_outer = outer_of(preset, outer, {**every, **settings})
        self.outer = self._resolved_outer.outer
        self.network = self._given_network = network_of(address, network, of_network)
        self.run_id, self.name, self.manifest, self.runtime = run_id, name, manifest, runtime
        # a loop of somebody's own: he typed these arguments
        self._in_loop = manifest is None and runtime is None
        self.key = key if manifest is None else manifest.run.key
        if self.key is None and (self.network.token or self.network.key_path):
            with as_typed(self._in_loop):
                self.key = gate_for(run_id, None, self.network.token, self.network.key_path).run_key
        self._key = PeerKey(
            None if identity in (None, "") else Path(str(identity)), run_id, runtime is not None
        )
        self._memory_path: Path | None = None
        self._of_program: dict[str, Any] = {}  # what else the node is told
        self.sequences = ""  # names those that have numbers which all peers share (see `Hello`)
        self._log = ConsoleLog(quiet)
        self.on_event: Callable[[str, dict[str, object]], None] = on_event or self._log.event
        self.on_ready: Callable[[str], None] = on_ready or self._log.address
        self._ends_loop = True  # see `in_trainer`
        self._signals_of_trainer: Sequence[int] = ()
        self._remedy: dict[str, str] = {}
        self._unwatch: Callable[[], None] = lambda: None
        self._held = ExitStack()  # what `close` gives back
        self._patience_s = 0.0  # in which others may come back who can be called
        self._alone_s = 0.0  # after which it trains though fewer than `min_peers` came back
        self._active: ActivePeers | None = None
        self._checkpoints: LoopCheckpoints | None = None
        self.attachment: Attachment | None = None
        # what the run is on the wire, on rank 0, once a model is attached
        self.run: RunSpec | None = None
        self.state: dict[str, Any] = {}
        self._saved_version = 0

    @classmethod
    def of(
        cls,
        config: Config,
        manifest: Manifest,
        identity: Path,
        name: str,
        on_event: Callable[[str, dict[str, object]], None],
        on_ready: Callable[[str], None] | None = None,
        runtime: Runtime | None = None,
    ) -> Swarm:
        """The run of a manifest, with the peer-local settings `swarm.` of a configuration."""
        run: dict[str, Any] = {
            "run_id": manifest.run.id,
            "manifest": manifest,
            "outer": manifest.outer,
        }
        heard: dict[str, Any] = {"on_event": on_event, "on_ready": on_ready, "quiet": True}
        swarm = cls(
            **run, **heard, network=config.swarm, identity=identity, name=name, runtime=runtime
        )
        if runtime is None:  # a simulation begins anew each time
            swarm._memory_path = config.run.dir / "refusals" / f"{name}.json"
            swarm._of_program = {
                "record": config.run.dir / NAME if config.run.record else None,
                "files": files_of(config),
                "blank": config.model.weights is not None and not models.has_files(config.model),
            }
        return swarm

    def open(self) -> Swarm:
        """As entering, for a program that is in no `with` block; `close` ends it."""
        return self.__enter__()

    def close(self) -> None:
        """End everything: an attached model leaves the swarm as at the end of its `with` block. Can
        be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with self._held.pop_all() as stack:
            stack.callback(self._key.give_back)
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close)
            if self.attachment is not None:
                stack.callback(self.attachment.close, kind)

    # -- in another library's trainer --------------------------------------------------------------

    def in_trainer(self, signals: Sequence[int], remedy: str, active: ActivePeers | None) -> None:
        """The trainer looks at `interrupted` itself, though it handles these `signals`; `remedy` is
        for training that diverges.
        """
        self._ends_loop, self._signals_of_trainer, self._remedy = False, signals, {"remedy": remedy}
        self._active = active

    def hold(self, context: AbstractContextManager[object]) -> None:
        """Enter a context until this is closed."""
        self._held.enter_context(context)

    def say(self, text: str) -> None:
        """A line on stderr, from rank 0."""
        self._log.say(text)

    def take_over(self) -> None:
        """The peer of this run that this thread has left attached leaves, unless this one was told
        to join at it."""
        before = _attached.get(place := (self.run_id, threading.get_ident()))
        if before is not None and before.attachment is not None and self._in_loop:
            view = before.attachment.view
            if before is self or view is None or view.address not in self.network.initial_peers:
                before.__exit__(RuntimeError, None, None)
        _attached[place] = self

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
        self.take_over()
        model, optimizer = unwrap_model(model), unwrap_optimizer(optimizer)
        if self._checkpoints is not None:
            self._checkpoints.close()
        if is_attached(optimizer):
            raise ConfigError(
                f"optimizer={kind_of(optimizer)} is attached to a swarm already; use one callback,"
                " or one attach, for one optimizer"
            )
        runtime = self.runtime or NodeThread()
        options, parameters = None, TrainedParams(model)
        self.outer = self._resolved_outer.of(sum(parameters.numels.values()))
        device = next((one.device for one in parameters.values()), torch.device("cpu"))
        ranks = ranks or RankGroup.from_process_group(device)
        paced_schedulers = Schedulers(schedulers, ranks.size)
        with ExitStack() as stack:
            if checkpoints is not None:
                self._checkpoints = LoopCheckpoints(Path(checkpoints), model, optimizer, ranks)
                stack.callback(self._checkpoints.close)
                saved = self._load(self._checkpoints, paced_schedulers)
            parameters.check_start(optimizer, self._heard)
            if ranks.is_rank0:
                options = self._options_of(model, parameters, ranks.device_name, saved, checkpoints)
            stack.pop_all()
        phases = phases or PhaseTimer(
            clock=runtime.clock, settle=partial(devices.synchronize, device)
        )
        words, ends = partial(as_typed, self._in_loop, **self._remedy), self._ends_loop
        callbacks = Callbacks(
            self._heard, self._ready, self._leaves, self._ended, self._joining, words, ends
        )
        self.attachment = Attachment(
            parameters,
            optimizer,
            self.outer,
            options,
            ranks,
            phases,
            runtime,
            callbacks,
            paced_schedulers,
        )
        self.attachment.patience_s = self._patience_s
        if isinstance(saved, PeerState):
            saved.apply(self.attachment)
        return self.attachment

    def _options_of(
        self,
        model: nn.Module,
        parameters: TrainedParams,
        device: str,
        saved: Saved | PeerState | None,
        checkpoints: str | Path | None,
    ) -> NodeOptions:
        """Rank 0: options of the node. Raises `CheckpointError` for a state of another run."""
        shown = "" if self.runtime is not None else class_name(model)  # nobody watches a simulation
        own = () if self.manifest is not None else (shown, frozen_digest(model))
        with as_typed(self._in_loop):
            of_swarm = saved.saved if isinstance(saved, PeerState) else saved
            options = self.options(parameters, of_swarm, device=device, model=own)
        self.run = options.run
        if isinstance(saved, PeerState):
            saved.check_same_run(
                self.run, "the checkpoint" if checkpoints is None else f"{checkpoints=!s}"
            )
        return options

    def _load(self, checkpoints: LoopCheckpoints, schedulers: Schedulers) -> PeerState | None:
        """From the newest checkpoint, if there is one."""
        if self._key.path is None and self._key.is_made:
            raise ConfigError(
                f"checkpoints={checkpoints.directory}: this peer's key would be there, and"
                " swarm.seed or swarm.shard has made another one; name its file with"
                " Swarm(identity=...)"
            )
        self._key.path = self._key.path or checkpoints.directory / "identity.key"
        found = checkpoints.load(schedulers)
        if found is None:
            return None
        state, self.state = found
        self._saved_version = state.saved.steps
        return state

    @devices.default_modes
    def save(self, **state: Any) -> Path | None:
        """All ranks: write a checkpoint, with whatever the loop adds as JSON; returns where, on
        rank 0.

        From one in the middle of a round a peer goes on at the last exchange. Raises `ConfigError`
        without `attach(checkpoints=...)`, and `CheckpointError` when it cannot be written: the
        older ones are good then.
        """
        if self._checkpoints is None or self.attachment is None:
            raise ConfigError(
                "Swarm.save: no place for checkpoints; name a directory with"
                " attach(checkpoints=...)"
            )
        saved = self._checkpoints.save(self.attachment, self.run, state)
        self.state, self._saved_version = state, self.attachment.version
        return saved

    def options(
        self,
        parameters: Mapping[str, Tensor],
        saved: Saved | None,
        trains: bool = True,
        device: str = "",
        model: tuple[str, str | None] | tuple[()] = (),
    ) -> NodeOptions:
        """Options of the node; a `model` without a manifest has a name, and a digest of what is not
        trained."""
        identity, manifest = self._key_file(), self.manifest
        if manifest is not None:
            tokens_per_step = manifest.inner.batch_size * manifest.data.sequence_length
            spec = RunSpec(self.run_id, manifest.hash(), manifest.to_json(), tokens_per_step)
        else:
            spec = loop_spec(
                self.run_id, self.key, self.network.admit, self.outer, parameters, *model
            )
        if self.runtime is None:  # in a simulation, wires are in memory
            self._come_back(identity, spec.manifest_hash, saved)
        network = self.network
        public = (network if manifest is None else manifest.swarm).admit == "anyone"
        invited = network.token, network.key_path
        gate = gate_for(
            self.run_id, self.key, *invited, trains, spec.manifest_hash, self._memory_path, public
        )
        plan = [0, 0, self.outer.rounds or 0] if manifest is None else planned(manifest)
        more = {"data": self.sequences, "planned": plan, **self._of_program}
        return NodeOptions(spec, network, identity, self.name, saved, gate, trains, device, **more)

    def _come_back(self, identity: Path, run: str, saved: Saved | None) -> None:
        """Call those whom this peer knew in the run, and listen where it did."""
        given = self._given_network
        self.network, called = called_again(
            given, identity, self.run_id, run, saved.addresses if saved else ()
        )
        self._patience_s = COME_BACK_S if called and given.initial_peers else 0.0
        self._alone_s = 0.0
        if called and not self.network.initial_peers:
            self._alone_s = COME_BACK_S if self._in_loop and given.min_peers > 1 else 0.0
            version = saved.steps if saved else 0
            self.on_event(
                "alone_again", {"called": called, "version": version, "wait_s": self._alone_s}
            )

    def _key_file(self) -> Path:
        return self._key.file(self.network.initial_peers)

    # -- what a training loop asks besides: its data and figures -----------------------------------

    @property
    def address(self) -> str:
        """The address with which others join, empty where nobody can call this peer; `ConfigError`
        before `attach`."""
        if self.attachment is None:
            raise ConfigError("Swarm.address: a peer has none before attach(...)")
        return "" if self.attachment.view is None else self.attachment.view.address

    @property
    def steps(self) -> int:
        """Inner steps that the swarm has made: H for each outer step, and those of this peer since
        then."""
        return 0 if self.attachment is None else swarm_steps(self.attachment, self.outer.sync_every)

    @cached_property
    def seed(self) -> int:
        """A seed of this peer (32 bits), as long-lived as its `identity`. All ranks ask for it
        together."""
        rank, size = RankGroup.rank_and_size()
        if size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"swarm.seed: {os.environ['WORLD_SIZE']} processes were started together, and there"
                " is no process group yet, in which rank 0 would tell it; make one first, or ask"
                " after attach(...)"
            )
        seed = 0
        if rank == 0:
            file = self._key_file()
            # a file that is never made
            simulated = int.from_bytes(sha256(str(file).encode()).digest()[:6], "big")
            with as_typed(self._in_loop):
                seed = (identity_number(file) if self.runtime is None else simulated) % 2**32
        if size == 1:
            return seed
        here = RankGroup.from_process_group(torch.device("cpu"))
        return (here if self.attachment is None else self.attachment.ranks).broadcast(seed)

    @property
    def index(self) -> int:
        """Which of the peers that train now this one is, in the order of their ids; rank 0 knows
        it, others say 0."""
        if self.attachment is None or self.attachment.view is None:
            return 0
        return self.attachment.view.look(lambda node: _trainers(node).index(node.core.facts.me))

    def shard(self, dataset: Any, *, index: int | None = None, of: int | None = None) -> Any:
        """The data of this peer: other peers have the same data in another order, or other items.

        A dataset with a length comes in an order that follows from `seed`; one of the library
        datasets stays one. Of a stream each item belongs to one of the peers that are attached when
        it is reached, also in workers of a DataLoader, if all peers have equally many. With `index`
        and `of` it is a fixed part of any dataset. Raises `ConfigError` for a mapping; for an array
        of tokens, and a stream on several ranks, without `index` and `of`.
        """
        return shard(dataset, lambda: self.seed, self._peers_there, index, of)

    def _peers_there(self) -> ActivePeers:
        if RankGroup.rank_and_size()[1] > 1:
            raise ConfigError(
                "shard: rank 0 alone knows who is there, so the ranks cannot share a stream; give"
                " index, of"
            )
        self._active = self._active or ActivePeers()
        return self._active

    def figures(self) -> dict[str, float]:
        """This peer's part in the swarm, for the logs of the training loop; empty without one, and
        on ranks other than
        0.
        """
        sync = self.attachment
        if sync is None or sync.view is None:
            return {}
        seconds, traffic = sync.phases.seconds(), sync.view.node.traffic
        return {
            "diloco/peers": sync.view.num_peers,
            "diloco/round": sync.version,
            "diloco/bytes_sent": traffic.bytes_sent,
            "diloco/bytes_received": traffic.bytes_received,
            "diloco/wait_share": seconds.wait / max(sum(astuple(seconds)), 1e-9),
            "diloco/tokens_discarded": sync.discarded_tokens,
        }

    # -- what is heard of the swarm ----------------------------------------------------------------

    def _heard(self, kind: str, fields: dict[str, object]) -> None:
        if (
            kind in ("join", "leave", "lost")
            and self.attachment is not None
            and self.attachment.node is not None
        ):
            self._share(self.attachment.node)
            if kind == "join":
                self._remember(self.attachment.node)
        self.on_event(kind, fields)

    def _share(self, node: Node) -> None:
        if self._active is not None:
            self._active.are(node.core.facts.me, _trainers(node))

    def _remember(self, node: Node) -> None:
        if self.runtime is None and self.run is not None:
            remember(
                self._key_file(), self.run.manifest_hash, node.addresses, node.core.others_at()
            )

    def _ready(self, address: str) -> None:
        assert self.attachment is not None and self.attachment.view is not None
        view = self.attachment.view
        view.look(self._remember)
        self.on_ready(address)
        view.look(self._share)
        self._log.waits(view, self.network.min_peers)
        if self._alone_s:
            view.look(partial(_wait_no_longer, self._alone_s))

    @contextmanager
    def _joining(self) -> Iterator[None]:
        assert self.attachment is not None
        if self._in_loop:
            self._unwatch = watch(
                self._interrupt, self.attachment.close_opened, self._signals_of_trainer
            )
        try:
            with as_typed(self._in_loop):
                yield
        except BaseException:
            self._unwatch()
            raise

    def _interrupt(self, number: int) -> bool:
        sync, name = self.attachment, signal.Signals(number).name
        assert sync is not None
        told = sync.stop_asked is not None
        sync.interrupt(number)
        if not told:
            self.say(f"{name}: leaving the swarm; another {name} ends at once")
        return self._ends_loop and sync.ranks.size == 1

    def _leaves(self, kind: type[BaseException] | None) -> None:
        """All ranks: before the goodbye. The last exchange is in a checkpoint when a signal ends
        the program."""
        sync = self.attachment
        if (
            self._checkpoints is not None
            and sync is not None
            and sync.ended_by
            and sync.version > self._saved_version
        ):
            try:
                self.save(**self.state)
            except CheckpointError as error:
                self.say(str(error))
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            self.say("leaving the swarm; Ctrl+C once more ends at once")

    def _ended(self, finished: bool) -> None:
        self._unwatch()
        sync = self.attachment
        if sync is not None and sync.view is not None:
            sent, founder = sync.view.node.traffic.bytes_sent, not self.network.initial_peers
            self._log.ended(finished, sync.steps, sync.version, sent, founder)


def _wait_no_longer(after_s: float, node: Node) -> None:
    """In the node's loop: so many seconds from now, nobody has to be there any more."""
    asyncio.get_running_loop().call_later(after_s, node.begin_alone)


def _trainers(node: Node) -> list[str]:
    """The peers that train, this one included, in the order of their ids."""
    core = node.core.facts
    others = (
        member.peer
        for member in core.members.all()
        if member.hello.trains and not member.status.leaves
    )
    return sorted([core.me, *others])
