"""Serverless DiLoCo: peers anywhere train one model and synchronise it without a server.

`Swarm` attaches the algorithm to any PyTorch training loop; the `diloco` command uses the same
class. The callbacks attach it to the trainers of other libraries. Importing this package imports
none of them, nor torch, nor hivemind.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.attach.ranks import RankGroup
    from diloco.attach.swarm import Swarm
    from diloco.data.sources import DataSource
    from diloco.extensions import register
    from diloco.integrations.lightning import DilocoLightningCallback
    from diloco.integrations.trainer import DilocoCallback
    from diloco.outer.merging import MergeRule
    from diloco.outer.optimizer import OuterOptimizer
    from diloco.outer.payloads import Codec
    from diloco.rundir.compare import compare

__all__ = [
    "Codec",
    "DataSource",
    "DilocoCallback",
    "DilocoLightningCallback",
    "MergeRule",
    "OuterOptimizer",
    "RankGroup",
    "Swarm",
    "__version__",
    "compare",
    "register",
]

__version__ = "0.1.0"

# Where each name is, and for those that need a library which a plain installation lacks, the
# library and the extra.
_PLACES = {
    "Codec": ("diloco.outer.payloads", "", ""),
    "DataSource": ("diloco.data.sources", "", ""),
    "DilocoCallback": ("diloco.integrations.trainer", "accelerate", "hf"),
    "DilocoLightningCallback": ("diloco.integrations.lightning", "lightning", "lightning"),
    "RankGroup": ("diloco.attach.ranks", "", ""),
    "MergeRule": ("diloco.outer.merging", "", ""),
    "OuterOptimizer": ("diloco.outer.optimizer", "", ""),
    "Swarm": ("diloco.attach.swarm", "", ""),
    "compare": ("diloco.rundir.compare", "", ""),
    "register": ("diloco.extensions", "", ""),
}


def __getattr__(name: str) -> Any:
    if name == "Island":
        raise ImportError("diloco.Island is diloco.RankGroup now")
    if name == "AccelerateSwarm":
        raise AttributeError(
            "diloco.AccelerateSwarm is gone; use diloco.Swarm (diloco/integrations/README.md)"
        )
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, library, extra = _PLACES[name]
    if library and find_spec(library) is None:
        raise ImportError(
            f"{name} needs {library}, which is not installed: pip install 'diloco[{extra}]'"
        )
    return getattr(import_module(module), name)
