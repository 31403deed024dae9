"""State as named tensors and JSON, without pickle: the swarm's, an optimizer's, random
generators'."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco.attach.devices import random_states, restore_random
from diloco.attach.inner_optimizer import CombinedOptimizer, kind_of
from diloco.attach.sharded import full_tensor, sharded_like
from diloco.core.history import Tip, state_of
from diloco.errors import CheckpointError
from diloco.messages.heads import Book, Head
from diloco.outer.digest import part_digests
from diloco.outer.optimizer import OuterState
from diloco.swarm.node.saved import Saved

KERNELS = ("fused", "foreach")  # how a torch optimizer computes a step, not what
Tensors = dict[str, Tensor]
Groups = dict[str, Tensors]


def restore_swarm(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> Saved:
    """The inverse of `flatten_swarm`. Raises `CheckpointError` for anchors that are not what their
    heads say."""
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
    tensors: Tensors, state: Mapping[str, Any], fragment: int
) -> tuple[Tensor, OuterState]:
    """The master, and what the optimizer keeps."""
    vectors, kept = [tensors[f"{fragment}.momentum"]], tensors.keys()
    while (name := f"{fragment}.buffer{len(vectors)}") in kept:
        vectors.append(tensors[name])
    version, *window = state["windows"][str(fragment)]
    return tensors[f"{fragment}.master"], OuterState(version, tuple(vectors), *window)


def flatten_swarm(saved: Saved) -> tuple[Groups, dict[str, Any]]:
    """What `restore_swarm` reads: groups of tensors (anchor, outer, residual), and JSON."""
    anchors = {str(fragment): anchor for fragment, anchor in enumerate(saved.anchors)}
    residuals = {str(fragment): residual for fragment, residual in saved.residuals.items()}
    outer: Tensors = {}
    windows: dict[int, list[int]] = {}
    for fragment, (master, state) in saved.outer.items():
        outer |= {f"{fragment}.master": master, f"{fragment}.momentum": state.momentum}
        outer |= {
            f"{fragment}.buffer{number}": vector
            for number, vector in enumerate(state.vectors[1:], 1)
        }
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
    """The inverse of `flatten_own`."""
    restore_optimizer(optimizer, tensors["inner"], saved["inner"], key)
    restore_rng(tensors["rng"], saved["rng"])


def flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All ranks: `state_dict()` of any torch optimizer as (named tensors, which are no copies, JSON
    that refers to them).

    Sharded ones become whole on rank 0. Raises `TypeError` for what JSON cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    encoded = to_json(optimizer.state_dict(), "", tensors)
    return tensors, {
        "type": kind_of(optimizer),
        "shapes": _shapes(optimizer),
        "state_dict": encoded,
    }


def restore_optimizer(
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    key: str = "run.dir",
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
    """The same state, cut like the optimizer's parameters, and for the kernels that compute
    here."""
    if isinstance(optimizer, CombinedOptimizer):
        return {
            "parts": [_sharded(*both) for both in zip(optimizer.parts, state["parts"], strict=True)]
        }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        there |= {name: here[name] for name in KERNELS if name in here}
    for index, kept in state["state"].items():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = sharded_like(value, parameters[index])
    return state


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch (CPU; every accelerator once they are in use), Python
    and numpy."""
    tensors = {"torch": torch.get_rng_state()}  # (5056,) uint8
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words)  # (625,) int64
    legacy: dict[str, Any] = dict(numpy.random.get_state(legacy=False))
    twister = legacy.pop("state")
    # (624,), torch supports little of uint32
    tensors["numpy"] = torch.tensor(twister["key"].astype(numpy.int64))
    tensors |= random_states()
    return tensors, {
        "python": {"version": version, "gauss": gauss},
        "numpy": {**legacy, "position": twister["pos"]},
    }


def restore_rng(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`; ignores the state of devices that this machine lacks."""
    torch.set_rng_state(tensors["torch"])
    python, legacy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    twister = {"key": keys, "pos": legacy["position"]}
    numpy.random.set_state(
        {**{key: legacy[key] for key in ("bit_generator", "has_gauss", "gauss")}, "state": twister}
    )
    restore_random(tensors)


def _shapes(optimizer: Optimizer) -> list[list[int]]:
    return [
        list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]
    ]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Nested containers as JSON. Tensors, tuples and number keys, which JSON lacks, become small
    objects and lists."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors have the name {path}"
        tensors[path] = full_tensor(value)
        return {"tensor": path}
    if isinstance(value, dict):
        return {
            "dict": [
                [key, to_json(item, f"{path}.{key}".lstrip("."), tensors)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
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
