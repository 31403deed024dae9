"""The state of a peer as named tensors and JSON, without pickle: its part of the swarm, its
optimizer, and its random generators; and the checkpoints of a custom loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.attach.attachment import Attachment
from diloco.attach.devices import restore_rng, rng_state
from diloco.attach.optimizer import NONE, Parameters, kind_of, parts_of
from diloco.attach.parameters import full_tensor, load_rows_, named, sharded_like
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers
from diloco.core.history import Tip, state_of
from diloco.errors import CheckpointError, PayloadError
from diloco.messages.heads import Book, Head
from diloco.outer.digest import part_digests
from diloco.outer.optimizer import OuterState
from diloco.rundir.checkpoint import DTYPES, CheckpointStore
from diloco.rundir.containers import from_json, plain_json, to_json
from diloco.rundir.files import exclusive
from diloco.swarm.node.options import RunSpec
from diloco.swarm.node.saved import Saved

KEY = "checkpoints directory"
KEEP = 2
EXTRA = "_extra_state"  # end of the names under which torch saves `get_extra_state`
KERNELS = ("fused", "foreach")  # settings of torch optimizers without effect on the result
Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]
_Groups = list[list[str]]  # names of parameters


@dataclass(frozen=True)
class PeerState:
    """State with which a peer continues as itself, without its model and its optimizer.

    `run` is the manifest; `counters` are inner steps, tokens and discarded tokens; `seed` is the
    seed of the data order, with which a trainer skips what it has read.
    """

    run: str
    saved: Saved
    counters: tuple[int, int, int]
    seed: int | None = None

    @classmethod
    def of(cls, sync: Attachment, run: RunSpec, saved: Saved) -> PeerState:
        """Make the state of an attached peer. Unsent tokens count as discarded."""
        counters = sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens
        return cls(run.manifest_text, saved, counters)

    def flatten(self) -> tuple[Groups, dict[str, Any]]:
        """Return groups of tensors, which are not copies, and JSON."""
        tensors, state = flatten_swarm(self.saved)
        return tensors, state | {"run": self.run, "counters": self.counters}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> PeerState:
        """The inverse of `flatten`."""
        steps, tokens, discarded = state["counters"]
        saved = restore_swarm(tensors, state)
        return cls(state["run"], saved, (steps, tokens, discarded), state.get("seed"))

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
        """Set the counters of an attachment that is not entered yet."""
        sync.steps, sync.tokens, sync.discarded_tokens = self.counters


class LoopCheckpoints:
    """The checkpoints of one peer in a directory, in the format of `diloco train`; two stay.

    Instead of a damaged one the older is loaded. Raises `ConfigError` if another process uses the
    directory, and `CheckpointError` for a model that no checkpoint can hold.
    """

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: Optimizer, ranks: RankGroup
    ) -> None:
        self.directory = directory
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._parameters, self._checked = dict(named(model)), WeakSet[Optimizer]()
        self._store = CheckpointStore(directory, KEEP, KEY)
        for name, tensor in self._tensors().items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{name}: a checkpoint cannot hold {tensor.dtype}; register it with"
                    " persistent=False, or attach without checkpoints"
                )
        self._extra({})
        self._lock = ExitStack()
        check = torch.compiler.disable(self._check_optimizer)  # type: ignore[no-untyped-call]
        for part in parts_of(optimizer):
            hook = part.register_step_post_hook(check)
            self._lock.callback(hook.remove)
        if ranks.is_rank0:
            self._lock.enter_context(exclusive(directory, KEY))

    def _check_optimizer(self, part: Optimizer, *_: object) -> None:
        """Check after its first step that it can be saved: the first save may be hours later."""
        if part in self._checked:
            return
        self._checked.add(part)
        try:
            to_json(part.state_dict(), "", {})
        except CheckpointError as error:
            raise CheckpointError(
                f"optimizer={kind_of(part)}: {error}; attach without checkpoints, or train with"
                " another optimizer"
            ) from None

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.close()

    def load(self, schedulers: Schedulers) -> tuple[PeerState, dict[str, Any]] | None:
        """All ranks: restore model, optimizer and generators from the newest checkpoint, if any.

        Raises `CheckpointError` when none can be used, or the newest is of another model or not the
        same for all ranks.
        """
        checkpoint = self._store.load_latest()
        step = -1 if checkpoint is None else checkpoint.step
        self._ranks.check_newest(step, f"checkpoints={self.directory}")
        if checkpoint is None:
            return None
        state, tensors = checkpoint.state, checkpoint.tensors
        self._load_model_(tensors["model"])
        if "extra" in state:
            extra = from_json(state["extra"], tensors["extra"])
            self._model.load_state_dict(extra, strict=False)
        with schedulers.keeping_rates():
            restore_own(self._optimizer, tensors, state, KEY, self._parameters)
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
        return {name: value for name, value in state.items() if not name.endswith(EXTRA)}

    def _extra(self, tensors: Tensors) -> Any:
        """Return the modules' extra state as JSON; its tensors go to `tensors`."""
        state = self._model.state_dict()
        extra = {name: value for name, value in state.items() if name.endswith(EXTRA)}
        return to_json(extra, "", tensors)

    def save(self, sync: Attachment, run: RunSpec | None, loop: Mapping[str, Any]) -> Path | None:
        """All ranks: rank 0, which has `run`, writes a checkpoint.

        Raises `CheckpointError`, also for what no checkpoint can hold.
        """
        model = {name: full_tensor(tensor.detach()) for name, tensor in self._tensors().items()}
        own, own_json = flatten_own(self._optimizer, self._parameters)
        extra: Tensors = {}
        state = {**own_json, "extra": self._extra(extra), "loop": plain_json(loop, "swarm.save")}
        if run is None:
            return None
        with sync.checkpointing() as saved:
            tensors, peer = PeerState.of(sync, run, saved).flatten()
            groups = {**tensors, **own, "model": model, "extra": extra}
            return self._store.save(sync.version, groups, {**state, "peer": peer})


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))


