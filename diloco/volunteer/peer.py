"""A volunteer's peer: what it keeps between runs, and its configuration, mostly from the swarm.

    $XDG_DATA_HOME/diloco/peer-0/identity.key       this machine's first peer; another is peer-1
                                 identity.key.peers  addresses of the peers in its last run
                                 runs/RUN_ID/        metrics, checkpoints and model of each run

A volunteer starts from the state of the swarm, never from its own checkpoint: somebody may have
started the run again, and then the higher version, the volunteer's, would win.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from diloco.attach.arguments import known_by
from diloco.config import Config, Manifest
from diloco.config.address import Address, peer_id_of, reachability
from diloco.errors import ConfigError
from diloco.rundir.files import data_home, exclusive
from diloco.swarm.wire.identity import own_id
from diloco.train.checkpoint import checkpoints_name
from diloco.train.gradients import check_base
from diloco.train.machine import Machine, MemoryNeed, fit_micro_batch, memory_need

PEERS_PER_MACHINE = 64


@dataclass(frozen=True)
class PeerDirectory:
    """The directory of one of this user's peers: its key and its runs."""

    number: int
    path: Path
    identity: Path

    @property
    def peer_id(self) -> str:
        """The peer id of the key; the key is made if it is missing."""
        return own_id(self.identity)

    @property
    def name(self) -> str:
        """The peer's name in tables: the end of its id."""
        return self.peer_id[-6:]


@contextmanager
def lock_peer_directory(identity: str | None = None) -> Iterator[PeerDirectory]:
    """Lock and yield the directory of the first of this user's peers that is not running.

    `identity` is swarm.identity_path, a key that replaces the peer's own. Raises `ConfigError` if
    too many peers run on this machine, or another process uses the key.
    """
    with ExitStack() as stack:
        if identity is not None:  # two peers with one key would put each other out of the swarm
            stack.enter_context(exclusive(Path(f"{identity}.lock"), "swarm.identity_path"))
        for number in range(PEERS_PER_MACHINE):
            directory = data_home() / f"peer-{number}"
            try:
                stack.enter_context(exclusive(directory, "XDG_DATA_HOME"))
            except ConfigError:
                if not directory.is_dir():
                    raise
                continue  # this peer is running
            yield PeerDirectory(number, directory, Path(identity or directory / "identity.key"))
            return
    running = f"{PEERS_PER_MACHINE} of your peers are running on this machine"
    raise ConfigError(f"{running}; end one, or set XDG_DATA_HOME")


def volunteer_config(
    config: Config,
    manifest: Manifest,
    typed: Collection[str],
    directory: PeerDirectory,
    peers: Sequence[str],
) -> Config:
    """Take the run's half from the manifest; fill the peer's half with `typed` keys and defaults.

    `peers` are addresses that answer. Raises `ConfigError` if the manifest does not fit this peer,
    for example data.source=text without a data.path here.
    """
    joined = config.adopt(manifest)
    elsewhere = any(reachability(peer) != "loopback" for peer in peers)
    chosen = {
        "run.dir": directory.path / "runs" / manifest.run.id,
        "run.name": directory.name,
        "eval.every": 0,  # the others would wait for it
        "swarm.listen": ("/ip4/0.0.0.0/tcp/0",) if elsewhere else config.swarm.listen,
    }
    settings = {key: value for key, value in chosen.items() if key not in typed}
    joins = Address(tuple(peers))
    settings |= {"swarm.initial_peers": joins.callable, "swarm.mailbox": joins.mailbox}
    return with_settings(joined, settings | {"swarm.identity_path": str(directory.identity)})


def with_settings(config: Config, settings: dict[str, object]) -> Config:
    """Replace `settings`, by dotted key, in a configuration, and validate it."""
    values = config.model_dump()
    for key, value in settings.items():
        group, _, name = key.partition(".")
        values[group][name] = value
    return config.model_validate(values)


def fit_to_machine(
    config: Config, machine: Machine, peers: int | None = None, ranks: int = 1
) -> tuple[MemoryNeed, int]:
    """Return the memory for a swarm of `peers`, and the sequences a rank computes at a time.

    Raises `ConfigError` if not even one sequence fits, or `train.base` cannot be had.
    """
    check_base(config)
    need = memory_need(config, machine, peers, ranks, config.train.parallel == "fsdp")
    fitting = fit_micro_batch(need, machine, max(1, config.inner.batch_size // ranks))
    return need, config.train.micro_batch or fitting


def move_aside(config: Config) -> None:
    """Rename checkpoints of an earlier visit to this run to `NAME.before`, over older ones."""
    mine = config.run.dir / "checkpoints" / checkpoints_name(config)
    if mine.is_dir():
        before = mine.with_name(f"{mine.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        mine.rename(before)


def known_addresses(addresses: Sequence[str], identity: Path) -> list[str]:
    """List other peers from this user's last runs that had one of the given peers in them."""
    given = {peer_id_of(address) for address in addresses if not address.startswith("@")}
    keys = [identity, *(path / "identity.key" for path in sorted(data_home().glob("peer-*")))]
    runs = [others for key in keys if (others := known_by(key)[1])]
    runs = [others for others in runs if not given.isdisjoint(map(peer_id_of, others))]
    return [address for address in dict.fromkeys(chain(*runs)) if address not in addresses]
