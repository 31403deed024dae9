"""From `configs/` and the command line to a validated `Config`.

1. Each argument is parsed; a setting or a choice that does not exist is refused, naming the nearest
   that does.
2. Hydra composes the files: defaults of the schema, `config.yaml`, one file per group, a file of
   `--config`, experiments. This takes a twentieth of a second and is remembered.
3. The settings of the command line are laid over, and `${...}` is resolved.
4. Pydantic validates; its first complaint becomes one line.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

import diloco.config.sizes  # noqa: F401 (files of configs/ name what it registers)
from diloco.config.explain import (
    describe_type,
    description,
    explain,
    is_known_key,
    setting_fields,
    show,
    unknown_key,
)
from diloco.config.files import (
    ComposeRequest,
    ConfigSource,
    choices,
    compose_files,
    no_choice,
    read_saved,
    search_path,
)
from diloco.config.hub_names import with_commits
from diloco.config.manifest import Manifest, flatten
from diloco.config.overrides import Override, first_line, key_of, parse
from diloco.config.run_settings import KEYLESS
from diloco.config.schema import Config
from diloco.errors import ConfigError

KEYS = dict(setting_fields(Config))


class Composed(NamedTuple):
    """What files and arguments say: nothing is resolved or validated yet."""

    tree: DictConfig
    typed: dict[str, str]  # settings and their values, as typed
    request: ComposeRequest
    start: ConfigSource


def compose(
    overrides: Sequence[str] = (), start: ConfigSource | None = None, *, base: Path | None = None
) -> Config:
    """Builds the configuration for arguments such as `["experiment=quickstart", "outer.lr=0.5"]`;
    the last one wins.

    `base` is short for `ConfigSource(base=...)`: the `config.yaml` of a run directory in place of
    `configs/`, or a file with some settings over those of `configs/`. A choice in `overrides`
    replaces what it says of that group. Raises ConfigError, with one line, for anything that is not
    a valid configuration.
    """
    return validated(compose_tree(overrides, start or ConfigSource(base=base)))


def compose_tree(overrides: Sequence[str], start: ConfigSource) -> Composed:
    """Everything but resolving and validating. Raises ConfigError for arguments and files that
    cannot be composed."""
    groups, experiments = choices(start), list[str]()
    chosen, settings = dict[str, str](), list[tuple[Override, Any]]()
    for argument in overrides:
        check_key(key_of(argument), groups)  # before Hydra is imported
        typed, override = parse(argument)
        if typed.key not in groups:
            settings.append((typed, override.value()))
            continue
        names = override.value() if isinstance(override.value(), list) else [typed.text]
        if typed.key == "experiment":
            experiments = [] if override.value() is None else list(map(str, names))
            names = experiments
        else:
            chosen[typed.key] = str(override.input_line)
        for name in names:
            _check_choice(typed.key, str(name), groups[typed.key], search_path(start))
    saved = None if start.base is None else read_saved(start.base)
    request = ComposeRequest(search_path(start), tuple(chosen.values()), tuple(experiments), saved)
    tree = copy.deepcopy(compose_files(request))
    OmegaConf.set_struct(tree, False)  # keys of an open mapping, such as model.config, are new
    for typed, value in settings:
        try:
            OmegaConf.update(tree, typed.key, value, merge=False)  # `model.config={}` is empty
        except OmegaConfBaseException as error:
            raise ConfigError(f"{show(f'{typed.key}={typed.text}')}: {first_line(error)}") from None
    return Composed(tree, dict(typed for typed, _ in settings), request, start)


def check_key(key: str, groups: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError for what is neither a setting nor a group."""
    if key.startswith(("hydra.", "hydra/")):
        raise ConfigError(
            f"{show(key)} has no effect; drop it (diloco sweep tries every combination)"
        )
    if key not in groups and not is_known_key(KEYS, key):
        raise ConfigError(unknown_key(key, [*KEYS, *groups]))


