"""The order in which a trainer's loader reads its data: a peer gets one of its own, where the loader has a seed.

Trainers seed their loaders alike on every machine, so all peers would train on the same batches, and together learn
what one of them learns.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import RandomSampler

from diloco.errors import DataError

__all__ = ["ORDERED", "check_has_batches", "order_by_", "remedy"]

ORDERED = "this peer reads its data in an order of its own"


def order_by_(loader: Any, seed: int, epoch: int = 0) -> bool:
    """Have a loader draw the order of its data by this seed, from this epoch on; False where it draws none.

    It must not have begun to read.
    """
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
                f"the training data makes no batch of its {len(loader.dataset)} rows; give more rows, a smaller batch, "
                "or keep the last batch (drop_last)"
            )


def remedy(loader: Any, owner: str) -> str:
    """What to do about a loader that draws no order; the `owner` of `shard` is a callback or a swarm."""
    sampler = _sampler(loader)
    if sampler is None:
        return (
            "the training data is a stream, which every peer reads from its beginning; give each peer its share: "
            f"{owner}.shard(dataset)"
        )
    return (
        f"the training data comes in the order of a {type(sampler).__name__}, the same at every peer; shuffle it, or "
        f"give each peer other data: {owner}.shard(dataset, index=0, of=2)"
    )


def _sampler(loader: Any) -> Any:
    """What draws the indices below whatever has been wrapped around it; None of a stream."""
    found = getattr(loader, "batch_sampler", None)
    while found is not None:
        inner = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
        if inner is None:
            return None if type(found).__name__ == "_InfiniteConstantSampler" else found  # torch's, of every stream
        found = inner
    return None
