"""The batches of a trainer's loader: in which order a peer reads them, and their tokens.

Trainers seed their loaders alike on every machine, so all peers would train on the same batches,
and together learn what one of them learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from diloco.errors import DataError

IGNORED = -100  # of labels, where there is nothing to learn


def order_by_(loader: Any, seed: int, epoch: int) -> bool:
    """Make an unread loader shuffle by this seed; return False if it does not shuffle."""
    sampler = _sampler(loader)
    if hasattr(sampler, "initial_seed"):  # Accelerate's adds the epoch itself
        sampler.initial_seed = seed
    elif isinstance(sampler, RandomSampler) or hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(seed + epoch)
    elif hasattr(sampler, "shuffle") and hasattr(sampler, "seed"):  # DistributedSampler
        sampler.seed = seed
        return bool(sampler.shuffle)
    else:
        return False
    return True


def check_has_batches(loader: Any) -> None:
    """Raise `DataError` for a loader that gives no batch, before anybody waits for this peer."""
    with suppress(TypeError):  # a stream has no length
        if len(loader) == 0:
            raise DataError(
                f"the training data makes no batch of its {len(loader.dataset)} rows; give more"
                " rows, a smaller batch, or keep the last batch (drop_last)"
            )


def remedy(loader: Any) -> str:
    """Advice for the user of a loader that does not shuffle."""
    sampler = _sampler(loader)
    if sampler is None:
        return (
            "the training data is a stream, which every peer reads from its beginning; give each"
            " peer its share: callback.shard(dataset)"
        )
    return (
        f"the training data comes in the order of a {type(sampler).__name__}, the same at every"
        " peer; shuffle it, or give each peer other data: callback.shard(dataset, index=0, of=2)"
    )


def _sampler(loader: Any) -> Any:
    """Find the sampler that draws the indices, inside its wrappers; None for a stream."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            # torch gives this sampler to every stream
            return None if type(sampler).__name__ == "_InfiniteConstantSampler" else sampler
        sampler = inner
    return None


def tokens_of(batch: Any) -> Tensor | int:
    """Count the tokens of a batch without padding; its samples if it has no tokens (pictures).

    Only the batch counts, so equal batches have equal weight at all peers: the elements of each
    tensor named `*input_ids`, or else of the largest matrix of integers. The result may be a tensor
    on the batch's device, so that training need not wait for it.
    """
    tensors = list(_tensors(batch, ""))
    ids = [both for both in tensors if both[0].endswith("input_ids")]
    if ids := [(name, tensor) for name, tensor in ids if not tensor.is_floating_point()]:
        masks = dict(tensors)
        names = [name.removesuffix("input_ids") + "attention_mask" for name, _ in ids]
        return sum(
            _unmasked(tensor, masks.get(mask)) for (_, tensor), mask in zip(ids, names, strict=True)
        )
    integers = (torch.int32, torch.int64)  # pictures have smaller integers
    matrices = [tensor for name, tensor in tensors if tensor.ndim > 1 and "mask" not in name]
    if matrices := [matrix for matrix in matrices if matrix.dtype in integers]:
        return torch.stack([(matrix != IGNORED).sum() for matrix in matrices]).max()
    samples = next((len(tensor) for _, tensor in tensors if tensor.ndim), None)
    return samples or (len(batch) if isinstance(batch, Sized) else 1)


def _unmasked(ids: Tensor, mask: Tensor | None) -> Tensor | int:
    return ids.numel() if mask is None or mask.shape != ids.shape else (mask != 0).sum()


def _tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _tensors(value, str(key))
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _tensors(value, name)
