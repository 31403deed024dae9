"""The schema in words: what each setting accepts, and one line for a mistake: key, value, remedy.

Nothing here knows a particular setting, so that `types.py` can import it.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import getsource
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from diloco.text import masked

_KINDS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class TypeHint:
    """A description of allowed values, where the type alone is none: for errors and help."""

    text: str


def setting_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields (dotted key, field) of every setting below `model`, in the order of the schema."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def description(model: type[BaseModel], key: str) -> str:
    """Return the meaning of a setting below `model`: its description, or the text under it.

    Pydantic could read these texts from the source, but would do so at every start of a command.
    """
    *groups, name = key.split(".")
    kind: Any = model
    for group in groups:
        kind = kind.model_fields[group].annotation
    if text := kind.model_fields[name].description:
        return str(text)
    owner = next(cls for cls in kind.__mro__ if name in vars(cls).get("__annotations__", ()))
    below = re.search(rf'\n    {name}: .*?\n    """(.*?)"""', getsource(owner), re.DOTALL)
    return " ".join(below[1].split()) if below else ""


def is_known_key(keys: Mapping[str, FieldInfo], key: str) -> bool:
    """Return True if `key` is a setting, or lies below an open mapping such as `model.config`."""
    return key in keys or any(
        get_origin(field.annotation) is dict and key.startswith(f"{known}.")
        for known, field in keys.items()
    )


def describe_type(field: FieldInfo) -> str:
    """Describe the allowed values of a field, such as `a whole number >= 1, or null`."""
    return _expected(field.annotation, field.metadata)


def _expected(annotation: Any, metadata: Iterable[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        return _expected(annotation, [*inner, *metadata])
    # Field(ge=0) wraps Ge(0)
    metadata = [part for item in metadata for part in getattr(item, "metadata", [item])]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kind = next(part for part in arguments if part is not type(None))
        return f"{_expected(kind, metadata)}, or null"
    for item in metadata:
        if isinstance(item, TypeHint):
            return item.text
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        size = "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
        return f"{size}, each {_expected(arguments[0], ())}"
    if origin is dict:
        return "a group of settings"
    bounds = [(sign, item) for item in metadata for sign in _SIGNS if hasattr(item, sign)]
    limits = " and ".join(f"{_SIGNS[sign]} {getattr(item, sign):.10g}" for sign, item in bounds)
    return f"{_KINDS.get(annotation, 'a text')} {limits}".strip()


def show(value: Any, limit: int = 80) -> str:
    """Format a value, perhaps of an untrusted peer, as one printable line of `limit` characters."""
    plain = isinstance(value, str) and value != "" and value.isprintable()
    text = masked(str(value) if plain else json.dumps(value, default=ascii))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, printable."""
    return show(next(iter(str(error).splitlines()), type(error).__name__), limit=200)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """`outer.lrr is not a setting; did you mean outer.lr?`"""
    guess = " or ".join(nearest(key, known))
    hint = f"did you mean {guess}?" if guess else "--cfg help lists them all"
    return f"{show(key)} is not a setting; {hint}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that were probably meant; none if nothing is similar."""
    known = list(known)
    if matches := get_close_matches(word, known, n=1, cutoff=0.8):
        return matches
    # data.batch_size may be of another group
    leaves = {name: name.rpartition(".")[2] for name in known}
    leaf = get_close_matches(word.rpartition(".")[2], leaves.values(), n=1, cutoff=0.7)
    return [name for name in known if leaves[name] in leaf]


def explain(
    error: ValidationError, model: type[BaseModel], typed: Mapping[str, str] | None = None
) -> str:
    """Format a validation error as one line: its first mistake, and how many more there are.

    `typed` maps keys to values as the user wrote them, where that is known.
    """
    first, *others = error.errors(include_url=False)
    kind, keys = first["type"], dict(setting_fields(model))
    key = ".".join(part for part in first["loc"] if isinstance(part, str))  # no index into a list
    field = next((keys[known] for known in keys if f"{key}.".startswith(f"{known}.")), None)
    wanted = "a group of settings" if field is None else describe_type(field)
    setting = f"{show(key)}={(typed or {}).get(key) or show(first['input'])}"
    if kind == "extra_forbidden" and field is None:
        text = unknown_key(key, keys)
    elif kind == "missing":
        text = f"{key} is missing; expected {wanted}"
    elif kind == "value_error":  # a check of ours, which wrote its own line
        text = show(str(first["ctx"]["error"]), limit=400)
    elif kind == "name":  # of `registry.py`, or of a rate
        text = f"{setting} {show(first['ctx']['why'], limit=400)}"
    else:
        wrong = "not a choice" if kind == "literal_error" else "not valid"
        if kind.startswith(("greater_than", "less_than")):
            wrong = "out of range"
        text = f"{setting} is {wrong}; expected {wanted}"
    return f"{text} (and {len(others)} more)" if others else text