# -- the peer's part of the swarm ------------------------------------------------------------------


def flatten_swarm(saved: Saved) -> tuple[Groups, dict[str, Any]]:
    """Return groups of tensors (anchor, outer, residual), and JSON, for `restore_swarm`."""
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
    """Return the master, and the state of the outer optimizer."""
    vectors = [outer[f"{fragment}.momentum"]]
    while (name := f"{fragment}.buffer{len(vectors)}") in outer:
        vectors.append(outer[name])
    version, *window = state["windows"][str(fragment)]
    return outer[f"{fragment}.master"], OuterState(version, tuple(vectors), *window)


# -- optimizer and random generators ---------------------------------------------------------------


def flatten_own(
    optimizer: Optimizer, parameters: Parameters = NONE
) -> tuple[Groups, dict[str, Any]]:
    """All ranks: flatten the state of this process: its optimizer and its random generators."""
    (inner, inner_json), (rng, rng_json) = flatten_optimizer(optimizer, parameters), rng_state()
    return {"inner": inner, "rng": rng}, {"inner": inner_json, "rng": rng_json}


def restore_own(
    optimizer: Optimizer,
    tensors: Mapping[str, Tensors],
    saved: Mapping[str, Any],
    key: str = "run.dir",
    parameters: Parameters = NONE,
) -> None:
    """The inverse of `flatten_own`; see `restore_optimizer`."""
    restore_optimizer(optimizer, tensors["inner"], saved["inner"], key, parameters)
    restore_rng(tensors["rng"], saved["rng"])


def flatten_optimizer(
    optimizer: Optimizer, parameters: Parameters = NONE
) -> tuple[Tensors, dict[str, Any]]:
    """All ranks: flatten any torch optimizer's state to named tensors, no copies, and JSON.

    Sharded tensors become whole on rank 0. Where `parameters` name them, the groups may be in
    another order when it is restored. Raises `CheckpointError` for what JSON cannot hold.
    """
    tensors: Tensors = {}
    state = to_json(optimizer.state_dict(), "", tensors)
    tensors = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    saved = {"type": kind_of(optimizer), "shapes": _shapes(optimizer)}
    return tensors, {**saved, "names": _names(optimizer, parameters), "state_dict": state}


