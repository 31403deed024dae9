"""Settings: `configs/` and the command line become a frozen `Config`; its run-owned half is the `Manifest`.

    configs/*.yaml + overrides --Hydra--> mapping --pydantic--> Config --manifest()--> Manifest --> hash on the wire

- `base.py`      the run-owned and the peer-local half as types
- `groups.py`, `peer_local.py`   every setting of the run, and of one peer: type, range, meaning
- `schema.py`    `Config`, checks across groups, doubtful settings
- `manifest.py`  `Manifest`: canonical JSON, hash, differences, untrusted input
- `compose.py`   Hydra composition, unknown keys and choices
- `effect.py`     settings that nothing reads in a command or beside others
- `explain.py`   the schema in words: help and one-line errors
"""

from __future__ import annotations

from diloco.config.base import PeerLocal, RunOwned
from diloco.config.compose import choices, compose, help_text
from diloco.config.effect import refuse_ignored, refuse_run_owned
from diloco.config.groups import (
    BudgetConfig,
    DataConfig,
    DataRecipe,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    RunIdentity,
)
from diloco.config.manifest import WIRE_VERSION, Manifest, flatten
from diloco.config.peer_local import (
    CheckpointConfig,
    DataPlace,
    EvalConfig,
    LocalConfig,
    RunPlace,
    SwarmConfig,
    TrainConfig,
    WandbConfig,
)
from diloco.config.schema import Config

__all__ = [
    "WIRE_VERSION",
    "BudgetConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataPlace",
    "DataRecipe",
    "EvalConfig",
    "InnerConfig",
    "LocalConfig",
    "Manifest",
    "ModelConfig",
    "OuterConfig",
    "PeerLocal",
    "RunConfig",
    "RunIdentity",
    "RunOwned",
    "RunPlace",
    "SwarmConfig",
    "TrainConfig",
    "WandbConfig",
    "choices",
    "compose",
    "flatten",
    "help_text",
    "refuse_ignored",
    "refuse_run_owned",
]
