"""The numeric fields of all messages, and messages in which one of them is at a bound of its type.

    schemas of `KINDS` -> `targets` -> a message of that kind -> the same message with a number at a
    bound

A message of which a field is changed still fits its schema; if it cannot, it stays what it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from diloco.messages.base import Message
from diloco.messages.codec import KINDS

Schema = dict[str, Any]
NUM_VALUES = 8
ITEM = "*"  # in a path: each item of a list or a map
BIG = 2.0**63


@dataclass(frozen=True)
class Target:
    """A numeric field of a kind of messages, and which of its extreme values it gets."""

    kind: str
    path: tuple[str, ...]
    value: int

    def __str__(self) -> str:
        return f"{self.kind}.{'.'.join(self.path)} at its extreme {self.value}"


@cache
def targets() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Kind and path of every numeric field of every message; `1` is the second field of a line, a
    head or a book."""
    found = []
    for kind in sorted(map(str, KINDS)):
        found += [(kind, path) for path in _numbers(_schema(kind), _schema(kind)["$defs"], ())]
    return tuple(dict.fromkeys(found))


@cache
def _schema(kind: str) -> Schema:
    return msgspec.json.schema(KINDS[kind])


def changed(message: Message, target: Target, r: random.Random) -> Message:
    """The message with the field of the target at its extreme, wherever the message has that
    field."""
    if message.kind != target.kind:
        return message
    schema = _schema(message.kind)
    try:
        extreme = _put(_fields(message), schema, schema["$defs"], target.path, target.value, r)
        return msgspec.convert(extreme, type(message), strict=False)
    except (msgspec.ValidationError, _NoSuchField):
        return message


def _fields(message: Message) -> Any:
    """As basic types; what `changed` makes of them has keys of text, also where they stand for
    numbers."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), strict=False)


class _NoSuchField(Exception):
    pass


def _resolved(node: Schema, defs: Schema) -> list[Schema]:
    """The alternatives of a schema, without references."""
    if "$ref" in node:
        return _resolved(defs[node["$ref"].rpartition("/")[2]], defs)
    return (
        [found for part in node["anyOf"] for found in _resolved(part, defs)]
        if "anyOf" in node
        else [node]
    )


def _numbers(node: Schema, defs: Schema, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for one in _resolved(node, defs):
        if one.get("type") in ("integer", "number"):
            yield path
        for step, part in _parts(one):
            yield from _numbers(part, defs, (*path, step))


def _parts(node: Schema) -> Iterator[tuple[str, Schema]]:
    yield from node.get("properties", {}).items()
    yield from ((str(index), part) for index, part in enumerate(node.get("prefixItems", ())))
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield ITEM, node[key]


def _extreme(node: Schema, old: object, index: int, r: random.Random) -> int | float:
    low, high = (
        node.get("minimum", -BIG),
        node.get("maximum", node.get("exclusiveMaximum", BIG + 1) - 1),
    )
    if node["type"] == "number":
        return float(
            [high, low, high / 2, 5e-324, 1e-6, 1e-300, high - 1, r.uniform(low, high)][index]
        )
    before = old if isinstance(old, int) else low
    near = [before + 1, before + r.choice([2, 2**10, 2**20]), before - 1]
    return int(min(max([high, low, high - 1, high // 2, low + 1, *near][index], low), high))


def _put(
    value: Any, node: Schema, defs: Schema, path: tuple[str, ...], index: int, r: random.Random
) -> Any:
    """The value with all fields at that path changed. A list or a map that is empty there gets an
    item."""
    for one in _resolved(node, defs):
        if not path and one.get("type") in ("integer", "number"):
            return _extreme(one, value, index, r)
        parts = dict(_parts(one))
        if not path or path[0] not in parts:
            continue
        part, rest = parts[path[0]], path[1:]
        value = _least(one, defs) if value is None else value
        if isinstance(value, list):
            items = value or [_least(part, defs)] if path[0] == ITEM else value
            chosen = range(len(items)) if path[0] == ITEM else [int(path[0])]
            return [
                _put(v, part, defs, rest, index, r) if at in chosen else v
                for at, v in enumerate(items)
            ]
        if isinstance(value, dict) and path[0] == ITEM:
            return {
                key: _put(item, part, defs, rest, index, r)
                for key, item in (value or {"0": None}).items()
            }
        if isinstance(value, dict):
            return {**value, path[0]: _put(value.get(path[0]), part, defs, rest, index, r)}
    raise _NoSuchField(path)


def _least(node: Schema, defs: Schema) -> Any:
    """A small value that fits the schema."""
    one = _resolved(node, defs)[0]
    match one.get("type"):
        case "integer" | "number":
            return one.get("minimum", 0)
        case "boolean":
            return False
        case "string" if "contentEncoding" in one:
            return b""
        case "string":
            return (
                "0" * 64 if "[0-9a-f]{64}" in one.get("pattern", "") else one.get("enum", ["x"])[0]
            )
        case "array":
            return [_least(part, defs) for part in one.get("prefixItems", ())]
        case _:
            return {name: _least(one["properties"][name], defs) for name in one.get("required", ())}
