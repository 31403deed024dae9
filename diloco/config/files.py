"""Hydra composes files: folders, a file to begin with and choices become one tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

from diloco.config.explain import leaves, nearest, show
from diloco.config.overrides import first_line, key_of, split
from diloco.config.schema import Config
from diloco.config.sources import SCHEMA, SECTIONS
from diloco.errors import ConfigError

__all__ = [
    "VERSION_BASE", "Request", "Saved", "compose_files", "hydra_for", "no_choice", "read_saved", "said_by_hydra",
    "stored",
]  # fmt: skip

BASE, SAVED = "diloco_base", "diloco_saved"
VERSION_BASE = "1.3"


class Saved(NamedTuple):
    """The settings of a file of `--config`: the config.yaml of a run, or some settings of somebody's own."""

    file: Path
    text: str  # as JSON, which can be compared
    whole: bool  # every setting without a default is there, so the file needs nothing else


class Request(NamedTuple):
    """What to compose: folders from the first to the last, the file to begin with, and choices."""

    places: tuple[Path, ...]
    name: str
    chosen: tuple[str, ...]  # group overrides, in Hydra's words
    saved: Saved | None


def compose_files(request: Request) -> DictConfig:
    """The tree without the node `hydra`; do not change it. Raises ConfigError with one line.

    It is remembered where it is from the package alone, whose files stay as they are.
    """
    return (_remembered if len(request.places) == 1 else _composed)(request)


def _composed(request: Request) -> DictConfig:
    import hydra
    from hydra.errors import HydraException

    with hydra_for(request.places):
        try:
            name, chosen = stored(request)
            return hydra.compose(name, chosen)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(_reason(request, error)) from None


_remembered = lru_cache(maxsize=64)(_composed)


@contextmanager
def hydra_for(places: tuple[Path, ...]) -> Iterator[None]:
    """Hydra without another application's state; the program around us may be one, which gets its own back."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    application = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(places[0]), "diloco", VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = application


def stored(request: Request) -> tuple[str, list[str]]:
    """What Hydra begins with, and the choices and folders as its overrides.

    Gives Hydra the defaults of the schema, and the file of `--config`, which lies between groups and experiments. The
    file to begin with is below another, because Hydra looks for the uppermost one in one folder only.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(SCHEMA, _schema_defaults())
    further = ",".join(f"file://{place}" for place in request.places[1:])
    folders = [f"hydra.searchpath=[{further}]"] if further else []
    if request.saved is None:
        store.store(BASE, {"defaults": [request.name]})
        return BASE, [*request.chosen, *folders]
    return BASE, [*_store_saved(request, request.saved, folders), *folders]


def _store_saved(request: Request, saved: Saved, folders: Sequence[str]) -> list[str]:
    """Returns the choices other than experiments. Those of groups replace what the file says of that group."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    mine = [one for one in request.chosen if key_of(one) == "experiment"]
    others = [one for one in request.chosen if key_of(one) != "experiment"]
    value = OverridesParser.create().parse_override(mine[-1]).value() if mine else None
    experiments = [f"experiment/{name}" for name in (value if isinstance(value, list) else [value]) if name]
    below: list[Any] = [request.name]
    if saved.whole:  # it needs no defaults, and an open mapping such as model.config is not to be mixed with theirs
        below = [SCHEMA, *({section: None} for section in SECTIONS)]
    store = ConfigStore.instance()
    store.store(SAVED, {})
    store.store(BASE, {"defaults": [*below, SAVED, *experiments]})
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list(BASE, [*others, *folders], RunMode.RUN).overrides.override_choices
    store.store(SAVED, {key: value for key, value in json.loads(saved.text).items() if key not in found})
    return others


def _schema_defaults() -> dict[str, Any]:
    """The settings that have a default, as nested mappings."""
    tree: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, field in leaves(Config):
        if not field.is_required():
            group, _, name = key.rpartition(".")
            value = field.get_default(call_default_factory=True)
            tree[group][name] = list(value) if isinstance(value, tuple) else value
    tree["data"]["tokenizer"] = "${tokenizer_of_model:bytes}"
    return tree


def read_saved(file: Path) -> Saved:
    """Reads and checks a file. Raises ConfigError if it is not readable, no YAML or no settings, or holds ${...}."""
    try:
        saved = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(f"{file} is not YAML: {line}{getattr(error, 'problem', None) or first_line(error)}") from None
    if "${" in json.dumps(OmegaConf.to_container(saved), ensure_ascii=False, default=str):
        # A part of it may come from a peer. To resolve it would put secrets of this machine into a setting.
        raise ConfigError(f"{file} holds ${{...}}, which is resolved in configs/ only; write the value itself")
    if not isinstance(saved, DictConfig) or saved.keys().isdisjoint({*SECTIONS, "defaults"}):
        raise ConfigError(f"{file} is not a configuration; expected the config.yaml of a run directory")
    if "defaults" in saved:
        raise ConfigError(
            f"{file} has a defaults list; start from it with --config-dir {file.parent} --config-name {file.stem}"
        )
    required = (key for key, field in leaves(Config) if field.is_required())
    whole = all(OmegaConf.select(saved, key, default=None) is not None for key in required)
    return Saved(file, json.dumps(OmegaConf.to_container(saved), default=str), whole)


def no_choice(group: str, name: str, there: Sequence[str]) -> str:
    """Says that a group has no such choice, and which ones it has."""
    guesses = nearest(name, there)
    hint = f" (did you mean {guesses[0]}?)" if guesses else ""
    return f"{group}={show(name)} is not a choice{hint}; expected one of {', '.join(there)}"


def said_by_hydra(error: Exception) -> str:
    """What an error of Hydra says, as one line."""
    return show(" ".join(str(error).split()).partition(" Config search path:")[0], limit=300)


def _reason(request: Request, error: Exception) -> str:
    """One line that names the file, or the argument."""
    while isinstance(error.__cause__, Exception) and not isinstance(error, YAMLError):
        error = error.__cause__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {first_line(ValueError(error.problem or 'is not YAML'))}"
    text = said_by_hydra(error)
    for argument in request.chosen:
        sign, key, _ = split(argument)
        if f"'{key}'" in text and "Could not override" in text:
            return f"{argument}: {key} is not in the defaults list of {request.name}.yaml; write +{argument}"
        if sign and ("Multiple values for" in text or "force-add of config groups" in text):
            return f"{argument} adds a group, but {key} is there already; write {argument.lstrip('+')}"
    if f"Could not load '{request.name}'" in text:
        folders = ", ".join(map(str, request.places))
        return f"--config-name={request.name} is not there; looked for {request.name}.yaml in {folders}"
    return f"{', '.join(map(str, request.places))}: {text}"
