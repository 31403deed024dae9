"""Different data for each peer: an order of its own for data that can be indexed, and a share of a
stream.

    dataset[i]             -> dataset[order[i]]          each peer draws its order by its seed
    item 0, item 1, ...    -> those that are this peer's  each item has one owner among the peers

Rendezvous hashing finds the owner of an item: all peers that agree on who is there agree on it
without talking. When a peer goes, its items, and no others, go to the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from diloco.errors import ConfigError

MOST = 4096  # peers
WORKERS = 2**48  # numbers of items that one worker of a DataLoader may count


class ActivePeers:
    """The peers that share a stream, in shared memory, for workers of a DataLoader.

    Without any, each item is this peer's.
    """

    def __init__(self) -> None:
        # how many, this peer, all peers
        self._numbers = torch.zeros(2 + MOST, dtype=torch.int64, device="cpu")
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]

    def are(self, me: str, peers: Iterable[str]) -> None:
        """These are there, this one included."""
        numbers = sorted(map(_number, peers))[:MOST]
        self._numbers[2 : 2 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._numbers[1] = _number(me)
        self._numbers[0] = len(numbers)

    def owns(self, item: int) -> bool:
        """Whether the item of that number is this peer's."""
        count, me, *peers = self._numbers[: 2 + int(self._numbers[0])].tolist()
        ranked = max(peers, key=lambda one: sha256(f"{item}:{one}".encode()).digest(), default=me)
        return count == 0 or bool(me == ranked)


def _number(peer: str) -> int:
    return int.from_bytes(sha256(peer.encode()).digest()[:7], "big")


class _FixedPart(NamedTuple):
    """Every `of`-th item, from `first` on."""

    first: int
    of: int

    def owns(self, item: int) -> bool:
        return item % self.of == self.first


Share = ActivePeers | _FixedPart


def _is_own(share: Share, item: object, number: int) -> bool:
    """Workers of a DataLoader count the items that they get each."""
    worker = get_worker_info()
    return share.owns(number if worker is None else worker.id * WORKERS + number)


class _SharedStream(IterableDataset[Any]):
    """This peer's share of a stream, which is read whole and passed on in part."""

    def __init__(self, stream: Iterable[Any], share: Share) -> None:
        self.stream, self._share = stream, share

    def __iter__(self) -> Iterator[Any]:
        items = enumerate(self.stream)
        return (item for number, item in items if _is_own(self._share, item, number))


def shard(
    dataset: Any,
    seed: Callable[[], int],
    active: Callable[[], ActivePeers],
    index: int | None,
    of: int | None,
) -> Any:
    """As `Swarm.shard`; `seed` and `active` are called where they are needed."""
    part = None if index is None or of is None else _FixedPart(index, of)
    if (index, of) != (None, None) and (part is None or not 0 <= part.first < part.of):
        raise ConfigError(
            f"index={index}, of={of}: give both or none; index=0, of=2 is the first of two parts"
        )
    kind, library = type(dataset).__name__, type(dataset).__module__.partition(".")[0]
    if isinstance(dataset, Mapping | str):
        raise ConfigError(
            f"shard({kind}): no dataset; give one of its values, such as data['train']"
        )
    if hasattr(dataset, "dtype") and hasattr(dataset, "shape"):  # an array or a tensor
        if part is None:
            raise ConfigError(
                f"shard({kind}): rows of an array may hang together, so they keep their order; draw"
                " from it with a generator of swarm.seed, or take a part with index=0, of=2"
            )
        begin, end = (len(dataset) * number // part.of for number in (part.first, part.first + 1))
        return dataset[begin:end]
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if indexed and not isinstance(dataset, IterableDataset):
        # its own methods return one of its datasets, which trainers know how to use
        if library == "datasets" and part is None:
            return dataset.shuffle(seed=seed())
        if library == "datasets" and part is not None:
            return dataset.shard(part.of, part.first)
        if part is not None:
            return Subset(dataset, range(part.first, len(dataset), part.of))
        generator = torch.Generator().manual_seed(seed())
        order = torch.randperm(len(dataset), generator=generator, device="cpu")
        return Subset(dataset, array("q", order.numpy().tobytes()))
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"shard({kind}): it has no __len__ and __getitem__, nor __iter__; give a dataset"
        )
    share = part or active()
    if library == "datasets":
        return dataset.filter(partial(_is_own, share), with_indices=True)
    return _SharedStream(dataset, share)
