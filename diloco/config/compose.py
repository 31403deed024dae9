"""From `configs/` and the command line to a validated `Config`.

1. Each argument is parsed; what does not exist is refused, naming the nearest that does.
2. Hydra composes defaults, groups, a file of `--config` and experiments (`files.py`).
3. The settings of the command line are laid over, and `${...}` is resolved.
4. Pydantic validates; its first complaint becomes one line.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from diloco.config.explain import (
    describe_type,
    description,
    explain,
    first_line,
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
    fragments_for,
    no_choice,
    read_saved,
    search_path,
)
from diloco.config.manifest import Manifest, flatten
from diloco.config.model_data import split_commits
from diloco.config.run_settings import KEYLESS
from diloco.config.schema import Config
from diloco.errors import ConfigError

KEYS = dict(setting_fields(Config))


class Composed(NamedTuple):
    """A composed configuration: nothing is resolved or validated yet."""

    tree: DictConfig
    typed: dict[str, str]  # settings and their values, as typed
    request: ComposeRequest
    start: ConfigSource


def compose(
    overrides: Sequence[str] = (), start: ConfigSource | None = None, *, base: Path | None = None
) -> Config:
    """Compose and validate arguments such as `["model=14m", "outer.lr=0.5"]`; the last one wins.

    `base`, short for `ConfigSource(base=...)`, is the `config.yaml` of a run directory in place of
    `configs/`, or a file with some settings over those of `configs/`. A choice in `overrides`
    replaces what it says of that group. Raises ConfigError with one line.
    """
    return validated(compose_tree(overrides, start or ConfigSource(base=base)))


def compose_tree(overrides: Sequence[str], start: ConfigSource) -> Composed:
    """Do everything but resolving and validating; raises ConfigError."""
    groups, places = choices(start), search_path(start)
    experiments, chosen = list[str](), dict[str, str]()
    settings = list[tuple[str, str, Any]]()
    for argument in overrides:
        check_key(key_of(argument), groups)  # before Hydra is imported
        key, text, override = parse_argument(argument)
        value = override.value()
        if key not in groups:
            settings.append((key, text, value))
            continue
        names = list(map(str, value)) if isinstance(value, list) else [text]
        if key == "experiment":
            experiments = names = [] if value is None else names
        else:
            chosen[key] = str(override.input_line)
        for name in names:
            _check_choice(key, name, groups[key], places)
    saved = None if start.base is None else read_saved(start.base)
    request = ComposeRequest(places, tuple(chosen.values()), tuple(experiments), saved)
    tree = copy.deepcopy(compose_files(request))
    OmegaConf.set_struct(tree, False)  # keys of an open mapping, such as model.config, are new
    for key, text, value in settings:
        try:
            OmegaConf.update(tree, key, value, merge=False)  # `model.config={}` is empty
        except OmegaConfBaseException as error:
            raise ConfigError(f"{show(f'{key}={text}')}: {first_line(error)}") from None
    return Composed(tree, {key: text for key, text, _ in settings}, request, start)


def key_of(argument: str) -> str:
    """Return the key or group of KEY=VALUE or GROUP=CHOICE, unchecked, without a + before it."""
    key = argument.lstrip("+").partition("=")[0]
    return "inner.schedule" if key == "schedule" else key


def parse_argument(argument: str, swept: bool = False) -> tuple[str, str, Any]:
    """Split an argument into key and text, and parse it as Hydra does.

    Text that Hydra wants in quotes (`data.path=~/a=b`) is taken as it is. Raises ConfigError for
    what is no override, and for several values unless they may be `swept`.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, text = key_of(argument), argument.partition("=")[2]
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"{key}={text}")
    except HydraException as error:
        if text[:1] in ("[", "{", "'", '"'):
            wrong = f"{show(key)}={show(text)} cannot be parsed ({first_line(error)})"
            raise ConfigError(f"{wrong}; check brackets and quotes") from None
        try:  # Hydra's grammar reserves some characters of ordinary text
            override = parser.parse_override(f"{key}={quoted(text)}")
        except HydraException:
            override = None
    if override is None or "=" not in argument or override.is_delete():
        raise ConfigError(f"{show(argument)} is not a setting; write KEY=VALUE or GROUP=CHOICE")
    if override.is_sweep_override() and not swept:
        remedy = f"give one value, or a list in brackets: '{key}=[{text}]'"
        raise ConfigError(f"{key}={text} is several values; {remedy}")
    return key, text, override


def quoted(value: Path | str) -> str:
    """Quote a path or a text as a value in Hydra's grammar."""
    doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value))
    return "'" + doubled.replace("'", "\\'") + "'"


