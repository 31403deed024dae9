"""What a link makes of a run, before it starts: utilization, bytes and bandwidth, by arithmetic alone.

Streaming DiLoCo (arXiv 2501.18512) counts 2 N bits (1 - 1/n) per outer step over an all-reduce. Here every fragment
has one syncer. Of n peers the busiest holds h = ceil(F/n) of the F fragments that are exchanged at once, and through
its link go, in each direction once,

    (n - 1) h/F U   contributions of the others        U, D: bytes of the exchanged fragments up and down
    (n - 1) h/F D   updates to the others

With F a multiple of n this is (1 - 1/n) (U + D), as there. The two follow each other, so one exchange takes
T = 8 (n - 1) h/F (U + D) / W + 6 latency: streams are opened, and it is agreed who takes part, before anything moves.
Of that the overlap hides tau s; the rest is waited for once per outer step, or once per fragment where fragments are
staggered. Against `diloco simulate` (1.6M parameters, 4 peers, 1 MB/s, 50 ms) the wait is up to a sixth too short where
fragments go together, as streams that share links do not keep all of them busy, and a third too long where they are
staggered, as one that is late uses what others leave. Models of a few chunks wait longer than this says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.codecs import codec

__all__ = [
    "HIGHEST_H",
    "Exchange",
    "Figures",
    "Link",
    "Prediction",
    "Recommendation",
    "arithmetic",
    "needed_bits_per_s",
    "needed_sync_every",
    "parse_bandwidth",
    "predict",
    "read_figures",
    "recommend",
]

HIGHEST_H = 500  # DiLoCo's own (arXiv 2311.08105); beyond it the loss suffers
TRIPS = 6  # one-way trips of an exchange in the simulator, once a run is under way
SAFE_OVERLAP = 5  # up to here the loss does not change (Streaming DiLoCo)

_BANDWIDTH = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Link:
    """Of each peer, each way; the latency is one way."""

    bits_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """What n = `peers` exchange every H = `sync_every` inner steps.

    `bytes_up` and `bytes_down` are the whole model in the encodings of pseudo-gradients and of updates.
    """

    bytes_up: int
    bytes_down: int
    peers: int
    sync_every: int
    fragments: int = 1
    overlap: int = 0
    staggered: bool = False

    @classmethod
    def of(cls, outer: OuterConfig, numel: int, peers: int) -> Exchange:
        """What a run with these settings exchanges; data parallel as a ring in every inner step, in fp32."""
        if outer.method == "data_parallel":  # a ring moves what as many syncers of gradients would
            nbytes = codec("fp32").nbytes(numel)
            return cls(nbytes, nbytes, peers, sync_every=1, fragments=peers)
        return cls(
            codec(outer.codec_up).nbytes(numel),
            codec(outer.codec_down).nbytes(numel),
            peers,
            sync_every=outer.sync_every,
            fragments=outer.fragments,
            overlap=outer.overlap,
            staggered=outer.staggered,
        )

    @property
    def at_once(self) -> int:
        """Fragments that are exchanged together."""
        return 1 if self.staggered else self.fragments

    @property
    def held(self) -> int:
        """Fragments of one exchange that the busiest syncer holds, as `protocol.rendezvous` deals them out."""
        return -(-self.at_once // self.peers)

    @property
    def per_cycle(self) -> int:
        """Exchanges in `sync_every` inner steps."""
        return self.fragments // self.at_once

    @property
    def busiest_bytes(self) -> float:
        """Bytes of one exchange through the link of the busiest syncer, one direction after the other."""
        return (self.peers - 1) * self.held / self.fragments * (self.bytes_up + self.bytes_down)


@dataclass(frozen=True)
class Prediction:
    """Of one outer step (`sync_every` inner steps) of a peer.

    utilization: share of compute. bytes_sent: of an average peer; it receives as many. exchange_s: one exchange,
    whether or not training goes on meanwhile. wait_s: what is waited for. peak_bytes: of one exchange, through the
    link of the busiest syncer.
    """

    utilization: float
    compute_s: float
    exchange_s: float
    wait_s: float
    bytes_sent: int
    peak_bytes: int


@dataclass(frozen=True)
class Recommendation:
    """Settings that reach a target, and the prediction for them."""

    codec_up: str
    codec_down: str
    exchange: Exchange
    prediction: Prediction


def predict(exchange: Exchange, link: Link, step_s: float) -> Prediction:
    """The outer step of peers whose inner steps take `step_s` seconds each."""
    exchange_s = 0.0
    if exchange.peers > 1:
        exchange_s = 8 * exchange.busiest_bytes / link.bits_per_s + TRIPS * link.latency_s
    compute_s = exchange.sync_every * step_s
    wait_s = exchange.per_cycle * max(0.0, exchange_s - exchange.overlap * step_s)
    sent = (1 - 1 / exchange.peers) * (exchange.bytes_up + exchange.bytes_down)
    return Prediction(
        utilization=compute_s / (compute_s + wait_s),
        compute_s=compute_s,
        exchange_s=exchange_s,
        wait_s=wait_s,
        bytes_sent=round(sent),
        peak_bytes=round(exchange.busiest_bytes),
    )


def needed_bits_per_s(exchange: Exchange, latency_s: float, step_s: float, target: float) -> float:
    """The bandwidth at which the utilization is `target` (0 to 1, exclusive); infinite where the latency forbids it."""
    if exchange.peers == 1:
        return 0.0
    allowed_s = exchange.overlap * step_s + (1 - target) / target * exchange.sync_every * step_s / exchange.per_cycle
    left_s = allowed_s - TRIPS * latency_s
    return 8 * exchange.busiest_bytes / left_s if left_s > 0 else math.inf


def needed_sync_every(exchange: Exchange, link: Link, step_s: float, target: float) -> int:
    """The smallest H with a utilization of at least `target` that the overlap and the fragments of `exchange` allow."""
    wait_s = predict(exchange, link, step_s).wait_s / exchange.per_cycle
    interval = max(exchange.overlap + 1, math.ceil(target / (1 - target) * wait_s / step_s - 1e-9))
    return interval * exchange.per_cycle


def recommend(
    exchange: Exchange, codecs: tuple[str, str], nbytes: Callable[[str], int], link: Link, step_s: float, target: float
) -> Recommendation:
    """The mildest change of the settings by which the utilization reaches `target`.

    In this order: as many fragments as spread evenly, another H, int8, overlap, staggered fragments, 4 bits up. The
    first that needs no H above 500 is taken, else the one with the smallest H. An H that suffices already is kept.

    Args:
        codecs: names of the encodings up and down that `exchange` has.
        nbytes: bytes of the whole model in an encoding, by name.
    """
    even = -(-exchange.fragments // exchange.peers) * exchange.peers
    found: list[Recommendation] = []
    for up, down, overlap, staggered in _candidates(exchange, codecs):
        candidate = replace(
            exchange, bytes_up=nbytes(up), bytes_down=nbytes(down), fragments=even, overlap=overlap, staggered=staggered
        )
        needed = needed_sync_every(candidate, link, step_s, target)
        candidate = replace(candidate, sync_every=max(needed, exchange.sync_every))
        found.append(Recommendation(up, down, candidate, predict(candidate, link, step_s)))
        if needed <= max(HIGHEST_H, exchange.sync_every):
            return found[-1]
    return min(found, key=lambda one: one.exchange.sync_every)


def _candidates(exchange: Exchange, codecs: tuple[str, str]) -> Iterator[tuple[str, str, int, bool]]:
    """Yields (codec up, codec down, overlap, staggered), the mildest first."""
    overlap, staggered = exchange.overlap, exchange.staggered
    longer = max(overlap, SAFE_OVERLAP)
    yield *codecs, overlap, staggered
    if exchange.bytes_up >= exchange.bytes_down:  # else it is compressed more than any of these
        yield "int8", "int8", overlap, staggered
        yield "int8", "int8", longer, staggered
        yield "int8", "int8", longer, True
        yield "e3m0", "int8", longer, staggered
        yield "e3m0", "int8", longer, True


def arithmetic(exchange: Exchange, link: Link, step_s: float, target: float) -> list[tuple[str, str]]:
    """The prediction as (what, sum with its numbers), line by line."""
    now = predict(exchange, link, step_s)
    n, fragments, cycles = exchange.peers, exchange.at_once, exchange.per_cycle
    up, down = _bytes(exchange.bytes_up), _bytes(exchange.bytes_down)
    parts = f"{n - 1} x {exchange.held}/{fragments} x ({up} + {down}){f' / {cycles} fragments' if cycles > 1 else ''}"
    wait = f"max(0, {_seconds(now.exchange_s)} - {exchange.overlap} x {_seconds(step_s)})"
    allowed = f"{exchange.overlap} x {_seconds(step_s)} + {(1 - target) / target:.4g} x {_seconds(now.compute_s)}"
    if cycles > 1:
        allowed += f" / {cycles}"
    needed = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    return [
        ("sent per peer and outer step", f"(1 - 1/{n}) x ({up} + {down}) = {_bytes(now.bytes_sent)}"),
        ("through the busiest syncer", f"{parts} = {_bytes(now.peak_bytes)} per exchange"),
        (
            "one exchange",
            f"8 x {_bytes(now.peak_bytes)} / {_bits(link.bits_per_s)} + {TRIPS} x {_seconds(link.latency_s)}"
            f" = {_seconds(now.exchange_s)}"
            if n > 1
            else "none: one peer",
        ),
        ("compute", f"{exchange.sync_every} x {_seconds(step_s)} = {_seconds(now.compute_s)} per outer step"),
        ("waiting", f"{f'{cycles} x ' if cycles > 1 else ''}{wait} = {_seconds(now.wait_s)} per outer step"),
        (
            "utilization",
            f"{_seconds(now.compute_s)} / ({_seconds(now.compute_s)} + {_seconds(now.wait_s)}) = {now.utilization:.1%}",
        ),
        (
            f"peak bandwidth for {target:.4g}",
            f"8 x {_bytes(now.peak_bytes)} / ({allowed} - {TRIPS} x {_seconds(link.latency_s)}) = {_bits(needed)}",
        ),
    ]


def parse_bandwidth(text: str) -> float:
    """`100Mbit`, `1.5Gbit/s`, `20Mbps` or `12MB/s` in bits per second; B is bytes, prefixes are powers of 1000.

    Raises `ConfigError` for anything else, and for zero.
    """
    found = _BANDWIDTH.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"--bandwidth={text[:40]!r} is no bandwidth; write it like 100Mbit, 1.5Gbit or 12MB (per second)"
        )
    return float(found[1]) * _PREFIXES[found[2]] * (8 if found[3] == "B" else 1)


@dataclass(frozen=True)
class Figures:
    """What a plan takes of a link and a machine; the defaults are those of an ordinary connection."""

    bits_per_s: float = 100e6
    latency_ms: float = 50.0
    step_s: float | None = None


def read_figures(path: Path) -> Figures:
    """What `diloco doctor --json` has measured, with the slower direction of the link.

    Raises `ConfigError` if the file cannot be read, or is no such report.
    """
    try:
        found = json.loads(path.read_text())["figures"]
        defaults = Figures()
        rates = [float(found[key]) for key in ("up_bits_per_s", "down_bits_per_s") if key in found]
        figures = Figures(
            min(rates, default=defaults.bits_per_s),
            1000 * float(found["latency_s"]) if "latency_s" in found else defaults.latency_ms,
            float(found["step_s"]) if found.get("step_s") else None,
        )
    except OSError as error:
        raise ConfigError(f"--doctor={path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"--doctor={path} is no report; write one with diloco doctor ADDRESS --json > FILE") from None
    if not (figures.bits_per_s > 0 and figures.latency_ms >= 0 and (figures.step_s is None or figures.step_s > 0)):
        raise ConfigError(f"--doctor={path} holds figures that cannot be; run diloco doctor again")
    return figures


def _scaled(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "more than any link"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _bytes(value: float) -> str:
    return _scaled(value, "B")


def _bits(value: float) -> str:
    return _scaled(value, "bit/s")


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value < 1e4 else f"{value:,.0f} s"
