"""Predicts utilization, bytes and bandwidth of a run from its link, before it starts, by arithmetic
alone.

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

import math
import re
from dataclasses import dataclass

from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.codecs import codec

# one-way trips of an exchange in the simulator: offer, payload, tip and record, each with its
# answers
TRIPS = 11

_BANDWIDTH = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


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
        """The exchange of a run with these settings; data parallel is an fp32 ring in every inner
        step."""
        # a ring moves as many bytes as one author of gradients per peer would
        if outer.method == "data_parallel":
            nbytes = codec("fp32").nbytes(numel)
            return cls(nbytes, nbytes, peers, sync_every=1, fragments=peers)
        up, down = codec(outer.codec_up).nbytes(numel), codec(outer.codec_down).nbytes(numel)
        state = down if codec(outer.codec_down).carries_values else codec("fp32").nbytes(numel)
        versions = 1 if outer.quorum is None else -(-peers // outer.quorum)
        every = outer.sync_every
        return cls(
            up, down, peers, every, outer.fragments, outer.overlap, outer.staggered, versions, state
        )

    @property
    def bytes_back(self) -> int:
        """Bytes of the whole model that come back to a contributor: updates, or the state if that
        is smaller."""
        return (
            self.bytes_down
            if self.versions == 1
            else min(self.versions * self.bytes_down, self.state_bytes)
        )

    @property
    def at_once(self) -> int:
        """The number of fragments that are exchanged together."""
        return 1 if self.staggered else self.fragments

    @property
    def authored(self) -> int:
        """The number of fragments of one exchange that the busiest peer is author of
        (`Facts.heir`)."""
        return -(-self.at_once // self.peers)

    @property
    def per_cycle(self) -> int:
        """The number of exchanges in `sync_every` inner steps."""
        return self.fragments // self.at_once

    @property
    def busiest_bytes(self) -> float:
        """Bytes of one exchange in each direction of the busiest author's link."""
        return (self.peers - 1) * self.authored / self.fragments * (self.bytes_up + self.bytes_back)


@dataclass(frozen=True)
class Prediction:
    """One outer step (`sync_every` inner steps) of a peer.

    utilization: the share of compute. exchange_s: seconds of one exchange, even if training goes on
        meanwhile.
    wait_s: seconds that the peer waits. bytes_sent: bytes that an average peer sends; it receives
        as many.
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
    utilization = compute_s / (compute_s + wait_s)
    return Prediction(
        utilization, compute_s, exchange_s, wait_s, sent, round(exchange.busiest_bytes)
    )


def needed_bits_per_s(
    exchange: ExchangeSize, latency_s: float, step_s: float, target: float
) -> float:
    """The bandwidth at which the utilization is `target` (0 to 1, exclusive); infinite if the
    latency forbids it."""
    if exchange.peers == 1:
        return 0.0
    allowed_s = (
        exchange.overlap * step_s
        + (1 - target) / target * exchange.sync_every * step_s / exchange.per_cycle
    )
    left_s = allowed_s - TRIPS * latency_s
    return 8 * exchange.busiest_bytes / left_s if left_s > 0 else math.inf


def needed_sync_every(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> int:
    """The smallest H with a utilization of at least `target` that the overlap and the fragments of
    `exchange` allow."""
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
    compute, wait, exchange_s = (
        _seconds(one) for one in (now.compute_s, now.wait_s, now.exchange_s)
    )
    both = f"({_bytes(exchange.bytes_up)} + {_bytes(exchange.bytes_back)})"
    needed = _scaled(needed_bits_per_s(exchange, link.latency_s, step_s, target), "bit/s")
    return [
        (
            "sent per peer and outer step",
            f"(1 - 1/{exchange.peers}) x {both} = {_bytes(now.bytes_sent)}",
        ),
        ("through the busiest author", f"{_bytes(now.peak_bytes)} per exchange"),
        ("one exchange", exchange_s if exchange.peers > 1 else "none: one peer"),
        ("compute, waiting", f"{compute} and {wait} per outer step"),
        ("utilization", f"{compute} / ({compute} + {wait}) = {now.utilization:.1%}"),
        (f"peak bandwidth for {target:.4g}", needed),
        (
            f"inner steps for {target:.4g}",
            f"{needed_sync_every(exchange, link, step_s, target)} between exchanges",
        ),
    ]


def parse_bandwidth(text: str) -> float:
    """`100Mbit`, `1.5Gbit/s` or `12MB/s` in bits per second; `ConfigError` for anything else, and
    for zero."""
    found = _BANDWIDTH.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"--bandwidth={text[:40]!r} is no bandwidth; write it like 100Mbit, 1.5Gbit or 12MB"
            " (per second)"
        )
    return float(found[1]) * _PREFIXES[found[2]] * (8 if found[3] == "B" else 1)


def _scaled(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "more than any link"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _bytes(value: float) -> str:
    return _scaled(value, "B")


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value < 1e4 else f"{value:,.0f} s"