def check_key(key: str, groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a key that is neither a setting nor a group."""
    if key.startswith(("hydra.", "hydra/")):
        remedy = "drop it (diloco sweep tries every combination)"
        raise ConfigError(f"{show(key)} has no effect; {remedy}")
    if key.startswith("~"):  # by which Hydra deletes
        remedy = f"set {key[1:]} to its default, as --cfg help shows it"
        raise ConfigError(f"{show(key)}: no setting can be deleted; {remedy}")
    if key not in groups and not is_known_key(KEYS, key):
        raise ConfigError(unknown_key(key, [*KEYS, *groups]))


def _check_choice(group: str, name: str, there: Sequence[str], folders: Sequence[Path]) -> None:
    if name.removesuffix(".yaml") in there:
        return
    looked = ""
    if name.endswith((".yaml", ".yml")):
        looked = f"; a choice is a file in a folder {group}/, or give --config {name}"
    elif len(folders) > 1:
        looked = f"; looked in {', '.join(f'{folder / group}' for folder in folders)}"
    raise ConfigError(f"{no_choice(group, name, there)}{looked}")


def validated(composed: Composed) -> Config:
    """Resolve and validate a composed tree. Raises ConfigError if it is not valid."""
    typed, file = composed.typed, composed.start.base
    try:
        content: Any = OmegaConf.to_container(composed.tree, resolve=True)
    except OmegaConfBaseException as error:
        prefix = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{prefix}{first_line(error)}") from None
    if "experiment" in content:
        begin = "its file begins with the line # @package _global_"
        raise ConfigError(f"an experiment holds no settings of a run; {begin}")
    split_commits(content, typed)
    files: Any = OmegaConf.to_container(composed.tree, resolve=False)
    if "${diloco.fragments_for:" in str(files["outer"].get("fragments")):
        content["outer"]["fragments"] = _fragments(content, composed.start.together)
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        text = explain(error, Config, typed)
        is_typed = any(text.startswith(key) for key in typed)
        if file is not None and " is not a setting" in text and not is_typed:
            text += " If" if text.endswith("?") else "; if"
            text += f" another diloco wrote {file}, use that one, or delete the key from the file"
        raise ConfigError(text) from None
    return _with_key(config)


def _fragments(content: Mapping[str, Any], together: bool) -> int:
    """Return the number of fragments of a resumed run; else one that suits model and peers."""
    run_dir = Path(str(content["run"]["dir"]))
    with suppress(OSError, ValueError, KeyError, TypeError):  # `check_same_run` says what is wrong
        if any((run_dir / "checkpoints").glob("*/step-*")):
            saved = json.loads((run_dir / "manifest.json").read_text("utf-8"))
            return int(saved["outer"]["fragments"])
    model, outer = content["model"], content["outer"]
    # These have too few layers for a fragment per peer, or do not exchange all fragments at once.
    alone = outer["pattern"] == "strided" or outer["staggered"] or model["adapter"] != "none"
    peers = [content["swarm"]["min_peers"], content["local"]["peers"] if together else 1]
    expected = max([1, *(number for number in peers if type(number) is int)])
    return fragments_for(model["config"], 1 if alone else expected)


def _with_key(config: Config) -> Config:
    """Fill in `run.key` from the private key or the invitation, which both contain it."""
    swarm, typed = config.swarm, config.run.key
    if swarm.key_path is None and swarm.token is None:
        if swarm.admit == "anyone" and typed is None:
            raise ConfigError(KEYLESS)
        return config
    from diloco.admission import RunKey, Token

    if swarm.key_path is not None:
        source = f"swarm.key_path={swarm.key_path}"
        key = RunKey.read(Path(swarm.key_path)).public.hex()
    else:
        source, key = "swarm.token", Token.read(swarm.token or "").grant.run_key.hex()
    if typed not in (None, key):
        wrong = f"run.key={typed} is not the key of {source}, which is {key}"
        raise ConfigError(f"{wrong}; drop one of them")
    return config.model_copy(update={"run": config.run.model_copy(update={"key": key})})


def outer_preset(name: str) -> dict[str, Any]:
    """Load the settings of a file of configs/outer, with those that it names as its defaults.

    `${...}` is left as it is. Raises `ConfigError` for another name.
    """
    presets = [key for key in choices()["outer"] if key != "data_parallel"]  # no outer steps
    if name not in presets:
        raise ConfigError(no_choice("outer", str(name), presets))
    tree = compose_tree([f"outer={name}"], ConfigSource()).tree
    values: Any = OmegaConf.to_container(tree.outer, resolve=False)
    return {str(key): value for key, value in values.items()}


def cfg_text(config: Config, package: str | None) -> str:
    """Return the configuration, or a part such as `outer`, as YAML; ConfigError if it has none."""
    part: Any = config.model_dump(mode="json")
    for name in package.split(".") if package else ():
        if not isinstance(part, dict) or name not in part:
            missing = f"--package={package} is not in the configuration"
            raise ConfigError(f"{missing}; expected a key such as outer")
        part = part[name]
    if isinstance(part, dict | list):
        return OmegaConf.to_yaml(OmegaConf.create(part))
    return f"{show(part)}\n"


def help_text(start: ConfigSource | None = None) -> str:
    """List groups with their choices, and settings with meaning, type, default and owner."""
    run_owned = dict(setting_fields(Manifest))
    values = dict(flatten(compose().model_dump(mode="json")))
    lines = ["Groups (GROUP=CHOICE):"]
    lines += [f"  {group}: {' '.join(names)}" for group, names in choices(start).items()]
    lines += ["", "Settings (KEY=VALUE) with defaults; all peers of a run share those marked *:"]
    for key, field in KEYS.items():
        default = "see --cfg job"
        if key in values:
            default = show(values[key])
        elif not field.is_required() and not field.default_factory:
            default = show(field.default)
        lines.append(f"  {key}={default}{' *' if key in run_owned else ''}")
        lines.append(f"      {description(Config, key)} Expects {describe_type(field)}.")
    return "\n".join(lines)
