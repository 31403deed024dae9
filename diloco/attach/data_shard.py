"""Different data for each peer: an order of its own for data that can be indexed, and a share of a
stream.

    dataset[i]             -> dataset[order[i]]          each peer draws its order by its seed
    item 0, item 1, ...    -> the items of this peer      each item has one owner among the peers

Rendezvous hashing finds the owner of an item: peers with the same list of members find the same
owner without talking. When a peer leaves, only its own items get another owner.

A peer notes beside its key how far it has read, and its next session goes on from there.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, get_worker_info

from diloco.attach.ranks import RankGroup
from diloco.errors import ConfigError
from diloco.rundir.files import write_atomic

MOST = 4096  # peers that share a stream
SLOTS = 64  # counters: one of the loop itself, the others of workers of its DataLoader
WORKERS = 2**48  # most items that one worker of a DataLoader numbers


class ActivePeers:
    """The peers that share a stream, in shared memory, for workers of a DataLoader.

    While the list is empty, this peer owns every item.
    """

    def __init__(self) -> None:
        # number of peers, number of this peer, numbers of all peers
        self._numbers = torch.zeros(2 + MOST, dtype=torch.int64, device="cpu")
        self._numbers.share_memory_()  # type: ignore[no-untyped-call]

    def are(self, me: str, peers: Iterable[str]) -> None:
        """Set the peers that share the stream, this one included."""
        numbers = sorted(map(_number, peers))[:MOST]
        self._numbers[2 : 2 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._numbers[1] = _number(me)
        self._numbers[0] = len(numbers)

    def owns(self, item: int) -> bool:
        """Return True if this peer owns the item of that number."""
        count, me, *peers = self._numbers[: 2 + int(self._numbers[0])].tolist()
        ranked = max(peers, key=lambda peer: sha256(f"{item}:{peer}".encode()).digest(), default=me)
        return count == 0 or bool(me == ranked)


def _number(peer: str) -> int:
    return int.from_bytes(sha256(peer.encode()).digest()[:7], "big")


class ReadPosition:
    """Position up to which a peer has read its data, in a file beside its key for the next session.

    Where the file is lost, or cannot be written, that session begins at the first row.

    Attributes:
        steps: inner steps of the swarm at the end of the last session; 0 in the first one.
        ranks: returns the ranks of this peer, or None before it has any.
    """

    def __init__(
        self, file: Path | None, ranks: Callable[[], RankGroup | None] = lambda: None
    ) -> None:
        self._file, self.steps, self._before = file, 0, dict[str, list[int]]()
        self.ranks = ranks
        self._rows: dict[str, Tensor] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or an incomplete one
            saved: Any = json.loads(file.read_bytes()) if file else {"steps": 0, "rows": {}}
            self.steps, self._before = int(saved["steps"]), dict(saved["rows"])

    def rows(self, name: str) -> Tensor:
        """Return (SLOTS,) int64, in shared memory: rows of this data read by each process."""
        if name not in self._rows:
            numbers = self._rows[name] = torch.zeros(SLOTS, dtype=torch.int64, device="cpu")
            for slot, count in enumerate(self._before.get(name, ())[:SLOTS]):
                numbers[slot] = count
            numbers.share_memory_()  # type: ignore[no-untyped-call]
        return self._rows[name]

    def count(self, name: str, is_part: bool) -> int:
        """Return rows read before this session; all ranks call it, unless each has its own part."""
        size = RankGroup.rank_and_size()[1]
        if is_part and size > 1:
            return 0
        return of_rank0(lambda: sum(self._before.get(name, ())) * size, self.ranks())

    def note(self, steps: int) -> None:
        """Save the position, at which the next session begins."""
        rows = {name: numbers.tolist() for name, numbers in self._rows.items()}
        if self._file is not None:
            with suppress(OSError):  # a full disk must not end a run
                write_atomic(self._file, json.dumps({"steps": steps, "rows": self._before | rows}))


def _slot() -> int:
    worker = get_worker_info()
    return 0 if worker is None else 1 + worker.id % (SLOTS - 1)


class _OwnRows(Subset[Any]):
    """Rows of a dataset in this peer's own order, without those that it has read already."""

    def __init__(self, dataset: Any, order: array[int], rows: Tensor, begin: int) -> None:
        super().__init__(dataset, order[begin:] + order[:begin])
        self._rows = rows

    def __getitem__(self, index: Any) -> Any:
        self._rows[_slot()] += len(index) if isinstance(index, list) else 1
        return super().__getitem__(index)  # type: ignore[no-untyped-call]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self._rows[_slot()] += len(indices)
        return super().__getitems__(indices)


