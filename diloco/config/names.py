"""The names that `outer.optimizer`, `outer.codec_up` and `outer.codec_down` may have: ours, and those of users' code.

What the settings have to know of each is here, so that a configuration is checked without importing torch. A name that
is not here is looked for among the entry points of installed packages, group `diloco.extensions`, of exactly that name;
importing it calls `diloco.register`. So a manifest from a stranger makes this process import what its user installed
under that name, and nothing else. A package that cannot be imported is named in the error, as a missing one is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, NamedTuple

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from diloco.config.explain import Expected, nearest

__all__ = ["CODECS", "GROUP", "OPTIMIZERS", "CodecDown", "CodecTraits", "CodecUp", "OptimizerName"]

GROUP = "diloco.extensions"


class CodecTraits(NamedTuple):
    """A codec."""

    wide: bool = False  # two bytes per value or more
    publishes: bool = True  # updates, and not only contributions


OPTIMIZERS = {"nesterov": False, "delayed_nesterov": True}
"""Whether each has a momentum step per outer.delay contributions, rather than per version."""
CODECS = {
    "fp32": CodecTraits(wide=True),
    "fp16": CodecTraits(wide=True),
    "int8": CodecTraits(),
    "e3m0": CodecTraits(),
    "stat2": CodecTraits(publishes=False),
    "topk": CodecTraits(publishes=False),
}


def _found_in(known: Mapping[str, object]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name in known:
            return name
        installed = entry_points(group=GROUP)
        why = ""
        for point in installed.select(name=name):
            try:
                point.load()
            except Exception as error:  # of code that is not ours
                why = f": {point.value} cannot be imported ({type(error).__name__}: {error})"
        if name not in known:
            raise _not_here(name, why, [*known, *(point.name for point in installed if point.name not in known)])
        return name

    return check


def _not_here(name: str, why: str, names: list[str]) -> PydanticCustomError:
    choices = [one for one in names if one != name]
    guess = "" if why else " or ".join(nearest(name, choices))
    why += f" (did you mean {guess}?)" if guess else ""
    text = f"is not installed here{why}; expected one of {', '.join(choices)}, or ask whoever started the run which "
    return PydanticCustomError("name", "{why}", {"why": f"{text}package has it"})


def _publishes(name: str) -> str:
    if not CODECS[name].publishes:
        names = ", ".join(one for one, traits in CODECS.items() if traits.publishes)
        raise PydanticCustomError("name", "{why}", {"why": f"is for contributions only; expected one of {names}"})
    return name


def _of(names: Mapping[str, object]) -> Expected:
    return Expected(f"one of {', '.join(names)}, or the name of an installed one")


OptimizerName = Annotated[str, AfterValidator(_found_in(OPTIMIZERS)), _of(OPTIMIZERS)]
CodecUp = Annotated[str, AfterValidator(_found_in(CODECS)), _of(CODECS)]
CodecDown = Annotated[
    str,
    AfterValidator(_found_in(CODECS)),
    AfterValidator(_publishes),
    _of({name: one for name, one in CODECS.items() if one.publishes}),
]
