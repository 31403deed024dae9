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

_MODULES = {
    "Codec": "diloco.outer.payloads",
    "DataSource": "diloco.data.sources",
    "DilocoCallback": "diloco.integrations.trainer",
    "DilocoLightningCallback": "diloco.integrations.lightning",
    "MergeRule": "diloco.outer.merging",
    "OuterOptimizer": "diloco.outer.optimizer",
    "RankGroup": "diloco.attach.ranks",
    "Swarm": "diloco.attach.swarm",
    "compare": "diloco.rundir.compare",
    "register": "diloco.extensions",
}
# Libraries that a plain installation lacks, and the extra that has them.
_EXTRAS = {
    "DilocoCallback": ("accelerate", "hf"),
    "DilocoLightningCallback": ("lightning", "lightning"),
}
_GONE = {
    "AccelerateSwarm": "diloco.AccelerateSwarm is diloco.Swarm now (diloco/docs/loops.md)",
    "Island": "diloco.Island is diloco.RankGroup now",
}


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise ImportError(_GONE[name])
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library, extra = _EXTRAS.get(name, ("", ""))
    if library and find_spec(library) is None:
        remedy = f"pip install 'diloco[{extra}]'"
        raise ImportError(f"{name} needs {library}, which is not installed: {remedy}")
    return getattr(import_module(_MODULES[name]), name)
