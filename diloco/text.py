"""Formats numbers, durations and untrusted text for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["counted", "human_bytes", "human_count", "human_seconds", "one_line", "plain", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"


def plain(value: object) -> str:
    """Printable text on one line: text that a peer sent can neither move a cursor nor break a line."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def one_line(error: BaseException) -> str:
    """The text of another library's exception, on one line and at most 300 characters long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars. Each is the mean of an equal share of `values`, scaled from lowest to highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def counted(number: int, what: str) -> str:
    """1, "peer" -> "1 peer"; 2 -> "2 peers"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def human_bytes(count: float | None) -> str:
    """1234567 -> "1.2 MB" (powers of 1000)."""
    number, unit = _scaled(count, "kMGT")
    return f"{number} {unit}B" if number else "-"


def human_count(count: float | None) -> str:
    """4100 -> "4.1k"."""
    return "".join(_scaled(count, "kMGT")) or "-"


def _scaled(count: float | None, units: str) -> tuple[str, str]:
    if count is None or not math.isfinite(count):
        return "", ""
    index = 0
    while abs(count) >= 999.5 and index < len(units):
        count, index = count / 1000, index + 1
    digits = 1 if index and abs(count) < 99.95 else 0
    return f"{count:.{digits}f}", units[index - 1 : index] if index else ""


def human_seconds(seconds: float) -> str:
    """3725 -> "1:02:05"."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
