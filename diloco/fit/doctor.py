"""Checks one by one whether this machine can take part in a run, without joining it.

Every check returns a `Check`, even if it breaks. A failed check stops a run; a warning means a slower or worse run.
"""

from __future__ import annotations

import platform
import shutil
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from diloco.config import WIRE_VERSION, Config
from diloco.config.address import scope
from diloco.errors import ConfigError, DilocoError, SwarmError
from diloco.fit.speed import step_seconds
from diloco.fit.volunteer import PeerDirectory, fit_to_machine, volunteer_config
from diloco.fit.whole import Layout, layout_of
from diloco.swarm.visit.look import CLOCK_LIMIT_S, Found, look, parse_manifest
from diloco.swarm.visit.rehearse import try_to_listen
from diloco.swarm.wire.gate import Gate, watching
from diloco.text import counted, one_line
from diloco.train.machine import GIB, Machine, inspect_machine
from diloco.train.memory import parameters_of

__all__ = ["Check", "Doctor"]

PROBE_BYTES = 2**20
CHECKPOINT_BYTES = 20  # per parameter: anchor, AdamW's two moments, master and momentum
THIN_BITS_PER_S = 10e6
FAR_S = 0.5
SLOW_CLOCK_S = 1.0


@dataclass(frozen=True)
class Check:
    """One line of output. `verdict` is `ok`, `warning` or `failed`; `swarm`: a failure is not this machine's fault."""

    name: str
    verdict: str
    text: str
    remedy: str = ""
    swarm: bool = False


