"""Messages in which one number is at a bound of its type.

schemas of `kinds` -> `targets` -> a message of that kind -> the same with the number at a bound
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from diloco.messages.base import Message
from diloco.messages.codec import kinds

Schema = dict[str, Any]
Path = tuple[str, ...]  # of fields; "1" is the second field of a line, a head or a book
NUM_VALUES = 8
ITEM = "*"  # in a path: each item of a list or a map
BIG = 2.0**63


@dataclass(frozen=True)
class Target:
    """A numeric field of a kind of messages, and which of its extreme values it gets."""

    kind: str
    path: Path
    value: int

    def __str__(self) -> str:
        return f"{self.kind}.{'.'.join(self.path)} at its extreme {self.value}"


@cache
def targets() -> tuple[tuple[str, Path], ...]:
    """Kind and path of every numeric field of every message."""
    return tuple(_schemas())


@cache
def _schemas() -> dict[tuple[str, Path], Schema]:
    """The schema of each numeric field."""
    found: dict[tuple[str, Path], Schema] = {}
    for kind in sorted(kinds()):
        schema = msgspec.json.schema(kinds()[kind])
        for path, number in _numbers(schema, schema["$defs"], ()):
            found.setdefault((kind, path), number)
    return found


def _numbers(node: Schema, defs: Schema, path: Path) -> Iterator[tuple[Path, Schema]]:
    if "$ref" in node:
        node = defs[node["$ref"].rpartition("/")[2]]
    if node.get("type") in ("integer", "number"):
        yield path, node
    parts = [(path, one) for one in node.get("anyOf", ())]
    parts += [((*path, name), one) for name, one in node.get("properties", {}).items()]
    parts += [((*path, str(at)), one) for at, one in enumerate(node.get("prefixItems", ()))]
    items = (node.get(key) for key in ("items", "additionalProperties"))
    parts += [((*path, ITEM), one) for one in items if isinstance(one, dict)]
    for where, one in parts:
        yield from _numbers(one, defs, where)


def changed(message: Message, target: Target, r: random.Random) -> Message:
    """The message with the target's field at its extreme; itself where that does not fit."""
    if message.kind != target.kind:
        return message
    schema = _schemas()[target.kind, target.path]
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message), strict=False)
    fields = _put(fields, target.path, lambda old: _extreme(schema, old, target.value, r))
    try:
        lie = msgspec.convert(fields, type(message), strict=False)
    except msgspec.ValidationError:
        return message
    return message if lie == message else lie


def _put(value: Any, path: Path, number: Callable[[object], float]) -> Any:
    """The value with all numbers at that path changed; an empty list of numbers gets one."""
    if not path:
        return number(value)
    step, rest = path[0], path[1:]
    value = [None] if step == ITEM and not value else value
    if isinstance(value, list):
        return [
            _put(one, rest, number) if step in (ITEM, str(at)) else one
            for at, one in enumerate(value)
        ]
    if isinstance(value, dict):
        steps = value if step == ITEM else [step]
        return value | {key: _put(value.get(key), rest, number) for key in steps}
    return value


def _extreme(schema: Schema, old: object, index: int, r: random.Random) -> float:
    low = schema.get("minimum", -BIG)
    high = schema.get("maximum", schema.get("exclusiveMaximum", BIG + 1) - 1)
    if schema["type"] == "number":
        values = [high, low, high / 2, 5e-324, 1e-6, 1e-300, high - 1, r.uniform(low, high)]
        return float(values[index])
    before = old if isinstance(old, int) else low
    near = [before + 1, before + r.choice([2, 2**10, 2**20]), before - 1]
    return int(min(max([high, low, high - 1, high // 2, low + 1, *near][index], low), high))
