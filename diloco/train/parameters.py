"""What of a model the swarm keeps in step, and what it leaves alone.

trained parameters      synchronised. They are read where they are now, so `model.to(...)` and `p.data = ...` may
                        move them at any time.
frozen parameters       must be equal on all peers: their digest is part of the manifest
buffers                 each peer's own, such as the running statistics of BatchNorm. A peer says which ones its
                        training changes.

Names do not depend on what libraries wrap around a model or its parts, so peers may wrap it differently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco.errors import ConfigError
from diloco.outer.digest import fragment_digest, part_digest, part_ranges
from diloco.outer.fragments import gather_, partition
from diloco.swarm.node.node import OnEvent
from diloco.train.inner import kind_of
from diloco.train.rows import is_rows, is_sharded, own_rows
from diloco.train.wrapped import named, plain_name

__all__ = ["OwnBuffers", "Trained", "check_finite", "frozen_digest", "values_digest"]

AGAIN = "make such changes before attach, or attach the model again"
SHOWN = 3  # names or shapes in one line


class Trained(dict[str, Tensor]):
    """The parameters of a model that require a gradient, by name; the outer step moves these objects.

    Raises `ConfigError` for parameters that no outer step can carry.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(one):
                raise ConfigError(f"{name} has no shape yet; run one batch through the model before attach")
        super().__init__(_trained(model))
        for name, parameter in self.items():
            _check(name, parameter)
        self._model = model
        self._shapes = {name: parameter.shape for name, parameter in self.items()}
        self._buffers = OwnBuffers(model)
        self._before: dict[str, str | None] = {}  # digests of values before the first exchange

    @property
    def numels(self) -> dict[str, int]:
        """Elements of each parameter."""
        return {name: parameter.numel() for name, parameter in self.items()}

    def check_start(self, optimizer: torch.optim.Optimizer, on_event: OnEvent) -> None:
        """`ConfigError` for an optimizer of other parameters than these, and for values that are not finite.

        The event `in_no_group` names parameters that the optimizer leaves alone.
        """
        name, grouped = kind_of(optimizer), [one for group in optimizer.param_groups for one in group["params"]]
        own, ids = {id(one) for one in self._model.parameters()}, {id(one) for one in grouped}
        strange = [list(one.shape) for one in grouped if id(one) not in own]
        missing = [key for key, one in self.items() if id(one) not in ids]
        if self and len(missing) == len(self):
            raise ConfigError(
                f"optimizer={name} has none of the model's {len(self)} trained parameters; make it of "
                "model.parameters(), after the model is built, moved and wrapped"
            )
        if strange:
            raise ConfigError(
                f"optimizer={name} has {len(strange)} parameters that are in no attached model "
                f"({_some(strange)}), so peers would not share them; attach them, too: attach([model, head], "
                "optimizer), or make them part of the model"
            )
        for key, one in self.items():
            check_finite(key, own_rows(one.detach()))
        if missing:
            on_event("in_no_group", {"parameters": len(missing), "of": len(self), "names": _some(missing)})

    def remember(self) -> None:
        """These values are where the first round begins; the event `unmoved` is about them."""
        self._before = {name: values_digest({name: one.detach()}) for name, one in self.items() if not is_sharded(one)}

    def check(self, on_event: OnEvent) -> None:
        """`ConfigError` when the model trains other parameters now than when it was attached.

        After the first round the event `own_buffers` says that training changes buffers, and `unmoved` that it leaves
        parameters exactly as they were.
        """
        if changed := self._buffers.changed():
            on_event("own_buffers", changed)
        before, self._before = self._before, {}
        still = [
            name for name, digest in before.items() if digest and digest == values_digest({name: self[name].detach()})
        ]
        if still:
            on_event("unmoved", {"parameters": len(still), "of": len(self), "names": _some(still)})
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
    return ((name, parameter) for name, parameter in named(model) if parameter.requires_grad)


def _some(things: Sequence[object]) -> str:
    return ", ".join(map(str, things[:SHOWN])) + (", ..." if len(things) > SHOWN else "")


def check_finite(name: str, values: Tensor) -> None:
    """`ConfigError` with the name of a tensor of which some value is not finite."""
    ends = values.aminmax() if values.numel() else ()
    if not all(math.isfinite(end) for end in ends):
        raise ConfigError(
            f"{name} has values that are not finite before anything is trained; load or initialise the model again"
        )


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
    return values_digest({name: p.detach() for name, p in named(model) if not p.requires_grad})


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
        kept = {plain_name(self._model, name) for name in self._model.state_dict()}
        named = ((plain_name(self._model, name), one) for name, one in self._model.named_buffers())
        return {name: values_digest({name: one}) for name, one in named if name in kept}


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
        part = torch.empty(stop - start, dtype=torch.float32)
        gather_(part, whole, start, stop, real)
        parts.append(part_digest(part))
    shapes = json.dumps({name: list(one.shape) for name, one in real.items()})
    return sha256(f"{shapes} {fragment_digest(parts)}".encode()).hexdigest()
