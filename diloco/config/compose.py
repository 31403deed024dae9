"""From `configs/` and the command line to a validated `Config`.

1. Each argument is parsed; a setting or a choice that does not exist is refused, naming the nearest that does.
2. Hydra composes `config.yaml`, one file per group and an experiment; the settings of the command line come last.
3. Defaults of the schema fill what no file says, so that `${...}` can refer to any setting; then it is resolved.
4. Pydantic validates; its first complaint becomes one line.

Hydra is imported inside functions, so that a help text does not wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from diloco.config.explain import accepts, expected, explain, leaves, nearest, show, unknown_key
from diloco.config.hub_names import with_commits
from diloco.config.manifest import Manifest, flatten
from diloco.config.schema import Config
from diloco.errors import ConfigError

__all__ = ["choices", "compose", "help_text", "settings_of"]

# Settings of earlier versions that say nothing about a run: a saved configuration may still name them.
RETIRED = ("sim.mode",)


class _Override(NamedTuple):
    """One argument of the command line."""

    key: str
    text: str  # the value as typed
    value: Any


def compose(overrides: Sequence[str] = (), *, base: Path | None = None) -> Config:
    """Builds the configuration for arguments such as `["experiment=quickstart", "outer.lr=0.5"]`; the last one wins.

    `base` is the `config.yaml` of a run directory to start from in place of `configs/`; a choice in `overrides` then
    replaces that whole group. Raises ConfigError, with one line, for anything that is not a valid configuration.
    """
    groups = choices()
    known = dict(leaves(Config))
    parsed = [_parse(text) for text in overrides]
    chosen = {item.key: _checked_choice(item, groups) for item in parsed if item.key in groups}
    settings = [item for item in parsed if item.key not in groups]
    for item in settings:
        if not accepts(known, item.key):
            raise ConfigError(unknown_key(item.key, [*known, *groups]))
    try:
        tree = OmegaConf.merge(_schema_defaults(), _compose_files(chosen) if base is None else _rebase(base, chosen))
        for item in settings:
            OmegaConf.update(tree, item.key, item.value, force_add=True)
        content = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{place}{_first_line(error)}") from None
    try:
        config = Config.model_validate(with_commits(content, {item.key for item in settings}))
    except ValidationError as error:
        raise ConfigError(explain(error, Config, {item.key: item.text for item in settings})) from None
    return _closed(config)


def _closed(config: Config) -> Config:
    """Fills in `run.key` from the private key or the invitation, which both contain it."""
    swarm, typed = config.swarm, config.run.key
    if swarm.key_path is None and swarm.token is None:
        return config
    from diloco.admission import RunKey, Token

    if swarm.key_path is not None:
        named, key = f"swarm.key_path={swarm.key_path}", RunKey.read(Path(swarm.key_path)).public.hex()
    else:
        named, key = "swarm.token", Token.read(swarm.token or "").grant.run_key.hex()
    if typed not in (None, key):
        raise ConfigError(f"run.key={typed} is not the key of {named}, which is {key}; drop one of them")
    return config.model_copy(update={"run": config.run.model_copy(update={"key": key})})


def choices() -> dict[str, tuple[str, ...]]:
    """The groups of `configs/` and the names that can be chosen in each, sorted."""
    folders = sorted(path for path in _directory().iterdir() if path.is_dir())
    return {folder.name: tuple(sorted(path.stem for path in folder.glob("*.yaml"))) for folder in folders}


def settings_of(group: str, name: str) -> list[str]:
    """The settings that a choice holds itself, such as ["swarm.listen"] for `swarm=network`."""
    content = OmegaConf.load(_directory() / group / f"{name}.yaml")
    assert isinstance(content, DictConfig), f"{group}/{name}.yaml holds no settings"
    return [f"{group}.{key}" for key in map(str, content) if key != "defaults"]


def help_text() -> str:
    """Every group with its choices and every setting with meaning, expected value, default and owner, as plain text."""
    run_owned = dict(leaves(Manifest))
    values = dict(flatten(compose().model_dump(mode="json")))
    lines = ["Groups (GROUP=CHOICE):"]
    lines += [f"  {group}: {' '.join(names)}" for group, names in choices().items()]
    lines += [
        "",
        "Settings (KEY=VALUE), with their defaults; those marked * define the run and are equal on all its peers:",
    ]
    for key, field in leaves(Config):
        empty = "[]" if field.default == () else "see --cfg job"  # an empty mixture is in no dump
        default = show(values[key]) if key in values else empty
        lines.append(f"  {key}={default}{' *' if key in run_owned else ''}")
        lines.append(f"      {field.description} Expects {expected(field)}.")
    return "\n".join(lines)


def _directory() -> Path:
    """`configs/` inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    for place in (package / "_configs", package.parent / "configs"):
        if (place / "config.yaml").is_file():
            return place
    raise ConfigError(f"{package}: the configs directory is missing; install diloco again")


