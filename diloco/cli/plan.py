"""`diloco plan`: how fast a run would be over a link, and a peer's memory, by arithmetic alone.

F fragments, which have one author each, are exchanged at once. The busiest of n peers has h =
ceil(F/n) of them, others have floor(F/n). U and D are the bytes of the whole model as contributions
and as updates; with a quorum K, D are those of n/K versions, or the state if that is smaller. An
exchange sends contributions, in max(U (1 - floor(F/n)/F) / up, (n - 1) U h/F / down), and then
updates, in max(D max(2 h/F, (1 - 1/n) b) / up, D (1 - floor(F/n)/F) / down): an author sends its
update twice, and peers pass parts on while they arrive, some more than others: b = (3 + log2(n))/4,
at most 2, is the busiest over the mean, as seen in `scripts/scenes`. That adds log2(n) parts, of
D/64F and at least 16 KiB, and there are 10 + log2(n) latencies. Overlap hides tau s, for tau inner
steps of s seconds. With a quorum K < n a peer goes on from the newest version that it has: it waits
only if an exchange takes longer than the steps between two. On a thin link more waiting is
predicted than there is: a version takes what comes while the one before is sent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from diloco.cli import Command, Options, configured
from diloco.errors import ConfigError
from diloco.text import counted, human_bytes, rate_bytes, rate_text

if TYPE_CHECKING:
    from diloco.config import Config, OuterConfig

GIB = 2**30
# One-way trips of an exchange of two in the simulator: offer, payload, tip, record, answers.
TRIPS = 11
PARTS, LEAST_PART = 64, 2**14  # parts of an update, and the least bytes of one
FRAGMENTS = {1, 2, 4, 8, 16, 24, 32}  # numbers that are compared
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command(cls=Command)
@configured
@click.option("--step-s", type=click.FloatRange(0, min_open=True), help="Seconds of an inner step.")
@click.option("--bandwidth", default="100Mbit", help="Of each peer's link: each way, or DOWN/UP.")
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
    diloco plan experiment=quickstart --bandwidth 100Mbit/20Mbit --target 0.99

    local.peers is the size of the swarm, and --bandwidth what a speed test says of the link.
    Without --step-s an inner step is measured here. The bandwidth and the inner steps that reach
    the target are printed, too, and the number of fragments with which peers wait least.
    """
    config = options.compose(together=True)
    from diloco.train.machine import memory_rows, parameters_of, sequence_bytes

    link = parse_link(bandwidth, latency_ms / 1000)
    numel, is_measured = parameters_of(config.model), step_s is None
    step_s = _measured_step(config) if step_s is None else step_s
    exchange = ExchangeSize.of(config.outer, numel, config.local.peers)
    needed = needed_link(exchange, link, step_s, target)
    most = most_fragments(config, numel)
    best, waits = compare_fragments(exchange, link, step_s, most)
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
        "needed_link": None if needed is None else asdict(needed),
        "needed_sync_every": needed_sync_every(exchange, link, step_s, target),
        "fragments": {"best": best, "wait_s": waits},
        "memory": [row._asdict() for row in memory_rows(config, exchange.peers)],
        "sequence_bytes": sequence_bytes(config),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return 0
    rows = _sizes(report, config.outer, exchange) + arithmetic(exchange, link, step_s, target)
    rows += [("fragments", _advice(best, exchange.fragments, waits))] if most else []
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    click.echo("\n".join([*lines, "", *_memory(report)]))
    return 0


def _measured_step(config: Config) -> float:
    """Measure seconds of an inner step here; `ConfigError` where the model does not fit."""
    from diloco.train.machine import inspect_machine, step_seconds
    from diloco.volunteer.peer import fit_to_machine

    machine = inspect_machine(config.train.device, config.train.threads)
    try:
        _, micro_batch = fit_to_machine(config, machine)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give --step-s, and no step is measured here") from None
    return step_seconds(config, micro_batch)


