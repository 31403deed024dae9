"""The parts of a model that the swarm synchronises, and those that it leaves alone.

trained parameters      synchronised. They are read where they are now, so `model.to(...)` and
                        `p.data = ...` may move them at any time.
frozen parameters       must be equal on all peers: their digest is part of the manifest
buffers                 each peer's own, such as the running statistics of BatchNorm. A peer says
                        which ones its training changes.

Peers may wrap a model or its parts differently: the names are those of the plain model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco.errors import ConfigError
from diloco.outer.digest import fragment_digest, part_digest, part_ranges
from diloco.outer.fragments import gather_, partition
from diloco.swarm.node.node import OnEvent

AGAIN = "make such changes before attach, or attach the model again"
SHOWN = 3  # names or shapes in one line
SAMPLED = 64  # values of each parameter
WATCHED = 3  # parameters that are compared after each step
# attributes with the module that torch.compile, activation checkpoints and Lightning's Fabric wrap
INSIDE = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
TORCHRUN = "share the model with DistributedDataParallel (torchrun), or with FSDP2 (fully_shard)"


class TrainedParams(dict[str, Tensor]):
    """The trained parameters of a model, by name.

    Raises `ConfigError` for those that no outer step can carry.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name} has no shape yet; run one batch through the model before attach"
                )
            if not is_sharded(tensor) and tensor.layout is not torch.strided:
                raise ConfigError(f"{name} is {tensor.layout}; make it dense, or persistent=False")
        super().__init__(_trained(model))
        for name, parameter in self.items():
            _check(name, parameter)
        self._model = model
        self._shapes = {name: parameter.shape for name, parameter in self.items()}
        self._buffers = buffer_digests(model)  # at attach; empty after the first round
        self._before: dict[str, str | None] = {}  # digests of values before the first exchange
        ordered = sorted(self, key=lambda name: self[name].numel())
        self._watched = [self[name] for name in ordered[-WATCHED:]]
        self._begun: list[Tensor] = []  # samples of the watched ones before the last step
        self._left: list[Tensor] = []  # and after it
        self._is_usual = False  # True: the loop writes to parameters between steps in every round
        self._earlier = self._left, self._is_usual  # both as they were before the last step

    @property
    def numels(self) -> dict[str, int]:
        """Elements of each parameter."""
        return {name: parameter.numel() for name, parameter in self.items()}

    def check_start(self, name: str, groups: Sequence[dict[str, Any]], on_event: OnEvent) -> None:
        """Compare with the groups of the optimizer `name`; report parameters that are in none.

        Raises `ConfigError` if it has parameters of no attached model, and for non-finite values.
        """
        own = set(self._model.parameters())
        grouped = dict.fromkeys(parameter for group in groups for parameter in group["params"])
        strange = [list(parameter.shape) for parameter in grouped if parameter not in own]
        missing = [key for key, parameter in self.items() if parameter not in grouped]
        if self and len(missing) == len(self):
            raise ConfigError(
                f"optimizer={name} has none of the model's {len(self)} trained parameters; make it"
                " of model.parameters(), after the model is built, moved and wrapped"
            )
        if strange:
            raise ConfigError(
                f"optimizer={name} has {len(strange)} parameters that are in no attached model"
                f" ({_some(strange)}); make them part of the model, or attach both: attach([model,"
                " head], optimizer)"
            )
        for key, parameter in self.items():
            values = local_tensor(parameter.detach())
            if values.numel() and not all(math.isfinite(end) for end in values.aminmax()):
                raise ConfigError(
                    f"{key} has NaN or infinite values at attach; load or initialise it again"
                )
        why = "are in no group of the optimizer, so this peer does not train them"
        self._tell(on_event, missing, why)

    def _tell(self, on_event: OnEvent, names: Sequence[str], why: str) -> None:
        if names:
            fields = {"parameters": len(names), "of": len(self), "names": _some(names), "why": why}
            on_event("untrained", fields)

    def remember(self) -> None:
        """Note the values at the start of the first round."""
        whole = {name: tensor.detach() for name, tensor in self.items() if not is_sharded(tensor)}
        self._before = {name: values_digest({name: tensor}) for name, tensor in whole.items()}

    def step_done(self) -> None:
        """Note the values after a step and the exchange that followed it."""
        self._left = self._samples()

    def step_begins(self, is_first: bool) -> None:
        """Note the values before a step; the first of a round shows if the loop writes to them."""
        self._begun, self._earlier = self._samples(), (self._left, self._is_usual)
        if is_first:
            self._is_usual = self._has_changed()

    def are_written(self) -> bool:
        """Return True if the loop wrote to the model after the last step, such as an average."""
        if self._begun and all(map(torch.equal, self._begun, self._left)):
            # a step that moved nothing, such as Lightning's after it has loaded its average
            self._left, self._is_usual = self._earlier
        return not self._is_usual and self._has_changed()

    def _has_changed(self) -> bool:
        return not all(map(torch.equal, self._samples(), self._left))

    def _samples(self) -> list[Tensor]:
        return [_first(parameter).nan_to_num() for parameter in self._watched]

    def check(self, on_event: OnEvent) -> None:
        """Raise `ConfigError` if the model trains other parameters now.

        After the first round, report which buffers training has changed, and which parameters it
        has not.
        """
        self._tell_changes(on_event)
        for name, parameter in _trained(self._model):
            if name not in self:
                raise ConfigError(
                    f"{name} is trained since attach, but the swarm does not know it; {AGAIN}"
                )
            if parameter is not self[name]:
                raise ConfigError(
                    f"{name} is another parameter since attach; the swarm has the old one; {AGAIN}"
                )
            if parameter.shape != self._shapes[name]:
                now, then = list(parameter.shape), list(self._shapes[name])
                raise ConfigError(
                    f"{name} has shape {now}, and had {then} when it was attached; {AGAIN}"
                )
            _check(name, parameter)

    def _tell_changes(self, on_event: OnEvent) -> None:
        buffers, self._buffers = self._buffers, {}
        now = buffer_digests(self._model) if buffers else {}
        if changed := [name for name, digest in now.items() if digest != buffers.get(name)]:
            why = "training changes them, and each peer keeps its own; GroupNorm needs none"
            on_event("own_buffers", {"buffers": len(changed), "first": changed[0], "why": why})
        before, self._before = self._before, {}
        now = {name: values_digest({name: self[name].detach()}) for name in before}
        still = [name for name, digest in before.items() if digest and digest == now[name]]
        why = "did not move before the first exchange (no gradient, or too small a rate)"
        self._tell(on_event, still, why)


