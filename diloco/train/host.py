"""A host: a peer that does not train, merges contributions and gives newcomers the state."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import torch

from diloco import model as models
from diloco.attach.node_thread import NodeThread
from diloco.attach.parameters import TrainedParams
from diloco.attach.swarm import Swarm
from diloco.config import Config
from diloco.config.manifest import raised
from diloco.errors import ConfigError
from diloco.messages.control import Figures
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.rundir.files import exclusive, prepare_run_directory
from diloco.rundir.metrics import RunLog
from diloco.rundir.reporting import Listener, Notice, PeerStatus
from diloco.rundir.summary import write_contributions
from diloco.swarm.client.ask import check_clock, inspect_swarm, parse_manifest
from diloco.swarm.node.runtime import EventLoopThread
from diloco.swarm.wire.gate import observer_gate
from diloco.train import start_files
from diloco.train.checkpoint import AddressFile, identity_path


class Host:
    """A swarm `node` over parameters that it does not train. On leaving it hands its fragments
    over.

    Entering raises `SwarmError` when the swarm cannot be reached or refuses this host.
    `listen` hears what happens in the swarm.
    """

    def __init__(self, config: Config, name: str, listen: Listener = lambda report: None) -> None:
        prepare_run_directory(config.run.dir)
        self._config, self._name = config, name
        say = lambda text: listen(Notice(name, time.time(), text))  # noqa: E731
        self._log = RunLog(config.run.dir, name, say=say)
        manifest, identity = config.manifest(), identity_path(config, name)
        if donors := config.swarm.donors:
            gate = observer_gate(config.run.id, config.swarm.token, config.swarm.key_path)
            info = inspect_swarm(donors, identity, gate=gate)
            check_clock(info)
            manifest = parse_manifest(info.manifest_text)
            config = start_files.with_manifest(config, manifest)
            config = start_files.fetch_start_files(config, info.addresses or donors, gate, identity)
        self.manifest, self.config = manifest, config
        self.model = model = models.build(config.model, manifest.run.seed, narrow=True)
        start_files.keep(config, model)
        parameters = TrainedParams(model)
        outer = manifest.outer
        if outer.method != "diloco":
            raise ConfigError(f"outer.method={outer.method} has no swarm to host")
        numels = {key: p.numel() for key, p in parameters.items()}
        fragments = partition(numels, outer.fragments, outer.pattern)
        on_event = self._log.swarm_event
        swarm = Swarm.of(config, manifest, identity=identity, name=name, on_event=on_event)
        self._options = swarm.options(parameters, trains=False, device="cpu")
        self._replica = Replica(parameters, fragments, outer)
        self._runtime = EventLoopThread()
        self._used_up = False
        torch.set_grad_enabled(False)

    def __enter__(self) -> Host:
        with ExitStack() as stack:
            stack.enter_context(exclusive(self._config.run.dir / "checkpoints" / self._name))
            stack.callback(self._log.close)
            stack.callback(self._runtime.close)
            on_event = self._log.swarm_event
            self.node = NodeThread.open(self._runtime, self._options, self._replica, on_event)
            stack.callback(self.node.close)
            file = stack.enter_context(closing(AddressFile(self._config)))
            file.write(self.address)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self.node.leave(finished=False)
            path = self._config.run.dir / "contributions.csv"
            write_contributions(path, self.node.record().contributions)

    @property
    def address(self) -> str:
        """The address by which others join."""
        return self.node.address

    def is_over(self) -> bool:
        """Return True if the run's budget is used up, and no peer that trains is left.

        Ask at least once a second: the last version may not come here when its peers leave; then
        their status counts.
        """
        record = self.node.record()
        self.manifest = raised(self.manifest, record.planned)
        self._used_up |= self.manifest.budget.is_used_up(record.version, record.applied_tokens)
        return self._used_up and not record.others_that_train

    def load(self) -> None:
        """Wait for the swarm's newest anchor, and load it into `model`."""
        self.node.is_late()
        self.node.load_anchors()

    def status(self) -> PeerStatus:
        """Return this host's state and figures, for a live table."""
        record, (sent, received) = self.node.record(), self.node.traffic
        figures = Figures(bytes_sent=sent, bytes_received=received)
        self.node.measure(figures)
        return PeerStatus(
            self._name,
            time.time(),
            state="training" if record.ready else "waiting",
            version=record.version,
            outer_steps=self.manifest.budget.outer_steps,
            figures=figures,
            peers=record.live,
        )
