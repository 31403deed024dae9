"""`diloco plan`: what a link would make of a run, and the memory of a peer, by arithmetic alone.

F fragments, which have one author each, are exchanged at once, and the busiest of n peers has h =
ceil(F/n) of them. Its link carries in each direction (n - 1) h/F (U + D) bytes: contributions of
the others, U for the whole model, and updates to them, D (arXiv 2501.18512 counts the same for an
all-reduce). With a quorum K, n/K versions are made while a peer trains, and D are the updates of
them all, or the state if that is smaller. So one exchange takes T = 8 (n - 1) h/F (U + D) / W + 11
latency at bandwidth W. Overlap hides tau s of it, for tau inner steps of s seconds.

Compared with `diloco simulate` (37,000 parameters, 4 peers, 1 MB/s, 50 ms), the predicted wait is
up to a tenth too short if fragments go together, and a tenth too long if they are staggered.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from diloco.cli import Command, Options, configured
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.config import Config, OuterConfig

GIB = 2**30
TRIPS = 11  # one-way trips of an exchange in the simulator: offer, payload, tip, record, answers

_BANDWIDTH = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?\s*")
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(cls=Command)
@configured
@click.option("--step-s", type=click.FloatRange(0, min_open=True), help="Seconds of an inner step.")
@click.option("--bandwidth", default="100Mbit", help="Of each peer's link, each way.")
@click.option("--latency-ms", type=click.FloatRange(0, 60_000), default=50.0, help="One way.")
@click.option("--target", type=_SHARE, default=0.95, help="Utilization to plan for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(
    options: Options,
    step_s: float | None,
    bandwidth: str,
    latency_ms: float,
    target: float,
    as_json: bool,
) -> int:
    """Predict utilization, bytes and bandwidth, with the arithmetic.

    \b
    diloco plan model=150m local.peers=8 --step-s 1 --bandwidth 100Mbit
    diloco plan experiment=quickstart --target 0.99

    local.peers is the size of the swarm, and diloco doctor measures a link. Without --step-s an
    inner step is measured here. The bandwidth and the inner steps that reach the target are
    printed, too.
    """
    config = options.compose()
    from diloco.train.machine import memory_rows, parameters_of, sequence_bytes

    link = NetworkLink(parse_bandwidth(bandwidth), latency_ms / 1000)
    numel, is_measured = parameters_of(config.model), step_s is None
    step_s = _measured_step(config) if step_s is None else step_s
    exchange = ExchangeSize.of(config.outer, numel, config.local.peers)
    needed = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    report: dict[str, Any] = {
        "model": config.model.name,
        "parameters": numel,
        "peers": exchange.peers,
        "step_s": step_s,
        "step_measured": is_measured,
        "link": asdict(link),
        "target": target,
        "exchange": asdict(exchange),
        "predicted": asdict(predict(exchange, link, step_s)),
        "needed_bits_per_s": needed if math.isfinite(needed) else None,
        "needed_sync_every": needed_sync_every(exchange, link, step_s, target),
        "memory": [row._asdict() for row in memory_rows(config, exchange.peers)],
        "sequence_bytes": sequence_bytes(config),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return 0
    rows = _sizes(report, config.outer, exchange) + arithmetic(exchange, link, step_s, target)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    click.echo("\n".join([*lines, "", *_memory(report)]))
    return 0


def _measured_step(config: Config) -> float:
    """Seconds of an inner step here; `ConfigError` where the model does not fit."""
    from diloco.cli.volunteer import fit_to_machine
    from diloco.train.machine import inspect_machine, step_seconds

    machine = inspect_machine(config.train.device, config.train.threads)
    try:
        _, micro_batch = fit_to_machine(config, machine)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give --step-s, and no step is measured here") from None
    return step_seconds(config, micro_batch)


def _sizes(
    report: dict[str, Any], outer: OuterConfig, exchange: ExchangeSize
) -> list[tuple[str, str]]:
    """The model, its peers and what they exchange, as pairs of a name and a value."""
    numel = report["parameters"]
    is_parallel = outer.method == "data_parallel"
    up, down = ("fp32", "fp32") if is_parallel else (outer.codec_up, outer.codec_down)

    def size(nbytes: int) -> str:
        return f"{nbytes:,} B ({nbytes / numel:.4g} per parameter)"

    how = "measured here" if report["step_measured"] else "as given"
    both = f"{up} {size(exchange.bytes_up)} and {down} {size(exchange.bytes_down)}"
    rows = [
        ("model", f"{report['model']}, {numel:,} parameters"),
        ("peers", f"{exchange.peers}, exchanging every {exchange.sync_every} inner steps"),
        ("inner step", f"{report['step_s']:.4g} s, {how}"),
        ("up, down", both),
    ]
    if exchange.versions > 1:
        rows.append(("back", f"{exchange.versions} versions in {size(exchange.bytes_back)}"))
    return rows


def _memory(report: dict[str, Any]) -> list[str]:
    """The table of what a peer takes, with sums."""

    def line(where: str, what: str, nbytes: float, each: float | None = None) -> str:
        per = "" if each is None else f"{each:.3g}"
        return f"  {where:<12}{what:<45}{per:>5}{nbytes / GIB:>12.3f}"

    lines = [f"memory of a peer{'':29}bytes per parameter{'':9}GiB"]
    for where, name in (("device", "device"), ("main", "main memory"), ("spare", "if free")):
        rows = [row for row in report["memory"] if row["where"] == where]
        lines += [line(name, one["what"], one["nbytes"], one["per_parameter"]) for one in rows]
        if where != "spare":
            lines.append(line(name, "in all", sum(one["nbytes"] for one in rows)))
    return [*lines, line("device", "activations of one sequence, about", report["sequence_bytes"])]


@dataclass(frozen=True)
class NetworkLink:
    """A peer's link, with the same bandwidth in both directions; the latency is one way."""

    bits_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class ExchangeSize:
    """The exchange of `peers` = n peers in each H = `sync_every` inner steps.

    `bytes_up` and `bytes_down` are the sizes of the whole model, encoded as pseudo-gradients and as
    updates, and `state_bytes` as anchors. `versions` are made from a peer's exchange to its next.
    """

    bytes_up: int
    bytes_down: int
    peers: int
    sync_every: int
    fragments: int = 1
    overlap: int = 0
    staggered: bool = False
    versions: int = 1
    state_bytes: int = 0

    @classmethod
    def of(cls, outer: OuterConfig, numel: int, peers: int) -> ExchangeSize:
        """The exchange of a run; data parallel is an fp32 ring in every inner step."""
        from diloco.outer.codecs import CODECS

        full = CODECS["fp32"].nbytes(numel)
        # a ring moves as many bytes as one author of gradients per peer would
        if outer.method == "data_parallel":
            return cls(full, full, peers, sync_every=1, fragments=peers)
        down = CODECS[outer.codec_down].nbytes(numel)
        return cls(
            CODECS[outer.codec_up].nbytes(numel),
            down,
            peers,
            outer.sync_every,
            outer.fragments,
            outer.overlap,
            outer.staggered,
            versions=1 if outer.quorum is None else -(-peers // outer.quorum),
            state_bytes=down if CODECS[outer.codec_down].carries_values else full,
        )

    @property
    def bytes_back(self) -> int:
        """Bytes of the model that come back: updates, or the state if that is smaller."""
        if self.versions == 1:
            return self.bytes_down
        return min(self.versions * self.bytes_down, self.state_bytes)

    @property
    def at_once(self) -> int:
        """The number of fragments that are exchanged together."""
        return 1 if self.staggered else self.fragments

    @property
    def per_cycle(self) -> int:
        """The number of exchanges in `sync_every` inner steps."""
        return self.fragments // self.at_once

    @property
    def busiest_bytes(self) -> float:
        """Bytes of one exchange in each direction of the busiest author's link."""
        authored = -(-self.at_once // self.peers)  # fragments of one exchange (`Facts.heir`)
        share = (self.peers - 1) * authored / self.fragments
        return share * (self.bytes_up + self.bytes_back)


@dataclass(frozen=True)
class Prediction:
    """One outer step (`sync_every` inner steps) of a peer.

    utilization: the share of compute. exchange_s: seconds of one exchange, even if training goes on
        meanwhile. wait_s: seconds that the peer waits.
    bytes_sent: bytes that an average peer sends; it receives as many.
    peak_bytes: bytes of one exchange through the busiest author's link.
    """

    utilization: float
    compute_s: float
    exchange_s: float
    wait_s: float
    bytes_sent: int
    peak_bytes: int


def predict(exchange: ExchangeSize, link: NetworkLink, step_s: float) -> Prediction:
    """The outer step of peers whose inner steps take `step_s` seconds each."""
    exchange_s = 0.0
    if exchange.peers > 1:
        exchange_s = 8 * exchange.busiest_bytes / link.bits_per_s + TRIPS * link.latency_s
    compute_s = exchange.sync_every * step_s
    wait_s = exchange.per_cycle * max(0.0, exchange_s - exchange.overlap * step_s)
    sent = round((1 - 1 / exchange.peers) * (exchange.bytes_up + exchange.bytes_back))
    share, peak = compute_s / (compute_s + wait_s), round(exchange.busiest_bytes)
    return Prediction(share, compute_s, exchange_s, wait_s, sent, peak)


def needed_bits_per_s(
    exchange: ExchangeSize, latency_s: float, step_s: float, target: float
) -> float:
    """The bandwidth for a utilization of `target` (0 to 1, exclusive); infinite if none does."""
    if exchange.peers == 1:
        return 0.0
    wait_s = (1 - target) / target * exchange.sync_every * step_s / exchange.per_cycle
    left_s = exchange.overlap * step_s + wait_s - TRIPS * latency_s
    return 8 * exchange.busiest_bytes / left_s if left_s > 0 else math.inf


def needed_sync_every(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> int:
    """The smallest H for a utilization of `target` that overlap and fragments allow."""
    wait_s = predict(exchange, link, step_s).wait_s / exchange.per_cycle
    steps = target / (1 - target) * wait_s / step_s
    # a whole number is rounded, too
    interval = max(exchange.overlap + 1, math.ceil(steps - 1e-9 - 1e-12 * steps))
    return interval * exchange.per_cycle


def arithmetic(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> list[tuple[str, str]]:
    """The prediction as pairs of a name and a value, for the larger ones with the formula."""
    now = predict(exchange, link, step_s)
    compute, wait, one = (_seconds(each) for each in (now.compute_s, now.wait_s, now.exchange_s))
    both = f"({_scaled(exchange.bytes_up, 'B')} + {_scaled(exchange.bytes_back, 'B')})"
    sent = f"(1 - 1/{exchange.peers}) x {both} = {_scaled(now.bytes_sent, 'B')}"
    bandwidth = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    interval = needed_sync_every(exchange, link, step_s, target)
    return [
        ("sent per peer and outer step", sent),
        ("through the busiest author", f"{_scaled(now.peak_bytes, 'B')} per exchange"),
        ("one exchange", one if exchange.peers > 1 else "none: one peer"),
        ("compute, waiting", f"{compute} and {wait} per outer step"),
        ("utilization", f"{compute} / ({compute} + {wait}) = {now.utilization:.1%}"),
        (f"peak bandwidth for {target:.4g}", _scaled(bandwidth, "bit/s")),
        (f"inner steps for {target:.4g}", f"{interval} between exchanges"),
    ]


def parse_bandwidth(text: str) -> float:
    """`100Mbit`, `1.5Gbit/s` or `12MB/s` in bits per second; else, and for zero, `ConfigError`."""
    found = _BANDWIDTH.fullmatch(text)
    if found is None or float(found[1]) == 0:
        example = "write it like 100Mbit, 1.5Gbit or 12MB (per second)"
        raise ConfigError(f"--bandwidth={text[:40]!r} is no bandwidth; {example}")
    return float(found[1]) * _PREFIXES[found[2]] * (8 if found[3] == "B" else 1)


def _scaled(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "more than any link"
    size, prefix = next(
        ((size, prefix) for prefix, size in _PREFIXES.items() if value >= size * 0.9995), (1.0, "")
    )
    return f"{value / size:.3g} {prefix}{unit}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value < 1e4 else f"{value:,.0f} s"
