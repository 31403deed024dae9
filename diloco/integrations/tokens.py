"""How many tokens a batch is made of: what a trainer's contribution weighs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

__all__ = ["tokens_of"]

IGNORED = -100  # of labels, where there is nothing to learn


def tokens_of(batch: Any) -> Tensor | int:
    """Tokens of a batch without padding, where a mask tells it; where there are none, as in pictures, its samples.

    The batch alone tells it, so equal batches count alike in all peers, whatever their models do with them: the
    elements of `input_ids` and of everything named like it, or else of the largest matrix of integers. The result may
    be on the batch's device, so that nobody waits for it.
    """
    found = list(_tensors(batch, ""))
    ids = [(name, one) for name, one in found if name.endswith("input_ids") and not one.is_floating_point()]
    if ids:
        masks = {name: one for name, one in found if name.endswith("attention_mask")}
        return sum(_unmasked(one, masks.get(name.replace("input_ids", "attention_mask"))) for name, one in ids)
    matrices = [one for name, one in found if one.ndim > 1 and "mask" not in name and _counts(one)]
    if matrices:
        return torch.stack([(one != IGNORED).sum() for one in matrices]).max()
    samples = next((len(one) for _, one in found if one.ndim), None)
    return samples or (len(batch) if isinstance(batch, Sized) else 1)


def _unmasked(ids: Tensor, mask: Tensor | None) -> Tensor | int:
    return ids.numel() if mask is None or mask.shape != ids.shape else (mask != 0).sum()


def _counts(one: Tensor) -> bool:
    return one.dtype in (torch.int32, torch.int64)  # pictures are of smaller ones


def _tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _tensors(value, str(key))
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _tensors(value, name)
