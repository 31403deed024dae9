"""The inner optimizer of `diloco train`: AdamW, Muon, or one that a user registered."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.optimizer import CombinedOptimizer, moments_of
from diloco.config import InnerConfig
from diloco.config.registry import INNER_OPTIMIZERS

# Newton and Schulz's iteration, steep at zero: five steps take singular values to 0.7 to 1.2
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def inner_optimizer(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """Return AdamW over all trained parameters, Muon on the matrices inside the model, or an
    optimizer that a user registered; weight decay on matrices only."""
    hidden, others = _hidden_and_others(model, inner)
    if inner.optimizer not in INNER_OPTIMIZERS.own:
        kind: type[torch.optim.Optimizer] = INNER_OPTIMIZERS[inner.optimizer]
        return kind(_groups(others, inner), inner)  # type: ignore[arg-type]
    if not hidden:
        return _adamw(others, inner)
    muon = Muon(hidden, lr=inner.peak_lr, weight_decay=inner.weight_decay)
    return CombinedOptimizer(muon, _adamw(others, inner))


def _hidden_and_others(
    model: nn.Module, inner: InnerConfig
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split trained parameters into matrices inside the model, for Muon, and the others."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        inside = p.ndim == 2 and "embed" not in name and "head" not in name
        if p.requires_grad:
            (hidden if inside and inner.optimizer == "muon" else others).append(p)
    return hidden, others


def moment_numel(model: nn.Module, inner: InnerConfig) -> int:
    """Count the elements of the optimizer's state: two per parameter with AdamW, one with Muon; as
    many as AdamW's where a class does not declare its `moments`."""
    hidden, others = _hidden_and_others(model, inner)
    moments = moments_of(INNER_OPTIMIZERS.found.get(inner.optimizer, torch.optim.AdamW))
    each = 2 if moments is None else len(moments)
    return sum(p.numel() for p in hidden) + each * sum(p.numel() for p in others)


def _groups(parameters: list[nn.Parameter], inner: InnerConfig) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(parameters: list[nn.Parameter], inner: InnerConfig) -> torch.optim.AdamW:
    # one kernel for all of a step; the default has one for each of its operations
    fused = all(p.device.type == "cuda" for p in parameters) or None
    groups = _groups(parameters, inner)
    return torch.optim.AdamW(groups, lr=inner.peak_lr, betas=inner.betas, fused=fused)


# -- Muon ------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay (Jordan et al. 2024).

    Each step has AdamW's root mean square of 0.2 (arXiv 2502.16982). Unlike `torch.optim.Muon`,
    which is in torch since 2.9, it iterates in float32 where that is four times as fast as
    bfloat16. Raises `ValueError` for a parameter that is no matrix.
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        shapes = [
            tuple(parameter.shape) for group in self.param_groups for parameter in group["params"]
        ]
        if others := [shape for shape in shapes if len(shape) != 2]:
            raise ValueError(f"Muon takes matrices, and not a parameter of shape {others[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonal(parameter.grad.lerp(mean, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * (0.2 * math.sqrt(max(parameter.shape))))
        return loss


@functools.cache
def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the faster dtype of products that a device has natively: bfloat16 or float32."""
    native = True
    if device.type == "cpu":
        # Old versions of torch do not tell: float32 is then right, and may be slower.
        known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        native = any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    elif device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def _orthogonal(matrix: Tensor) -> Tensor:
    """Approximate U V^T of a matrix U S V^T."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(iteration_dtype(matrix.device))
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x
