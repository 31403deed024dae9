"""Folders with files of settings, and their composition by Hydra into one tree.

The first folder that has a file counts: `--config-dir`, the package, then `configs/` in the working
directory. So the last one, which may belong to another program, adds choices and replaces none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

from diloco.config.explain import first_line, nearest, setting_fields, show
from diloco.config.schema import Config
from diloco.errors import ConfigError

MOST_PARAMETERS = 2**25  # of a fragment: 384 MiB of outer state for its author
# A smaller one does not pay for its messages: in 8 bits it takes 10 ms at 100 Mbit/s.
LEAST_PARAMETERS = 2**17
MOST_AUTHORS = 64  # every peer has a stream to each of them
SECTIONS = tuple(Config.model_fields)
GROUPS = (*(section for section in SECTIONS if section != "run"), "adapter")
# Names under which Hydra finds what is no file: config.yaml of any folder (Hydra looks for what it
# begins with in one folder only), the defaults of the schema, groups without choices, the file of
# --config.
BEGIN, SCHEMA, NOTHING, SAVED = "diloco_begin", "diloco_schema", "diloco_nothing", "diloco_saved"


@dataclass(frozen=True)
class ConfigSource:
    """The base of a configuration, before its overrides."""

    base: Path | None = None  # --config: some settings, or the config.yaml of a run with all
    folder: Path | None = None  # --config-dir
    together: bool = False  # for all local.peers of a run, rather than for one peer

    def arguments(self) -> list[str]:
        """Return the same base as options of a command line."""
        given = [("--config", self.base), ("--config-dir", self.folder)]
        return [part for key, path in given if path is not None for part in (key, str(path))]


class SavedConfig(NamedTuple):
    """The settings of a file of `--config`."""

    text: str  # as JSON, which can be compared
    whole: bool  # every setting without a default is there, so the file needs nothing else


class ComposeRequest(NamedTuple):
    """A request to compose a tree."""

    places: tuple[Path, ...]  # folders, the first one first
    chosen: tuple[str, ...]  # GROUP=CHOICE, in Hydra's words
    experiments: tuple[str, ...]
    saved: SavedConfig | None


def search_path(start: ConfigSource) -> tuple[Path, ...]:
    """List the folders in which files are looked for, the first one first.

    Raises ConfigError if `--config-dir` is not there, or the package is damaged.
    """
    if start.folder is not None and not start.folder.is_dir():
        missing = f"--config-dir={start.folder} is no directory"
        raise ConfigError(f"{missing}; make it, or drop the option")
    package = Path(__file__).parents[1]
    shipped = [package / "_configs", package.parent / "configs"]
    installed = next((folder for folder in shipped if folder.is_dir()), None)
    if installed is None:
        raise ConfigError(f"{package}: the configs directory is missing; install diloco again")
    places = [start.folder, installed, Path("configs")]
    return tuple(dict.fromkeys(folder.resolve() for folder in places if folder and folder.is_dir()))


def choices(start: ConfigSource | None = None) -> dict[str, tuple[str, ...]]:
    """Return the groups, and the names that can be chosen in each, sorted."""
    groups = {}
    places = search_path(start or ConfigSource())
    for group in (*GROUPS, "experiment"):
        if names := {file.stem for folder in places for file in (folder / group).glob("*.yaml")}:
            groups[group] = tuple(sorted(names))
    return groups


def no_choice(group: str, name: str, there: Sequence[str]) -> str:
    """Say that a group has no such choice, and which ones it has."""
    guesses = nearest(name, there)
    hint = f" (did you mean {guesses[0]}?)" if guesses else ""
    return f"{group}={show(name)} is not a choice{hint}; expected one of {', '.join(there)}"


def compose_files(request: ComposeRequest) -> DictConfig:
    """Compose a tree without the node `hydra`; do not change it. Raises ConfigError in one line.

    A request that reads only the package is cached, as those files do not change.
    """
    _register_resolvers()
    return (_cached if len(request.places) == 1 else _composed)(request)


def sweep_params(request: ComposeRequest) -> dict[str, str]:
    """Return the values that vary in a sweep, by key, as in `hydra.sweeper.params` of a file."""
    _register_resolvers()
    params = OmegaConf.select(_composed(request, with_hydra=True), "hydra.sweeper.params")
    return {str(key): str(value) for key, value in (params or {}).items()}


def _composed(request: ComposeRequest, with_hydra: bool = False) -> DictConfig:
    import hydra
    from hydra.errors import HydraException

    with _own_hydra(request.places[0]):
        try:
            return hydra.compose(BEGIN, _hydra_overrides(request), return_hydra_config=with_hydra)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(_reason(request.places, error)) from None


_cached = lru_cache(maxsize=64)(_composed)


@contextmanager
def _own_hydra(folder: Path) -> Iterator[None]:
    """Use Hydra; a program around us that uses it, too, gets its own state back."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    application = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), "diloco", "1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = application


