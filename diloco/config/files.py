"""Where files of settings are looked for, and how Hydra composes them: folders, choices and a file
become one tree.

The first place that has a file counts: `--config-dir`, the package, then `configs/` in the working
directory. So that one, which may belong to another program or lie there by chance, adds choices and
replaces none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

from diloco.config.explain import nearest, setting_fields, show
from diloco.config.overrides import first_line
from diloco.config.schema import Config
from diloco.errors import ConfigError

VERSION_BASE = "1.3"
SECTIONS = tuple(Config.model_fields)
GROUPS = tuple(section for section in SECTIONS if section != "run")
# Names under which Hydra finds what is no file: config.yaml of any folder (Hydra looks for what it
# begins with in one folder only), the defaults of the schema, groups without choices, the file of
# --config.
BEGIN, SCHEMA, NOTHING, SAVED = "diloco_begin", "diloco_schema", "diloco_nothing", "diloco_saved"


@dataclass(frozen=True)
class ConfigSource:
    """What a configuration starts from, before its overrides."""

    # --config: a file over the defaults, or the config.yaml of a run instead of them
    base: Path | None = None
    folder: Path | None = None  # --config-dir

    def arguments(self) -> list[str]:
        """The same start as options of a command line."""
        given = {"--config": self.base, "--config-dir": self.folder}
        return [
            part for key, value in given.items() if value is not None for part in (key, str(value))
        ]


class SavedConfig(NamedTuple):
    """The settings of a file of `--config`: the config.yaml of a run, or some settings of
    somebody's own."""

    text: str  # as JSON, which can be compared
    whole: bool  # every setting without a default is there, so the file needs nothing else


class ComposeRequest(NamedTuple):
    """What to compose."""

    places: tuple[Path, ...]  # folders, the first one first
    chosen: tuple[str, ...]  # GROUP=CHOICE, in Hydra's words
    experiments: tuple[str, ...]
    saved: SavedConfig | None


def search_path(start: ConfigSource) -> tuple[Path, ...]:
    """The folders in which files are looked for, the first one first.

    Raises ConfigError if `--config-dir` is not there, or the package is damaged.
    """
    if start.folder is not None and not start.folder.is_dir():
        raise ConfigError(
            f"--config-dir={start.folder} is no directory; make it, or drop the option"
        )
    package = Path(__file__).parents[1]
    installed = [
        place for place in (package / "_configs", package.parent / "configs") if place.is_dir()
    ]
    if not installed:
        raise ConfigError(f"{package}: the configs directory is missing; install diloco again")
    places = [start.folder, installed[0], Path("configs")]
    return tuple(
        dict.fromkeys(place.resolve() for place in places if place is not None and place.is_dir())
    )


def choices(start: ConfigSource | None = None) -> dict[str, tuple[str, ...]]:
    """The groups and the names that can be chosen in each, sorted."""
    found = {}
    places = search_path(start or ConfigSource())
    for group in (*GROUPS, "experiment"):
        if names := {file.stem for place in places for file in (place / group).glob("*.yaml")}:
            found[group] = tuple(sorted(names))
    return found


def compose_files(request: ComposeRequest) -> DictConfig:
    """The tree without the node `hydra`; do not change it. Raises ConfigError with one line.

    It is remembered where it is from the package alone, whose files stay as they are.
    """
    return (_remembered if len(request.places) == 1 else _composed)(request)


def sweep_params(request: ComposeRequest) -> dict[str, str]:
    """What varies in a sweep, by key, as files have it in `hydra.sweeper.params`."""
    found = OmegaConf.select(_composed(request, with_hydra=True), "hydra.sweeper.params")
    return {str(key): str(value) for key, value in (found or {}).items()}


def _composed(request: ComposeRequest, with_hydra: bool = False) -> DictConfig:
    import hydra
    from hydra.errors import HydraException

    with _hydra_for(request.places):
        try:
            return hydra.compose(BEGIN, _hydra_overrides(request), return_hydra_config=with_hydra)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(_reason(request.places, error)) from None


_remembered = lru_cache(maxsize=64)(_composed)


