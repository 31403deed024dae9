"""A peer that comes back to a run, in the same process or another: its key, whom it calls, and
where it listens."""

from __future__ import annotations

import atexit
import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from diloco.config import SwarmConfig
from diloco.config.address import address_error
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.client.ask import inspect_swarm
from diloco.swarm.wire.gate import observer_gate
from diloco.swarm.wire.identity import own_id
from diloco.swarm.wire.libp2p import check_free

NAMED = 16  # addresses of other peers that are remembered
# directories with keys that nobody uses, by run
_free: defaultdict[str, list[Path]] = defaultdict(list)


class PeerKey:
    """The file with a peer's private key. Without a `path` it stays as long as the process, for the
    run's next peer."""

    def __init__(self, path: Path | None, run_id: str, simulated: bool) -> None:
        self.path = path
        self._free = [] if simulated else _free[run_id]
        self._directory: Path | None = None

    @property
    def is_made(self) -> bool:
        """Whether somebody has asked for a key without a path."""
        return self._directory is not None

    def file(self, addresses: Sequence[str]) -> Path:
        """Where the key is, or will be, of a peer that joins at these addresses."""
        if self.path is not None:
            return self.path
        if self._directory is None:
            # it cannot join itself
            if not self._free or own_id(self._free[-1] / "identity.key") in "".join(addresses):
                self._free.append(Path(mkdtemp(prefix="diloco-")))
                atexit.register(rmtree, self._free[-1], ignore_errors=True)
            self._directory = self._free.pop()
        return self._directory / "identity.key"

    def give_back(self) -> None:
        """The peer has closed."""
        if self._directory is not None:
            self._free.append(self._directory)
            self._directory = None


def known_by(identity: Path, run: str) -> tuple[list[str], list[str]]:
    """Addresses of the peer with this key, and of others, when it was in that run last."""
    try:
        found = json.loads(_file(identity).read_text())
        own, others = (
            [one for one in found[key] if address_error(one) is None] for key in ("own", "others")
        )
        return (own, others) if found["run"] == run else ([], [])
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or half of one
        return [], []


def remember(identity: Path, run: str, own: Sequence[str], others: Sequence[str]) -> None:
    """Keep that for the next time; those that were known before, too."""
    others = list(dict.fromkeys((*others, *known_by(identity, run)[1])))[:NAMED]
    with suppress(OSError):  # no run ends for it
        _file(identity).write_text(json.dumps({"run": run, "own": list(own), "others": others}))


def _file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.peers")


def called_again(
    network: SwarmConfig, identity: Path, run_id: str, manifest_hash: str, saved: Sequence[str]
) -> tuple[SwarmConfig, list[str]]:
    """The settings with addresses of last time, and those of others that were known: beside the
    key, or `saved`.

    Who founded the run joins at the known peers that answer. If nobody does, or they train another
    run, it goes on alone.
    """
    own, others = known_by(identity, manifest_hash)
    known = list(dict.fromkeys((*others, *saved)))
    addresses = tuple(dict.fromkeys((*network.initial_peers, *known)))
    if known and not network.initial_peers:
        addresses = _answering(network, known, identity, run_id, manifest_hash)
    listen = tuple(next(filter(_is_free, _with_ports(one, own)), one) for one in network.listen)
    return network.model_copy(update={"initial_peers": addresses, "listen": listen}), known


def _answering(
    network: SwarmConfig, known: Sequence[str], identity: Path, run_id: str, manifest_hash: str
) -> tuple[str, ...]:
    gate = observer_gate(run_id, network.token, network.key_path)
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
            found = thread.submit(inspect_swarm, known, identity, gate=gate).result()
    except SwarmError:
        return ()
    return tuple(found.addresses) if hash_of(found.manifest_text) == manifest_hash else ()


def _with_ports(listen: str, own: Sequence[str]) -> list[str]:
    """A multiaddr that leaves the port open, with those that this peer had."""
    parts = listen.split("/")
    if len(parts) < 5 or parts[4] != "0":
        return []
    ports = [one.split("/")[4] for one in own if one.split("/")[3:4] == parts[3:4]]
    return ["/".join([*parts[:4], port, *parts[5:]]) for port in ports]


def _is_free(listen: str) -> bool:
    try:
        check_free([listen])
    except SwarmError:
        return False
    return True
