"""What survives the process of a peer: everything that must be restored is in one checkpoint, and only there.

Written at outer boundaries: anchors and their versions, outer states of the fragments held, inner optimizer, random
generators, position in the data, counters. At a barrier the local parameters are the anchors, so they are not stored
twice; where they differ (overlap, mixing, no barrier), a resumed peer goes on from the anchors. The state of optimizers
and random generators becomes tensors and JSON: no checkpoint needs pickle.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.config import Config
from diloco.data import Stream
from diloco.errors import CheckpointError
from diloco.outer.state import OuterState
from diloco.protocol.messages import decode, encode, expect
from diloco.protocol.messages.heads import Record
from diloco.protocol.phase_seconds import PhaseSeconds
from diloco.protocol.shares import Share
from diloco.rundir.background import BackgroundWriter, copied
from diloco.rundir.checkpoint import CheckpointStore
from diloco.rundir.files import check_same_run
from diloco.train.api import Attachment, Saved
from diloco.train.baseline import DataParallel
from diloco.train.devices import random_states, restore_random
from diloco.train.inner import Pair
from diloco.train.rows import load_rows_, sharded_like, whole

__all__ = [
    "Session",
    "checkpoints_name",
    "flatten_optimizer",
    "identity_path",
    "restore_optimizer",
    "restore_rng",
    "rng_state",
]

Sync = Attachment | DataParallel
KERNELS = ("fused", "foreach")  # how a torch optimizer computes a step, not what
Tensors = dict[str, Tensor]


def identity_path(config: Config, name: str) -> Path:
    """Where this peer's key is: with the run, so that a resumed peer is the same peer."""
    if config.swarm.identity_path is not None:
        return Path(config.swarm.identity_path)
    return config.run.dir / "identities" / f"{name}.key"


def checkpoints_name(config: Config) -> str:
    """The directory of this peer's checkpoints. Processes in data parallel are alike, so all go on from one of them."""
    return "rank0" if config.outer.method == "data_parallel" else config.run.name or "peer"