def _first(parameter: Tensor) -> Tensor:
    return local_tensor(parameter.detach()).reshape(-1)[:SAMPLED]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in named(model) if parameter.requires_grad)


def _some(things: Sequence[object]) -> str:
    return ", ".join(map(str, things[:SHOWN])) + (", ..." if len(things) > SHOWN else "")


def _check(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise ConfigError(
            f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and outer steps are of real"
            " numbers; keep its real and imaginary parts as two parameters (torch.view_as_real),"
            " or freeze it"
        )
    if parameter.is_meta:
        raise ConfigError(f"{name} has no values yet (device=meta); load the model before attach")
    if not has_row_layout(parameter):
        placements = list(parameter.placements)  # type: ignore[attr-defined]
        raise ConfigError(
            f"{name} is laid out as {placements}, and outer steps know rows along the first"
            " dimension only; shard the model with fully_shard, without tensor parallelism"
        )
    if type(parameter.data) is not Tensor and not is_sharded(parameter):
        raise ConfigError(
            f"{name} is a {type(parameter.data).__name__}, and outer steps need whole plain"
            " tensors; share the model among processes with DistributedDataParallel (torchrun), or"
            " freeze it"
        )


def frozen_digest(model: nn.Module) -> str | None:
    """Digest of the parameters that require no gradient, if any (about 2 s per 10^9 of them)."""
    return values_digest({name: p.detach() for name, p in named(model) if not p.requires_grad})


def buffer_digests(model: nn.Module) -> dict[str, str | None]:
    """Digests of the buffers of a model's state dict, by name."""
    kept = {unwrapped_name(model, name) for name in model.state_dict()}
    buffers = ((unwrapped_name(model, name), buffer) for name, buffer in model.named_buffers())
    return {name: values_digest({name: buffer}) for name, buffer in buffers if name in kept}


def values_digest(tensors: Mapping[str, Tensor]) -> str | None:
    """Digest (hex) of names, shapes and values (as fp32) of tensors of any dtype and layout.

    None without any values.
    """
    real = {key: torch.view_as_real(t) if t.is_complex() else t for key, t in tensors.items()}
    numels = {name: tensor.numel() for name, tensor in real.items()}
    if not sum(numels.values()):
        return None
    [whole] = partition(numels, 1)
    parts = []
    for start, stop in part_ranges(whole.numel):
        part = torch.empty(stop - start, dtype=torch.float32)
        gather_(part, whole, start, real)
        parts.append(part_digest(part))
    shapes = json.dumps({name: list(tensor.shape) for name, tensor in real.items()})
    return sha256(f"{shapes} {fragment_digest(parts)}".encode()).hexdigest()


# -- models ----------------------------------------------------------------------------------------


def unwrap_model(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return the model inside its wrappers; of several, a ModuleList of them.

    Raises `ConfigError` for FSDP1 and DeepSpeed.
    """
    if isinstance(model, list | tuple):
        several = [unwrap_model(part) for part in model]
        return several[0] if len(several) == 1 else nn.ModuleList(several)
    while True:
        name = type(model).__name__
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={name} is no torch.nn.Module; attach one, or several in a list"
            )
        if "deepspeed" in type(model).__module__:
            raise ConfigError(f"model={name}: DeepSpeed keeps the parameters to itself; {TORCHRUN}")
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
            raise ConfigError(f"model={name}: FSDP1 makes flat parameters of it; {TORCHRUN}")
        inside = _inside(model)
        # PEFT keeps parameters of adapters outside of these
        if inside is None or inside in ("base_model", "model"):
            return model
        model = getattr(model, inside)


def _inside(module: Any) -> str | None:
    """Name of the submodule that a module wraps; None if it is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    library = type(module).__module__
    if library.startswith("peft."):
        names: tuple[str, ...] = () if ".layer" in library else ("base_model", "model")
    else:
        names = INSIDE
    return next((name for name in names if name in getattr(module, "_modules", ())), None)


def unwrapped_name(model: nn.Module, name: str) -> str:
    """Return the name that a parameter or buffer has in the model without wrappers."""
    at: Any = model
    parts = []
    for part in name.split("."):
        if part != _inside(at):
            parts.append(part)
        at = getattr(at, part, None)
    return ".".join(parts)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model, by names that do not depend on wrappers."""
    return ((unwrapped_name(model, name), tensor) for name, tensor in model.named_parameters())


def class_name(model: nn.Module) -> str:
    """Name the class of the plain model, or of each of several, without FSDP2's subclass."""
    if isinstance(model, nn.ModuleList):
        return " + ".join(map(class_name, model))
    while (inside := _inside(model)) is not None:
        model = getattr(model, inside)
    kinds = type(model).__mro__
    return next(
        kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed")
    )


# -- rows of a sharded parameter -------------------------------------------------------------------


def has_row_layout(tensor: Tensor) -> bool:
    """Return True if this process has all rows or one range of them, as outer steps require."""
    placements = getattr(tensor, "placements", ())
    cuts = [(type(p).__name__, getattr(p, "dim", 0)) for p in placements if not p.is_replicate()]
    return cuts in ([], [("Shard", 0)])


def row_range(tensor: Tensor) -> tuple[int, int]:
    """Range [start, stop) of the flattened tensor in this process, if `has_row_layout`."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        # FSDP2 cuts as torch.chunk does: the last processes may have fewer rows, or none
        if placement.is_shard():
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            rows, size, rank = tensor.shape[0], mesh.size(dim), mesh.get_local_rank(dim)
            each, width = -(-rows // size), tensor.numel() // max(rows, 1)
            return min(rank * each, rows) * width, min((rank + 1) * each, rows) * width
    return 0, tensor.numel()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, without a copy: writes change the tensor."""
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor. (Importing the class for `isinstance` takes a second.)"""
    return hasattr(tensor, "placements")


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """All ranks: gather a sharded tensor on rank 0's CPU; the result is empty on other ranks.

    Any other tensor is returned as it is.
    """
    sharded: Any = tensor
    if not is_sharded(tensor):
        return tensor
    full: Tensor = sharded.full_tensor()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)


@torch.no_grad()
def sharded_like(values: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor sharded like `tensor`, with this process's rows of the whole `values`."""
    if not is_sharded(tensor) or values.shape != tensor.shape:
        return values
    from torch.distributed.tensor import DTensor

    begin, end = row_range(tensor)
    own = local_tensor(tensor)
    rows = values.reshape(-1)[begin:end].view(own.shape).to(own.device, copy=True)
    like: Any = tensor
    layout = {"device_mesh": like.device_mesh, "placements": like.placements, "run_check": False}
    return DTensor.from_local(rows, **layout, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def load_rows_(tensor: Tensor, values: Tensor) -> None:
    """Copy this process's rows of the whole `values` into a tensor, which may be sharded."""
    begin, end = row_range(tensor)
    own = local_tensor(tensor)
    own.copy_(values.reshape(-1)[begin:end].view(own.shape))


@contextmanager
def restored_after(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the parameters after the block; needs a copy of this process's part of them."""
    before = {name: local_tensor(p.detach()).clone() for name, p in parameters.items()}
    try:
        yield
    finally:
        for name, values in before.items():
            local_tensor(parameters[name].detach()).copy_(values)
