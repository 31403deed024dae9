"""Formats numbers and untrusted text for terminals and pages, and reads text that people wrote."""

from __future__ import annotations

import codecs
import math
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

_UNITS = "kMGT"
_NUMBER = r"\d{1,30}\.?\d{0,30}(?:e[+-]?\d\d?)?|\.\d{1,30}"
_RATE = re.compile(rf"\s*({_NUMBER})\s*(?:([kMGT]?)(bit|b|B)(?:/s|ps)?)?\s*", re.ASCII)
BARS = "▁▂▃▄▅▆▇█"
# A word that may hold a secret; what stands after `token=` and is no path; a private key.
_WORD = re.compile(r"[^\s'\"`=.,:;/@?]{20,}")
_TOKEN = re.compile(
    r"(?i)(\btoken=['\"]?)(?!@|[^\s'\"]*/)[^\s'\"]{8,}|-----BEGIN.*?(?:END[ A-Z]*-----|\Z)",
    re.DOTALL,
)


def expanded(path: str | Path) -> Path:
    """Expand `~` as a shell does; a shell leaves it alone behind `key=`, and YAML and Python do."""
    return Path(os.path.expanduser(path))


def small_text(path: Path, most_bytes: int = 1 << 16) -> str:
    """Read a small file as text; raises OSError."""
    with expanded(path).open("rb") as file:
        return decoded(file.read(most_bytes))


def decoded(raw: bytes) -> str:
    """Decode text of any editor: UTF-8 or UTF-16, with or without a byte order mark."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return raw.decode("utf-16", "replace")
    unmarked = "utf-16-be" if raw[::2].count(0) > raw[1::2].count(0) else "utf-16-le"
    return raw.decode(unmarked if b"\0" in raw else "utf-8-sig", "replace")


def masked(text: str) -> str:
    """Hide what may be a part of an invitation or a key."""
    text = _TOKEN.sub(lambda match: f"{match[1] or ''}(hidden)", text)
    return _WORD.sub(lambda match: "(hidden)" if _is_random(match[0]) else match[0], text)


def _is_random(word: str) -> bool:
    """Return True if capitals, small letters and digits change as in base64, not as in names."""
    if re.fullmatch(r"12D3Koo\w{,45}|Qm\w{,44}", word):  # a peer id
        return False
    kinds = [character.isupper() - character.islower() for character in word if character.isalnum()]
    pairs = list(pairwise(kinds)) or [(0, 0)]
    changes, small = sum(a != b for a, b in pairs) / len(pairs), pairs.count((-1, -1)) / len(pairs)
    least = 0.2 if max(map(len, re.split("[-_]", word))) > 35 else 0.36  # names have hyphens
    return min(kinds.count(1), kinds.count(-1)) > 1 and changes > least and small < 0.8 - least


def plain(value: object) -> str:
    """Return printable text on one line: a peer's text cannot move a cursor or break a line."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception, on one line of at most 300 characters."""
    text = masked(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` bars: means of equal shares of `values`, scaled to their range."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def counted(number: int, noun: str) -> str:
    """Format 1, "peer" as "1 peer"; 2 as "2 peers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(count: float | None) -> str:
    """Format 1234567 as "1.2 MB" (powers of 1000)."""
    number, unit = _scaled(count)
    return f"{number} {unit}B" if number else "-"


def human_count(count: float | None) -> str:
    """Format 4100 as "4.1k"."""
    return "".join(_scaled(count)) or "-"


def _scaled(count: float | None) -> tuple[str, str]:
    if count is None or not math.isfinite(count):
        return "", ""
    index = 0
    while abs(count) >= 999.5 and index < len(_UNITS):
        count, index = count / 1000, index + 1
    digits = 1 if index and abs(count) < 99.95 else 0
    return f"{count:.{digits}f}", _UNITS[index - 1 : index] if index else ""


def rate_bytes(text: str) -> float:
    """Convert `50Mbit`, `1.5 Gbit/s`, `20Mbps` or `6MB/s` to bytes per second.

    Raises `ValueError` with what to write, also for a number without a unit.
    """
    match = _RATE.fullmatch(text)
    if match is None or not (number := Decimal(match[1])):
        raise ValueError("is no rate above 0; write it like 50Mbit, 1.5Gbit/s or 6MB")
    if match[3] is None:
        short, bits = "".join(_exact(number)), rate_text(float(number))
        readings = f"{short}B (which is {bits}) or {short}bit"
        raise ValueError(f"could be bits or bytes per second; write {readings}")
    number = number.scaleb(3 * (_UNITS.find(match[2] or "-") + 1))
    return float(number if match[3] == "B" else number / 8)


def rate_text(bytes_per_s: float) -> str:
    """Format 6.25e6 as "50 Mbit/s", which `rate_bytes` reads as exactly this number."""
    number, unit = _exact(Decimal(repr(8 * bytes_per_s)))
    return f"{number} {unit}bit/s"


def _exact(number: Decimal) -> tuple[str, str]:
    index = min(max(number.adjusted() // 3, 0), len(_UNITS))
    return f"{number.scaleb(-3 * index).normalize():f}", _UNITS[index - 1 : index] if index else ""


def human_seconds(seconds: float) -> str:
    """Format 3725 as "1:02:05"."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