def _parse(argument: str) -> _Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, text = argument.lstrip("+").partition("=")
    if not equals or not key or argument.startswith("~"):
        raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"{key}={text}")
    except HydraException as error:
        if text[:1] in ("[", "{", "'", '"'):
            reason = _first_line(error)
            raise ConfigError(
                f"{show(key)}={show(text)} cannot be parsed ({reason}); check brackets and quotes"
            ) from None
        return _Override(key, text, text)  # Hydra's grammar reserves some characters of ordinary text, such as ~
    if override.is_sweep_override():
        raise ConfigError(f"{key}={text} is several values; give one value, or a list in brackets: '{key}=[{text}]'")
    return _Override(key, text, override.value())


def _checked_choice(item: _Override, groups: Mapping[str, Sequence[str]]) -> str | None:
    names = groups[item.key]
    if item.value is None and item.key == "experiment":
        return None
    if item.text in names:
        return item.text
    guesses = nearest(item.text, names)
    hint = f" (did you mean {guesses[0]}?)" if guesses else ""
    raise ConfigError(f"{item.key}={show(item.text)} is not a choice{hint}; expected one of {', '.join(names)}")


def _compose_files(chosen: Mapping[str, str | None]) -> DictConfig:
    """Composes the files alone for the choices on the command line. The result is cached: do not change it."""
    arguments = tuple(f"{group}={name}" for group, name in chosen.items() if name is not None)
    return _hydra_compose(_directory().resolve(), arguments)


@lru_cache(maxsize=64)  # a tenth of a second each, and a sweep or a test session composes hundreds
def _hydra_compose(directory: Path, arguments: tuple[str, ...]) -> DictConfig:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    state = GlobalHydra.instance()
    application, state.hydra = state.hydra, None  # the program around us may be a Hydra application itself
    try:
        with hydra.initialize_config_dir(str(directory), version_base="1.3"):
            return hydra.compose("config", list(arguments))
    except (HydraException, YAMLError) as error:
        raise ConfigError(f"{directory}: {_first_line(error)}") from None
    finally:
        GlobalHydra.instance().hydra = application


def _rebase(base: Path, chosen: Mapping[str, str | None]) -> DictConfig:
    """The saved configuration, with the chosen groups in place of its own."""
    if chosen.get("experiment") is not None:
        raise ConfigError(f"experiment={chosen['experiment']} cannot be laid over {base}; give its settings one by one")
    try:
        saved = OmegaConf.load(base)
    except OSError as error:
        raise ConfigError(f"{base} cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{base} is not YAML: {_first_line(error)}") from None
    if "${" in json.dumps(OmegaConf.to_container(saved), ensure_ascii=False, default=str):
        # A part of it may come from a peer. To resolve it would put secrets of this machine into a setting.
        raise ConfigError(f"{base} holds ${{...}}, which is resolved in configs/ only; write the value itself")
    if not isinstance(saved, DictConfig) or saved.keys().isdisjoint(Config.model_fields):
        raise ConfigError(f"{base} is not a configuration; expected the config.yaml of a run directory")
    for key in RETIRED:
        group, _, name = key.partition(".")
        if isinstance(saved.get(group), DictConfig):
            saved[group].pop(name, None)
    groups = {group: name for group, name in chosen.items() if name is not None}
    if groups:
        fresh = _compose_files(groups)
        saved.update({group: fresh[group] for group in groups})
    return saved


def _schema_defaults() -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, field in leaves(Config):
        if not field.is_required():
            group, _, name = key.rpartition(".")
            value = field.get_default(call_default_factory=True)
            tree.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
    return tree


def _first_line(error: Exception) -> str:
    return show(next(iter(str(error).splitlines()), type(error).__name__), limit=200)
