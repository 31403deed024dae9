"""The names that `outer.optimizer`, `outer.codec_up` and `outer.codec_down` may have: ours, and
those of users' code.

What the settings have to know of each is here, so that a configuration is checked without importing
torch. A name that is not here is looked for among the entry points of installed packages, group
`diloco.extensions`, of exactly that name; importing it calls `diloco.register`. So a manifest from
a stranger makes this process import what its user installed under that name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from diloco.config.explain import TypeHint, nearest

GROUP = "diloco.extensions"


OPTIMIZERS = {"nesterov": False, "delayed_nesterov": True}
"""Whether each has a momentum step per outer.delay contributions, rather than per version."""
CODECS = {"fp32": True, "fp16": True, "int8": True, "e3m0": True, "stat2": False, "topk": False}
"""Whether each encodes what authors publish, too, and not only contributions."""


def _known(known: Mapping[str, object]) -> Any:
    """A name in `known`, or of an installed package that registers it."""

    def check(name: str) -> str:
        if name in known:
            return name
        installed, why = entry_points(group=GROUP), ""
        for point in installed.select(name=name):
            try:
                point.load()
            except Exception as error:  # of code that is not ours
                why = f": {point.value} cannot be imported ({type(error).__name__}: {error})"
        if name in known:
            return name
        choices = [
            one
            for one in dict.fromkeys([*known, *(point.name for point in installed)])
            if one != name
        ]
        if not why and (guesses := nearest(name, choices)):
            why = f" (did you mean {' or '.join(guesses)}?)"
        raise _wrong(
            f"is not installed here{why}; expected one of {', '.join(choices)}, or ask whoever"
            " started the run which package has it"
        )

    return AfterValidator(check)


def _publishes(name: str) -> str:
    if not CODECS[name]:
        names = ", ".join(one for one, publishes in CODECS.items() if publishes)
        raise _wrong(f"is for contributions only; expected one of {names}")
    return name


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("name", "{why}", {"why": why})


def _one_of(names: Iterable[str]) -> TypeHint:
    return TypeHint(f"one of {', '.join(names)}, or the name of an installed one")


OptimizerName = Annotated[str, _known(OPTIMIZERS), _one_of(OPTIMIZERS)]
CodecUp = Annotated[str, _known(CODECS), _one_of(CODECS)]
CodecDown = Annotated[
    str, _known(CODECS), AfterValidator(_publishes), _one_of(one for one in CODECS if CODECS[one])
]
