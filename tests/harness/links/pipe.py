"""One direction of an emulated link, in virtual time: packets are lost, wait for the rate, then for
the delay.

    push(now, packet) -> lost by chance | dropped, as the queue is full | leaves at (end of its
    transmission) + delay

Nothing here reads a clock. Packets keep their order.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE_S = 0.4  # a queue of that length in front of the rate, then packets are dropped
# but some packets of 64 KiB wait in any case, or a slow link would carry none
FEWEST_BYTES = 256 * 1024
RATES = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Shape:
    """What one direction of a link does to packets. `loss` is a share of packets, `rate` in bytes
    per second."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate: float | None = None

    def then(self, other: Shape) -> Shape:
        """Both in a row, as one."""
        rates = [rate for rate in (self.rate, other.rate) if rate is not None]
        loss = 1 - (1 - self.loss) * (1 - other.loss)
        return Shape(self.delay_s + other.delay_s, loss, min(rates, default=None))


class Pipe:
    """A queue; the same seed and the same packets at the same times give the same fate to each."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.lost = self.dropped = self.passed = 0
        self._draw = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()  # when a packet leaves, in order
        self._free_at = 0.0
        self._last_at = 0.0

    @property
    def next_at(self) -> float | None:
        """When the next packet leaves."""
        return self._queue[0][0] if self._queue else None

    def push(self, now: float, packet: bytes) -> None:
        shape = self.shape
        if shape.loss and self._draw.random() < shape.loss:
            self.lost += 1
            return
        at = now
        if shape.rate is not None:
            begins_at = max(now, self._free_at)
            if begins_at - now > max(PATIENCE_S, FEWEST_BYTES / shape.rate):
                self.dropped += 1
                return
            at = self._free_at = begins_at + len(packet) / shape.rate
        self._last_at = max(at + shape.delay_s, self._last_at)
        self._queue.append((self._last_at, packet))

    def pull(self, now: float) -> list[bytes]:
        """The packets that have left by now."""
        gone = []
        while self._queue and self._queue[0][0] <= now:
            gone.append(self._queue.popleft()[1])
        self.passed += len(gone)
        return gone


# Values are written as `tc` takes them; each of these raises `ValueError` with an example.


def rate_bytes(text: str) -> float:
    """Bytes per second of `2mbit`."""
    return _scaled(text, RATES, "a rate such as 2mbit") / 8


def delay_s(text: str) -> float:
    """Seconds of `50ms`."""
    return _scaled(text, TIMES, "a time such as 50ms", zero=True)


def share(text: str) -> float:
    """The part of `2%`."""
    value = _scaled(text, {"%": 0.01}, "a loss such as 2%", zero=True)
    if value >= 1:
        raise ValueError(f"{text!r}: a link that loses all is no link; expected less than 100%")
    return value


def _scaled(text: str, units: dict[str, float], example: str, zero: bool = False) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z%]+)", text)
    if match is None or match[2] not in units or (float(match[1]) == 0 and not zero):
        raise ValueError(f"{text!r} is not {example}")
    return float(match[1]) * units[match[2]]


# A fault of a link: what of its shape it sets, an example, and the reader.
WORSE: dict[str, tuple[str, str, Callable[[str], float]]] = {
    "slow": ("rate", "2mbit", rate_bytes),
    "delay": ("delay_s", "50ms", delay_s),
    "loss": ("loss", "2%", share),
}
