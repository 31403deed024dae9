"""From `configs/` and the command line to a validated `Config`.

1. Each argument is parsed; a setting or a choice that does not exist is refused, naming the nearest that does.
2. Hydra composes the files: defaults of the schema, `config.yaml`, one file per group, a file of `--config`,
   experiments. This takes a twentieth of a second and is remembered.
3. Hydra applies the settings of the command line, and `${...}` is resolved.
4. Pydantic validates; its first complaint becomes one line.

Hydra is imported inside functions, so that a help text does not wait for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

import diloco.config.sizes  # noqa: F401 (files of configs/ name what it registers)
from diloco.config.explain import accepts, explain, leaves, show, unknown_key
from diloco.config.files import Request, compose_files, installed, missing_plugin, no_choice
from diloco.config.hub_names import with_commits
from diloco.config.hydra_block import HydraBlock, block_of, read_block
from diloco.config.overrides import Typed, first_line, key_of, parse
from diloco.config.saved import read_saved
from diloco.config.schema import Config
from diloco.config.sources import SECTIONS, Start, choices, search_path, stamp
from diloco.errors import ConfigError

__all__ = ["Composed", "compose", "compose_tree", "resolved", "validated"]

KEYS = dict(leaves(Config))


class Composed(NamedTuple):
    """What Hydra made of files and arguments: nothing is resolved or validated yet."""

    tree: DictConfig  # with the node `hydra`
    block: HydraBlock
    typed: tuple[Typed, ...]  # the settings
    arguments: tuple[str, ...]  # the same for Hydra
    request: Request
    start: Start


def compose(overrides: Sequence[str] = (), start: Start | None = None, *, base: Path | None = None) -> Config:
    """Builds the configuration for arguments such as `["experiment=quickstart", "outer.lr=0.5"]`; the last one wins.

    `base` is short for `Start(base=...)`: the `config.yaml` of a run directory to start from in place of `configs/`, or
    a file with some settings over those of `configs/`. A choice in `overrides` replaces what it says of that group.
    Raises ConfigError, with one line, for anything that is not a valid configuration.
    """
    return validated(compose_tree(overrides, start or Start(base=base)))


def compose_tree(overrides: Sequence[str], start: Start) -> Composed:
    """Everything but resolving and validating. Raises ConfigError for arguments and files that cannot be composed."""
    groups = choices(start)
    parsed = [parse(text) for text in overrides]
    chosen, settings = list[str](), list[tuple[Typed, Any]]()
    for typed, override in parsed:
        if typed.key in groups or typed.key.startswith("hydra/"):
            chosen.append(_choice(typed, override, groups, start))
        else:
            settings.append(_setting(typed, override, groups))
    saved = None if start.base is None else read_saved(start.base)
    places = search_path(start)
    request = Request(places, start.name, tuple(chosen), saved)
    tree = copy.deepcopy(compose_files(request))
    _apply(tree, settings)
    keys = tuple(typed for typed, _ in settings)
    said = any(one.key.startswith("hydra.") for one in keys)
    block = read_block(tree) if said else block_of(request, stamp(places))
    return Composed(tree, block, keys, tuple(map(_line, settings)), request, start)


def validated(composed: Composed) -> Config:
    """The configuration of a composed tree. Raises ConfigError with one line if it is not valid."""
    tree, block, typed = composed.tree, composed.block, {one.key: one.text for one in composed.typed}
    if {"run.dir", "hydra.run.dir"} <= typed.keys():
        both = f"hydra.run.dir={show(typed['hydra.run.dir'])} and run.dir={show(typed['run.dir'])}"
        raise ConfigError(f"{both} are one setting; drop the former")
    try:
        if block.run_dir is not None and "run.dir" not in typed:
            OmegaConf.update(tree, "run.dir", block.run_dir)
        with _hydra_config(tree):
            content = {str(key): _resolved(tree, str(key)) for key in tree if key != "hydra"}
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{place}{first_line(error)}") from None
    try:
        config = Config.model_validate(with_commits(content, typed.keys()))
    except ValidationError as error:
        raise ConfigError(_complaint(error, content, typed, composed)) from None
    return _closed(config)


def resolved(composed: Composed, key: str) -> Any:
    """One value, such as that of hydra.sweep.dir. Raises ConfigError if it refers to something that is not there."""
    try:
        with _hydra_config(composed.tree):
            return OmegaConf.select(composed.tree, key)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {first_line(error)}") from None


def _complaint(error: ValidationError, content: Mapping[str, Any], typed: Mapping[str, str], composed: Composed) -> str:
    """The first mistake, and what its file lacks where that is the reason."""
    text, start = explain(error, Config, typed), composed.start
    if "experiment" in content:
        name = composed.tree.hydra.runtime.choices.get("experiment")
        return f"experiment={name} holds no settings of a run; its file begins with the line # @package _global_"
    if start.name != "config" and "model" not in content:
        return f"{text}; does {start.name}.yaml begin with defaults: [config, _self_]?"
    unknown = [key for key in content if key not in SECTIONS] or " is not a setting" in text
    if start.base is not None and unknown and not any(text.startswith(key) for key in typed):
        text += " If" if text.endswith("?") else "; if"
        return f"{text} a newer diloco wrote {start.base}, use that one, or delete the key from the file"
    return text


def _resolved(tree: DictConfig, key: str) -> Any:
    value = tree[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@contextmanager
def _hydra_config(tree: DictConfig) -> Iterator[None]:
    """`${hydra:...}` reads this tree meanwhile; the program around us may be a Hydra application itself."""
    from hydra.core.hydra_config import HydraConfig

    state: Any = HydraConfig.instance()
    before, state.cfg = state.cfg, tree
    try:
        yield
    finally:
        state.cfg = before


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


def _setting(typed: Typed, override: Any, groups: Mapping[str, Sequence[str]]) -> tuple[Typed, Any]:
    """A setting as Hydra applies it. Keys of an open mapping, such as model.config, need no +."""
    if f"{typed.key}.".startswith("hydra.sweeper.params."):
        raise ConfigError(
            f"{typed.key} is for a file; here what varies is an argument as it is, such as outer.lr=0.5,0.7"
        )
    if typed.key.startswith("hydra."):
        return typed, override
    if typed.sign == "~" and typed.key in SECTIONS:
        return typed, override
    if not accepts(KEYS, typed.key):
        raise ConfigError(unknown_key(typed.key, [*KEYS, *groups]))
    known = KEYS.get(typed.key)
    open_mapping = known is None or "dict" in str(known.annotation)
    if typed.sign == "" and open_mapping:
        from hydra.core.override_parser.types import OverrideType

        override.type = OverrideType.FORCE_ADD
    return typed, override


def _choice(typed: Typed, override: Any, groups: Mapping[str, Sequence[str]], start: Start) -> str:
    """A choice as Hydra takes it, all of whose names exist."""
    plugin = typed.key in ("hydra/sweeper", "hydra/launcher")
    names = installed(typed.key) if typed.key.startswith("hydra/") else groups[typed.key]
    value = override.value()
    if typed.sign == "~" or (value is None and typed.key == "experiment"):
        return typed.argument if typed.sign == "~" else "~experiment"
    for name in value if isinstance(value, list) else [typed.text]:
        if str(name).removesuffix(".yaml") in names:
            continue
        if plugin:
            raise ConfigError(missing_plugin(typed.key, str(name), names))
        places = search_path(start)
        looked = f"; looked in {', '.join(f'{place / typed.key}' for place in places)}" if len(places) > 1 else ""
        if str(name).endswith((".yaml", ".yml")):
            looked = f"; a choice is a file in a folder {typed.key}/, or give --config {name}"
        raise ConfigError(f"{no_choice(typed.key, str(name), names)}{looked}")
    return typed.argument


def _line(setting: tuple[Typed, Any]) -> str:
    typed, override = setting
    return f"++{override.input_line}" if override.is_force_add() and not typed.sign else str(override.input_line)


def _apply(tree: DictConfig, settings: Sequence[tuple[Typed, Any]]) -> None:
    """Applies the settings as Hydra does when it composes, with its own code."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
    from hydra.errors import HydraException

    for typed, override in settings:
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], tree)
        except HydraException as error:
            raise ConfigError(_refusal(typed, error)) from None
        tree.hydra.overrides["hydra" if typed.key.startswith("hydra.") else "task"].append(typed.argument)
    if settings:
        task: Any = OmegaConf.to_container(tree.hydra.overrides.task)
        # A directory that is named by what was typed is not named by itself.
        mine = [parse(one)[1] for one in task if key_of(one) != "run.dir" and "override_dirname" not in one]
        separators: Any = OmegaConf.to_container(tree.hydra.job.config.override_dirname)
        tree.hydra.job.override_dirname = get_overrides_dirname(mine, **separators)


def _refusal(typed: Typed, error: Exception) -> str:
    """What Hydra says of an argument, as one line of ours."""
    plain = f"{typed.key}={typed.text}"
    if typed.sign == "+" and "Could not append" in str(error):
        return f"{show(typed.argument)} adds a key, but {typed.key} is there already; write {plain}, or ++{plain}"
    if typed.sign == "~":
        reason = "is not there" if "does not exist" in str(error) else "has another value"
        return f"{show(typed.argument)} deletes nothing: {typed.key} {reason}; drop it"
    if typed.key.startswith("hydra.") and "Could not override" in str(error):
        return f"{typed.key} is not a setting of Hydra here; see --cfg hydra, or write +{plain} to add it"
    cause = error.__cause__ or error.__context__ or error
    return f"{show(plain)}: {first_line(cause if isinstance(cause, Exception) else error)}"