def _check_choice(group: str, name: str, there: Sequence[str], places: Sequence[Path]) -> None:
    if name.removesuffix(".yaml") in there:
        return
    looked = (
        f"; looked in {', '.join(f'{place / group}' for place in places)}"
        if len(places) > 1
        else ""
    )
    if name.endswith((".yaml", ".yml")):
        looked = f"; a choice is a file in a folder {group}/, or give --config {name}"
    raise ConfigError(f"{no_choice(group, name, there)}{looked}")


def validated(composed: Composed) -> Config:
    """The configuration of a composed tree. Raises ConfigError with one line if it is not valid."""
    typed = composed.typed
    try:
        content = OmegaConf.to_container(composed.tree, resolve=True)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{place}{first_line(error)}") from None
    assert isinstance(content, dict)
    if "experiment" in content:
        raise ConfigError(
            "an experiment holds no settings of a run; its file begins with the line # @package"
            " _global_"
        )
    try:
        config = Config.model_validate(
            with_commits({str(key): content[key] for key in content}, typed)
        )
    except ValidationError as error:
        text, file = explain(error, Config, typed), composed.start.base
        if (
            file is not None
            and " is not a setting" in text
            and not any(text.startswith(key) for key in typed)
        ):
            text += " If" if text.endswith("?") else "; if"
            text += f" another diloco wrote {file}, use that one, or delete the key from the file"
        raise ConfigError(text) from None
    return _closed(config)


def _closed(config: Config) -> Config:
    """Fills in `run.key` from the private key or the invitation, which both contain it."""
    swarm, typed = config.swarm, config.run.key
    if swarm.admit == "anyone" and typed is None and swarm.key_path is None and swarm.token is None:
        raise ConfigError(KEYLESS)
    if swarm.key_path is None and swarm.token is None:
        return config
    from diloco.admission import RunKey, Token

    if swarm.key_path is not None:
        named, key = (
            f"swarm.key_path={swarm.key_path}",
            RunKey.read(Path(swarm.key_path)).public.hex(),
        )
    else:
        named, key = "swarm.token", Token.read(swarm.token or "").grant.run_key.hex()
    if typed not in (None, key):
        raise ConfigError(
            f"run.key={typed} is not the key of {named}, which is {key}; drop one of them"
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"key": key})})


def outer_preset(name: str) -> dict[str, Any]:
    """All settings of the outer step, as a file of configs/outer and those that it names as its
    defaults have them.

    `${...}` is left as it is. Raises `ConfigError` for a name that is none of a preset.
    """
    there = [one for one in choices()["outer"] if one != "data_parallel"]  # it makes no outer steps
    if name not in there:
        raise ConfigError(no_choice("preset", str(name), there))
    values = OmegaConf.to_container(
        compose_tree([f"outer={name}"], ConfigSource()).tree.outer, resolve=False
    )
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def cfg_text(config: Config, package: str | None) -> str:
    """The configuration as YAML, with every key, or a part of it such as outer. ConfigError if that
    is not there."""
    part: Any = config.model_dump(mode="json")
    for name in () if package is None else package.split("."):
        if not isinstance(part, dict) or name not in part:
            raise ConfigError(
                f"--package={package} is not in the configuration; expected a key such as outer"
            )
        part = part[name]
    return (
        OmegaConf.to_yaml(OmegaConf.create(part))
        if isinstance(part, dict | list)
        else f"{show(part)}\n"
    )


def help_text(start: ConfigSource | None = None) -> str:
    """Every group with its choices and every setting with meaning, expected value, default and
    owner, as plain text."""
    run_owned = dict(setting_fields(Manifest))
    values = dict(flatten(compose().model_dump(mode="json")))
    lines = ["Groups (GROUP=CHOICE):"]
    lines += [f"  {group}: {' '.join(names)}" for group, names in choices(start).items()]
    lines += [
        "",
        (
            "Settings (KEY=VALUE), with their defaults; those marked * define the run and are equal"
            " on all its peers:"
        ),
    ]
    for key, field in setting_fields(Config):
        unsaid = (
            "see --cfg job" if field.is_required() or field.default_factory else show(field.default)
        )
        default = show(values[key]) if key in values else unsaid
        lines.append(f"  {key}={default}{' *' if key in run_owned else ''}")
        lines.append(f"      {description(Config, key)} Expects {describe_type(field)}.")
    return "\n".join(lines)
