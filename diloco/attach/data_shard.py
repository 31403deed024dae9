"""Different data for each peer: an order of its own for data that can be indexed, and a share of a
stream.

    dataset[i]             -> dataset[order[i]]          each peer draws its own order, by its seed
    item 0, item 1, ...    -> those that are this peer's  each item has one owner among the peers
                           that are there

The owner of an item of a stream is found by rendezvous hashing: all peers that agree on who is
there agree on the owner of every item, without talking. When a peer goes, its items, and no others,
go to the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from diloco.errors import ConfigError

MOST = 4096  # peers
WORKERS = 2**48  # numbers of items that one worker of a DataLoader may count


class ActivePeers:
    """The peers among whom a stream is shared, in shared memory, for workers of a DataLoader. Of
    none it is all."""

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
        return count == 0 or bool(
            me == max(peers, key=lambda peer: sha256(f"{item}:{peer}".encode()).digest())
        )


def _number(peer: str) -> int:
    return int.from_bytes(sha256(peer.encode()).digest()[:7], "big")


class _Share:
    """Every `of`-th item, from `index` on."""

    def __init__(self, index: int, of: int) -> None:
        self.index, self.of = index, of

    def owns(self, item: int) -> bool:
        return item % self.of == self.index


def _is_own(share: ActivePeers | _Share, item: object, number: int) -> bool:
    """For `filter(with_indices=True)` of the library datasets, whose workers count the items that
    they get each."""
    return share.owns(_of_worker(number))


def _of_worker(number: int) -> int:
    """A number of an item that no other worker of this peer gives to another item."""
    worker = get_worker_info()
    return number if worker is None else worker.id * WORKERS + number


class _Shared(IterableDataset[Any]):
    """This peer's share of a stream, which is read whole and passed on in part."""

    def __init__(self, stream: Iterable[Any], share: ActivePeers | _Share) -> None:
        self.stream, self._share = stream, share

    def __iter__(self) -> Iterator[Any]:
        return (
            item for number, item in enumerate(self.stream) if self._share.owns(_of_worker(number))
        )


def shard(
    dataset: Any,
    seed: Callable[[], int],
    living: Callable[[], ActivePeers],
    index: int | None,
    of: int | None,
) -> Any:
    """As `Swarm.shard`; `seed` and `living` are asked for where they are needed."""
    if (index is None) != (of is None) or (
        of is not None and index is not None and not 0 <= index < of
    ):
        raise ConfigError(
            f"index={index}, of={of}: give both or none; index=0, of=2 is the first of two parts"
        )
    part = None if index is None or of is None else _Share(index, of)
    kind, library = type(dataset).__name__, type(dataset).__module__.partition(".")[0]
    if isinstance(dataset, Mapping) or isinstance(dataset, str):
        raise ConfigError(
            f"shard({kind}): no dataset; give one of its values, such as data['train']"
        )
    if hasattr(dataset, "dtype") and hasattr(dataset, "shape"):  # an array or a tensor
        if part is None:
            raise ConfigError(
                f"shard({kind}): rows of an array may hang together, so they are put into no other"
                " order; draw from it with a generator of swarm.seed, or take a part with index=0,"
                " of=2"
            )
        return dataset[
            len(dataset) * part.index // part.of : len(dataset) * (part.index + 1) // part.of
        ]
    indexed = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
    if indexed and hasattr(dataset, "__getitem__"):
        # what it returns is one of its own, which trainers know how to use
        if library == "datasets":
            return (
                dataset.shuffle(seed=seed()) if part is None else dataset.shard(part.of, part.index)
            )
        if part is not None:
            return Subset(dataset, range(part.index, len(dataset), part.of))
        order = torch.randperm(
            len(dataset), generator=torch.Generator().manual_seed(seed()), device="cpu"
        )
        return Subset(dataset, array("q", order.numpy().tobytes()))
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"shard({kind}): it has neither __len__ and __getitem__ nor __iter__; give a dataset or"
            " an iterable"
        )
    share = part or living()
    if library == "datasets":
        return dataset.filter(partial(_is_own, share), with_indices=True)
    return _Shared(dataset, share)
