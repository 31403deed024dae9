"""Hydra composes files: the search path becomes one tree, and the result is remembered while no file changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

from diloco.config.explain import leaves, nearest, show
from diloco.config.overrides import first_line, split
from diloco.config.saved import Saved
from diloco.config.schema import Config
from diloco.config.sources import SCHEMA, SECTIONS, stamp
from diloco.errors import ConfigError

__all__ = [
    "Request", "compose_files", "defaults_of_hydra", "hydra_for", "installed", "missing_plugin", "no_choice",
    "prepared",
]  # fmt: skip

BASE, SAVED = "diloco_base", "diloco_saved"
PACKAGES = {
    "optuna": "diloco[sweep]", "submitit": "diloco[sweep]", "ax": "hydra-ax-sweeper", "joblib": "hydra-joblib-launcher",
    "nevergrad": "hydra-nevergrad-sweeper", "ray": "hydra-ray-launcher", "rq": "hydra-rq-launcher",
}  # fmt: skip


class Request(NamedTuple):
    """What to compose: folders from the first to the last, the file to begin with, and choices."""

    places: tuple[Path, ...]
    name: str
    chosen: tuple[str, ...]  # group overrides, in Hydra's words
    saved: Saved | None


def compose_files(request: Request) -> DictConfig:
    """The tree with its node `hydra`. It is remembered: do not change it. Raises ConfigError with one line."""
    return _composed(request, stamp(request.places))


@lru_cache(maxsize=64)
def _composed(request: Request, stamp: tuple[Any, ...]) -> DictConfig:
    import hydra
    from hydra.errors import HydraException

    with hydra_for(request.places):
        try:
            name, chosen = prepared(request)
            return hydra.compose(name, chosen, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(_reason(request, error)) from None


def prepared(request: Request) -> tuple[str, list[str]]:
    """The file that Hydra begins with, and the choices. A file of `--config` is given to Hydra before."""
    if request.saved is None:
        return request.name, list(request.chosen)
    return BASE, _store_saved(request, request.saved)


@contextmanager
def hydra_for(places: tuple[Path, ...]) -> Iterator[Any]:
    """Hydra with this search path; the program around us may be a Hydra application, which gets its own one back."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    ConfigStore.instance().store(SCHEMA, schema_defaults())
    state = GlobalHydra.instance()
    application, state.hydra = state.hydra, None
    version.setbase("1.3")
    path = create_config_search_path(None)
    for place in places:
        path.prepend("diloco", f"file://{place}", SearchPathQuery(provider="schema"))
    try:
        yield Hydra.create_main_hydra2("diloco", path)
    finally:
        GlobalHydra.instance().hydra = application


def installed(group: str) -> list[str]:
    """The choices of one of Hydra's own groups, such as hydra/launcher, with those of the plugins that are there."""
    with hydra_for(()) as hydra:
        return sorted(hydra.config_loader.get_group_options(group))


def missing_plugin(group: str, name: str, there: Sequence[str]) -> str:
    """Says that a sweeper or launcher is not installed, and how to install it where that is known."""
    package = next((package for word, package in PACKAGES.items() if name.startswith(word)), None)
    remedy = f"pip install '{package}', or choose" if package else "install the plugin that has it, or choose"
    return f"{group}={show(name)} is a plugin of Hydra that is not installed: {remedy} one of {', '.join(there)}"


@lru_cache(maxsize=8)
def defaults_of_hydra(chosen: tuple[str, ...]) -> DictConfig:
    """The node `hydra` of an application without files, for choices such as hydra/sweeper=optuna."""
    import hydra

    with hydra_for(()):
        node: DictConfig = hydra.compose(None, list(chosen), return_hydra_config=True).hydra
        return node


def schema_defaults() -> dict[str, Any]:
    """The settings that have a default, as nested mappings."""
    tree: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, field in leaves(Config):
        if not field.is_required():
            group, _, name = key.rpartition(".")
            value = field.get_default(call_default_factory=True)
            tree[group][name] = list(value) if isinstance(value, tuple) else value
    tree["data"]["tokenizer"] = "${tokenizer_of_model:bytes}"
    return tree


