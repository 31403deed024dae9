"""Nested containers as JSON and named tensors, for the state of optimizers and modules."""

from __future__ import annotations

import base64
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from diloco.errors import CheckpointError


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert nested containers to JSON that marks tuples, sets, ...; tensors go to `tensors`."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, Tensor):
        assert path not in tensors, f"two tensors have the name {path}"
        tensors[path] = value
        # a file has rows in their order, and other strides give other last bits in a product
        turned = type(value) is Tensor and not value.is_contiguous() and 0 not in value.stride()
        return {"tensor": [path, list(value.stride())] if turned else path}
    if isinstance(value, dict):
        items = ((key, f"{path}.{key}".lstrip("."), item) for key, item in value.items())
        return {"dict": [[_key(key, at), to_json(item, at, tensors)] for key, at, item in items]}
    if isinstance(value, set | frozenset):
        return {"set": [_key(item, path) for item in value]}
    if isinstance(value, list | tuple | deque):
        parts = [to_json(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        if isinstance(value, deque):
            return {"deque": [value.maxlen, parts]}
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{path}: a checkpoint cannot hold {type(value).__name__}")


def _key(value: Any, path: str) -> Any:
    """Convert a hashable value to JSON."""
    tensors: dict[str, Tensor] = {}
    written = to_json(value, path, tensors)
    if tensors:
        raise CheckpointError(f"{path}: a checkpoint cannot hold a tensor as a key")
    return written


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `to_json`."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "tensor" if isinstance(content, str):
            return tensors[content]
        case "tensor":
            path, strides = content
            here = tensors[path]
            return torch.empty_strided(here.shape, strides, dtype=here.dtype).copy_(here)
        case "bytes":
            return base64.b64decode(content)
        case "tuple":
            return tuple(from_json(item, tensors) for item in content)
        case "set":
            return {from_json(item, tensors) for item in content}
        case "deque":
            longest, items = content
            return deque((from_json(item, tensors) for item in items), longest)
        case "dtype":
            return getattr(torch, content)
    return {from_json(key, tensors): from_json(item, tensors) for key, item in content}


def plain_json(value: Any, path: str) -> Any:
    """Convert a loop's values to JSON: numbers of numpy and torch, paths, Hydra's containers."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numpy.generic | numpy.ndarray | Tensor) and math.prod(value.shape) == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_json(item, f"{path}.{index}") for index, item in enumerate(value)]
    return to_json(value, path, {})
