"""Which settings have no effect in a command or beside other settings. A command refuses them when a user types them.

A preset may hold settings that a mode does not use, such as those of an experiment under `outer=data_parallel`. A typed
setting is meant: if nothing reads it, the command ends with one line that names the setting, the reason and the remedy.
`groups.py` refuses settings of the outer step that contradict each other, wherever they come from.

A new setting is declared in the table of `tests/unit/config/test_effect.py`, which compares every key in every
command and mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from diloco.config.data import DataConfig
from diloco.config.explain import leaves, show
from diloco.config.groups import OuterConfig
from diloco.config.manifest import Manifest
from diloco.config.overrides import key_of, split
from diloco.config.schema import Config
from diloco.config.sources import Start, choices, settings_of
from diloco.errors import ConfigError

__all__ = ["COMMANDS", "refuse_ignored", "refuse_run_owned"]


class Ignored(NamedTuple):
    """Settings without effect, and why in words that follow "has no effect"."""

    keys: str  # settings and groups, with spaces between
    reason: str  # in COMMANDS a clause that follows "with diloco COMMAND,"
    remedy: str = "drop it"


_REAL_TIME = Ignored("sim", "which runs in real time", "drop it, or use diloco simulate")
_ONE_RUN = Ignored("sweep", "which is one run", "drop it, or use diloco sweep")
_ONE_PEER = Ignored("local", "which is one peer", "drop it, or use diloco local")
_NAMED = "run.name run.lead run.report"
_SHARDS = "data.shard data.shards"
_LAYERS = "train.tf32 train.attention train.checkpointing train.compile"

# What each command does not read. `plan` and `doctor` take the whole run-owned half: it says which run is meant.
COMMANDS: dict[str, tuple[Ignored, ...]] = {
    "local": (
        _ONE_RUN,
        _REAL_TIME,
        Ignored(
            f"{_NAMED} {_SHARDS} swarm.identity_path",
            "which gives each peer its own",
            "drop it, or start each peer with diloco train",
        ),
    ),
    "train": (_ONE_RUN, _REAL_TIME, _ONE_PEER),
    "join": (_ONE_RUN, _REAL_TIME, _ONE_PEER, Ignored("swarm.initial_peers", "which is given the ADDRESS")),
    "host": (
        _ONE_RUN,
        _REAL_TIME,
        _ONE_PEER,
        Ignored("swarm.initial_peers", "which is given the ADDRESS or --new"),
        Ignored(
            f"train checkpoint eval wandb run.lead run.report {_SHARDS} data.cache swarm.inner_state",
            "which trains nothing",
            "drop it, or use diloco train",
        ),
    ),
    "simulate": (
        _ONE_RUN,
        Ignored("train.step_delay_s local.step_delay_s", "which runs in virtual time", "set sim.step_s"),
        Ignored(f"train.parallel {_LAYERS}", "whose peers are in one process"),
        Ignored("checkpoint", "which writes no checkpoints"),
        Ignored("wandb", "which logs to run.dir only"),
        Ignored(f"{_NAMED} {_SHARDS} swarm.min_peers", "which gives each peer its own"),
        Ignored(
            "run.key swarm.initial_peers swarm.listen swarm.announce swarm.reachable swarm.identity_path swarm.token "
            "swarm.key_path",
            "whose network has neither addresses nor strangers",
        ),
    ),
    "plan": (
        _ONE_RUN,
        Ignored("sim", "which only computes", "give --step-s, --bandwidth and --latency-ms"),
        Ignored(
            f"run.dir {_NAMED} {_SHARDS} data.cache local.step_delay_s train.parallel train.micro_batch {_LAYERS} "
            "train.step_delay_s train.log_every swarm checkpoint eval wandb",
            "which runs nothing",
        ),
    ),
    "doctor": (
        _ONE_RUN,
        _REAL_TIME,
        _ONE_PEER,
        Ignored(
            f"{_NAMED} {_SHARDS} data.cache train.parallel train.micro_batch train.precision {_LAYERS} "
            "train.step_delay_s train.log_every checkpoint.every checkpoint.background eval wandb swarm.initial_peers "
            "swarm.reachable swarm.min_peers swarm.upload_limit swarm.heartbeat_s "
            "swarm.inner_state",
            "which takes part in no run",
        ),
    ),
    "eval": (
        _ONE_RUN,
        Ignored("model", "which is given a MODEL_DIR"),
        Ignored(
            f"run.id run.key run.dir {_NAMED} budget local {_SHARDS} inner.optimizer inner.lr inner.muon_lr_ratio "
            "inner.betas inner.weight_decay inner.clip inner.schedule inner.warmup_steps inner.final_lr_ratio outer "
            f"swarm sim train.parallel train.micro_batch train.threads {_LAYERS} train.step_delay_s "
            "train.log_every checkpoint eval.every wandb",
            "which trains nothing",
        ),
    ),
}


def refuse_ignored(config: Config, command: str, overrides: Sequence[str], start: Start | None = None) -> None:
    """Raises ConfigError for a typed setting that the command does not read with this configuration.

    `command` is one of `COMMANDS`, `overrides` are the arguments as the user typed them. A choice such as
    `swarm=network` is refused when nothing reads any of the settings that it holds.
    """
    entries = (entry._replace(reason=f"with diloco {command}, {entry.reason}") for entry in COMMANDS[command])
    ignored = {  # the command's own reason comes last and counts
        one: entry for entry in (*_beside(config), *entries) for key in entry.keys.split() for one in _covered(key)
    }
    groups = choices(start)
    found = []
    for override in overrides:
        sign, key, value = split(override)
        named = key.removeprefix("hydra.") if key == "hydra.run.dir" else key
        if key == "experiment" or sign == "~" or named.startswith(("hydra.", "hydra/")):
            continue
        typed = settings_of(key, value, start) if key in groups else [named]
        reasons = [ignored.get(one) for name in typed for one in _covered(name)]
        if reasons and reasons[0] is not None and all(reasons):
            found.append(f"{key}={show(value)} has no effect {reasons[0].reason}; {reasons[0].remedy}")
    if found:
        raise ConfigError(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))


def refuse_run_owned(overrides: Sequence[str], allowed: Collection[str] = ()) -> None:
    """Raises ConfigError for a typed setting of the run, where the run is that of the peer at an ADDRESS."""
    owned = [key for key, _ in leaves(Manifest)]
    for override in overrides:
        key = key_of(override)
        chosen = key in ("budget", "model", "data", "inner", "outer", "experiment")
        if key not in allowed and (chosen or any(key == one or key.startswith(f"{one}.") for one in owned)):
            raise ConfigError(f"{key} belongs to the run and comes from the swarm; drop it, or start your own swarm")


def _covered(key: str) -> list[str]:
    """The settings that a key stands for: itself, all settings of a group, or the mapping that contains the key."""
    return [one for one, _ in leaves(Config) if one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.")]


def _beside(config: Config) -> Iterator[Ignored]:
    """Yields settings that have no effect beside the other settings."""
    model, swarm = config.model, config.swarm
    if config.outer.method == "data_parallel":
        outer = " ".join(f"outer.{name}" for name in OuterConfig.model_fields if name not in ("method", "sync_every"))
        yield Ignored(
            f"{outer} swarm run.key wandb.aggregate",
            "with outer.method=data_parallel, which has no outer steps and no swarm",
            "drop it, or choose another outer",
        )
        yield Ignored(_SHARDS, "with outer.method=data_parallel, which gives each process its own")
    else:
        yield from _beside_outer(config.outer)
    if config.inner.schedule == "constant":
        yield Ignored("inner.final_lr_ratio", "with inner.schedule=constant", "drop it, or set inner.schedule=cosine")
    if config.inner.optimizer != "muon":
        optimizer = config.inner.optimizer
        yield Ignored("inner.muon_lr_ratio", f"with inner.optimizer={optimizer}", "drop it, or choose inner=muon")
    yield from _beside_source(config.data)
    if model.path is not None:
        yield Ignored("model.model_type", "with model.path, whose directory says it")
    if swarm.key_path is not None:
        yield Ignored("swarm.token", "with swarm.key_path, by which a peer invites itself")
    if swarm.reachable == "no":
        yield Ignored("swarm.listen swarm.announce", "with swarm.reachable=no, which listens nowhere")
    if config.wandb.mode == "disabled":
        yield Ignored(
            "wandb.project wandb.entity wandb.aggregate",
            "with wandb.mode=disabled",
            "drop it, or set wandb.mode=online or offline",
        )


def _beside_source(data: DataConfig) -> Iterator[Ignored]:
    if data.source in ("stdlib", "text"):
        yield Ignored("data.field", f"with data.source={data.source}, which has no columns")
    if data.source == "mixture":
        yield Ignored("data.field", "with data.source=mixture", "say it for each source of data.mixture")
    if data.source in ("stdlib", "hub"):
        yield Ignored("data.cache", f"with data.source={data.source}, which has no files of this machine")
    if data.source != "hub":
        yield Ignored("data.split", f"with data.source={data.source}, which has no splits", "drop it, or use data=hub")


def _beside_outer(outer: OuterConfig) -> Iterator[Ignored]:
    """The same for settings of the outer step that do not contradict each other."""
    if outer.fragments == 1:
        yield Ignored("outer.pattern", "with outer.fragments=1", "drop it, or set outer.fragments")
    if not outer.staleness_limit:
        yield Ignored(
            "outer.staleness_exponent",
            "with outer.staleness_limit=0",
            "drop it, or set outer.staleness_limit and outer.quorum",
        )
    if outer.judging == "none":
        yield Ignored("outer.clip_factor", f"with outer.robust={outer.robust}", "drop it, or set outer.robust=clip")
    if outer.flatten:
        remedy = "drop it, or set outer.flatten=0"
        yield Ignored("outer.audit", "with outer.flatten, which mixes all values of a matrix", remedy)
    elif not outer.judged_together:
        reason = f"with outer.robust={outer.robust}, outer.codec_up={outer.codec_up} and outer.quorum={outer.quorum}"
        remedy = "drop it, or set outer.robust=clip" if outer.barrier else "drop it, or set outer.quorum=null"
        yield Ignored("outer.audit", f"{reason}, which add contributions up as they come", remedy)
    elif not outer.audited and outer.audit:
        reason = f"with outer.optimizer={outer.optimizer} and outer.codec_down={outer.codec_down}"
        yield Ignored("outer.audit", f"{reason}, which nobody can recompute", "drop it, or choose others")
    if outer.lr_by_peers:
        yield Ignored("outer.lr", "with outer.lr_by_peers, which says it for every number of peers")
    if not outer.momentum:
        keys = "outer.momentum_warmup outer.rounds" if outer.momentum_warmup else "outer.rounds"
        yield Ignored(keys, "with outer.momentum=0", "drop it, or set outer.momentum")
    elif outer.momentum_warmup is not None:
        reason = f"with outer.momentum_warmup={outer.momentum_warmup}, after which the momentum has risen"
        yield Ignored("outer.rounds", reason, "drop one of them")
