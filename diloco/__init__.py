"""Serverless DiLoCo: peers anywhere train one model and synchronise it without a server.

`Swarm` attaches the algorithm to any PyTorch training loop; the `diloco` command uses the same class. Importing this
package imports neither torch nor hivemind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.train.api import Swarm

__all__ = ["Swarm", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Swarm":
        from diloco.train.api import Swarm

        return Swarm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
