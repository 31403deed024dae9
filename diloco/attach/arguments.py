"""From the arguments of `Swarm`, as its caller types them, to the options of its node.

    outer < keywords             -> `OuterConfig`
    address < network < keywords -> `SwarmConfig`

Some settings are called differently here: `swarm.initial_peers` is the argument `address`. An error
that names a setting is therefore raised again with the caller's name for it. A peer that comes back
to a run, in this process or another, uses its old key, old ports and the addresses that it knew.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from torch import Tensor, nn

from diloco import model as models
from diloco.attach.parameters import class_name, frozen_digest
from diloco.attach.ranks import RankGroup
from diloco.config import Config, Manifest, OuterConfig, SwarmConfig
from diloco.config.address import address_error, is_mailbox
from diloco.config.compose import outer_preset
from diloco.config.explain import nearest
from diloco.config.manifest import hash_of, planned
from diloco.errors import ConfigError, DivergedError, JoinError, SwarmError
from diloco.rundir.base_files import served
from diloco.swarm.client.ask import inspect_swarm
from diloco.swarm.node.node import OnEvent
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.recorder import PeerRecord
from diloco.swarm.node.recording import NAME
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import gate_for, observer_gate
from diloco.swarm.wire.identity import identity_number, own_id
from diloco.swarm.wire.lane import check_free
from diloco.text import expanded

COME_BACK_S = 30.0  # how long to retry: the peer at the given address may be restarting, too
NAMED = 16  # addresses of other peers that are remembered
LOWER_RATE = "lower the optimizer's learning rate"

_TYPED = {"swarm.initial_peers": "address", "swarm.identity_path": "identity"}
_TYPED |= {"run.id": "run_id", "run.key": "key"}
_NAMES = re.compile("|".join(map(re.escape, _TYPED)) + r"|\bswarm\.(?=[a-z_]+[=:])")
_NOBODY = "; if it had made all its steps before this peer came, start it with min_peers=2"
# settings whose argument of `Swarm` has another name
_OTHERWISE = {"initial_peers", "identity_path"}
# by run: directories with a key that no peer of this process uses now
_free_keys: defaultdict[str, list[Path]] = defaultdict(list)


# -- settings as they are typed --------------------------------------------------------------------


def outer_of(
    outer: str | Mapping[str, Any] | OuterConfig | None, keywords: Mapping[str, Any]
) -> tuple[OuterConfig, bool]:
    """The settings of the outer step; `outer` may be a preset, a file of configs/outer.

    The flag is True if the number of fragments follows from the size of the model. Raises
    `ConfigError`.
    """
    laid: dict[str, Any] = {"method": "diloco"}
    if isinstance(outer, str):
        laid, outer = outer_preset(outer), None
    elif isinstance(outer, OuterConfig):
        if not keywords and outer.method == "diloco":
            return outer, False  # `diloco train` passes the settings of its run
        outer = outer.model_dump()
    settings = {**(outer or {}), **keywords}
    _check_names(settings, OuterConfig.model_fields)
    if settings.get("method", "diloco") != "diloco":
        raise ConfigError(
            f"method={settings['method']}: a Swarm makes outer steps; diloco train has other"
            " methods"
        )
    laid.pop("rounds", None)  # computed from a budget, which a custom loop does not have
    has_rule = "${diloco.fragments_for:" in str(laid.get("fragments"))
    by_size = has_rule and "fragments" not in settings
    if by_size:
        del laid["fragments"]
    return OuterConfig.parse({**laid, **settings}), by_size


def network_of(
    address: str | Sequence[str] | None,
    network: Mapping[str, Any] | SwarmConfig | None,
    keywords: Mapping[str, Any],
) -> SwarmConfig:
    """The settings below `swarm.`; raises `ConfigError` with the names of `Swarm`."""
    if isinstance(network, SwarmConfig):
        if address is None and not keywords:
            return network
        network = network.model_dump()
    settings = {**(network or {}), **keywords}
    _check_names(settings, SwarmConfig.model_fields)
    if address is not None:
        settings["initial_peers"] = address
    for name in ("initial_peers", "listen", "announce"):
        if name in settings:
            texts = [settings[name]] if isinstance(settings[name], str) else settings[name] or ()
            settings[name] = tuple(dict.fromkeys(texts))
    if is_mailbox("".join(map(str, settings.get("initial_peers", ())))):
        settings["mailbox"] = settings.pop("initial_peers")[0]
    if "" in settings.get("initial_peers", ()):
        unset = "address is empty (a variable that is not set?)"
        raise ConfigError(f"{unset}; give that of a peer, or leave it out to start a swarm")
    if settings.get("key_path") is not None:
        settings["key_path"] = str(settings["key_path"])
    with as_typed():
        try:
            return SwarmConfig.parse(settings)
        except ConfigError as error:
            raise ConfigError(f"swarm.{error}") from None


def check_names(given: Iterable[str], swarm: Callable[..., object]) -> None:
    """Raise `ConfigError` for a name that is neither an argument of `Swarm` nor a setting."""
    arguments = list(inspect.signature(swarm).parameters)[:-1]
    of_network = SwarmConfig.model_fields.keys() - _OTHERWISE
    _check_names(given, [*arguments, *OuterConfig.model_fields, *of_network])


def _check_names(given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name == "preset":
            raise ConfigError("preset is not an argument any more; name the preset with outer=")
        if name not in known:
            guess = " or ".join(nearest(name, known))
            other = "help(diloco.Swarm) has the arguments and settings"
            raise ConfigError(
                f"{name} is neither an argument of Swarm nor a setting of the outer step;"
                f" {f'did you mean {guess}?' if guess else other}"
            )


@contextmanager
def as_typed(typed: bool = True, remedy: str = LOWER_RATE) -> Iterator[None]:
    """Raise errors of the block again with the names of `Swarm`'s arguments, if `typed`.

    `remedy` replaces the advice of a `DivergedError`.
    """
    try:
        yield
    except (SwarmError, DivergedError, ConfigError) as error:
        text = _NAMES.sub(lambda match: _TYPED.get(match[0], ""), str(error))
        if typed and isinstance(error, SwarmError):
            alone = text.startswith("address=") and "cannot be reached" in text
            raise JoinError(text + _NOBODY if alone else text) from None
        if typed and isinstance(error, DivergedError):
            raise DivergedError(f"{str(error).partition(';')[0]}; {remedy}") from None
        if not typed or text == str(error):
            raise
        raise type(error)(text) from None


# -- the peer --------------------------------------------------------------------------------------


class PeerArguments:
    """The arguments of a `Swarm` about the run and this peer; makes the options of its node.

    Attributes:
        typed: True in a custom loop, whose author typed these arguments.
        network: the settings given; after `options`, with the addresses of the last session.
        run: the run's identity on the wire; on rank 0, after `options`.
        sequences: name of the training sequences, if all peers number them alike (see `Hello`).
        outer_steps: outer steps that a trainer plans, or 0.
        patience_s: seconds for which to retry peers that may be restarting.
        alone_s: seconds after which to train even if fewer than `min_peers` came back.
    """

    def __init__(
        self,
        run_id: str,
        network: SwarmConfig,
        identity: str | Path | None,
        name: str,
        key: str | None,
        manifest: Manifest | None,
        runtime: Runtime | None,
    ) -> None:
        self.run_id, self.name, self.manifest, self.runtime = run_id, name, manifest, runtime
        self.network = self._given = network
        self.typed = manifest is None and runtime is None
        self._key = key if manifest is None else manifest.run.key
        if self._key is None and (network.token or network.key_path):
            with as_typed(self.typed):
                self._key = gate_for(run_id, None, network.token, network.key_path).run_key
        self.identity = None if identity in (None, "") else expanded(identity)
        # without a key file, the next peer of the run in this process reuses the key
        self._free_keys = [] if runtime is not None else _free_keys[run_id]
        self._made_key: Path | None = None  # its directory
        self._refusals: Path | None = None  # the file with the memory of refusals
        self._of_program: dict[str, Any] = {}  # further node options, from `diloco train`
        self.run: RunSpec | None = None
        self.sequences = ""
        self.outer_steps = 0
        self.patience_s = self.alone_s = 0.0

    def use_files(self, config: Config) -> None:
        """Give the node the run directory's files, and those that the manifest names."""
        self._refusals = config.run.dir / "refusals" / f"{self.name}.json"
        self._of_program = {
            "record": config.run.dir / NAME if config.run.record else None,
            "files": served(config),
            "blank": config.model.weights is not None and not models.has_files(config.model),
        }

    def key_file(self) -> Path:
        """Return the path of this peer's key, which may not exist yet."""
        if self.identity is not None:
            return self.identity
        if self._made_key is None:
            free, called = self._free_keys, "".join(self.network.initial_peers)
            if not free or own_id(free[-1] / "identity.key") in called:  # it cannot join itself
                free.append(Path(mkdtemp(prefix="diloco-")))
                atexit.register(_remove, free[-1], os.getpid())
            self._made_key = free.pop()
        return self._made_key / "identity.key"

    def seed(self, begin: int) -> int:
        """Derive a 32-bit seed from the key and the inner step at which the session begins."""
        file = self.key_file()
        if self.runtime is not None:  # a simulation makes no file
            number = int.from_bytes(sha256(str(file).encode()).digest()[:6], "big")
        else:
            with as_typed(self.typed):
                number = identity_number(file)
        if begin:
            number = int.from_bytes(sha256(f"{number} {begin}".encode()).digest()[:6], "big")
        return number % 2**32

    def position_file(self) -> Path | None:
        """Path of rank 0's read position; None on other ranks, and without `identity`."""
        file = self.identity if self.runtime is None and RankGroup.rank_and_size()[0] == 0 else None
        return file and file.with_name(f"{file.name}.position")

    def put_key_into(self, checkpoints: Path) -> None:
        """Put the key beside the checkpoints, unless `identity` is set.

        Raises `ConfigError` if a key was made elsewhere already.
        """
        if self._made_key is not None and self.identity is None:
            raise ConfigError(
                f"checkpoints={checkpoints}: this peer's key would be there, and swarm.seed or"
                " swarm.shard has made another one; name its file with Swarm(identity=...)"
            )
        self.identity = self.identity or checkpoints / "identity.key"

    def close(self) -> None:
        """Let the run's next peer in this process reuse a key that was made here."""
        if self._made_key is not None:
            self._free_keys.append(self._made_key)
            self._made_key = None

    def options(
        self,
        outer: OuterConfig,
        parameters: Mapping[str, Tensor],
        model: nn.Module | None,
        saved: Saved | None,
        trains: bool,
        device: str,
        on_event: OnEvent,
    ) -> NodeOptions:
        """Rank 0: options of the node."""
        identity, manifest = self.key_file(), self.manifest
        if manifest is not None:
            tokens_per_step = manifest.inner.batch_size * manifest.data.sequence_length
            run = RunSpec(self.run_id, manifest.hash(), manifest.to_json(), tokens_per_step)
            plan, admit = planned(manifest), manifest.swarm.admit
        else:
            run = self._run_of(outer, parameters, model)
            plan, admit = [self.outer_steps, 0, outer.rounds or 0], self.network.admit
        self.run = run
        if self.runtime is None:  # in a simulation, wires are in memory
            self._come_back(identity, saved, on_event)
        network = self.network
        key, public = (self._key, network.token, network.key_path), admit == "anyone"
        gate = gate_for(self.run_id, *key, trains, run.manifest_hash, self._refusals, public)
        more = {"data": self.sequences, "planned": plan, **self._of_program}
        return NodeOptions(run, network, identity, self.name, saved, gate, trains, device, **more)

    def _run_of(
        self, outer: OuterConfig, parameters: Mapping[str, Tensor], model: nn.Module | None
    ) -> RunSpec:
        """Without a manifest: outer settings, class and shapes of the model, and frozen values."""
        # nobody watches a simulation
        name = "" if model is None or self.runtime is not None else class_name(model)
        content = {
            "run": {"id": self.run_id, "key": self._key},
            "swarm": {"admit": self.network.admit},
            "outer": outer.model_dump(mode="json"),
            **({"model": {"name": name}} if name else {}),
            "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
            "frozen_parameters": None if model is None else frozen_digest(model),
        }
        text = json.dumps(content, sort_keys=True)
        return RunSpec(self.run_id, hash_of(text), text)

    def _come_back(self, identity: Path, saved: Saved | None, on_event: OnEvent) -> None:
        """Set `network` to call the peers that were known, and to listen on the old ports."""
        assert self.run is not None
        run, given, before = self.run, self._given, saved.addresses if saved else ()
        self.network, called = called_again(given, identity, run.id, run.manifest_hash, before)
        self.patience_s = COME_BACK_S if called and given.initial_peers else 0.0
        self.alone_s = 0.0
        if called and not self.network.initial_peers:
            self.alone_s = COME_BACK_S if self.typed and given.min_peers > 1 else 0.0
            version = saved.steps if saved else 0
            fields = {"called": called, "version": version, "wait_s": self.alone_s}
            on_event("alone_again", fields)

    def remember(self, record: PeerRecord) -> None:
        """Save this peer's addresses and those that it knows, for its next session."""
        if self.runtime is None and self.run is not None:
            key, run = self.key_file(), self.run.manifest_hash
            remember(key, run, record.addresses, record.others)