def _store_saved(request: Request, saved: Saved) -> list[str]:
    """Gives Hydra the file of `--config` between groups and experiments; returns the other choices."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    mine = [one for one in request.chosen if split(one).key == "experiment"]
    others = [one for one in request.chosen if split(one).key != "experiment"]
    value = OverridesParser.create().parse_override(mine[-1]).value() if mine else None
    experiments = [f"experiment/{name}" for name in (value if isinstance(value, list) else [value]) if name]
    below: list[Any] = [request.name]
    if saved.whole:  # it needs no defaults, and an open mapping such as model.config is not to be mixed with theirs
        below = [SCHEMA, *({section: None} for section in SECTIONS)]
    store = ConfigStore.instance()
    store.store(SAVED, {})
    store.store(BASE, {"defaults": [*below, SAVED, *experiments]})
    found = GlobalHydra.instance().config_loader().compute_defaults_list(BASE, others, RunMode.RUN)
    content = {key: value for key, value in saved.content().items() if key not in found.overrides.override_choices}
    store.store(SAVED, content)
    return others


def _reason(request: Request, error: Exception) -> str:
    """One line that names the file, or the argument."""
    while isinstance(error.__cause__, Exception) and not isinstance(error, YAMLError):
        error = error.__cause__
    if isinstance(error, YAMLError):
        return _yaml_error(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith("composing config:"):
        text = f"{text} {lines[1]}"
        empty = re.search(r"'hydra\.sweeper\.params\.(.+)' is not Optional", text)
        if empty is not None:
            return f"hydra.sweeper.params has no values for {empty[1]}; list some, such as {empty[1]}: 1,2"
    plugin = re.search(r"Could not find '(hydra/(?:sweeper|launcher))/(\w+)'", text)
    if plugin is not None:
        return missing_plugin(plugin[1], plugin[2], installed(plugin[1]))
    missing = re.search(r"In '(\S+)': Could not (?:find|load) '([^/']+)/([^']+)'", text)
    if missing is not None:
        return _missing_choice(request, *missing.groups())
    for argument in request.chosen:
        typed = split(argument)
        if f"'{typed.key}'" in text and "Could not override" in text:
            return f"{argument}: {typed.key} is not in the defaults list of {request.name}.yaml; write +{argument}"
        if typed.sign.startswith("+") and ("Multiple values for" in text or "force-add of config groups" in text):
            return f"{argument} adds a group, but {typed.key} is there already; write {argument.lstrip('+')}"
    if "Cannot find primary config" in text or "Could not load" in text:
        folders = ", ".join(map(str, request.places))
        return f"--config-name={request.name} is not there; looked for {request.name}.yaml in {folders}"
    return f"{', '.join(map(str, request.places))}: {first_line(ValueError(text))}"


def no_choice(group: str, name: str, there: Sequence[str]) -> str:
    """Says that a group has no such choice, and which ones it has."""
    guesses = nearest(name, there)
    hint = f" (did you mean {guesses[0]}?)" if guesses else ""
    return f"{group}={show(name)} is not a choice{hint}; expected one of {', '.join(there)}"


def _missing_choice(request: Request, where: str, group: str, name: str) -> str:
    """The same of a choice in the defaults list of a file, which is named."""
    # Of a choice that overrides another one Hydra says only that it is somewhere below the file to begin with.
    pattern = f"{where}.yaml" if "/" in where else "*.yaml"
    files = [file for place in request.places for file in sorted(place.rglob(pattern))]
    files.sort(key=lambda file: file.stem != request.name and f"experiment={file.stem}" not in request.chosen)
    wanted = re.compile(rf"(\b{group}(@\S*)?\s*:|[-/[])\s*['\"]?{re.escape(name)}\b")
    named = next((f"{file}: " for file in files if wanted.search(file.read_text(errors="replace"))), "")
    of_group = (place / group for place in request.places)
    there = {str(file.relative_to(place).with_suffix("")) for place in of_group for file in place.rglob("*.yaml")}
    return f"{named}{no_choice(group, name, sorted(there))}"


def _yaml_error(error: YAMLError) -> str:
    """The file, the line and what is wrong there."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {first_line(ValueError(error.problem or 'is not YAML'))}"
    return first_line(error)