@dataclass
class Doctor:
    """Checks this machine for a configuration and, given `addresses`, for the swarm there.

    `typed` are the keys that the user set. Afterwards `figures` has the input of `diloco plan`: up_bits_per_s,
    down_bits_per_s, latency_s, step_s.
    """

    config: Config
    directory: PeerDirectory
    addresses: Sequence[str] = ()
    typed: Collection[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    _found: Found | None = None
    _machine: Machine | None = None
    _layout: Layout | None = None

    def checks(self) -> Iterator[Check]:
        """Yields each result as soon as it is known."""
        for name, check in (
            ("python", self._python),
            ("torch", self._torch),
            ("identity", self._identity),
            ("swarm", self._swarm),
            ("manifest", self._manifest),
            ("clock", self._clock),
            ("accelerator", self._accelerator),
            ("memory", self._memory),
            ("disk", self._disk),
            ("port", self._port),
            ("reachable", self._reachable),
            ("bandwidth", self._bandwidth),
            ("speed", self._speed),
        ):
            swarm = name in ("swarm", "manifest", "clock", "bandwidth")
            try:
                found = check()
            except DilocoError as error:
                text, _, remedy = str(error).partition("; ")
                found = Check(name, "failed", text, remedy, swarm or isinstance(error, SwarmError))
            except Exception as error:  # a broken check is a result too, and the others go on
                found = Check(name, "failed", one_line(error), "please report this", swarm)
            if found is not None:
                yield found

    def _seeds(self) -> Sequence[str]:
        return (self._found and self._found.addresses) or self.addresses

    def _gate(self) -> Gate:
        return watching(self.config.run.id, self.config.swarm.token, self.config.swarm.key_path)

    def _python(self) -> Check:
        text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        if platform.system() != "Linux":
            return Check("python", "warning", text, "only Linux is tested")
        return Check("python", "ok", text)

    def _torch(self) -> Check:
        return Check("torch", "ok", f"torch {torch.__version__}, hivemind {version('hivemind')}")

    def _identity(self) -> Check:
        self.figures["peer_id"] = self.directory.peer_id
        return Check("identity", "ok", f"{self.directory.peer_id} in {self.directory.identity}")

    def _accelerator(self) -> Check:
        machine = self._machine = inspect_machine(self.config.train.device, self.config.train.threads)
        if machine.shared:
            text = f"none: trains on the CPU, with {machine.threads} of {machine.cores} cores, those idle now"
            return Check("accelerator", "ok", text)
        free = f"{machine.device_bytes / GIB:.1f} GiB free"
        return Check("accelerator", "ok", f"{machine.name}, {free}, {machine.precision}")

    def _memory(self) -> Check | None:
        if self._machine is None:
            return None
        peers = len(self._found.peers) if self._found else 0
        layout = self._layout = layout_of(self.config, self.typed, peers, None, ())
        if layout is not None:
            text = f"{self.config.model.name}, {layout.need.parameters / 1e6:.4g}M parameters, on {layout.text}"
            return Check("memory", "ok", text)
        batch_size = self.config.inner.batch_size
        config, need = fit_to_machine(self.config, self._machine)
        micro_batch = config.train.micro_batch or batch_size
        text = (
            f"{self.config.model.name}, {need.parameters / 1e6:.4g}M parameters: {need.device_bytes / GIB:.2f} GiB to "
            f"train, {need.main_bytes / GIB:.2f} GiB to take part, {self._machine.main_bytes / GIB:.1f} GiB free"
        )
        if micro_batch < batch_size:
            return Check("memory", "warning", f"{text}; a batch of {batch_size} in parts of {micro_batch}")
        return Check("memory", "ok", f"{text}; a batch of {batch_size} at once")

    def _disk(self) -> Check:
        place = self.config.run.dir.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        needed = (self.config.checkpoint.keep + 1) * CHECKPOINT_BYTES * parameters_of(self.config.model) + 1e8
        text = f"{free / GIB:.1f} GiB free in {place}, {needed / GIB:.2f} GiB needed for checkpoints and the model"
        if free < needed:
            return Check("disk", "failed", text, "free some space, or choose another place with run.dir=DIRECTORY")
        return Check("disk", "ok", text)

    def _port(self) -> Check:
        listen = self.config.swarm.listen
        result = try_to_listen((), listen, self.config.swarm.announce, self._gate())
        best = result.addresses[0].rpartition("/p2p/")[0]
        return Check("port", "ok", f"{', '.join(listen)} can be listened on, for example as {best} ({scope(best)})")

    def _speed(self) -> Check | None:
        if self._machine is None or (self._layout is not None and self._layout.split.sharded):
            return None
        config, _ = fit_to_machine(self.config, self._machine)
        step_s = self.figures["step_s"] = step_seconds(config, config.train.micro_batch)
        tokens = self.config.inner.batch_size * self.config.data.sequence_length
        return Check("speed", "ok", f"{step_s:.3g} s per inner step, {tokens / step_s:.4g} tokens per second")

    def _swarm(self) -> Check | None:
        if not self.addresses:
            return Check("swarm", "ok", "no ADDRESS given, no swarm is checked")
        found = self._found = look(
            self.addresses, self.directory.identity, measure_bytes=PROBE_BYTES, gate=self._gate()
        )
        self.figures["peers"] = len(found.peers)
        names = ", ".join(peer.reply.name for peer in found.peers) or "none gives a name"
        if found.silent:
            silent = "; ".join(f"{address}: {why}" for address, why in found.silent.items())
            return Check("swarm", "warning", f"answered by {len(found.peers)} ({names}); {silent}", swarm=True)
        return Check("swarm", "ok", f"answered by {len(found.peers)}: {names}", swarm=True)

    def _manifest(self) -> Check | None:
        if self._found is None:
            return None
        manifest = parse_manifest(self._found.manifest_text)
        text = f"{manifest.run.id} ({manifest.hash()[:12]}), {manifest.model.name} on {manifest.data.source}"
        try:
            self.config = volunteer_config(self.config, manifest, self.typed, self.directory, self._seeds())
        except ConfigError as error:
            return Check("manifest", "failed", text, str(error))
        return Check("manifest", "ok", f"{text}, wire version {WIRE_VERSION}", swarm=True)

    def _clock(self) -> Check | None:
        found = self._found
        if found is None or found.ahead_s is None:
            return None
        each = ", ".join(f"{peer.ahead_s:+.3f}" for peer in found.peers)
        text = f"{found.ahead_s:+.3f} s against the swarm (by peer {each})"
        self.figures["clock_ahead_s"] = found.ahead_s
        if abs(found.ahead_s) > CLOCK_LIMIT_S:
            remedy = f"more than {CLOCK_LIMIT_S:.0f} s is refused; set it, for example by timedatectl set-ntp true"
            return Check("clock", "failed", text, remedy)
        verdict = "ok" if abs(found.ahead_s) <= SLOW_CLOCK_S else "warning"
        return Check("clock", verdict, text, "" if verdict == "ok" else "let NTP set it")

    def _reachable(self) -> Check | None:
        if self._found is None:
            return None
        swarm = self.config.swarm
        result = try_to_listen(self._seeds(), swarm.listen, swarm.announce, self._gate(), self.directory.identity)
        if result.reachable:
            best = result.addresses[0].rpartition("/p2p/")[0]
            return Check("reachable", "ok", f"a peer called back {best}; no relay is needed")
        how = "it trains over its own connections and holds no fragments"
        return Check("reachable", "warning", f"others cannot call this peer: {how}", result.advice, swarm=True)

    def _bandwidth(self) -> Check | None:
        found = self._found
        rated = [peer for peer in found.peers if peer.up_bytes_per_s and peer.down_bytes_per_s] if found else []
        if not rated:
            return None if found is None else Check("bandwidth", "warning", "no peer allowed a measurement", swarm=True)
        up = statistics.median(8 * (peer.up_bytes_per_s or 0) for peer in rated)
        down = statistics.median(8 * (peer.down_bytes_per_s or 0) for peer in rated)
        latency_s = statistics.median(peer.round_trip_s for peer in rated) / 2
        self.figures |= {"up_bits_per_s": up, "down_bits_per_s": down, "latency_s": latency_s}
        text = (
            f"{up / 1e6:.4g} Mbit/s up, {down / 1e6:.4g} Mbit/s down, {latency_s * 1e3:.3g} ms away "
            f"(median of {counted(len(rated), 'peer')}, {PROBE_BYTES >> 20} MiB each way)"
        )
        if min(up, down) < THIN_BITS_PER_S or latency_s > FAR_S:
            return Check("bandwidth", "warning", text, "diloco plan --doctor computes the cost", swarm=True)
        return Check("bandwidth", "ok", text, swarm=True)
