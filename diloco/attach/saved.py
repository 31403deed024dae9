"""What of a peer survives its process, as named tensors and JSON without pickle: its part of the
swarm, its optimizer, and its random generators; and the checkpoints of a loop of one's own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.attach.attachment import Attachment
from diloco.attach.devices import random_states, restore_random
from diloco.attach.optimizer import CombinedOptimizer, kind_of
from diloco.attach.parameters import full_tensor, load_rows_, sharded_like
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers
from diloco.core.history import Tip, state_of
from diloco.errors import CheckpointError, PayloadError
from diloco.messages.heads import Book, Head
from diloco.outer.digest import part_digests
from diloco.outer.optimizer import OuterState
from diloco.rundir.checkpoint import CheckpointStore
from diloco.rundir.files import exclusive
from diloco.swarm.node.options import RunSpec
from diloco.swarm.node.saved import Saved

KEY = "checkpoints directory"
KEEP = 2
KERNELS = ("fused", "foreach")  # how a torch optimizer computes a step, not what
Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]


@dataclass(frozen=True)
class PeerState:
    """What a peer needs to go on as itself, besides its model and its optimizer.

    `run` is the manifest; `counters` are inner steps, tokens and discarded tokens; `schedules` are
    the learning rate schedules at step 0.
    """

    run: str
    saved: Saved
    counters: tuple[int, int, int]
    schedules: list[Any]

    @classmethod
    def of(cls, sync: Attachment, run: RunSpec, saved: Saved) -> PeerState:
        """Of an attached peer. Unsent tokens count as discarded: it will go on from the anchors."""
        counters = sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens
        return cls(run.manifest_text, saved, counters, flatten_schedules(sync.schedulers))

    def flatten(self) -> tuple[Groups, dict[str, Any]]:
        """Groups of tensors, which are not copies, and JSON."""
        tensors, state = flatten_swarm(self.saved)
        own = {"run": self.run, "counters": self.counters, "schedules": self.schedules}
        return tensors, state | own

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> PeerState:
        """The inverse of `flatten`."""
        steps, tokens, discarded = state["counters"]
        saved = restore_swarm(tensors, state)
        return cls(state["run"], saved, (steps, tokens, discarded), state["schedules"])

    def check_same_run(self, run: RunSpec, where: str) -> None:
        """Raise `CheckpointError` for the state of another run; `where` is where it comes from."""
        try:
            differing = run.differences(self.run)
        except PayloadError:
            raise CheckpointError(f"{where} holds no manifest; choose another checkpoint") from None
        if differing:
            raise CheckpointError(
                f"{where} holds a run with other settings ({'; '.join(differing[:4])}); use the"
                " same settings, or another checkpoint"
            )

    def apply(self, sync: Attachment) -> None:
        """Give counters and schedules to a peer that is attached and not entered yet."""
        sync.steps, sync.tokens, sync.discarded_tokens = self.counters
        restore_schedules(sync.schedulers, self.schedules)


class LoopCheckpoints:
    """The checkpoints of one peer in a directory, in the format of `diloco train`; two stay.

    A damaged one is skipped for the one before. Raises `ConfigError` if another process uses the
    directory.
    """

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: Optimizer, ranks: RankGroup
    ) -> None:
        self.directory = directory
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._store = CheckpointStore(directory, KEEP, KEY)
        self._lock = ExitStack()
        if ranks.is_rank0:
            self._lock.enter_context(exclusive(directory, KEY))

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.close()

    def load(self, schedulers: Schedulers) -> tuple[PeerState, dict[str, Any]] | None:
        """All ranks: restore model, optimizer and generators from the newest checkpoint, if any.

        Raises `CheckpointError` when none can be used, or the newest is of another model or not the
        same for all ranks.
        """
        found = self._store.load_latest()
        step = -1 if found is None else found.step
        self._ranks.check_newest(step, f"checkpoints={self.directory}")
        if found is None:
            return None
        state, tensors = found.state, found.tensors
        self._load_model_(tensors["model"])
        restore_own(self._optimizer, tensors, state, KEY)
        schedulers.start_again_()
        return PeerState.restore(tensors, state["peer"]), state["loop"]

    @torch.no_grad()
    def _load_model_(self, saved: Tensors) -> None:
        own = self._tensors()
        for name in sorted(own.keys() | saved.keys()):
            here, there = _shape(own.get(name)), _shape(saved.get(name))
            if here != there:
                raise CheckpointError(
                    f"checkpoints={self.directory} holds another model ({name} is {there} there,"
                    f" and {here} here); build the model that it was written for, or choose another"
                    " directory"
                )
        for name, tensor in own.items():
            load_rows_(tensor, saved[name])

    def _tensors(self) -> Tensors:
        state = self._model.state_dict()
        return {name: one for name, one in state.items() if isinstance(one, Tensor)}

    def save(self, sync: Attachment, run: RunSpec | None, loop: Mapping[str, Any]) -> Path | None:
        """All ranks: rank 0, which has `run`, writes a checkpoint.

        Raises `CheckpointError`, and `TypeError` for what is no JSON.
        """
        model = {name: full_tensor(tensor.detach()) for name, tensor in self._tensors().items()}
        own, own_json = flatten_own(self._optimizer)
        if run is None:
            return None
        with sync.checkpointing() as saved:
            tensors, peer = PeerState.of(sync, run, saved).flatten()
            state = {**own_json, "peer": peer, "loop": dict(loop)}
            return self._store.save(sync.version, {**tensors, **own, "model": model}, state)


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))


# -- the peer's part of the swarm ------------------------------------------------------------------


def flatten_swarm(saved: Saved) -> tuple[Groups, dict[str, Any]]:
    """What `restore_swarm` reads: groups of tensors (anchor, outer, residual), and JSON."""
    anchors = {str(fragment): anchor for fragment, anchor in enumerate(saved.anchors)}
    residuals = {str(fragment): residual for fragment, residual in saved.residuals.items()}
    outer: Tensors = {}
    windows: dict[int, list[int]] = {}
    for fragment, (master, state) in saved.outer.items():
        outer |= {f"{fragment}.master": master, f"{fragment}.momentum": state.momentum}
        for number, vector in enumerate(state.vectors[1:], 1):
            outer[f"{fragment}.buffer{number}"] = vector
        windows[fragment] = [state.version, state.pushes, state.delay]
    return {"anchor": anchors, "outer": outer, "residual": residuals}, {
        "tips": [msgspec.msgpack.encode((tip.head, tip.book)).hex() for tip in saved.tips],
        "processed": saved.processed,
        "stamp": saved.stamp,
        "merged": saved.tips[0].book.merged,
        "applied_tokens": saved.applied_tokens,
        "windows": windows,
        "addresses": list(saved.addresses),
    }


def restore_swarm(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> Saved:
    """The inverse of `flatten_swarm`.

    Raises `CheckpointError` for anchors that are not what their heads say.
    """
    anchors, outer = tensors["anchor"], tensors["outer"]
    held = sorted({int(name.split(".")[0]) for name in outer})
    return Saved(
        anchors=[anchors[str(fragment)] for fragment in range(len(anchors))],
        tips=[_tip(text, anchors[str(fragment)]) for fragment, text in enumerate(state["tips"])],
        processed=state["processed"],
        stamp=state["stamp"],
        outer={fragment: _outer_state(outer, state, fragment) for fragment in held},
        addresses=state["addresses"],
        residuals={int(name): residual for name, residual in tensors["residual"].items()},
    )


def _tip(text: str, anchor: Tensor) -> Tip:
    head, book = msgspec.msgpack.decode(bytes.fromhex(text), type=tuple[Head, Book])
    tip = Tip(head, book, part_digests(anchor))
    if state_of(book, tip.parts) != head.state:
        raise CheckpointError(
            "a checkpoint holds an anchor that is not what its head says; choose another one"
        )
    return tip


def _outer_state(
    outer: Tensors, state: Mapping[str, Any], fragment: int
) -> tuple[Tensor, OuterState]:
    """The master, and what the outer optimizer keeps."""
    vectors = [outer[f"{fragment}.momentum"]]
    while (name := f"{fragment}.buffer{len(vectors)}") in outer:
        vectors.append(outer[name])
    version, *window = state["windows"][str(fragment)]
    return outer[f"{fragment}.master"], OuterState(version, tuple(vectors), *window)


# -- what is this process's own --------------------------------------------------------------------


def flatten_own(optimizer: Optimizer) -> tuple[Groups, dict[str, Any]]:
    """All ranks: the state of a process, which are its optimizer and its random generators."""
    (inner, inner_json), (rng, rng_json) = flatten_optimizer(optimizer), rng_state()
    return {"inner": inner, "rng": rng}, {"inner": inner_json, "rng": rng_json}


def restore_own(
    optimizer: Optimizer,
    tensors: Mapping[str, Tensors],
    saved: Mapping[str, Any],
    key: str = "run.dir",
) -> None:
    """The inverse of `flatten_own`; see `restore_optimizer`."""
    restore_optimizer(optimizer, tensors["inner"], saved["inner"], key)
    restore_rng(tensors["rng"], saved["rng"])


def flatten_optimizer(optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """All ranks: the state of any torch optimizer as named tensors, no copies, and JSON.

    Sharded tensors become whole on rank 0. Raises `TypeError` for what JSON cannot hold.
    """
    tensors: Tensors = {}
    state = to_json(optimizer.state_dict(), "", tensors)
    kind, shapes = kind_of(optimizer), _shapes(optimizer)
    return tensors, {"type": kind, "shapes": shapes, "state_dict": state}


def restore_optimizer(
    optimizer: Optimizer, tensors: Tensors, saved: Mapping[str, Any], key: str = "run.dir"
) -> None:
    """The inverse of `flatten_optimizer`; the optimizer may keep the tensors themselves.

    Raises `CheckpointError` for the state of another optimizer or of other shapes; `key` is what
    chose the checkpoint.
    """
    here, there = (kind_of(optimizer), _shapes(optimizer)), (saved["type"], saved["shapes"])
    if here != there:
        raise CheckpointError(
            f"{key}: its checkpoint holds the state of {there[0]} for {_numel(there[1])}"
            f" parameters, this run has {here[0]} for {_numel(here[1])} with other shapes or order;"
            f" resume with the configuration that wrote it, or choose another {key}"
        )
    optimizer.load_state_dict(_sharded(optimizer, from_json(saved["state_dict"], tensors)))


def _sharded(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The same state, cut like the optimizer's parameters, for the kernels that compute here."""
    if isinstance(optimizer, CombinedOptimizer):
        both = zip(optimizer.parts, state["parts"], strict=True)
        return {"parts": [_sharded(part, saved) for part, saved in both]}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        there |= {name: here[name] for name in KERNELS if name in here}
    for index, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = sharded_like(value, parameters[index])
    return state


