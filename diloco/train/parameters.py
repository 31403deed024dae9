"""What of a model the swarm keeps in step, and what it leaves alone.

trained parameters      synchronised. They are read where they are now, so `model.to(...)` and `p.data = ...` may
                        move them at any time.
frozen parameters       must be equal on all peers: their digest is part of the manifest
buffers                 each peer's own, such as the running statistics of BatchNorm. A peer says which ones its
                        training changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.outer.digest import fragment_digest, part_digest, part_ranges
from diloco.outer.fragments import gather_, partition
from diloco.swarm.node.node import OnEvent
from diloco.train.rows import is_rows, is_sharded

__all__ = ["OwnBuffers", "Trained", "frozen_digest", "values_digest"]

AGAIN = "make such changes before attach, or attach the model again"


class Trained(dict[str, Tensor]):
    """The parameters of a model that require a gradient, by name; the outer step moves these objects.

    Raises `ConfigError` for parameters that no outer step can carry.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_trained(model))
        for name, parameter in self.items():
            _check(name, parameter)
        self._model = model
        self._shapes = {name: parameter.shape for name, parameter in self.items()}
        self._buffers = OwnBuffers(model)

    @property
    def numels(self) -> dict[str, int]:
        """Elements of each parameter."""
        return {name: parameter.numel() for name, parameter in self.items()}

    def check(self, on_event: OnEvent) -> None:
        """`ConfigError` when the model trains other parameters now than when it was attached.

        The event `own_buffers` says, after the first round, that training changes buffers.
        """
        if changed := self._buffers.changed():
            on_event("own_buffers", changed)
        for name, parameter in _trained(self._model):
            if name not in self:
                raise ConfigError(f"{name} is trained since attach, but the swarm does not know it; {AGAIN}")
            if parameter is not self[name]:
                raise ConfigError(f"{name} is another parameter since attach, and the swarm has the old one; {AGAIN}")
            if parameter.shape != self._shapes[name]:
                now, then = list(parameter.shape), list(self._shapes[name])
                raise ConfigError(f"{name} has shape {now}, and had {then} when it was attached; {AGAIN}")
            _check(name, parameter)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _check(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise ConfigError(
            f"{name} is {_dtype(parameter)}, and outer steps are of real numbers; keep its real and imaginary parts as "
            "two parameters (torch.view_as_real), or freeze it"
        )
    if parameter.is_meta:
        raise ConfigError(f"{name} has no values yet (device=meta); load the model before attach")
    if not is_rows(parameter):
        raise ConfigError(
            f"{name} is laid out as {list(parameter.placements)}, and outer steps know rows along the first dimension "  # type: ignore[attr-defined]
            "only; shard the model with fully_shard, without tensor parallelism"
        )
    if type(parameter.data) is not Tensor and not is_sharded(parameter):
        raise ConfigError(
            f"{name} is a {type(parameter.data).__name__}, and outer steps need whole plain tensors; share the model "
            "among processes with DistributedDataParallel (torchrun), or freeze it"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def frozen_digest(model: nn.Module) -> str | None:
    """Digest of the parameters that require no gradient; None where there are none.

    It costs about 2 s per 10^9 of them. A base model that was rounded or quantised differently is another one.
    """
    return values_digest({name: p.detach() for name, p in model.named_parameters() if not p.requires_grad})


class OwnBuffers:
    """The buffers of a model's state dict, and whether training changes them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, str | None] | None = self._digests()

    def changed(self) -> dict[str, object] | None:
        """The fields of an event about the buffers that are not what they were, the first time; then None."""
        before, self._before = self._before, None
        if not before:
            return None
        changed = [name for name, digest in self._digests().items() if digest != before.get(name)]
        why = "training changes these buffers, and each peer keeps its own; GroupNorm or LayerNorm need none"
        return {"buffers": len(changed), "first": changed[0], "why": why} if changed else None

    def _digests(self) -> dict[str, str | None]:
        kept = self._model.state_dict().keys()
        return {name: values_digest({name: one}) for name, one in self._model.named_buffers() if name in kept}


def values_digest(tensors: Mapping[str, Tensor]) -> str | None:
    """Digest (hex) of names, shapes and values of tensors of any dtype, device and layout; None where there are none.

    Values count as fp32, so a tensor and its exact copy in a wider dtype have one digest.
    """
    real = {name: torch.view_as_real(one) if one.is_complex() else one for name, one in tensors.items()}
    numels = {name: one.numel() for name, one in real.items()}
    if not sum(numels.values()):
        return None
    [whole] = partition(numels, 1)
    parts = []
    for start, stop in part_ranges(whole.numel):
        part = torch.empty(stop - start)
        gather_(part, whole, start, stop, real)
        parts.append(part_digest(part))
    shapes = json.dumps({name: list(one.shape) for name, one in real.items()})
    return sha256(f"{shapes} {fragment_digest(parts)}".encode()).hexdigest()