class _FixedPart(NamedTuple):
    """Every `of`-th item, from `first` on."""

    first: int
    of: int

    def owns(self, item: int) -> bool:
        return item % self.of == self.first


Share = ActivePeers | _FixedPart


def _is_own(share: Share, item: object, number: int) -> bool:
    """Return True if this peer owns the item; each worker of a DataLoader numbers its own items."""
    worker = get_worker_info()
    return share.owns(number if worker is None else worker.id * WORKERS + number)


class _SharedStream(IterableDataset[Any]):
    """This peer's share of a stream: it reads every item, and yields those that the peer owns.

    The first pass of a session skips the items that the last session has read.
    """

    def __init__(self, stream: Iterable[Any], share: Share, rows: Tensor) -> None:
        self.stream, self._share, self._rows = stream, share, rows
        self._before = rows.clone().share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        slot, count = _slot(), 0
        last, self._before[slot] = int(self._before[slot]), 0
        for before in dict.fromkeys((last, 0)):
            for count, item in enumerate(self.stream, 1):
                if count > before and _is_own(self._share, item, count - 1):
                    self._rows[slot] = count
                    yield item
            self._rows[slot] = 0
            if count > before:  # else the last session had read the whole stream
                return


def shard(
    dataset: Any,
    seed: Callable[[bool], int],
    active: Callable[[], ActivePeers],
    index: int | None,
    of: int | None,
    position: ReadPosition,
) -> Any:
    """As `Swarm.shard`; `seed` and `active` are called only where they are needed.

    `seed` gets True where the seed may differ between sessions.
    """
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
        # the library's own methods return a `datasets.Dataset`, which trainers know how to use
        if library == "datasets" and part is None:
            return dataset.shuffle(seed=seed(True))
        if library == "datasets" and part is not None:
            return dataset.shard(part.of, part.first)
        if part is not None:
            order = array("q", range(part.first, len(dataset), part.of))
        else:
            generator = torch.Generator().manual_seed(seed(False))
            drawn = torch.randperm(len(dataset), generator=generator, device="cpu")
            order = array("q", drawn.numpy().tobytes())
        name = f"{len(order)} rows"
        begin = position.count(name, part is not None) % max(len(order), 1)
        return _OwnRows(dataset, order, position.rows(name), begin)
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"shard({kind}): it has no __len__ and __getitem__, nor __iter__; give a dataset"
        )
    share = part or active()
    if library == "datasets":
        return dataset.filter(partial(_is_own, share), with_indices=True)
    return _SharedStream(dataset, share, position.rows("stream"))


def of_rank0(number: Callable[[], int], ranks: RankGroup | None) -> int:
    """All ranks: call `number` on rank 0 and return its result, also before `ranks` exist."""
    rank, size = RankGroup.rank_and_size()
    if size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"swarm.seed: {os.environ['WORLD_SIZE']} processes were started together, and there is"
            " no process group yet, in which rank 0 would tell it; make one first, or ask after"
            " attach(...)"
        )
    value = number() if rank == 0 else 0
    if size == 1:
        return value
    return (ranks or RankGroup.from_process_group(torch.device("cpu"))).broadcast(value)
