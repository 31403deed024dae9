"""Settings: `configs/` and the command line become a frozen `Config`; its run-owned half is the
`Manifest`.

configs/*.yaml + overrides --Hydra--> mapping --pydantic--> Config --manifest()--> Manifest --> hash
on the wire
"""

from __future__ import annotations

from diloco.config.compose import compose, help_text
from diloco.config.files import ConfigSource, choices
from diloco.config.manifest import Manifest, flatten
from diloco.config.model_data import MIXTURE_BLOCK, DataConfig, ModelConfig
from diloco.config.run_settings import BudgetConfig, InnerConfig, OuterConfig, SwarmConfig
from diloco.config.schema import Config

__all__ = [
    "MIXTURE_BLOCK",
    "BudgetConfig",
    "Config",
    "ConfigSource",
    "DataConfig",
    "InnerConfig",
    "Manifest",
    "ModelConfig",
    "OuterConfig",
    "SwarmConfig",
    "choices",
    "compose",
    "flatten",
    "help_text",
]
