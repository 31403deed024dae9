"""DiLoCo attached to anybody's training loop.

    with Swarm(run_id="mine", address=ADDRESS, sync_every=100) as swarm, swarm.attach(model, optimizer):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()            # every sync_every-th step exchanges pseudo-gradients with the swarm
            optimizer.zero_grad()

`diloco train` is such a loop and uses nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.config import Config, Manifest, OuterConfig, SwarmConfig
from diloco.errors import ConfigError
from diloco.rundir.files import files_of
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.runtime import NodeThread, Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import gate_for
from diloco.train import devices
from diloco.train.attachment import Attachment
from diloco.train.island import Island
from diloco.train.masters import refuse_masters
from diloco.train.parameters import Trained, frozen_digest

__all__ = ["Attachment", "Saved", "Swarm"]

logger = logging.getLogger(__name__)


class Swarm:
    """A peer's membership in a run: whom it joins, who it is, and what the run is.

    Args:
        run_id: name of the run; peers of another run are refused.
        address: multiaddr of any peer of the swarm, or several; none starts a new swarm.
        identity: file with this peer's private key, made when it is missing; none is a new identity each time.
        name: how this peer is called in tables and logs.
        key: public key of a run that admits invited peers only (64 hexadecimal digits); None is that of `token` or
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
        manifest: the run-owned settings; peers with another manifest are refused. The default is made of `run_id`, the
            outer settings, the shapes of the trained parameters and the values of the frozen ones.
        on_event: called with kind and fields of everything that happens in the swarm (default: the log).
        on_ready: called with this peer's address once it listens, before it waits for others (default: the log).
        runtime: where the swarm node runs (default: a thread of its own); the simulator's lets virtual time pass.
        **outer: settings of the outer step, as under `outer.` in the configuration: `sync_every` (required),
            `fragments`, `lr`, `momentum`, `codec_up`, `codec_down`.

    Raises `ConfigError` for settings that cannot be. `attach` raises `SwarmError` when nobody is at the address, or the
    run there is another one. Peers that vanish later are no error: the exchange goes on without them.
    """

    def __init__(
        self,
        *,
        run_id: str,
        address: str | Sequence[str] = (),
        identity: Path | None = None,
        name: str = "peer",
        key: str | None = None,
        token: str | None = None,
        key_path: str | None = None,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        reachable: str = "auto",
        min_peers: int = 1,
        heartbeat_s: float = 1.0,
        upload_limit: float | None = None,
        inner_state: str = "donor",
        manifest: Manifest | None = None,
        on_event: Callable[[str, dict[str, object]], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
        runtime: Runtime | None = None,
        **outer: Any,
    ) -> None:
        self.run_id = run_id
        self.name = name
        self.outer = OuterConfig.parse({"method": "diloco", **outer})
        network = {
            "initial_peers": [address] if isinstance(address, str) else list(address),
            "listen": list(listen),
            "announce": list(announce),
            "reachable": reachable,
            "min_peers": min_peers,
            "heartbeat_s": heartbeat_s,
            "upload_limit": upload_limit,
            "inner_state": inner_state,
            "token": token,
            "key_path": key_path,
        }
        self.network = SwarmConfig.parse(network)
        self.manifest = manifest
        self.key = key if manifest is None else manifest.run.key
        if self.key is None and (token or key_path):
            self.key = gate_for(run_id, None, token, key_path).run_key
        self._identity = identity
        self._memory_path: Path | None = None
        self._files: Mapping[str, Path] = {}
        self._blank = False
        self.on_event = on_event or (lambda kind, fields: logger.info("%s %s", kind, fields))
        self.on_ready = on_ready or (lambda address: logger.info("this peer can be reached at %s", address))
        self.runtime = runtime
        self._scratch: TemporaryDirectory[str] | None = None
        self.attachment: Attachment | None = None

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
            on_event=on_event,
            on_ready=on_ready,
            runtime=runtime,
            **outer,
        )
        swarm.network = config.swarm
        if runtime is None:  # a simulation begins anew each time
            swarm._memory_path = config.run.dir / "refusals" / f"{name}.json"
            swarm._files = files_of(config)
            swarm._blank = config.model.weights is not None and not models.has_files(config.model)
        return swarm

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    @property
    def address(self) -> str:
        """The address with which others join; there is one while a model is attached."""
        if self.attachment is None or self.attachment.view is None:
            raise ConfigError("Swarm.address: no model is attached yet; read it inside `with swarm.attach(...)`")
        return self.attachment.view.address

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        island: Island | None = None,
        saved: Saved | None = None,
        phases: PhaseTimer | None = None,
    ) -> Attachment:
        """Keep a model in step with the swarm while the returned context is open.

        Raises `ConfigError` for parameters that no outer step can carry: complex ones, parts, and those without values;
        and for an optimizer that trains copies of its own (masters) instead of the parameters. Values are exchanged as
        fp32, so those of fp64 parameters are rounded.

        On entry the parameters become the swarm's. After every `sync_every`-th `optimizer.step()` the pseudo-gradient
        is exchanged, gradients are freed to make room, and the parameters become the new anchor. On exit the peer
        leaves.

        Args:
            model, optimizer: as in any loop. Parameters that require no gradient are left alone, and must be equal on
                all peers. Buffers are left alone, too: each peer has its own running statistics, and a joiner begins
                with those of its model.
            island: the torchrun job that this process is a rank of (default: this process alone).
            saved: where to go on (default: the model as it is, version 0).
            phases: where wall time is accounted.
        """
        island = island or Island(torch.device("cpu"))
        runtime = self.runtime or NodeThread()
        options, parameters = None, Trained(model)
        refuse_masters(optimizer, parameters)
        if island.leads:
            frozen = None if self.manifest is not None else frozen_digest(model)
            options = self.options(parameters, saved, device=island.device_name, frozen=frozen)
        device = next((one.device for one in parameters.values()), island.device)
        phases = phases or PhaseTimer(clock=runtime.clock, settle=partial(devices.synchronize, device))
        self.attachment = Attachment(
            parameters, optimizer, self.outer, options, island, phases, runtime, self.on_event, self.on_ready
        )
        return self.attachment

    def options(
        self,
        parameters: Mapping[str, Tensor],
        saved: Saved | None,
        trains: bool = True,
        device: str = "",
        frozen: str | None = None,
    ) -> NodeOptions:
        """Options of the node over these parameters; watchers are shown `device`. `frozen` is the digest of the others'
        values.
        """
        if self._identity is None:
            self._scratch = TemporaryDirectory(prefix="diloco-")
            self._identity = Path(self._scratch.name) / "identity.key"
        if self.manifest is not None:
            tokens_per_step = self.manifest.inner.batch_size * self.manifest.data.sequence_length
            spec = RunSpec(self.run_id, self.manifest.hash(), self.manifest.to_json(), tokens_per_step)
        else:
            run = {"id": self.run_id, "key": self.key}
            shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
            outer = self.outer.model_dump(mode="json")
            content = {"run": run, "outer": outer, "parameters": shapes, "frozen_parameters": frozen}
            text = json.dumps(content, sort_keys=True)
            spec = RunSpec(self.run_id, sha256(text.encode()).hexdigest(), text)
        network = self.network
        gate = gate_for(
            self.run_id, self.key, network.token, network.key_path, trains, spec.manifest_hash, self._memory_path
        )
        return NodeOptions(
            spec,
            self.network,
            self._identity,
            self.name,
            saved,
            gate,
            trains,
            device=device,
            blank=self._blank,
            files=self._files,
        )
