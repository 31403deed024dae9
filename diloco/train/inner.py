"""The inner optimizer: AdamW, or Muon on the matrices inside the model with AdamW on the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diloco.config import InnerConfig

__all__ = ["Pair", "inner_optimizer"]


def inner_optimizer(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """The optimizer of these settings over the parameters that require a gradient; weight decay on matrices only."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "head" not in name]
    if inner.optimizer == "muon" and hidden:
        ids = {id(p) for p in hidden}
        muon = torch.optim.Muon(
            hidden, lr=inner.lr, weight_decay=inner.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        return Pair(muon, _adamw([p for _, p in named if id(p) not in ids], inner))
    return _adamw([p for _, p in named], inner)


def _adamw(parameters: list[nn.Parameter], inner: InnerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas)


class Pair(torch.optim.Optimizer):
    """Two optimizers that step together as one; it has the groups and the state of both.

    `load_state_dict` raises what the two raise for a state that does not fit them.
    """

    def __init__(self, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for part in (one, other) for group in part.param_groups], {})
        self.parts = (one, other)
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # shared, not copies

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both step; the closure is evaluated once."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
