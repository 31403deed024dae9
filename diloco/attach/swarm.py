"""DiLoCo attached to anybody's training loop.

    with Swarm(run_id="mine", address=ADDRESS, sync_every=100) as swarm, swarm.attach(model, optimizer):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()            # every sync_every-th step exchanges pseudo-gradients with the swarm
            optimizer.zero_grad()

`diloco train` is such a loop and uses nothing else.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach import devices
from diloco.attach.arguments import ResolvedOuter, as_typed, check_names, loop_spec, network_of, outer_of, several
from diloco.attach.attachment import Attachment
from diloco.attach.bootstrap_peers import known_by, ports_again, remember, seeds_again
from diloco.attach.checkpoints import Checkpoints
from diloco.attach.console_log import ConsoleLog, Listener
from diloco.attach.data_shard import ActivePeers, shard
from diloco.attach.inner_optimizer import kind_of
from diloco.attach.parameters import TrainedParams, frozen_digest
from diloco.attach.peer_state import PeerState
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers, is_attached, swarm_steps
from diloco.attach.signals import watch
from diloco.attach.unwrap import class_name, paced, plain_model, plain_optimizer
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
from diloco.swarm.wire.identity import identity_number, own_id

__all__ = ["Attachment", "Saved", "Swarm"]

COME_BACK_S = 30.0  # in which the peer at the given address may come back, too
_attached: WeakValueDictionary[tuple[str, int], Swarm] = WeakValueDictionary()  # by run and thread
_scratch: defaultdict[str, list[Path]] = defaultdict(list)  # with keys that nobody uses, by run


class Swarm:
    """A peer's membership in a run: whom it joins, who it is, and what the run is.

    It says on stderr how others join, for whom it waits, who comes and goes, and its end.

    Args:
        run_id: name of the run; peers of another run are refused.
        address: multiaddr of any peer of the swarm, or several; none, which may be "", starts a new swarm.
        preset: a file of `configs/outer`, such as "async", "streaming" or "decoupled", whose settings of the outer step
            hold where nothing else is said. Its number of fragments may follow from the size of the model.
        outer: settings of the outer step by their names in such a file, in a dictionary.
        sync_every, fragments, lr, momentum, codec_up, codec_down: the same, and so is every other setting that is given
            by its name. `sync_every` is required without a preset: inner steps from one exchange to the next.
        rounds: exchanges that are planned, such as max_steps / sync_every, over which the outer momentum rises; the
            greatest of all peers counts. Without it the momentum rises with the age of the run.
        identity: file with this peer's private key, made when it is missing, and a file beside it with the
            addresses by which the peer comes back; None is a new identity in each process.
        name: how this peer is called in tables and logs.
        key: public key of a closed or public run (64 hexadecimal digits; see `admit`); None is that of `token` or
            `key_path`, and without either everybody who reaches this peer can join.
        token: this peer's invitation, or `@FILE` with it.
        key_path: file with the run's private key, for its owner: this peer invites itself.
        listen: multiaddrs to listen on; the default is this machine only.
        announce: multiaddrs to tell others, where they differ from `listen`.
        reachable: whether others can connect to this peer: `yes`, `no`, or `auto`, which has one of them try. One that
            is not trains like any other and holds no fragments.
        min_peers: peers, this one included, that must be there before the first inner step, unless others train.
        upload_limit: bytes per second of payload that this peer sends at most.
        inner_state: where the inner optimizer's state of a peer that joins comes from: `donor`, another peer's; `cold`,
            nowhere, and what it learns in its first round is left out.
        admit: `anyone` lets whoever reaches a peer contribute to a run with a key, and only invited peers make the
            versions; equal on all peers.
        manifest: the run-owned settings; peers with another manifest are refused. The default is made of `run_id`, the
            outer settings, the class of the model, the shapes of the trained parameters and the values of the frozen
            ones.
        quiet: write nothing to stderr.
        on_event: called with kind and fields of everything that happens in the swarm (default: the log, and stderr).
        on_ready: called with this peer's address once it listens, before it waits for others (default: stderr).
        runtime: where the swarm node runs (default: a thread of its own); the simulator's lets virtual time pass.

    Raises `ConfigError` for settings that cannot be. `attach` raises `JoinError`, a `SwarmError`, when nobody is at the
    address, or the run there is another one. A program that does not catch these ends with one line of text. Peers that
    vanish later are no error: the exchange goes on without them.

    Attributes:
        state: what `save` was given last, at first in the checkpoint that this peer goes on from; empty without one.
    """

    def __init__(
        self,
        *,
        run_id: str,
        address: str | Sequence[str] | None = None,
        preset: str | None = None,
        outer: Mapping[str, Any] | None = None,
        sync_every: int | None = None,
        fragments: int | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        codec_up: str | None = None,
        codec_down: str | None = None,
        rounds: int | None = None,
        identity: str | Path | None = None,
        name: str = "peer",
        key: str | None = None,
        token: str | None = None,
        key_path: str | Path | None = None,
        listen: str | Sequence[str] = "/ip4/127.0.0.1/tcp/0",
        announce: str | Sequence[str] = (),
        reachable: str = "auto",
        min_peers: int = 1,
        heartbeat_s: float = 1.0,
        upload_limit: float | None = None,
        inner_state: str = "donor",
        admit: str = "invited",
        manifest: Manifest | None = None,
        quiet: bool = False,
        on_event: Callable[[str, dict[str, object]], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
        runtime: Runtime | None = None,
        **settings: Any,
    ) -> None:
        check_names(settings, OuterConfig.model_fields, list(inspect.signature(Swarm).parameters)[:-1])
        named = {
            "sync_every": sync_every, "fragments": fragments, "lr": lr, "momentum": momentum, "codec_up": codec_up,
            "codec_down": codec_down, "rounds": rounds,
        }  # fmt: skip
        said = {key: value for key, value in named.items() if value is not None}
        self.attachment: Attachment | None = None
        self._voice = ConsoleLog(quiet)
        self._living: ActivePeers | None = None
        self.run_id, self.name = run_id, name
        self._settings: ResolvedOuter = outer_of(preset, outer, {**said, **settings})
        self.outer = self._settings.outer
        self.network = network_of(
            initial_peers=several(address), listen=several(listen), announce=several(announce), reachable=reachable,
            min_peers=min_peers, heartbeat_s=heartbeat_s, upload_limit=upload_limit, inner_state=inner_state,
            token=token, key_path=None if key_path is None else str(key_path), admit=admit,
        )  # fmt: skip
        self.manifest = manifest
        self.key = key if manifest is None else manifest.run.key
        if self.key is None and (token or key_path):
            with as_typed():
                self.key = gate_for(run_id, None, token, self.network.key_path).run_key
        self._identity = None if identity is None or identity == "" else Path(identity)
        self._memory_path: Path | None = None
        self._record: Path | None = None
        self._files: Mapping[str, Path] = {}
        self._blank = False
        self.sequences = ""  # names those that have numbers which all peers share (see `Hello`)
        self._typed = runtime is None  # errors name these arguments; no simulation takes a `SystemExit`
        self.on_event: Callable[[str, dict[str, object]], None] = on_event or self._voice.event
        self.on_ready: Callable[[str], None] = on_ready or self._voice.address
        self.runtime = runtime
        self._watches = runtime is None  # for signals
        self._ends_loop = True  # without this it looks at `interrupted`
        self._over: Sequence[int] = ()
        self._remedy: dict[str, str] = {}  # when training diverges, in the words of a trainer
        self._unwatch: Callable[[], None] = lambda: None
        self._scratch: Path | None = None
        self._held = ExitStack()  # what `close` gives back
        self._given: SwarmConfig | None = None  # `network`, before addresses were added
        self._patience_s = 0.0  # in which others may come back who can be called
        self._alone_s = 0.0  # after which it trains though fewer than `min_peers` came back
        self._checkpoints: Checkpoints | None = None
        self.run: RunSpec | None = None  # what the run is on the wire, on rank 0, once a model is attached
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
        outer = manifest.outer.model_dump(exclude={"method"})
        swarm = cls(
            run_id=manifest.run.id,
            identity=identity,
            name=name,
            manifest=manifest,
            outer=outer,
            quiet=True,
            on_event=on_event,
            on_ready=on_ready,
            runtime=runtime,
        )
        swarm.network, swarm._typed, swarm._watches = config.swarm, False, False
        if runtime is None:  # a simulation begins anew each time
            swarm._memory_path = config.run.dir / "refusals" / f"{name}.json"
            swarm._record = config.run.dir / NAME if config.run.record else None
            swarm._files = files_of(config)
            swarm._blank = config.model.weights is not None and not models.has_files(config.model)
        return swarm

    def open(self) -> Swarm:
        """As entering, for a program that is in no `with` block; `close` ends it."""
        return self.__enter__()

    def close(self) -> None:
        """End everything: an attached model leaves the swarm as at the end of its `with` block. Can be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._held.pop_all() as stack:
            if self._checkpoints is not None:
                stack.callback(self._checkpoints.close)
            if self.attachment is not None:
                stack.callback(self.attachment.close, kind)

    def _take_over(self) -> None:
        """The peer of this run that this thread has left attached leaves: a cell of a notebook runs again, a program
        has caught an error. Not if this one was told to join at it.
        """
        before = _attached.get(place := (self.run_id, threading.get_ident()))
        if before is not None and before.attachment is not None and self._watches:
            view = before.attachment.view
            if before is self or view is None or view.address not in self.network.initial_peers:
                before.__exit__(RuntimeError, None, None)
        _attached[place] = self

    @property
    def address(self) -> str:
        """The address with which others join; empty on ranks other than 0, and where others cannot call this peer.

        Raises `ConfigError` before a model is attached, because this peer listens nowhere until then.
        """
        if self.attachment is None:
            raise ConfigError("Swarm.address: a peer has none before attach(...)")
        return "" if self.attachment.view is None else self.attachment.view.address

    @property
    def steps(self) -> int:
        """Inner steps that the swarm has made: H for each outer step, and those of this peer since then. A peer that
        joins late begins where the others are, and learning rate schedules follow this clock.
        """
        return 0 if self.attachment is None else swarm_steps(self.attachment, self.outer.sync_every)

    @devices.usual
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

        Raises `ConfigError` for parameters that no outer step can carry: complex ones, parts, those without values and
        those that are not finite; for an optimizer of other parameters, and one that goes back to a copy that it keeps,
        which is tried out; and for the models and optimizers of DeepSpeed and FSDP1. Raises `CheckpointError` for a
        checkpoint that cannot be used. Values are exchanged as fp32, so those of fp64 parameters are rounded.

        On entry the parameters become the swarm's. After every `sync_every`-th `optimizer.step()` the pseudo-gradient
        is exchanged, gradients are freed to make room, and the parameters become the new anchor. On exit the peer
        leaves.

        Args:
            model, optimizer: as in any loop, or as DistributedDataParallel, torch.compile or Accelerate have wrapped
                them. Several are lists, in the same order at all peers; a step of the swarm ends when each optimizer
                has taken one, and some may take more. Parameters that require no gradient are left alone, and must be
                equal on all peers. Buffers are left alone, too: each peer has its own running statistics, and a joiner
                begins with those of its model.
            schedulers: learning rate schedulers of the optimizer that are stepped once per optimizer step. Before each
                step they are brought to the inner step that the swarm is at, so a peer that joins late, or that was
                away, has the learning rate of the others. Stepping them in the loop as well does no harm.
            checkpoints: directory of this peer's checkpoints (`save`). If there is one, the peer goes on from it: the
                model, the optimizer, random generators, `state`, and the peer's part of the swarm. Its key is there,
                too, unless `identity` says another place.
            ranks: the torchrun job that this process is a rank of (default: the process group that there is, or this
                process alone).
            saved: where to go on without `checkpoints` (default: the model as it is, version 0). If peers that were
                there when it was written still train, this one joins them.
            phases: where wall time is accounted.
        """
        self._take_over()
        model, optimizer = plain_model(model), plain_optimizer(optimizer)
        if self._checkpoints is not None:
            self._checkpoints.close()
        if is_attached(optimizer):
            raise ConfigError(
                f"optimizer={kind_of(optimizer)} is attached to a swarm already; use one callback, or one "
                "attach, for one optimizer"
            )
        runtime = self.runtime or NodeThread()
        options, parameters = None, TrainedParams(model)
        self.outer = self._settings.of(sum(parameters.numels.values()))
        device = next((one.device for one in parameters.values()), torch.device("cpu"))
        ranks = ranks or RankGroup.from_process_group(device)
        schedules = Schedulers(paced(one, ranks.size) for one in schedulers)
        with ExitStack() as stack:
            if checkpoints is not None:
                self._checkpoints = Checkpoints(Path(checkpoints), model, optimizer, ranks)
                stack.callback(self._checkpoints.close)
                saved = self._go_on(self._checkpoints, schedules)
            parameters.check_start(optimizer, self._heard)
            if ranks.is_rank0:
                shown = "" if self.runtime is not None else class_name(model)  # nobody watches a simulation
                own = () if self.manifest is not None else (shown, frozen_digest(model))
                swarm = saved.saved if isinstance(saved, PeerState) else saved
                with as_typed(self._typed):
                    options = self.options(parameters, swarm, device=ranks.device_name, model=own)
                self.run = options.run
                if isinstance(saved, PeerState):
                    saved.check_same_run(self.run, "the checkpoint" if checkpoints is None else f"{checkpoints=!s}")
            stack.pop_all()
        phases = phases or PhaseTimer(clock=runtime.clock, settle=partial(devices.synchronize, device))
        words = partial(as_typed, self._typed, **self._remedy)
        listener = Listener(self._heard, self._ready, self._ended, self._joining, words, self._leaves, self._ends_loop)
        self.attachment = Attachment(
            parameters, optimizer, self.outer, options, ranks, phases, runtime, listener, schedules
        )
        self.attachment.patience_s = self._patience_s
        if isinstance(saved, PeerState):
            saved.apply(self.attachment)
        return self.attachment

    def _go_on(self, checkpoints: Checkpoints, schedules: Schedulers) -> PeerState | None:
        """From the newest checkpoint, if there is one."""
        if self._identity is None and self._scratch is not None:
            raise ConfigError(
                f"checkpoints={checkpoints.directory}: this peer's key would be there, and swarm.seed or "
                "swarm.shard has made another one; name its file with Swarm(identity=...)"
            )
        self._identity = self._identity or checkpoints.directory / "identity.key"
        found = checkpoints.load(schedules)
        if found is None:
            return None
        state, self.state = found
        self._saved_version = state.saved.steps
        return state

    @devices.usual
    def save(self, **state: Any) -> Path | None:
        """All ranks: write a checkpoint, with whatever the loop adds as JSON; returns where, on rank 0.

        After an exchange (`Attachment.exchanged`) it holds everything. In the middle of a round a peer that goes on
        from it begins at the last exchange. Raises `ConfigError` without `attach(checkpoints=...)`, and
        `CheckpointError` when there is no space, no permission or the like: the older checkpoints are good then.
        """
        if self._checkpoints is None or self.attachment is None:
            raise ConfigError("Swarm.save: no place for checkpoints; name a directory with attach(checkpoints=...)")
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
        """Options of the node over these parameters; watchers are shown `device`. Of a `model` without a manifest there
        are its name, and the digest of the values that are not trained.
        """
        identity = self._key_file()
        if self.manifest is not None:
            tokens_per_step = self.manifest.inner.batch_size * self.manifest.data.sequence_length
            spec = RunSpec(self.run_id, self.manifest.hash(), self.manifest.to_json(), tokens_per_step)
        else:
            spec = loop_spec(self.run_id, self.key, self.network.admit, self.outer, parameters, *model)
        if self.runtime is None:  # in a simulation, wires are in memory
            self._come_back(identity, spec.manifest_hash, saved)
        network, made_by = self.network, spec.manifest_hash
        public = (self.network if self.manifest is None else self.manifest.swarm).admit == "anyone"
        gate = gate_for(
            self.run_id, self.key, network.token, network.key_path, trains, made_by, self._memory_path, public
        )
        return NodeOptions(
            spec, network, identity, self.name, saved, gate, trains, device, blank=self._blank, files=self._files,
            data=self.sequences, record=self._record,
            planned=[0, 0, self.outer.rounds or 0] if self.manifest is None else planned(self.manifest),
        )  # fmt: skip

    def _come_back(self, identity: Path, run: str, saved: Saved | None) -> None:
        """Call those whom this peer knew in the run, and listen where it did."""
        network = self._given = self._given or self.network
        known = known_by(identity, run)
        called = list(dict.fromkeys((*known.others, *(saved.addresses if saved else ()))))
        seeds = seeds_again(network, called, identity, self.run_id, run)
        self._patience_s = COME_BACK_S if called and network.initial_peers else 0.0
        places = {"initial_peers": seeds, "listen": ports_again(network.listen, known.own)}
        self.network = network.model_copy(update=places)
        self._alone_s = 0.0
        if called and not seeds:
            self._alone_s = COME_BACK_S if self._watches and network.min_peers > 1 else 0.0
            said = {"called": called, "version": saved.steps if saved else 0, "wait_s": self._alone_s}
            self.on_event("alone_again", said)

    def _key_file(self) -> Path:
        """Where this peer's private key is, or will be. Without a place of its own it stays as long as the process: the
        next `Swarm` of the run has it when this one is closed.
        """
        if self._identity is not None:
            return self._identity
        if self._scratch is None:
            free = _scratch[self.run_id] if self.runtime is None else []
            given = "".join(self.network.initial_peers)
            if not free or own_id(free[-1] / "identity.key") in given:  # nobody joins at himself
                free.append(Path(mkdtemp(prefix="diloco-")))
                atexit.register(rmtree, free[-1], ignore_errors=True)
            self._scratch = free.pop()
            self._held.callback(self._give_back, free)
        return self._scratch / "identity.key"

    def _give_back(self, free: list[Path]) -> None:
        assert self._scratch is not None
        free.append(self._scratch)
        self._scratch = None

    # -- what a training loop asks besides: its data and figures ------------------------------------------------------

    @cached_property
    def seed(self) -> int:
        """A seed of this peer (32 bits), for the order of its data: other peers have others, and it stays the same as
        long as `identity` does. All ranks of a peer ask for it together, once there is a process group.
        """
        rank, size = RankGroup.rank_and_size()
        if size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"swarm.seed: {os.environ['WORLD_SIZE']} processes were started together, and there is no process "
                "group yet, in which rank 0 would tell it; make one first, or ask after attach(...)"
            )
        seed = 0
        if rank == 0:
            file = self._key_file()
            simulated = int.from_bytes(sha256(str(file).encode()).digest()[:6], "big")  # a file that is never made
            with as_typed(self._typed):
                seed = (identity_number(file) if self.runtime is None else simulated) % 2**32
        if size == 1:
            return seed
        ranks = RankGroup.from_process_group(torch.device("cpu")) if self.attachment is None else self.attachment.ranks
        return ranks.broadcast(seed)

    @property
    def index(self) -> int:
        """Which of the peers that train now this one is, in the order of their ids: 0 for one alone, and before a model
        is attached. It changes when others come and go. Rank 0 knows it, the other ranks say 0.
        """
        if self.attachment is None or self.attachment.view is None:
            return 0
        return self.attachment.view.look(lambda node: _trainers(node).index(node.core.facts.me))

    def shard(self, dataset: Any, *, index: int | None = None, of: int | None = None) -> Any:
        """The data of this peer: other peers have the same data in another order, or other items.

        A dataset with a length comes in an order that follows from `seed`; one of the library datasets stays one. A
        loader may put it into an order of its own besides. Of a stream this peer gets its share: each item belongs to
        one of the peers that are attached when it is reached, and those of a peer that goes to the others. This works
        in workers of a DataLoader, too, if all peers have equally many.

        With `index` and `of` it is a fixed part of any dataset: the parts of different index have nothing in common.

        Raises `ConfigError` for what cannot be sharded: a mapping, an array of tokens without `index` and `of`, and a
        stream without them on a peer of several ranks, of which rank 0 alone knows who is there.
        """
        return shard(dataset, lambda: self.seed, self._peers_there, index, of)

    def figures(self) -> dict[str, float]:
        """This peer's part in the swarm, for the logs of the training loop; empty before it is attached, and on ranks
        other than 0: peers that are connected, outer steps, bytes, tokens that were lost, and the share of the time in
        which this peer waited for others.
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

    # -- what is heard of the swarm -----------------------------------------------------------------------------------

    def _peers_there(self) -> ActivePeers:
        if RankGroup.rank_and_size()[1] > 1:
            raise ConfigError(
                "shard: rank 0 alone knows who is there, so the ranks cannot share a stream; give index, of"
            )
        self._living = self._living or ActivePeers()
        return self._living

    def _heard(self, kind: str, fields: dict[str, object]) -> None:
        if kind in ("join", "leave", "lost") and self.attachment is not None and self.attachment.node is not None:
            self._share(self.attachment.node)
            if kind == "join":
                self._remember(self.attachment.node)
        self.on_event(kind, fields)

    def _share(self, node: Node) -> None:
        if self._living is not None:
            self._living.are(node.core.facts.me, _trainers(node))

    def _remember(self, node: Node) -> None:
        if self.runtime is None and self.run is not None:
            remember(self._key_file(), self.run.manifest_hash, node.addresses, node.core.others_at())

    def _ready(self, address: str) -> None:
        if self.attachment is not None and self.attachment.view is not None:
            self.attachment.view.look(self._remember)
        self.on_ready(address)
        if self.attachment is not None and self.attachment.view is not None:
            self.attachment.view.look(self._share)
            self._voice.waits(self.attachment.view, self.network.min_peers)
            if self._alone_s:
                self.attachment.view.look(partial(_wait_no_longer, self._alone_s))

    @contextmanager
    def _joining(self) -> Iterator[None]:
        assert self.attachment is not None
        if self._watches:
            self._unwatch = watch(self._interrupt, self.attachment.close_opened, self._over)
        try:
            with as_typed(self._typed):
                yield
        except BaseException:
            self._unwatch()
            raise

    def _interrupt(self, number: int) -> bool:
        sync, name = self.attachment, signal.Signals(number).name
        assert sync is not None
        told = sync.asked_by
        sync.interrupt(number)
        if not told:
            self._voice.say(f"{name}: leaving the swarm; another {name} ends at once")
        return self._ends_loop and sync.ranks.size == 1

    def _leaves(self, kind: type[BaseException] | None) -> None:
        """All ranks: before the goodbye. The last exchange is in a checkpoint when a signal ends the program."""
        sync = self.attachment
        if self._checkpoints is not None and sync is not None and sync.ended_by and sync.version > self._saved_version:
            try:
                self.save(**self.state)
            except CheckpointError as error:
                self._voice.say(str(error))
        elif kind is not None and issubclass(kind, KeyboardInterrupt):
            self._voice.say("leaving the swarm; Ctrl+C once more ends at once")

    def _ended(self, finished: bool) -> None:
        self._unwatch()
        sync = self.attachment
        if sync is not None and sync.view is not None:
            sent, founder = sync.view.node.traffic.bytes_sent, not self.network.initial_peers
            self._voice.ended(finished, sync.steps, sync.version, sent, founder)


def _wait_no_longer(after_s: float, node: Node) -> None:
    """In the node's loop: so many seconds from now, nobody has to be there any more."""
    asyncio.get_running_loop().call_later(after_s, node.begin_alone)


def _trainers(node: Node) -> list[str]:
    """The peers that train, this one included, in the order of their ids."""
    core = node.core.facts
    others = (member.peer for member in core.members.all() if member.hello.trains and not member.status.leaves)
    return sorted([core.me, *others])
