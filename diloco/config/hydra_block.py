"""The node `hydra` of a composed tree: what somebody has set there, and a refusal of what has no effect here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from diloco.config.explain import show
from diloco.config.files import Request, compose_files, defaults_of_hydra
from diloco.errors import ConfigError

__all__ = ["HydraBlock", "block_of", "read_block"]

# Set by Hydra while it composes.
_ITS_OWN = ("runtime.", "overrides.", "job.config_name", "job.override_dirname")
_USED = ("mode", "verbose", "run.dir", "sweep.", "sweeper.", "launcher.")
_REFUSED = {
    "job.chdir": "diloco stays in the directory where it was started; drop it",
    "job.name": "set run.id",
    "job.env": "set variables in the shell, from where every member of a sweep has them",
    "output_subdir": "a run directory has config.yaml and manifest.json; drop it",
    "job_logging": "a run directory has metrics.jsonl and events.jsonl; hydra.verbose=true shows more on the terminal",
    "hydra_logging": "hydra.verbose=true shows more on the terminal",
    "callbacks": "diloco calls none; drop it",
    "searchpath": "name the folder with --config-dir",
}


class HydraBlock(NamedTuple):
    """What files and arguments set under `hydra`."""

    settings: dict[str, Any]  # dotted keys below hydra, with values that are not Hydra's defaults
    sweeper: str  # choice of hydra/sweeper
    launcher: str
    chosen: tuple[str, ...]  # all choices of sweepers and launchers, such as hydra/sweeper/sampler=random

    @property
    def params(self) -> dict[str, Any]:
        """What to sweep over, by setting."""
        found = self.settings.get("sweeper.params")
        return found if isinstance(found, dict) else {}

    @property
    def run_dir(self) -> str | None:
        return self.settings.get("run.dir")

    @property
    def sweep_dir(self) -> str | None:
        return self.settings.get("sweep.dir")

    @property
    def sweep_subdir(self) -> str | None:
        return self.settings.get("sweep.subdir")

    @property
    def multirun(self) -> bool | None:
        """What hydra.mode says; None: nothing."""
        mode = self.settings.get("mode")
        return None if mode is None else mode == "MULTIRUN"

    @property
    def verbose(self) -> Any:
        return self.settings.get("verbose", False)

    @property
    def of_a_sweep(self) -> list[str]:
        """What is there for a sweep only; hydra.sweep.dir, beside hydra.run.dir, is for whoever starts one."""
        keys = [f"hydra.{key}" for key in self.settings if key.startswith(("sweeper.", "launcher."))]
        plugins = [f"hydra/sweeper={self.sweeper}", f"hydra/launcher={self.launcher}"]
        return [*keys, *(one for one in plugins if not one.endswith("=basic"))]


def read_block(tree: DictConfig) -> HydraBlock:
    """What is set under `hydra`. Raises ConfigError, with the remedy, for a setting that nothing here reads."""
    node = tree.hydra
    usual = defaults_of_hydra(())
    others = {group: name for group, name in node.runtime.choices.items() if group.startswith("hydra/")}
    chosen = tuple(
        f"{group}={name}" for group, name in others.items() if group.startswith(("hydra/sweeper", "hydra/launcher"))
    )
    for group, name in others.items():
        if f"{group}={name}" not in chosen and usual.runtime.choices.get(group) != name:
            raise ConfigError(f"{group}={name} has no effect with diloco; {_remedy(group.removeprefix('hydra/'))}")
    mine, theirs = dict(_flat(node)), dict(_flat(usual if _is_usual(chosen, usual) else defaults_of_hydra(chosen)))
    settings = {key: value for key, value in mine.items() if key not in theirs or theirs[key] != value}
    for key, value in settings.items():
        if key.endswith(("._target_", ".custom_search_space")):  # a function that somebody names
            group = key.partition(".")[0]
            raise ConfigError(f"hydra.{key}={show(value)} is not a setting here; choose hydra/{group}=NAME")
        if not key.startswith(_USED) and not (key == "job.chdir" and value is False):
            raise ConfigError(f"hydra.{key}={show(value)} has no effect with diloco; {_remedy(key)}")
    return HydraBlock(settings, others["hydra/sweeper"], others["hydra/launcher"], chosen)


@lru_cache(maxsize=64)
def block_of(request: Request, stamp: tuple[object, ...]) -> HydraBlock:
    """`read_block` of what files alone say; `stamp` is theirs."""
    return read_block(compose_files(request))


def _is_usual(chosen: tuple[str, ...], usual: DictConfig) -> bool:
    return all(usual.runtime.choices.get(one.partition("=")[0]) == one.partition("=")[2] for one in chosen)


def _flat(node: DictConfig) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what somebody may have set; what is swept over stays one mapping."""

    def below(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and prefix != "sweeper.params.":
            for key, part in value.items():
                yield from below(f"{prefix}{key}.", part)
        elif not prefix.startswith(_ITS_OWN):
            yield prefix[:-1], value

    yield from below("", OmegaConf.to_container(node, resolve=False, enum_to_str=True))


def _remedy(key: str) -> str:
    return next((text for word, text in _REFUSED.items() if key.startswith(word)), "drop it")
