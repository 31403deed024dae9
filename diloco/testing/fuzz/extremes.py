"""The numeric fields of all messages, and messages in which one of them is at a bound of its type.

    schemas of `KINDS` -> `targets` -> a message of that kind -> the same message with a number at a bound

A message of which a field is changed still fits its schema; if it cannot, it stays what it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
from pydantic import ValidationError

from diloco.protocol.messages import Message
from diloco.protocol.messages.base import KINDS

__all__ = ["NUM_VALUES", "Target", "changed", "targets"]

Schema = dict[str, Any]
NUM_VALUES = 8
ITEM = "*"  # in a path: each item of a list or a map


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
    """Kind and path of every numeric field of every message."""
    found = []
    for kind in sorted(KINDS):
        schema = _schema(kind)
        found += [(kind, path) for path, _ in _numbers(schema, schema.get("$defs", {}), ())]
    return tuple(dict.fromkeys(found))


@cache
def _schema(kind: str) -> Schema:
    return KINDS[kind].model_json_schema()


def changed(message: Message, target: Target, r: random.Random) -> Message:
    """The message with the field of the target at its extreme, wherever the message has that field."""
    if message.kind != target.kind:
        return message
    schema = _schema(message.kind)
    fields = msgpack.unpackb(msgpack.packb(message.model_dump(), use_bin_type=True), raw=False)
    try:
        extreme = _put(fields, schema, schema.get("$defs", {}), target.path, target.value, r)
        _fit(extreme, target.path)
        return type(message).model_validate(extreme)
    except (ValidationError, _NoSuchField):
        return message


def _fit(fields: dict[str, Any], path: tuple[str, ...]) -> None:
    """Change what has to go along with the field at that path."""
    if path[-1] == "pushes":
        part = fields
        for step in path[:-1]:
            part = part[step]
        part["delay"] = 100_000  # a window of one contribution has none yet
    if path[-1] == "fragment" and isinstance(fields.get("record"), dict):
        head = fields["record"]["head"]
        fields["fragment"] = head["fragment"] = fields["fragment"] if len(path) == 1 else head["fragment"]


class _NoSuchField(Exception):
    pass


def _resolved(node: Schema, defs: Schema) -> list[Schema]:
    """The alternatives of a schema, without references."""
    if "$ref" in node:
        return _resolved(defs[node["$ref"].rpartition("/")[2]], defs)
    parts = [part for key in ("anyOf", "allOf", "oneOf") for part in node.get(key, ())]
    return [found for part in parts for found in _resolved(part, defs)] if parts else [node]


def _numbers(node: Schema, defs: Schema, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Schema]]:
    for one in _resolved(node, defs):
        if one.get("type") in ("integer", "number"):
            yield path, one
        for step, part in _parts(one):
            yield from _numbers(part, defs, (*path, step))


def _parts(node: Schema) -> Iterator[tuple[str, Schema]]:
    yield from node.get("properties", {}).items()
    yield from ((str(index), part) for index, part in enumerate(node.get("prefixItems", ())))
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield ITEM, node[key]


def _extreme(node: Schema, old: object, index: int, r: random.Random) -> int | float:
    low, high = node["minimum"], node["maximum"]
    if node["type"] == "number":
        return float([high, low, high / 2, 5e-324, 1e-6, 1e-300, high - 1, r.uniform(low, high)][index])
    before = old if isinstance(old, int) else low
    near = [before + 1, before + r.choice([2, 2**10, 2**20]), before - 1]
    return int(min(max([high, low, high - 1, high // 2, low + 1, *near][index], low), high))


def _put(value: Any, node: Schema, defs: Schema, path: tuple[str, ...], index: int, r: random.Random) -> Any:
    """The value with all fields at that path changed. A list or a map that is empty there gets an item."""
    for one in _resolved(node, defs):
        if not path and one.get("type") in ("integer", "number"):
            return _extreme(one, value, index, r)
        parts = dict(_parts(one))
        if not path or path[0] not in parts:
            continue
        part, rest = parts[path[0]], path[1:]
        if value is None:
            value = _least(one, defs)
        if path[0] == ITEM and isinstance(value, list):
            if one.get("minItems") == one.get("maxItems") == 2:  # a range of sequences
                end = max(1, int(_put(None, part, defs, rest, index, r)))
                return [r.choice([0, end - 1]), end]
            return [_put(item, part, defs, rest, index, r) for item in value or [_least(part, defs)]]
        if path[0] == ITEM and isinstance(value, dict):
            return {key: _put(item, part, defs, rest, index, r) for key, item in (value or {"x": None}).items()}
        if isinstance(value, list):
            at = int(path[0])
            return [*value[:at], _put(value[at], part, defs, rest, index, r), *value[at + 1 :]]
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
        case "string" if one.get("format") == "binary":
            return bytes(one.get("minLength", 0))
        case "string":
            return "0" * 64 if "pattern" in one else one.get("enum", ["x"])[0]
        case "array":
            return [_least(part, defs) for part in one.get("prefixItems", ())] or [
                _least(one["items"], defs) for _ in range(one.get("minItems", 0))
            ]
        case _:
            return {name: _least(one["properties"][name], defs) for name in one.get("required", ())}
