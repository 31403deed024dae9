"""`diloco doctor`: a line per check of this machine and of the way to a swarm, with the remedy.

Every check ends in a `Check`, even if it breaks. A failed check stops a run; a warning means a
slower or worse run.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from diloco.cli import Command, Options, configured, guest_arguments, split_address
from diloco.config.address import is_mailbox
from diloco.errors import ConfigError, DilocoError, SwarmError
from diloco.text import one_line

if TYPE_CHECKING:
    from diloco.config import Config
    from diloco.config.address import Address
    from diloco.swarm.client.ask import SwarmInfo
    from diloco.swarm.wire.gate import Gate
    from diloco.volunteer.peer import PeerDirectory

CHECKPOINT_BYTES = 20  # per parameter: anchor, AdamW's two moments, master and momentum
GIB = 2**30
OF_SWARM = ("swarm", "manifest", "clock")
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@click.command(cls=Command)
@click.argument("address", required=False)
@configured
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(address: str | None, options: Options, as_json: bool) -> int:
    """Check this machine and the way to a swarm.

    \b
    diloco doctor
    diloco doctor /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --json > doctor.json
    diloco doctor model=150m data.sequence_length=1024

    One line per check: ok, warning, or failed with the remedy. Exit code 2 says that something here
    has to change, 3 that the swarm cannot be joined. Nothing takes part in the run. An ADDRESS
    brings the run's own settings.
    """
    address, options = split_address(address, options)
    swarm, given = None, list[str]()
    if address is not None and not options.cfg:
        # run.id may be typed: in a closed run the invitation has it, too
        swarm, given = guest_arguments(address, options, ["run.id"])
    return run_checks(options.compose(given), swarm, as_json, options.keys)


def run_checks(
    config: Config, address: Address | None, as_json: bool, typed: Collection[str] = ()
) -> int:
    """Check this machine and a swarm; return 0, 2 for failures here, or 3 for failures there."""
    from rich.console import Console
    from rich.text import Text

    from diloco.volunteer.peer import lock_peer_directory

    console, checks = Console(), list[Check]()
    logging.basicConfig(level=logging.ERROR, format="diloco: %(message)s")
    with lock_peer_directory(config.swarm.identity_path) as directory:
        doctor = Doctor(config, directory, () if address is None else address.peers, typed)
        for check in doctor.checks():
            checks.append(check)
            if not as_json:
                verdict = (f"{check.verdict:<8}", STYLES[check.verdict])
                line = Text.assemble(verdict, (f"{check.name:<12}", "bold"), check.text)
                if check.remedy:
                    line.append(f"\n{'':<20}{check.remedy}")
                console.print(line, soft_wrap=True)
    code, failed = 0, [check for check in checks if check.verdict == "failed"]
    if failed:
        kind = SwarmError if all(check.swarm for check in failed) else ConfigError
        code = kind.exit_code
    elif address is not None and not as_json:
        console.print(Text("nothing stands in the way of diloco join", style="bold green"))
    if as_json:
        rows = [asdict(check) for check in checks]
        report = {"checks": rows, "figures": doctor.figures, "exit": code}
        click.echo(json.dumps(report, indent=2))
    return code


@dataclass(frozen=True)
class Check:
    """One line of output; `verdict` is ok, warning or failed; `swarm`: the swarm is at fault."""

    name: str
    verdict: str
    text: str
    remedy: str = ""
    swarm: bool = False


@dataclass
class Doctor:
    """Checks this machine for a configuration and, given `addresses`, for the swarm there.

    `typed` are the keys that the user set. Afterwards `figures` has what was measured: latency_s
    (one way), clock_ahead_s, step_s.
    """

    config: Config
    directory: PeerDirectory
    addresses: Sequence[str] = ()
    typed: Collection[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    _found: SwarmInfo | None = None

    def checks(self) -> Iterator[Check]:
        """Yield each result as soon as it is known."""
        yield self._check("python", self._python)
        if self.addresses:
            yield self._check("swarm", self._store if self._url else self._swarm)
        if self._found is not None:
            yield self._check("manifest", self._manifest, self._found)
            if not self._url:  # nobody trusts the clock of a store
                yield self._check("clock", self._clock, self._found)
            for name, texts in self._found.lines.items():
                yield Check(name, "ok", ", ".join(texts))
        yield self._check("memory", self._memory)
        yield self._check("disk", self._disk)
        if not self._url:
            yield self._check("port", self._port)

    def _check(self, name: str, check: Any, *arguments: Any) -> Check:
        swarm = name in OF_SWARM
        try:
            return Check(name, *check(*arguments))
        except DilocoError as error:
            text, _, remedy = str(error).partition("; ")
            return Check(name, "failed", text, remedy, swarm or isinstance(error, SwarmError))
        except Exception as error:  # a broken check is a result too, and the others go on
            return Check(name, "failed", one_line(error), "please report this", swarm)

    @property
    def _url(self) -> str:
        """The URL of a mailbox, if that is the address."""
        return next(filter(is_mailbox, self.addresses), "")

    def _store(self) -> tuple[str, ...]:
        from diloco.swarm.client.ask import inspect_swarm, try_store

        took_s = self.figures["store_s"] = try_store(self._url)
        self._found = inspect_swarm((self._url,), self.directory.identity, gate=self._gate())
        times = ", ".join(f"{what} in {seconds:.3g} s" for what, seconds in took_s.items())
        return "ok", f"{self._url}: an object can be {times}"

    def _peers(self) -> Sequence[str]:
        return (self._found and self._found.addresses) or self.addresses

    def _gate(self) -> Gate:
        from diloco.swarm.wire.gate import observer_gate

        swarm = self.config.swarm
        return observer_gate(self.config.run.id, swarm.token, swarm.key_path)

    def _python(self) -> tuple[str, ...]:
        from importlib.metadata import version

        names = ", ".join(f"{name} {version(name)}" for name in ("torch", "hivemind"))
        system = platform.system()
        text = f"{platform.python_version()} on {system} {platform.machine()}, {names}"
        return ("ok", text) if system == "Linux" else ("warning", text, "only Linux is tested")

    def _swarm(self) -> tuple[str, ...]:
        from diloco.swarm.client.ask import inspect_swarm

        identity = self.directory.identity
        info = self._found = inspect_swarm(
            self.addresses, identity, for_doctor=True, gate=self._gate()
        )
        self.figures |= {"peers": len(info.peers), "peer_id": self.directory.peer_id}
        away = ""
        if info.peers:
            trips_s = statistics.median(peer.round_trip_s for peer in info.peers)
            latency_s = self.figures["latency_s"] = trips_s / 2
            away = f", {latency_s * 1e3:.3g} ms away"
        names = ", ".join(peer.reply.name for peer in info.peers) or "none gives a name"
        silent = "".join(f"; {address}: {why}" for address, why in info.silent.items())
        text = f"answered by {len(info.peers)}{away}: {names}{silent}"
        return "warning" if silent else "ok", text

    def _manifest(self, info: SwarmInfo) -> tuple[str, ...]:
        from diloco.swarm.client.ask import parse_manifest
        from diloco.volunteer.peer import volunteer_config

        manifest = parse_manifest(info.manifest_text)
        task = f"{manifest.model.name} on {manifest.data.source}"
        text = f"{manifest.run.id} ({manifest.hash()[:12]}), {task}"
        peers = self._peers()
        try:
            self.config = volunteer_config(self.config, manifest, self.typed, self.directory, peers)
        except ConfigError as error:
            return "failed", text, str(error)
        return "ok", text

    def _clock(self, info: SwarmInfo) -> tuple[str, ...]:
        from diloco.swarm.client.ask import check_clock

        ahead_s = self.figures["clock_ahead_s"] = info.ahead_s or 0.0
        each = ", ".join(f"{peer.ahead_s:+.3f}" for peer in info.peers)
        text = f"{ahead_s:+.3f} s against the swarm (by peer {each})"
        return ("ok", text) if check_clock(info) is None else ("warning", text, "let NTP set it")

    def _memory(self) -> tuple[str, ...]:
        from diloco.train.machine import inspect_machine, step_seconds
        from diloco.volunteer.peer import fit_to_machine

        config = self.config
        machine = inspect_machine(config.train.device, config.train.threads)
        need, micro_batch = fit_to_machine(config, machine)
        step_s = self.figures["step_s"] = step_seconds(config, micro_batch)
        batch_size = config.inner.batch_size
        tokens_per_s = batch_size * config.data.sequence_length / step_s
        free = machine.main_bytes if machine.shared else machine.device_bytes
        text = (
            f"{config.model.name}, {need.parameters / 1e6:.4g}M parameters, on {machine.name}:"
            f" {need.device_bytes / GIB:.2f} GiB to train, {need.main_bytes / GIB:.2f} GiB to take"
            f" part, {free / GIB:.1f} GiB free; {step_s:.3g} s per inner step,"
            f" {tokens_per_s:.4g} tokens/s; a batch of {batch_size}"
        )
        if micro_batch < batch_size:
            return "warning", f"{text} in parts of {micro_batch}"
        return "ok", f"{text} at once"

    def _disk(self) -> tuple[str, ...]:
        from diloco.train.machine import parameters_of

        run_dir = self.config.run.dir.absolute()
        existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        free, copies = shutil.disk_usage(existing).free, self.config.checkpoint.keep + 1
        needed = copies * CHECKPOINT_BYTES * parameters_of(self.config.model) + 1e8
        need = f"{needed / GIB:.2f} GiB needed for checkpoints and the model"
        text = f"{free / GIB:.1f} GiB free in {existing}, {need}"
        if free < needed:
            return "failed", text, "free some space, or choose another place with run.dir=DIRECTORY"
        return "ok", text

    def _port(self) -> tuple[str, ...]:
        from diloco.config.address import reachability
        from diloco.swarm.client.ask import try_to_listen

        swarm, peers = self.config.swarm, self._peers() if self._found is not None else ()
        addresses, reachable, advice = try_to_listen(
            peers, swarm.listen, swarm.announce, self._gate(), self.directory.identity
        )
        best, listen = addresses[0].rpartition("/p2p/")[0], ", ".join(swarm.listen)
        if not peers:
            where = f"for example as {best} ({reachability(best)})"
            return "ok", f"{listen} can be listened on, {where}"
        if reachable:
            return "ok", f"a peer called back {best}; no relay is needed"
        hidden = "it trains over its own connections and holds no fragments"
        return "warning", f"others cannot call this peer: {hidden}", advice