def _shapes(optimizer: Optimizer) -> list[list[int]]:
    return [list(one.shape) for group in optimizer.param_groups for one in group["params"]]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def flatten_schedules(schedulers: Schedulers) -> list[Any]:
    """Their states at step 0; None for one that is not known, or holds more than JSON can."""
    found: list[Any] = []
    for fresh in schedulers.fresh:
        tensors: Tensors = {}
        try:
            written = None if fresh is None else to_json(fresh, "", tensors)
        except TypeError:
            written = None
        found.append(None if tensors else written)
    return found


def restore_schedules(schedulers: Schedulers, saved: Sequence[Any]) -> None:
    """The inverse of `flatten_schedules`."""
    schedulers.restore([one and from_json(one, {}) for one in saved])


def rng_state() -> tuple[Tensors, dict[str, Any]]:
    """State of the global generators of torch (accelerators: once in use), Python and numpy."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = dict(numpy.random.get_state(legacy=False))
    twister = legacy.pop("state")
    tensors = {
        "torch": torch.get_rng_state(),  # (5056,) uint8
        "python": torch.tensor(words),  # (625,) int64
        # (624,) int64, as torch supports little of uint32
        "numpy": torch.tensor(twister["key"].astype(numpy.int64)),
        **random_states(),
    }
    python = {"version": version, "gauss": gauss}
    return tensors, {"python": python, "numpy": {**legacy, "position": twister["pos"]}}


def restore_rng(tensors: Tensors, saved: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`; ignores the state of devices that this machine lacks."""
    torch.set_rng_state(tensors["torch"])
    python, legacy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    kept = {key: legacy[key] for key in ("bit_generator", "has_gauss", "gauss")}
    numpy.random.set_state({**kept, "state": {"key": keys, "pos": legacy["position"]}})
    restore_random(tensors)


# -- nested containers -----------------------------------------------------------------------------


def to_json(value: Any, path: str, tensors: Tensors) -> Any:
    """Nested containers as JSON, which lacks tensors, tuples and keys that are numbers."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors have the name {path}"
        tensors[path] = full_tensor(value)
        return {"tensor": path}
    if isinstance(value, dict):
        items = ((key, f"{path}.{key}".lstrip("."), item) for key, item in value.items())
        return {"dict": [[key, to_json(item, at, tensors)] for key, at, item in items]}
    if isinstance(value, list | tuple):
        parts = [to_json(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: a checkpoint cannot hold {type(value).__name__}")


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(from_json(item, tensors) for item in content)
    return {key: from_json(item, tensors) for key, item in content}
