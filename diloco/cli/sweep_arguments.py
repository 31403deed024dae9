"""The arguments of the members of a sweep, and where they go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.cli.members import Member
from diloco.config import Config, Start
from diloco.config.compose import Composed, compose_tree, resolved
from diloco.config.explain import show
from diloco.config.overrides import key_of
from diloco.errors import ConfigError

__all__ = ["default_directory", "given_directory", "listed", "marked", "member_of"]


def of_a_member(overrides: Sequence[str]) -> list[str]:
    """The arguments without those that are for the sweep."""
    return [
        one for one in overrides if key_of(one) not in ("run.dir", "sweep") and not key_of(one).startswith("sweep.")
    ]


def marked(arguments: tuple[str, ...], plan: Composed) -> tuple[str, ...]:
    """The arguments of a member. Where files describe a sweep, it says that it is one run of that."""
    block = plan.block
    one_run = ("hydra.mode=RUN",) if block.of_a_sweep or block.multirun else ()
    names = "true" if block.verbose is True else f"[{','.join(map(str, listed(block.verbose)))}]"
    return (*arguments, *one_run, *((f"hydra.verbose={names}",) if block.verbose else ()))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def given_directory(directory: Path | None, plan: Composed) -> Path | None:
    """`--dir` or hydra.sweep.dir."""
    if plan.block.sweep_dir is None:
        return directory
    theirs = Path(str(resolved(plan, "hydra.sweep.dir")))
    if directory not in (None, theirs):
        raise ConfigError(f"--dir={directory} and hydra.sweep.dir={theirs} are one setting; drop one of them")
    return theirs


def default_directory(overrides: Sequence[str], config: Config) -> Path:
    typed = any(key_of(one) == "run.dir" for one in overrides)
    return config.run.dir if typed else Path("runs") / f"{config.run.id}-sweep"


def member_of(
    command: str, arguments: tuple[str, ...], chosen: Sequence[tuple[str, str]], number: str, config: Config, jobs: int,
    subdir: str | None, start: Start,
) -> Member:  # fmt: skip
    """A member with its own name, which hydra.sweep.subdir may say, run.id (for wandb) and share of the cores."""
    values = "_".join(f"{key.rpartition('.')[2]}{value}" for key, value in chosen)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{number}-{values}" if values else number)[:80].rstrip("-")
    if subdir is not None:
        name = _subdirectory(subdir, arguments, number, start)
    mine = of_a_member(arguments)
    if not any(key == "run.id" for key, _ in chosen):
        mine.append(f"run.id={config.run.id[: 63 - len(number)]}-{number}")
    if jobs > 1 and config.train.threads is None:
        processes = jobs * (config.local.peers if command == "local" else 1)
        mine.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
    return Member(name, command, tuple(mine))


def _subdirectory(subdir: str, arguments: Sequence[str], number: str, start: Start) -> str:
    """What hydra.sweep.subdir says of one member."""
    member = compose_tree(arguments, start)
    node = member.tree.hydra
    node.sweep.subdir, node.job.num, node.job.id = subdir, int(number), number
    name = str(resolved(member, "hydra.sweep.subdir"))
    if not re.fullmatch(r"[\w=,][\w.=,+-]{0,254}", name):
        raise ConfigError(
            f"hydra.sweep.subdir={show(name)}: members lie side by side in hydra.sweep.dir; write a name of letters, "
            "digits and . _ = , + -"
        )
    return name
