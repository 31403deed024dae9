"""The schema in words: which settings there are and what each accepts. Errors and `--cfg help` are written from it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco.config.base import Expected

__all__ = ["accepts", "expected", "leaves"]

_KINDS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields (dotted key, field) of every setting below `model`, in the order of the schema."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def accepts(keys: Mapping[str, FieldInfo], key: str) -> bool:
    """Whether `key` is a setting, or lies below one that is an open mapping (`model.config.hidden_size`)."""
    return key in keys or any(
        get_origin(field.annotation) is dict and key.startswith(f"{known}.") for known, field in keys.items()
    )


def expected(field: FieldInfo) -> str:
    """What a value of the field must be, such as `a whole number >= 1, or null`."""
    return _expected(field.annotation, field.metadata)


def _expected(annotation: Any, metadata: Iterable[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        return _expected(annotation, [*inner, *metadata])
    metadata = [part for item in metadata for part in getattr(item, "metadata", [item])]  # Field(ge=0) wraps Ge(0)
    spoken = next((item.text for item in metadata if isinstance(item, Expected)), None)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return f"{_expected(next(part for part in arguments if part is not type(None)), metadata)}, or null"
    if spoken is not None:
        return spoken
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        size = "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
        return f"{size}, each {_expected(arguments[0], ())}"
    if origin is dict:
        return "a group of settings"
    bounds = " and ".join(_bounds(metadata))
    return f"{_KINDS.get(annotation, 'a text')} {bounds}".strip()


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, Gt):
            yield f"> {item.gt:.10g}"
        elif isinstance(item, Ge):
            yield f">= {item.ge:.10g}"
        elif isinstance(item, Lt):
            yield f"< {item.lt:.10g}"
        elif isinstance(item, Le):
            yield f"<= {item.le:.10g}"
