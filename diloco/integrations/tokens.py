"""How many tokens a model was trained on, as its calls show it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TokenCount"]


class TokenCount:
    """Counts the tokens of `input_ids` in the training calls of a model, without padding where a mask tells it.

    The masks are added up on the device, which is waited for once in each `take`. Calls inside a compiled program are
    not counted.
    """

    def __init__(self) -> None:
        self._hook: Any = None
        self._counted = 0
        self._masked: list[Tensor] = []

    def follow(self, model: nn.Module | None) -> None:
        """Count the calls of this model from now on, and no other's."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None if model is None else model.register_forward_pre_hook(self._see, with_kwargs=True)
        self.take()

    def take(self) -> int:
        """Tokens since this was called last."""
        found, self._counted = self._counted + sum(int(one) for one in self._masked), 0
        self._masked.clear()
        return found

    def _see(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens, mask = named.get("input_ids", arguments[0] if arguments else None), named.get("attention_mask")
        if not model.training or torch.compiler.is_compiling() or not isinstance(tokens, Tensor):
            return
        if tokens.is_floating_point():
            return
        if isinstance(mask, Tensor) and mask.shape == tokens.shape:
            self._masked.append(mask.sum())
        else:
            self._counted += tokens.numel()
