"""The two halves of a configuration as types, and the value types that both use.

The class that declares a setting says whether it defines the run (`RunOwned`) or belongs to one
peer (`PeerLocal`). A group with both inherits from one class of each, so that a function of the
run-owned class cannot see the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_serializer,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from diloco.config.address import unquoted
from diloco.config.explain import TypeHint, explain
from diloco.errors import ConfigError
from diloco.text import expanded, rate_bytes, rate_text

_Settings = TypeVar("_Settings", bound="Settings")


class Settings(BaseModel):
    """Frozen and strict: an unknown key or a value of another type is an error, never a guess."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    @classmethod
    def parse(cls: type[_Settings], values: Mapping[str, Any]) -> _Settings:
        """Validate values that a user typed: raises ConfigError with one line."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None


class RunOwned(Settings):
    """Settings that define the run: equal on all peers, part of the manifest and of its hash.

    A setting added later goes into `omitted_at_default`: JSON omits it while it has its default, so
    the hashes of older runs do not change.
    """

    omitted_at_default: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap", when_used="json")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields, values = type(self).model_fields, handler(self)
        for key in self.omitted_at_default:
            if getattr(self, key) == fields[key].get_default(call_default_factory=True):
                values.pop(key, None)
        return dict(values)


class PeerLocal(Settings):
    """Settings of one peer: devices, paths, addresses, logging. They never leave it."""


def _to_text(value: Any) -> Any:
    """Convert a number to text: the override parser reads `run.id=7` as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _to_tuple(value: Any) -> Any:
    """Convert a list from YAML or JSON, or a single text, to a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _to_path(value: Any) -> Any:
    if value == "":  # Path("") would silently be the current directory
        raise PydanticCustomError("format", "empty path")
    return expanded(value) if isinstance(value, str) else value


def _to_rate(value: Any) -> float:
    try:
        return rate_bytes(str(value))
    except ValueError as error:
        raise PydanticCustomError("name", "{why}", {"why": str(error)}) from None


def _is_filled(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise PydanticCustomError("format", "empty list")
    return value


_PART = "/[A-Za-z0-9._:%-]+"

Directory = Annotated[Path, BeforeValidator(_to_path), TypeHint("a directory")]
Unquoted = BeforeValidator(lambda value: unquoted(value) if isinstance(value, str) else value)
Tuple = BeforeValidator(_to_tuple)
NotEmpty = AfterValidator(_is_filled)
# Bytes per second of a link. It is written as it is typed, so that a file of settings reads back.
Rate = Annotated[
    float,
    BeforeValidator(_to_rate),
    Field(ge=1, le=1e15),
    PlainSerializer(rate_text),
    TypeHint("a rate such as 50Mbit or 6MB (per second)"),
]
Text = Annotated[str, Field(min_length=1)]
FileName = Annotated[Text, AfterValidator(lambda value: str(expanded(value)))]
Texts = Annotated[tuple[Text, ...], Tuple]
# A name becomes a file name and a DHT key, so it has nothing that is special to a shell or a path.
Name = Annotated[
    str,
    BeforeValidator(_to_text),
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
    TypeHint("1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"),
]
Commit = Annotated[
    str,
    Field(pattern=r"^[0-9a-f]{40}$"),
    TypeHint("a commit of a hub repository, 40 hexadecimal digits"),
]
Digest = Annotated[
    str, Field(pattern=r"^[0-9a-f]{64}$"), TypeHint("a digest, 64 hexadecimal digits")
]
Multiaddr = Annotated[
    str, Field(pattern=f"^({_PART})+$"), TypeHint("a multiaddr such as /ip4/0.0.0.0/tcp/4100")
]
PeerAddress = Annotated[
    str,
    Unquoted,
    Field(pattern=f"^(@.+|({_PART})*/p2p({_PART})+)$"),  # @FILE: a peer writes its address there
    TypeHint("an address with a peer id: /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo..., or @FILE"),
]