@contextmanager
def _hydra_for(places: tuple[Path, ...]) -> Iterator[None]:
    """Hydra without another application's state; the program around us may be one, which gets its
    own back."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    application = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(places[0]), "diloco", VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = application


def _hydra_overrides(request: ComposeRequest) -> list[str]:
    """The request as overrides of Hydra, inside `_hydra_for`; Hydra is told the defaults of the
    schema.

    The file of `--config` is the first experiment, so that it lies between groups and experiments.
    What is chosen of a group, also by an experiment, replaces what the file says of it.
    """
    import hydra
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(BEGIN, {"defaults": ["config"]})
    store.store(SCHEMA, _schema_defaults())
    further = ",".join(f"file://{place}" for place in request.places[1:])
    chosen = [*request.chosen, *([f"hydra.searchpath=[{further}]"] if further else [])]
    if request.saved is None:
        return (
            [*chosen, f"experiment=[{','.join(request.experiments)}]"]
            if request.experiments
            else chosen
        )
    optional: list[Any] = [
        SCHEMA,
        *({section: None} for section in SECTIONS),
        {"experiment": list(request.experiments)},
    ]
    store.store(NOTHING, {"defaults": optional})
    found = hydra.compose(NOTHING, chosen, return_hydra_config=True).hydra.runtime.choices
    content = {
        key: value
        for key, value in json.loads(request.saved.text).items()
        if found.get(key) is None
    }
    store.store(SAVED, content, group="experiment", package="_global_")
    # What a whole file says of a group, such as the open mapping model.config, is not to be mixed
    # with the defaults.
    whole = [section for section in content if section in GROUPS] if request.saved.whole else []
    return [
        *chosen,
        *(f"~{section}" for section in whole),
        f"experiment=[{','.join((SAVED, *request.experiments))}]",
    ]


def _schema_defaults() -> dict[str, Any]:
    """The settings that have a default, as nested mappings."""
    tree: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, field in setting_fields(Config):
        if not field.is_required():
            group, _, name = key.rpartition(".")
            value = field.get_default(call_default_factory=True)
            tree[group][name] = list(value) if isinstance(value, tuple) else value
    tree["data"]["tokenizer"] = "${tokenizer_of_model:bytes}"
    return tree


def read_saved(file: Path) -> SavedConfig:
    """Reads and checks a file. Raises ConfigError if it is not readable, no YAML or no settings, or
    holds ${...}."""
    try:
        saved = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(
            f"{file} is not YAML: {line}{getattr(error, 'problem', None) or first_line(error)}"
        ) from None
    text = json.dumps(OmegaConf.to_container(saved), ensure_ascii=False, default=str)
    # A part of it may come from a peer. To resolve it would put secrets of this machine into a
    # setting.
    if "${" in text:
        raise ConfigError(
            f"{file} holds ${{...}}, which is resolved in configs/ only; write the value itself"
        )
    if not isinstance(saved, DictConfig) or saved.keys().isdisjoint(SECTIONS):
        raise ConfigError(
            f"{file} is not a configuration; expected the config.yaml of a run directory"
        )
    if "defaults" in saved:
        raise ConfigError(
            f"{file} has a defaults list; make it DIR/experiment/{file.name}, of --config-dir DIR"
        )
    required = (key for key, field in setting_fields(Config) if field.is_required())
    return SavedConfig(
        text, all(OmegaConf.select(saved, key, default=None) is not None for key in required)
    )


def no_choice(group: str, name: str, there: Sequence[str]) -> str:
    """Says that a group has no such choice, and which ones it has."""
    guesses = nearest(name, there)
    hint = f" (did you mean {guesses[0]}?)" if guesses else ""
    return f"{group}={show(name)} is not a choice{hint}; expected one of {', '.join(there)}"


def _said_by_hydra(error: Exception) -> str:
    """What an error of Hydra says, as one line."""
    return show(" ".join(str(error).split()).partition(" Config search path:")[0], limit=300)


def _reason(places: Sequence[Path], error: Exception) -> str:
    """One line that names the file, or the folders."""
    while isinstance(error.__cause__, Exception) and not isinstance(error, YAMLError):
        error = error.__cause__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return (
            f"{mark.name}, line {mark.line + 1}:"
            f" {first_line(ValueError(error.problem or 'is not YAML'))}"
        )
    return f"{', '.join(map(str, places))}: {_said_by_hydra(error)}"