def _sizes(
    report: dict[str, Any], outer: OuterConfig, exchange: ExchangeSize
) -> list[tuple[str, str]]:
    """List the model, its peers and what they exchange, as pairs of a name and a value."""
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
    """Return the lines of the table of a peer's memory, with sums."""

    def line(where: str, purpose: str, nbytes: float, each: float | None = None) -> str:
        per = "" if each is None else f"{each:.3g}"
        return f"  {where:<12}{purpose:<45}{per:>5}{nbytes / GIB:>12.3f}"

    lines = [f"memory of a peer{'':29}bytes per parameter{'':9}GiB"]
    for where, name in (("device", "device"), ("main", "main memory"), ("spare", "if free")):
        rows = [row for row in report["memory"] if row["where"] == where]
        lines += [line(name, row["what"], row["nbytes"], row["per_parameter"]) for row in rows]
        if where != "spare":
            lines.append(line(name, "in all", sum(row["nbytes"] for row in rows)))
    return [*lines, line("device", "activations of one sequence, about", report["sequence_bytes"])]


@dataclass(frozen=True)
class NetworkLink:
    """A peer's link; the latency is one way."""

    down_bytes_per_s: float
    up_bytes_per_s: float
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
        """Return the exchange of a run; data parallel is an fp32 ring in every inner step."""
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
        """Bytes of the model that a peer receives: updates, or the state if it is smaller."""
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
    def hidden_steps(self) -> float:
        """Inner steps that go on during an exchange; all up to the next if others make versions."""
        return self.overlap if self.versions == 1 else self.sync_every / self.per_cycle

    @property
    def phases(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes through the busiest uplink and downlink: of contributions, then of updates."""
        peers, authored = self.peers, -(-self.at_once // self.peers)  # as in `Facts.heir`
        of_others = self.at_once - self.at_once // peers
        sent, back = self.bytes_up / self.fragments, self.bytes_back / self.fragments
        busiest = min(2.0, (3 + math.log2(peers)) / 4)  # over the mean
        passed_on = self.at_once * (1 - 1 / peers) * busiest
        copies = max(min(2, peers - 1) * authored, passed_on)
        return (of_others * sent, (peers - 1) * authored * sent), (copies * back, of_others * back)

    def seconds(self, link: NetworkLink) -> tuple[float, float]:
        """Seconds of one exchange for its bytes, and for its latencies."""
        if self.peers == 1:
            return 0.0, 0.0
        up, down, hops = link.up_bytes_per_s, link.down_bytes_per_s, math.log2(self.peers)
        update = self.bytes_back / self.fragments
        relays_s = hops * min(update, max(update / PARTS, LEAST_PART)) / up
        phases_s = sum(max(sent / up, got / down) for sent, got in self.phases)
        return phases_s + relays_s, (TRIPS - 1 + hops) * link.latency_s


@dataclass(frozen=True)
class Prediction:
    """One outer step (`sync_every` inner steps) of a peer.

    utilization: the share of compute. exchange_s: seconds of one exchange, even if training goes on
        meanwhile. wait_s: seconds that the peer waits.
    bytes_sent: bytes that an average peer sends; it receives as many.
    peak_bytes: bytes of one exchange through the busiest uplink or downlink, at most.
    """

    utilization: float
    compute_s: float
    exchange_s: float
    wait_s: float
    bytes_sent: int
    peak_bytes: int


def predict(exchange: ExchangeSize, link: NetworkLink, step_s: float) -> Prediction:
    """Predict the outer step of peers whose inner steps take `step_s` seconds each."""
    exchange_s = sum(exchange.seconds(link))
    compute_s = exchange.sync_every * step_s
    wait_s = exchange.per_cycle * max(0.0, exchange_s - exchange.hidden_steps * step_s)
    sent = round((1 - 1 / exchange.peers) * (exchange.bytes_up + exchange.bytes_back))
    share = compute_s / (compute_s + wait_s)
    peak = round(max(map(sum, zip(*exchange.phases, strict=True))))
    return Prediction(share, compute_s, exchange_s, wait_s, sent, peak)


def needed_link(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> NetworkLink | None:
    """Scale the link so that utilization is `target` (0 to 1, exclusive); None if none does."""
    wait_s = (1 - target) / target * exchange.sync_every * step_s / exchange.per_cycle
    transfer_s, latencies_s = exchange.seconds(link)
    left_s = exchange.hidden_steps * step_s + wait_s - latencies_s
    down, up = (transfer_s * rate for rate in (link.down_bytes_per_s, link.up_bytes_per_s))
    return NetworkLink(down / left_s, up / left_s, link.latency_s) if left_s > 0 else None


def needed_sync_every(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> int:
    """Return the smallest H for a utilization of `target` that overlap and fragments allow."""
    exchange_s = sum(exchange.seconds(link))
    if exchange.versions == 1:
        steps = target / (1 - target) * (exchange_s / step_s - exchange.overlap)
    else:
        steps = target * exchange_s / step_s
    # a rounding error over a whole number does not add a step
    interval = max(exchange.overlap + 1, math.ceil(steps - 1e-9 - 1e-12 * abs(steps)))
    return interval * exchange.per_cycle


def arithmetic(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> list[tuple[str, str]]:
    """List the prediction as pairs of a name and a value, the larger ones with their formula."""
    now = predict(exchange, link, step_s)
    compute, wait, sync = (_seconds(each) for each in (now.compute_s, now.wait_s, now.exchange_s))
    both = f"({human_bytes(exchange.bytes_up)} + {human_bytes(exchange.bytes_back)})"
    sent = f"(1 - 1/{exchange.peers}) x {both} = {human_bytes(now.bytes_sent)}"
    needed = needed_link(exchange, link, step_s, target)
    interval = needed_sync_every(exchange, link, step_s, target)
    return [
        ("link", f"{_rates(link)}, {link.latency_s * 1e3:.4g} ms one way"),
        ("sent per peer and outer step", sent),
        ("through the busiest link", f"{human_bytes(now.peak_bytes)} per exchange"),
        ("one exchange", sync if exchange.peers > 1 else "none: one peer"),
        ("compute, waiting", f"{compute} and {wait} per outer step"),
        ("utilization", f"{compute} / ({compute} + {wait}) = {now.utilization:.1%}"),
        (
            f"peak bandwidth for {target:.4g}",
            "more than any link" if needed is None else _rates(needed),
        ),
        (f"inner steps for {target:.4g}", f"{interval} between exchanges"),
    ]


def most_fragments(config: Config, numel: int) -> int:
    """Return the most fragments that model and schedule allow; 0 where there are no authors."""
    outer, layers = config.outer, config.model.config.get("num_hidden_layers")
    dealt = layers if isinstance(layers, int) else outer.fragments
    most = min(numel, dealt if outer.pattern == "strided" else numel)
    most = min(most, outer.sync_every) if outer.staggered else most
    return 0 if outer.method == "data_parallel" else most


def compare_fragments(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, most: int
) -> tuple[int, dict[int, float]]:
    """Return the best number of fragments up to `most`, and the seconds waited for each.

    Of those within 5 % of the shortest wait it is the number that is set, or else the lowest.
    """
    now = exchange.fragments
    tried = sorted({now} | {n for n in FRAGMENTS | {exchange.peers} if n <= most})
    waits = {n: predict(replace(exchange, fragments=n), link, step_s).wait_s for n in tried}
    good = [n for n in tried if waits[n] <= 1.05 * min(waits.values())]
    return now if now in good else good[0], waits


def _advice(best: int, now: int, waits: Mapping[int, float]) -> str:
    shown = sorted({best, now if best != now else min(waits)})
    each = (f"{_seconds(waits[number])} with {counted(number, 'fragment')}" for number in shown)
    return f"waiting {', '.join(each)}: outer.fragments={best}"


def parse_link(text: str, latency_s: float = 0.0) -> NetworkLink:
    """Parse `100Mbit` (both ways) or `100Mbit/20Mbit` (down/up); `ConfigError` for others."""
    down, *up = re.split(r"/(?=[\s\d.])", text, maxsplit=1)
    try:
        return NetworkLink(rate_bytes(down), rate_bytes(*(up or [down])), latency_s)
    except ValueError as error:
        raise ConfigError(f"--bandwidth={text[:40]!r} {error}") from None


def _rates(link: NetworkLink) -> str:
    both = (link.down_bytes_per_s, link.up_bytes_per_s)
    down, up = (rate_text(float(f"{8 * rate:.3g}") / 8) for rate in both)
    return f"{down} each way" if down == up else f"{down} down, {up} up"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value < 1e4 else f"{value:,.0f} s"
