"""Converts the state of optimizers and random generators to tensors plus JSON: no checkpoint needs pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from diloco.errors import CheckpointError

__all__ = ["flatten_optimizer", "restore_optimizer", "restore_rng", "rng_state"]


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`state_dict()` of any torch optimizer as (named tensors, JSON that refers to them).

    The tensors are the optimizer's own, not copies: save them before the next step. Raises `TypeError` if the state
    holds anything else than tensors, containers, numbers, strings and None.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(optimizer.state_dict(), "", tensors)
    return tensors, {"type": type(optimizer).__name__, "shapes": _shapes(optimizer), "state_dict": encoded}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> None:
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
    optimizer.load_state_dict(_decode(saved["state_dict"], tensors))


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch (CPU; every CUDA device once CUDA is in use), Python and numpy."""
    tensors = {"torch": torch.get_rng_state()}  # (5056,) uint8
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words)  # (625,) int64
    legacy: dict[str, Any] = dict(numpy.random.get_state(legacy=False))
    twister = legacy.pop("state")
    tensors["numpy"] = torch.tensor(twister["key"].astype(numpy.int64))  # (624,), torch supports little of uint32
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    return tensors, {"python": {"version": version, "gauss": gauss}, "numpy": {**legacy, "position": twister["pos"]}}


def restore_rng(tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`; ignores the state of CUDA devices that this machine lacks."""
    torch.set_rng_state(tensors["torch"])
    python, legacy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(tensors["python"].tolist()), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    twister = {"key": keys, "pos": legacy["position"]}
    numpy.random.set_state({**{key: legacy[key] for key in ("bit_generator", "has_gauss", "gauss")}, "state": twister})
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Nested containers as JSON. Tensors, tuples and number keys, which JSON lacks, become small objects and lists."""
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors have the name {path}"
        tensors[path] = value
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
