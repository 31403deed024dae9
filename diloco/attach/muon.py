"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024; arXiv 2502.16982 for the
size of its steps).

`torch.optim.Muon` is the same with two differences: it is in torch since 2.9 only, and it always
iterates in bfloat16, which takes four times as long as float32 where the device has no instructions
for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# steep at zero: five steps take singular values to 0.7 to 1.2
STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; each step has AdamW's root
    mean square of 0.2.

    Raises `ValueError` for a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(
                        "Muon takes matrices, and not a parameter of shape"
                        f" {tuple(parameter.shape)}"
                    )

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
    """The fastest dtype of products on a device that has it natively: bfloat16 or float32."""
    if device.type == "cpu":
        # Old versions of torch do not tell: float32 is then right, and may be slower.
        known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        bf16 = any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        return torch.bfloat16 if bf16 else torch.float32
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    return torch.bfloat16


def _orthogonal(matrix: Tensor) -> Tensor:
    """U V^T, nearly, of a matrix U S V^T, by Newton and Schulz."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(iteration_dtype(matrix.device))
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x
