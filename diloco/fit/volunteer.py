"""A volunteer's peer: what it keeps between runs, and its configuration, of which the swarm says the greater half.

    $XDG_DATA_HOME/diloco/peer-0/identity.key     this machine's first peer; a second one at the same time is peer-1
                              runs/RUN_ID/        metrics, checkpoints and the model of each run that it took part in
                       peers.json                 addresses of each run's peers, should those in a link all be gone

A volunteer begins from the swarm, never from a checkpoint of its own: the run may have been started anew since, and
the higher version would win.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.config import Config, Manifest
from diloco.config.address import scope
from diloco.errors import ConfigError
from diloco.fit.machine import Machine
from diloco.rundir.files import exclusive, write_atomic
from diloco.swarm.wire.libp2p import own_id, peer_id_of
from diloco.train.session import checkpoints_name

__all__ = ["Place", "acquaintances", "own_place", "remember", "set_aside", "suited", "volunteer", "with_settings"]

logger = logging.getLogger(__name__)

PEERS_PER_MACHINE = 64
KNOWN_RUNS, KNOWN_ADDRESSES = 64, 16


@dataclass(frozen=True)
class Place:
    """What belongs to one peer of this user: its key, and room for its runs."""

    number: int
    directory: Path
    identity: Path

    @property
    def peer_id(self) -> str:
        """Of the key, which is made when it is missing."""
        return own_id(self.identity)

    @property
    def name(self) -> str:
        """How the peer is called in tables: the end of its id."""
        return self.peer_id[-6:]


def _home() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "diloco"


@contextlib.contextmanager
def own_place(identity: str | None = None) -> Iterator[Place]:
    """The first of this user's peers that does not run already, for as long as the context is open.

    `identity` is the key named by swarm.identity_path, in place of the peer's own.

    Raises:
        ConfigError: as many peers as one machine may have run, or the key is held by another process.
    """
    with contextlib.ExitStack() as stack:
        if identity is not None:  # two peers with one key would throw each other out of the swarm
            stack.enter_context(exclusive(Path(f"{identity}.lock")))
        for number in range(PEERS_PER_MACHINE):
            directory = _home() / f"peer-{number}"
            try:
                stack.enter_context(exclusive(directory))
            except ConfigError:  # it runs
                continue
            yield Place(number, directory, directory / "identity.key" if identity is None else Path(identity))
            return
    raise ConfigError(f"{PEERS_PER_MACHINE} peers of yours run on this machine already; end one, or set XDG_DATA_HOME")


def volunteer(config: Config, manifest: Manifest, typed: Collection[str], place: Place, seeds: Sequence[str]) -> Config:
    """The configuration of a peer that joins: the run's half from its manifest, and for this half what suits a guest.

    Args:
        typed: keys that the user set, which win over all that is chosen here.
        seeds: addresses of peers that answer.

    Raises:
        ConfigError: the manifest does not fit this peer, such as data.source=text without a data.path here.
    """
    joined = config.adopt(manifest)
    elsewhere = any(scope(seed) != "loopback" for seed in seeds)
    chosen = {
        "run.dir": place.directory / "runs" / manifest.run.id,
        "run.name": place.name,
        "eval.every": 0,  # the others would wait for it
        "swarm.listen": ("/ip4/0.0.0.0/tcp/0",) if elsewhere else config.swarm.listen,
    }
    always = {"swarm.initial_peers": tuple(seeds), "swarm.identity_path": str(place.identity)}
    return with_settings(joined, {**{key: value for key, value in chosen.items() if key not in typed}, **always})


def with_settings(config: Config, settings: dict[str, object]) -> Config:
    """The configuration with some settings replaced, by dotted key, and validated."""
    values = config.model_dump()
    for key, value in settings.items():
        group, _, name = key.partition(".")
        values[group][name] = value
    return Config.model_validate(values)


def suited(config: Config, machine: Machine, micro_batch: int, typed: Collection[str]) -> Config:
    """The configuration with precision, threads and micro-batch as the machine can."""
    chosen: dict[str, object] = {
        "train.precision": "bf16" if machine.bf16 else "fp32",
        "train.threads": machine.threads,
        "train.micro_batch": None if micro_batch >= config.inner.batch_size else micro_batch,
    }
    return with_settings(config, {key: value for key, value in chosen.items() if key not in typed})


def set_aside(config: Config) -> None:
    """Moves the checkpoints of an earlier visit to this run out of the way, in place of those moved before them."""
    mine = config.run.dir / "checkpoints" / checkpoints_name(config)
    if not mine.is_dir():
        return
    before = mine.with_name(f"{mine.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    mine.rename(before)


def remember(run_id: str, addresses: Sequence[str]) -> None:
    """Keep where a run's peers are; without effect where that cannot be written."""
    known = _known()
    known[run_id] = list(dict.fromkeys([*addresses, *known.pop(run_id, [])]))[:KNOWN_ADDRESSES]
    with contextlib.suppress(ConfigError, OSError):
        _home().mkdir(parents=True, exist_ok=True)
        write_atomic(_home() / "peers.json", json.dumps(dict(list(known.items())[-KNOWN_RUNS:]), indent=1) + "\n")


def acquaintances(addresses: Sequence[str]) -> list[str]:
    """Addresses of other peers of the runs in which the peers at these were last seen."""
    peers = {peer_id_of(address) for address in addresses if not address.startswith("@")}
    found: list[str] = []
    for known in _known().values():
        if any(peer_id_of(one) in peers for one in known):
            found += known
    return [one for one in dict.fromkeys(found) if one not in addresses]


def _known() -> dict[str, list[str]]:
    try:
        content = json.loads((_home() / "peers.json").read_text())
        for addresses in content.values():
            for address in addresses:
                peer_id_of(address)
    except (OSError, ValueError, AttributeError, TypeError, ConfigError):
        return {}
    known: dict[str, list[str]] = content
    return known