def _remove(directory: Path, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        rmtree(directory, ignore_errors=True)


def known_by(identity: Path, run: str | None = None) -> tuple[list[str], list[str]]:
    """Return saved addresses of the peer with this key, and of others; empty for another run."""
    try:
        record = json.loads(_addresses_file(identity).read_text())
        both = [[a for a in record[key] if address_error(a) is None] for key in ("own", "others")]
        return (both[0], both[1]) if run in (None, record["run"]) else ([], [])
    except (OSError, ValueError, KeyError, TypeError):  # no file, or an incomplete one
        return [], []


def remember(identity: Path, run: str, own: Sequence[str], others: Sequence[str]) -> None:
    """Write the addresses for `known_by`; other peers known before are kept."""
    others = list(dict.fromkeys((*others, *known_by(identity, run)[1])))[:NAMED]
    with suppress(OSError):  # a full disk must not end a run
        text = json.dumps({"run": run, "own": list(own), "others": others})
        _addresses_file(identity).write_text(text)


def _addresses_file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.peers")


def called_again(
    network: SwarmConfig, identity: Path, run_id: str, manifest_hash: str, saved: Sequence[str]
) -> tuple[SwarmConfig, list[str]]:
    """Return the settings with this peer's old ports, and the addresses of peers that it knew.

    The addresses come from the file beside the key and from `saved`. The founder of the run, which
    has no `initial_peers`, joins those that answer, or starts alone if none of the run does.
    """
    own, others = known_by(identity, manifest_hash)
    known = list(dict.fromkeys((*others, *saved)))
    addresses = tuple(dict.fromkeys((*network.initial_peers, *known)))
    if known and not network.initial_peers:
        gate = observer_gate(run_id, network.token, network.key_path)
        addresses = ()
        with suppress(SwarmError), ThreadPoolExecutor(1) as thread:  # notebooks run a loop here
            info = thread.submit(inspect_swarm, known, identity, gate=gate).result()
            if hash_of(info.manifest_text) == manifest_hash:
                addresses = tuple(info.addresses)
    listen = tuple(next(filter(_is_free, _with_ports(addr, own)), addr) for addr in network.listen)
    return network.model_copy(update={"initial_peers": addresses, "listen": listen}), known


def _with_ports(listen: str, own: Sequence[str]) -> list[str]:
    """Return `listen` with each port that this peer had, if its own port is 0 (any)."""
    parts = listen.split("/")
    if len(parts) < 5 or parts[4] != "0":
        return []
    ports = [address.split("/")[4] for address in own if address.split("/")[3:4] == parts[3:4]]
    return ["/".join([*parts[:4], port, *parts[5:]]) for port in ports]


def _is_free(listen: str) -> bool:
    try:
        check_free([listen])
    except SwarmError:
        return False
    return True