def restore_optimizer(
    optimizer: Optimizer,
    tensors: Tensors,
    saved: Mapping[str, Any],
    key: str = "run.dir",
    parameters: Parameters = NONE,
) -> None:
    """The inverse of `flatten_optimizer`; the optimizer may keep the tensors themselves.

    Raises `CheckpointError` for the state of another optimizer, of other shapes or other groups;
    `key` is what chose the checkpoint.
    """
    names = _names(optimizer, parameters)
    before = saved.get("names", names)
    here, there = _by_name(names, _shapes(optimizer)), _by_name(before, saved["shapes"])
    if (kind_of(optimizer), here) != (saved["type"], there):
        raise CheckpointError(
            f"{key}: its checkpoint holds the state of {saved['type']} for"
            f" {_numel(saved['shapes'])} parameters, this run has {kind_of(optimizer)} for"
            f" {_numel(_shapes(optimizer))} with other shapes, order or groups; resume with the"
            f" configuration that wrote it, or choose another {key}"
        )
    state = from_json(saved["state_dict"], tensors)
    both = zip(parts_of(optimizer), state.get("parts", [state]), before, names, strict=True)
    if not all({"state", "param_groups"} <= part.keys() for part in state.get("parts", [state])):
        if before != names:
            raise CheckpointError(
                f"{key}: its checkpoint holds the state of {saved['type']} for parameters in"
                " another order; build the optimizer as in the run that wrote it"
            )
        return optimizer.load_state_dict(state)  # a wrapper whose state has another form
    parts = [_sharded(part, _renumbered(part_state, *order)) for part, part_state, *order in both]
    optimizer.load_state_dict({"parts": parts} if "parts" in state else parts[0])


def _renumbered(state: dict[str, Any], before: _Groups, names: _Groups) -> dict[str, Any]:
    """Renumber a state whose groups, or the parameters in them, had another order."""
    if before == names:
        return state
    settings = dict(zip(map(frozenset, before), state["param_groups"], strict=True))
    numbers = {name: number for number, name in enumerate(chain(*before))}
    order = [numbers[name] for name in chain(*names)]
    places, kept = iter(range(len(order))), state["state"]
    groups = [
        settings[frozenset(group)] | {"params": [next(places) for _ in group]} for group in names
    ]
    moved = {index: kept[number] for index, number in enumerate(order) if number in kept}
    shared = {name: value for name, value in kept.items() if name not in order}  # of the optimizer
    return {**state, "state": moved | shared, "param_groups": groups}


def _sharded(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shard a state like the optimizer's parameters, and keep this process's choice of kernels."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        there |= {name: here[name] for name in KERNELS if name in here}
    for index, parameter in enumerate(parameters):
        kept = state["state"].get(index, {})
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = sharded_like(value, parameter)
    return state


def _names(optimizer: Optimizer, parameters: Parameters) -> list[_Groups]:
    """Names of the parameters in each group of each part; numbers for those without a name."""
    known, numbers = {id(parameter): name for name, parameter in parameters.items()}, count()
    return [
        [[known.get(id(p)) or str(next(numbers)) for p in group["params"]] for group in groups]
        for groups in (part.param_groups for part in parts_of(optimizer))
    ]


def _by_name(names: list[_Groups], shapes: list[list[int]]) -> list[dict[frozenset[str], Any]]:
    """Shapes of each part's state by the names in a group, so that the order does not matter."""
    sizes = dict(zip(chain(*chain(*names)), shapes, strict=False))
    return [
        {frozenset(group): {name: sizes.get(name) for name in group} for group in groups}
        for groups in names
    ]


def _shapes(optimizer: Optimizer) -> list[list[int]]:
    return [
        list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]
    ]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