class Session:
    """One peer's checkpoints in a run directory.

    A corrupt checkpoint is skipped for the one before it, with a warning. One of another run (the manifests differ in
    more than the budget, which may be extended) raises `CheckpointError` that names the keys.

    Attributes:
        saved_version: outer step of the checkpoint from which this session goes on, then of the newest; -1 without one.
        skipped: which newer checkpoints this session could not use, and why.
        seconds, traffic: wall time per phase, and bytes sent and received, in the sessions before this one.
        loss_scale: what `LossScale` goes on from; empty without fp16. Set it before `save`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = CheckpointStore(config.run.dir / "checkpoints" / checkpoints_name(config), config.checkpoint.keep)
        self._writer = BackgroundWriter(self.store)
        found = self._checkpoint = self.store.load_latest()
        self.saved_version = self._intact_version = -1
        self.skipped: list[str] = []
        self.seconds, self.traffic = PhaseSeconds(), (0, 0)
        self.loss_scale: Sequence[float] = ()
        if found is None:
            return
        check_same_run(config, found.state["manifest"])
        self.saved_version = self._intact_version = found.step
        self.skipped = found.skipped
        self.seconds = PhaseSeconds(**found.state["seconds"])
        sent, received = found.state["traffic"]
        self.traffic = sent, received
        self.loss_scale = found.state.get("loss_scale", ())

    def outer(self) -> Saved | None:
        """Where the swarm side goes on; call it before `restore`."""
        if self._checkpoint is None:
            return None
        state, anchors = self._checkpoint.state, self._checkpoint.tensors["anchor"]
        outer = self._checkpoint.tensors["outer"]
        held = sorted({int(name.split(".")[0]) for name in outer})
        return Saved(
            anchors=[anchors[str(fragment)] for fragment in range(len(anchors))],
            versions=state["versions"],
            terms=state["terms"],
            applied_tokens=state["applied_tokens"],
            # Older checkpoints have none of these.
            units=state.get("units", (0, ())),
            shares=[{peer: Share(*share) for peer, share in known.items()} for known in state.get("shares", ())],
            applied={int(base_version): tokens for base_version, tokens in state.get("applied", {}).items()},
            outer={fragment: _outer_state(outer, state, fragment) for fragment in held},
            records=[None if text is None else _record(text) for text in state.get("records", ())],
            addresses=state.get("addresses", ()),
            residuals={int(name): residual for name, residual in self._checkpoint.tensors["residual"].items()},
        )

    def restore(self, sync: Sync, model: nn.Module, optimizer: Optimizer, stream: Stream) -> None:
        """Restore everything but the swarm's part; call it before `sync` is entered.

        The checkpoint is released then: while its files are mapped, their space stays in use after they are deleted.
        """
        if self._checkpoint is None:
            return
        state, tensors = self._checkpoint.state, self._checkpoint.tensors
        self._checkpoint = None
        sync.steps, sync.tokens, sync.discarded_tokens = state["counters"]
        stream.restore(state["stream"])
        restore_optimizer(optimizer, tensors["inner"], state["inner"])
        restore_rng(tensors["rng"], state["rng"])
        if isinstance(sync, DataParallel):
            sync.version, sync.applied_tokens = state["versions"][0], state["applied_tokens"]
            saved = tensors["anchor"]
            for name, parameter in model.named_parameters():
                load_rows_(parameter, saved[name])

    def save(
        self,
        sync: Sync,
        model: nn.Module,
        optimizer: Optimizer,
        stream: Stream,
        seconds: PhaseSeconds,
        traffic: Sequence[int],
        leads: bool = True,
        background: bool = False,
    ) -> None:
        """All ranks: have rank 0, which `leads`, write a checkpoint of the last outer boundary, unless there is one.

        In the `background` it is written from copies while training goes on; call `written` before the next one. In
        the middle of a round, tokens that this peer has not sent count as discarded there: a resumed peer goes on
        from the anchors. Tokens that are on their way then stay in flight.
        """
        if sync.version == self.saved_version:
            return
        with ExitStack() as stack:
            if isinstance(sync, DataParallel):
                parameters = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
                swarm: dict[str, Tensors] = {"anchor": parameters, "outer": {}, "residual": {}}
                swarm_json = {"versions": [sync.version], "terms": [0], "applied_tokens": sync.applied_tokens}
            elif leads:
                swarm, swarm_json = _swarm_state(stack.enter_context(sync.checkpointing()))
            inner, inner_json = flatten_optimizer(optimizer)
            if not leads:
                return
            rng, rng_json = rng_state()
            state: dict[str, Any] = {
                "manifest": self.config.manifest().to_json(),
                **swarm_json,
                "counters": [sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens],
                "stream": stream.state(),
                "inner": inner_json,
                "rng": rng_json,
                "seconds": asdict(seconds),
                "traffic": list(traffic),
                "loss_scale": list(self.loss_scale),
            }
            tensors = {**swarm, "inner": inner, "rng": rng}
            if background:
                self._writer.begin(sync.version, copied(tensors), state)
            else:
                self.store.save(sync.version, tensors, state)
                self._intact_version = sync.version
            self.saved_version = sync.version

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writer.busy

    def written(self) -> CheckpointError | None:
        """Wait until nothing is being written; returns why the last checkpoint is not there, once."""
        error = self._writer.result()
        if error is None:
            self._intact_version = self.saved_version
        else:
            self.saved_version = self._intact_version
        return error


def _outer_state(tensors: Tensors, state: Mapping[str, Any], fragment: int) -> tuple[Tensor, OuterState]:
    """The master, and what the optimizer keeps. An older checkpoint has the momentum only, and no windows."""
    vectors, kept = [tensors[f"{fragment}.momentum"]], tensors.keys()
    while (name := f"{fragment}.buffer{len(vectors)}") in kept:
        vectors.append(tensors[name])
    window = state.get("windows", {}).get(str(fragment), ())
    return tensors[f"{fragment}.master"], OuterState(state["versions"][fragment], tuple(vectors), *window)


def _record(text: str) -> Record:
    return expect(decode(bytes.fromhex(text)), Record)


def _swarm_state(saved: Saved) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """What `Session.outer` reads: groups of tensors, and JSON."""
    anchors = {str(fragment): anchor for fragment, anchor in enumerate(saved.anchors)}
    residuals = {str(fragment): residual for fragment, residual in saved.residuals.items()}
    outer: Tensors = {}
    windows: dict[int, list[int]] = {}
    for fragment, (master, state) in saved.outer.items():
        outer |= {f"{fragment}.master": master, f"{fragment}.momentum": state.momentum}
        outer |= {f"{fragment}.buffer{number}": vector for number, vector in enumerate(state.vectors[1:], 1)}
        windows[fragment] = [state.pushes, state.delay]
    cursor, open_ = saved.units
    return {"anchor": anchors, "outer": outer, "residual": residuals}, {
        "versions": list(saved.versions),
        "terms": list(saved.terms),
        "applied_tokens": saved.applied_tokens,
        "units": [cursor, [list(unit) for unit in open_]],
        "shares": [{peer: list(share) for peer, share in known.items()} for known in saved.shares],
        "applied": dict(saved.applied),
        "records": [None if record is None else encode(record).hex() for record in saved.records],
        "windows": windows,
        "addresses": list(saved.addresses),
    }


def flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All ranks: `state_dict()` of any torch optimizer as (named tensors, JSON that refers to them).

    The tensors are the optimizer's own, not copies: save them before the next step. Sharded ones become whole on
    rank 0. Raises `TypeError` if the state holds anything else than tensors, containers, numbers, strings and None.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(optimizer.state_dict(), "", tensors)
    return tensors, {"type": type(optimizer).__name__, "shapes": _shapes(optimizer), "state_dict": encoded}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """The inverse of `flatten_optimizer`: restores per-parameter state and the hyper-parameters of every group.

    The optimizer keeps the tensors themselves if device and dtype fit: do not use them elsewhere afterwards. Raises
    `CheckpointError` if the state belongs to another optimizer class or to parameters of other shapes.
    """
    here, there = (type(optimizer).__name__, _shapes(optimizer)), (saved["type"], saved["shapes"])
    if here != there:
        raise CheckpointError(
            f"run.dir: its checkpoint holds the state of {there[0]} for {_numel(there[1])} parameters, "
            f"this run has {here[0]} for {_numel(here[1])} with other shapes or order; "
            f"resume with the configuration that wrote it, or choose another run.dir"
        )
    optimizer.load_state_dict(_sharded(optimizer, _decode(saved["state_dict"], tensors)))


def _sharded(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The same state, cut like the optimizer's parameters, however many ranks have written it, and for the kernels that
    compute here: the checkpoint may come from another device.
    """
    if isinstance(optimizer, Pair):
        return {"parts": [_sharded(*both) for both in zip(optimizer.parts, state["parts"], strict=True)]}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        there |= {name: here[name] for name in KERNELS if name in here}
    for index, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = sharded_like(value, parameters[index])
    return state


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch (CPU; every accelerator once they are in use), Python and numpy."""
    tensors = {"torch": torch.get_rng_state()}  # (5056,) uint8
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words)  # (625,) int64
    legacy: dict[str, Any] = dict(numpy.random.get_state(legacy=False))
    twister = legacy.pop("state")
    tensors["numpy"] = torch.tensor(twister["key"].astype(numpy.int64))  # (624,), torch supports little of uint32
    tensors |= random_states()
    return tensors, {"python": {"version": version, "gauss": gauss}, "numpy": {**legacy, "position": twister["pos"]}}


def restore_rng(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`; ignores the state of devices that this machine lacks."""
    torch.set_rng_state(tensors["torch"])
    python, legacy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    twister = {"key": keys, "pos": legacy["position"]}
    numpy.random.set_state({**{key: legacy[key] for key in ("bit_generator", "has_gauss", "gauss")}, "state": twister})
    restore_random(tensors)


def _shapes(optimizer: Optimizer) -> list[list[int]]:
    return [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Nested containers as JSON. Tensors, tuples and number keys, which JSON lacks, become small objects and lists."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors have the name {path}"
        tensors[path] = whole(value)
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _encode(item, f"{path}.{key}".lstrip("."), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: a checkpoint cannot hold {type(value).__name__}")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return {key: _decode(item, tensors) for key, item in content}
