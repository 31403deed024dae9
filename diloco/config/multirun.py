"""Hydra's own multirun, for its sweepers and launchers: they choose values and say where a member runs.

Hydra sees what is swept only, under names without dots. Its basic launcher is replaced by one that runs the members
of a batch at the same time; the others, such as submitit's, call the task in a process of theirs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from diloco.atomic import replace_file
from diloco.config.compose import Composed
from diloco.config.explain import show
from diloco.config.overrides import split
from diloco.config.sweeps import Axis
from diloco.errors import ConfigError

__all__ = ["RESULTS", "Task", "check_storage", "hydra_multirun", "is_local"]

RESULTS = "optimization_results.yaml"  # Optuna's
NAME = "diloco_sweep"
Task = Callable[[int, tuple[tuple[str, str], ...]], Any]


def is_local(composed: Composed) -> bool:
    """Whether the members run in this process's threads rather than where a launcher of Hydra says."""
    return composed.block.launcher == "basic"


def hydra_multirun(
    axes: Sequence[Axis],
    task: Task,
    directory: Path,
    composed: Composed,
    *,
    jobs: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Lets the sweeper of `composed` choose values of the axes and its launcher call `task(number, chosen)` with them.

    `task` returns what the sweeper looks for, a number or a tuple, or None for a failure. `settings` are more of
    hydra.sweeper, such as {"n_jobs": 2}. Raises ConfigError for what Hydra refuses.
    """
    os.environ.setdefault("SQLALCHEMY_SILENCE_UBER_WARNING", "1")  # Optuna 2 needs its version 1.4
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    keys = {axis.key.replace(".", "__").replace("/", "___"): axis.key for axis in axes}

    def pairs(overrides: Sequence[str]) -> tuple[tuple[str, str], ...]:
        found = (split(one) for one in overrides)
        return tuple((keys[one.key], one.text) for one in found if one.key in keys)

    def member(config: Any) -> Any:
        job = HydraConfig.get()
        return task(int(job.job.num), pairs(job.overrides.task))

    _store(list(keys), directory, composed, settings or {})
    typed = [f"{name}={axis.text}" for name, axis in zip(keys, axes, strict=True)]
    try:
        with _arguments(["diloco", "--multirun", *typed]), _launcher(task, pairs, jobs):
            hydra.main(config_path=None, config_name=NAME, version_base="1.3")(member)()
    except HydraException as error:
        place = f"hydra/sweeper={composed.block.sweeper}"
        raise ConfigError(f"{place}: {show(str(error).splitlines()[0], limit=200)}") from None
    except ValueError as error:
        if "No trials are completed" not in str(error):  # what Optuna says where all have failed, as sweep.json does
            raise
    best = directory / RESULTS
    if best.is_file():  # under the names that Hydra saw
        text = best.read_text(encoding="utf-8")
        for name, key in keys.items():
            text = re.sub(rf"^([ -]*){name}:", rf"\g<1>{key}:", text, flags=re.MULTILINE)
        replace_file(best, text.encode())


def _store(names: Sequence[str], directory: Path, composed: Composed, settings: Mapping[str, Any]) -> None:
    """Gives Hydra the sweeper and the launcher as they are composed, and the names of what is swept."""
    from hydra.core.config_store import ConfigStore

    of_hydra = composed.tree.hydra
    node: dict[str, Any] = {name: OmegaConf.to_container(of_hydra[name]) for name in ("sweeper", "launcher")}
    node["sweeper"] = {**node["sweeper"], "params": None, **settings}
    node["sweep"] = {"dir": str(directory), "subdir": "."}
    usual = [{f"override {one.partition('=')[0]}": one.partition("=")[2]} for one in composed.block.chosen]
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    content = {"defaults": ["_self_", *usual, *quiet], "hydra": {**node, "output_subdir": None}, **dict.fromkeys(names)}
    ConfigStore.instance().store(NAME, content)


def check_storage(composed: Composed) -> None:
    """Raises ConfigError where Optuna 2, which the plugin takes, is to make its tables with SQLAlchemy 2: it cannot."""
    storage = composed.block.settings.get("sweeper.storage")
    if storage is not None and composed.block.sweeper == "optuna" and version("sqlalchemy").split(".")[0] != "1":
        raise ConfigError(
            f"hydra.sweeper.storage={show(storage)} needs SQLAlchemy below 2: pip install 'diloco[sweep]'"
        )


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """`hydra.main` reads its arguments from the process, and hides errors unless told not to."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = arguments, "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


@contextmanager
def _launcher(task: Task, pairs: Callable[[Sequence[str]], Any], jobs: int) -> Iterator[None]:
    """Hydra's basic launcher runs one member at a time; meanwhile it runs `jobs` members of a batch at a time."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher
    from hydra.core.utils import JobReturn, JobStatus

    def launch(_: BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        chosen = [pairs(one) for one in job_overrides]
        with ThreadPoolExecutor(jobs) as pool:
            values = list(pool.map(task, range(initial_job_idx, initial_job_idx + len(chosen)), chosen))
        return [JobReturn(_return_value=value, status=JobStatus.COMPLETED) for value in values]

    usual: Any = BasicLauncher.launch
    BasicLauncher.launch = launch  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BasicLauncher.launch = usual  # type: ignore[method-assign]