def _hydra_overrides(request: ComposeRequest) -> list[str]:
    """Translate the request into overrides of Hydra, inside `_own_hydra`.

    The file of `--config` is the first experiment, so that it lies between groups and experiments.
    A choice of a group, also by an experiment, replaces that group of the file.
    """
    import hydra
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(BEGIN, {"defaults": ["config"]})
    store.store(SCHEMA, _schema_defaults())
    chosen, experiments = list(request.chosen), list(request.experiments)
    if further := ",".join(f"file://{folder}" for folder in request.places[1:]):
        chosen.append(f"hydra.searchpath=[{further}]")
    if request.saved is not None:
        optional: list[Any] = [SCHEMA, *({section: None} for section in SECTIONS)]
        store.store(NOTHING, {"defaults": [*optional, {"experiment": experiments}]})
        choices = hydra.compose(NOTHING, chosen, return_hydra_config=True).hydra.runtime.choices
        saved = json.loads(request.saved.text)
        content = {key: value for key, value in saved.items() if choices.get(key) is None}
        store.store(SAVED, content, group="experiment", package="_global_")
        experiments.insert(0, SAVED)
        if request.saved.whole:  # else its model.config would be mixed with the default model's
            chosen += [f"~{section}" for section in content if section in GROUPS]
    return [*chosen, *([f"experiment=[{','.join(experiments)}]"] if experiments else [])]


def _schema_defaults() -> dict[str, Any]:
    """Return the settings that have a default, as nested mappings."""
    tree: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, field in setting_fields(Config):
        if not field.is_required():
            group, _, name = key.rpartition(".")
            value = field.get_default(call_default_factory=True)
            tree[group][name] = list(value) if isinstance(value, tuple) else value
    tree["data"]["tokenizer"] = "${diloco.tokenizer_of_model:bytes}"
    return tree


def read_saved(file: Path) -> SavedConfig:
    """Read a file of settings; raises ConfigError if it is none, or holds ${...}."""
    try:
        saved = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{file} is not YAML: {line}{problem}") from None
    text = json.dumps(OmegaConf.to_container(saved), ensure_ascii=False, default=str)
    # A part of it may come from a peer, and must not put secrets of this machine into a setting.
    if "${" in text:
        only = "which is resolved in configs/ only; write the value itself"
        raise ConfigError(f"{file} holds ${{...}}, {only}")
    if not isinstance(saved, DictConfig) or saved.keys().isdisjoint(SECTIONS):
        expected = "expected the config.yaml of a run directory"
        raise ConfigError(f"{file} is not a configuration; {expected}")
    if "defaults" in saved:
        remedy = f"make it DIR/experiment/{file.name}, of --config-dir DIR"
        raise ConfigError(f"{file} has a defaults list; {remedy}")
    required = [key for key, field in setting_fields(Config) if field.is_required()]
    return SavedConfig(text, all(OmegaConf.select(saved, key) is not None for key in required))


def _reason(places: Sequence[Path], error: Exception) -> str:
    """Format the error as one line that names the file, or the folders."""
    while isinstance(error.__cause__, Exception) and not isinstance(error, YAMLError):
        error = error.__cause__
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, ValueError(error.problem or "is not YAML")
        return f"{mark.name}, line {mark.line + 1}: {first_line(problem)}"
    message = " ".join(str(error).split()).partition(" Config search path:")[0]
    return f"{', '.join(map(str, places))}: {show(message, limit=300)}"


# --- what files of configs/ leave to the model: the names of `RESOLVERS` --------------------------


def fragments_of(parameters: int, peers: int = 1) -> int:
    """Return how many fragments of at most `MOST_PARAMETERS` suit a model and its `peers`."""
    fewest, peers = max(1, math.ceil(parameters / MOST_PARAMETERS)), min(peers, MOST_AUTHORS)
    return max(fewest, min(math.ceil(fewest / peers) * peers, parameters // LEAST_PARAMETERS))


def fragments_for(config: Mapping[str, Any], peers: int = 1) -> int:
    """Do the same for the sizes of a model like Llama; 1 if the config does not say them.

    All peers have to agree on the number, so it depends on the settings of the run alone.
    """
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes = [size for key in keys if isinstance(size := config.get(key), int)]
    if len(sizes) < len(keys):
        return 1
    vocabulary, width, inner, layers = sizes
    embeddings = vocabulary * width * (1 if config.get("tie_word_embeddings") else 2)
    return fragments_of(embeddings + layers * width * (4 * width + 3 * inner), peers)


def _tokenizer_of_model(otherwise: str, *, _root_: DictConfig) -> str:
    """Resolve to `model.path` as the tokenizer; without it, to the text after the colon."""
    path, commit = (OmegaConf.select(_root_, f"model.{key}") for key in ("path", "revision"))
    if path is None:
        return otherwise
    return str(path) if commit is None else f"{path}@{commit}"


RESOLVERS: dict[str, Callable[..., Any]] = {
    "diloco.fragments_for": fragments_for,
    "diloco.tokenizer_of_model": _tokenizer_of_model,
}


def _register_resolvers() -> None:
    for name, resolver in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)
