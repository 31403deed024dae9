"""Recording of a core for `scripts/replay`: its start, then every event with its time, and the
results of signer and arithmetic meanwhile. Tensors are left out.

    frame: 4 bytes of its length, then (seconds, kind, fields as (type, msgpack))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple
from msgspec.structs import replace as with_fields

from diloco.core import events
from diloco.core.events import AnchorPart, Connected, Event, Records
from diloco.core.facts import Facts
from diloco.core.history import Bounds, Tip
from diloco.core.settings import ProtocolSettings, Sizes
from diloco.messages.codec import kinds
from diloco.messages.control import Planned
from diloco.messages.heads import Head, Line

NAME = "recording.bin"
IDENTITY = ("me", "name", "run_id", "manifest_hash", "trains", "may_author", "tokens_per_step")
MOST_BYTES = 64 << 20  # of both files: at half of this, the newer one replaces the older one


@dataclass(frozen=True)
class Start:
    """State of a core at its start, or when its file began anew."""

    identity: dict[str, Any]
    settings: ProtocolSettings
    tips: tuple[Tip, ...]
    sizes: tuple[Sizes, ...]
    wall_ms: int
    processed: int
    stamp: int
    planned: Planned

    @classmethod
    def of(cls, core: Facts) -> Start:
        """Return the state of a core now."""
        return cls(
            {name: getattr(core.identity, name) for name in IDENTITY},
            core.settings,
            tuple(f.tip for f in core.fragments),
            tuple(f.sizes for f in core.fragments),
            core.wall_ms + int(core.now * 1000),
            *(core.loop.processed, core.loop.stamp, core.planned),
        )


class Said(msgspec.Struct, frozen=True):
    """Result of the signer or the arithmetic during the event before it."""

    signature: bytes = b""
    bounds: Bounds | None = None


KNOWN: tuple[Any, ...] = (*kinds().values(), Head, Line, Records, AnchorPart)
KNOWN += (ProtocolSettings, Bounds)
TYPES: dict[str, Any] = {kind.__name__: kind for kind in KNOWN}
EVENTS = {"Said": Said, **{n: kind for n, kind in vars(events).items() if isinstance(kind, type)}}


class Recording:
    """Writes the events of a core, and the results of its signer and arithmetic, which it wraps."""

    def __init__(self, path: Path, core: Facts) -> None:
        self._path, self._core, self._nbytes = path, core, 0
        self._signer, self._arithmetic = core.identity.signer, core.arithmetic
        self._begin()
        core.identity, core.arithmetic = replace(core.identity, signer=self), self

    def event(self, event: Event, now: float) -> None:
        """Write an event before the core gets it."""
        if self._nbytes > MOST_BYTES // 2:
            os.replace(self._path, self._path.with_suffix(".old"))
            self._begin()
        self._write(event, now)

    def sign(self, content: bytes) -> bytes:
        signature = self._signer.sign(content)
        self._write(Said(signature), self._core.now)
        return signature

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return self._signer.verify(peer, content, signature)

    def bounds(self, *arguments: Any) -> Bounds:
        bounds = self._arithmetic.bounds(*arguments)
        self._write(Said(bounds=bounds), self._core.now)
        return bounds

    def _begin(self) -> None:
        core = self._core
        self._path.write_bytes(b"")
        self._nbytes = 0
        start = [("Start", msgspec.msgpack.encode(Start.of(core)))]
        self._frame(msgspec.msgpack.encode((core.now, "Start", start)))
        for member in core.members.all():
            known = {"tips": member.tips, "hears": sorted(member.hears), "deaf": []}
            status = with_fields(member.status, whole=True, **known)
            self._write(Connected(member.peer, with_fields(member.hello, status=status)), core.now)
        if core.life.begun:
            self._write(events.Begun(), core.now)

    def _write(self, event: Any, now: float) -> None:
        without_tensors = msgspec.msgpack.Encoder(enc_hook=lambda tensor: b"")
        typed = [(type(value).__name__, without_tensors.encode(value)) for value in astuple(event)]
        self._frame(msgspec.msgpack.encode((now, type(event).__name__, typed)))

    def _frame(self, frame: bytes) -> None:
        with self._path.open("ab") as file:
            self._nbytes += file.write(len(frame).to_bytes(4, "big") + frame)


def read(path: Path) -> Iterator[tuple[float, Any]]:
    """Yield seconds and events, up to the last complete frame."""
    data = path.read_bytes()
    while 0 < (size := int.from_bytes(data[:4], "big")) <= len(data) - 4:
        now, kind, typed = msgspec.msgpack.decode(data[4 : 4 + size])
        data = data[4 + size :]
        if kind == "Start":
            yield now, msgspec.msgpack.decode(typed[0][1], type=Start)
        else:
            yield now, EVENTS[kind](*(_value(name, raw) for name, raw in typed))


def _value(name: str, raw: bytes) -> Any:
    if name in TYPES:
        return msgspec.msgpack.decode(raw, type=TYPES[name])
    value = msgspec.msgpack.decode(raw)
    return frozenset(value) if name == "frozenset" else _tuples(value) if name == "tuple" else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
