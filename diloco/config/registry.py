"""The names of settings to which user code may add its own: `diloco.register`.

The traits of each name that settings depend on are here, so that a configuration is checked without
importing torch. An unknown name is looked for among the entry points of installed packages, group
`diloco.extensions`; importing it registers it. So a manifest from a stranger makes this process
import what its user installed under that name, and nothing else. A file of the user's own is
imported because the user names it: `run.code`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from diloco.config.explain import TypeHint, nearest

GROUP = "diloco.extensions"
T = TypeVar("T")


class Registry(Mapping[str, T]):
    """The objects behind the names of one setting. Those of the package come with their module.

    Attributes:
        traits: every name, with what the settings have to know of it.
        found: what is registered, by name.
    """

    def __init__(self, setting: str, **own: bool) -> None:
        self.setting, self.own, self.traits = setting, frozenset(own), dict(own)
        self.found: dict[str, T] = {}

    def add(self, name: str, extension: T, trait: bool = True) -> None:
        assert self.traits.get(name) == trait or name not in self.own, f"{name} is {trait} here"
        self.found[name], self.traits[name] = extension, trait

    def __getitem__(self, name: str) -> T:
        if name not in self.found:
            raise KeyError(f"{self.setting}={name} is unknown; expected one of {', '.join(self)}")
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.traits)

    def __len__(self) -> int:
        return len(self.traits)

    def names(self, trait: bool) -> list[str]:
        return [name for name, its in self.traits.items() if its == trait]

    def check(self, name: str) -> str:
        """Validate, for pydantic, that a name is registered, perhaps by importing its package."""
        installed, why = entry_points(group=GROUP), ""
        for point in installed.select(name=name) if name not in self.traits else ():
            try:
                point.load()
            except Exception as error:  # of code that is not ours
                why = f": {point.value} cannot be imported ({type(error).__name__}: {error})"
        if name in self.traits:
            return name
        others = (point.name for point in installed if point.name != name)
        choices = [*dict.fromkeys([*self, *others])]
        if not why and (guesses := nearest(name, choices)):
            why = f" (did you mean {' or '.join(guesses)}?)"
        raise _wrong(
            f"is not installed here{why}; expected one of {', '.join(choices)}, or ask whoever"
            " started the run which package has it"
        )


OUTER_OPTIMIZERS: Registry[Any] = Registry("outer.optimizer", nesterov=False, delayed_nesterov=True)
"""Whether each has a momentum step per outer.delay contributions, rather than per version."""
MERGE_RULES: Registry[Any] = Registry("outer.merge", mean=True, rda=True)
CODECS: Registry[Any] = Registry(
    "outer.codec_up", fp32=True, fp16=True, int8=True, e3m0=True, stat2=False, topk=False
)
"""Whether each encodes what authors publish, too, and not only contributions."""
INNER_OPTIMIZERS: Registry[Any] = Registry("inner.optimizer", adamw=True, muon=True)
DATA_SOURCES: Registry[Any] = Registry(
    "data.source",
    **dict.fromkeys(("stdlib", "text", "json", "parquet"), True),
    **dict.fromkeys(("tokens", "hub", "mixture"), False),
)
"""Whether each is read on this machine, and may be part of a mixture."""
REGISTRIES = (OUTER_OPTIMIZERS, MERGE_RULES, CODECS, INNER_OPTIMIZERS, DATA_SOURCES)


def import_code(files: tuple[str, ...]) -> tuple[str, ...]:
    """Import, as a pydantic validator, files of the user's own, each once in a process."""
    for file in files:
        name = f"diloco_code:{Path(file).resolve()}"
        if name in sys.modules:
            continue
        loader = SourceFileLoader(name, file)
        spec = spec_from_loader(name, loader)
        assert spec is not None
        sys.modules[name] = module_from_spec(spec)
        try:
            loader.exec_module(sys.modules[name])
        except Exception as error:  # of code that is not ours
            del sys.modules[name]
            raise _wrong(
                f"has {file}, which cannot be imported ({type(error).__name__}: {error}); mend it"
            ) from None
    return files


def _publishes(name: str) -> str:
    if not CODECS.traits[name]:
        names = ", ".join(CODECS.names(True))
        raise _wrong(f"is for contributions only; expected one of {names}")
    return name


def _local(name: str) -> str:
    if not DATA_SOURCES.traits[name]:
        names = ", ".join(DATA_SOURCES.names(True))
        raise _wrong(f"cannot be a part of a mixture; expected one of {names}")
    return name


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("name", "{why}", {"why": why})


def _one_of(names: Iterable[str]) -> TypeHint:
    return TypeHint(f"one of {', '.join(names)}, or the name of an installed one")


OptimizerName = Annotated[str, AfterValidator(OUTER_OPTIMIZERS.check), _one_of(OUTER_OPTIMIZERS)]
MergeName = Annotated[str, AfterValidator(MERGE_RULES.check), _one_of(MERGE_RULES)]
InnerName = Annotated[str, AfterValidator(INNER_OPTIMIZERS.check), _one_of(INNER_OPTIMIZERS)]
CodecUp = Annotated[str, AfterValidator(CODECS.check), _one_of(CODECS)]
CodecDown = Annotated[
    str, AfterValidator(CODECS.check), AfterValidator(_publishes), _one_of(CODECS.names(True))
]
SourceName = Annotated[str, AfterValidator(DATA_SOURCES.check), _one_of(DATA_SOURCES)]
MixedSourceName = Annotated[
    str,
    AfterValidator(DATA_SOURCES.check),
    AfterValidator(_local),
    _one_of(DATA_SOURCES.names(True)),
]
