"""What of a model the swarm keeps in step, and what it leaves alone.

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

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco.attach.sharded import has_row_layout, is_sharded, local_tensor
from diloco.attach.unwrap import kind_of, named, unwrapped_name
from diloco.errors import ConfigError
from diloco.outer.digest import fragment_digest, part_digest, part_ranges
from diloco.outer.fragments import gather_, partition
from diloco.swarm.node.node import OnEvent

AGAIN = "make such changes before attach, or attach the model again"
SHOWN = 3  # names or shapes in one line
SAMPLED = 64  # values of each parameter


class TrainedParams(dict[str, Tensor]):
    """The trained parameters of a model, by name.

    Raises `ConfigError` for those that no outer step can carry.
    """

    def __init__(self, model: nn.Module) -> None:
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(one):
                raise ConfigError(
                    f"{name} has no shape yet; run one batch through the model before attach"
                )
        super().__init__(_trained(model))
        for name, parameter in self.items():
            _check(name, parameter)
        self._model = model
        self._shapes = {name: parameter.shape for name, parameter in self.items()}
        self._buffers = buffer_digests(model)  # until the first round is over
        self._before: dict[str, str | None] = {}  # digests of values before the first exchange
        # a sample of before and after the last exchange
        self._moved: tuple[Tensor, Tensor] | None = None
        self._is_kept = False

    @property
    def numels(self) -> dict[str, int]:
        """Elements of each parameter."""
        return {name: parameter.numel() for name, parameter in self.items()}

    def check_start(self, optimizer: torch.optim.Optimizer, on_event: OnEvent) -> None:
        """`ConfigError` for an optimizer of other parameters, and for values that are not finite.

        Says which parameters the optimizer leaves alone.
        """
        name, own = kind_of(optimizer), set(self._model.parameters())
        grouped = dict.fromkeys(one for group in optimizer.param_groups for one in group["params"])
        strange = [list(one.shape) for one in grouped if one not in own]
        missing = [key for key, one in self.items() if one not in grouped]
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
        for key, one in self.items():
            values = local_tensor(one.detach())
            if values.numel() and not all(math.isfinite(end) for end in values.aminmax()):
                raise ConfigError(
                    f"{key} has NaN or infinite values at attach; load or initialise it again"
                )
        why = "are in no group of the optimizer, so this peer does not train them"
        self._tell(on_event, missing, why)

    def _tell(self, on_event: OnEvent, names: Sequence[str], why: str) -> None:
        if names:
            told = {"parameters": len(names), "of": len(self), "names": _some(names), "why": why}
            on_event("untrained", told)

    def remember(self) -> None:
        """These values are where the first round begins."""
        whole = {name: one.detach() for name, one in self.items() if not is_sharded(one)}
        self._before = {name: values_digest({name: one}) for name, one in whole.items()}

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """An exchange moves the parameters inside; once, it is checked that training goes on from
        there."""
        before = None if self._is_kept else self._sample()
        yield
        self._moved = None if before is None else (before, self._sample())

    def _sample(self) -> Tensor:
        """A copy of a few values of each parameter."""
        local = (local_tensor(one.detach()) for one in self.values())
        return torch.cat([one.reshape(-1)[:SAMPLED].float().cpu() for one in local])

    def check_kept(self) -> None:
        """`ConfigError` when they went back most of the way that the last exchange moved them."""
        if self._moved is None:
            return
        (before, given), self._moved = self._moved, None
        way = given - before
        if float((given - self._sample()) @ way) > 0.5 * float(way @ way):
            raise ConfigError(
                "model: between two steps, something went back to the parameters of before the"
                " exchange; write no copy or average into the model while it is attached"
            )
        self._is_kept = bool(way.any())

    def check(self, on_event: OnEvent) -> None:
        """`ConfigError` when the model trains other parameters now.

        After the first round it says which buffers training changes, and which parameters it does
        not.
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
    """Of the buffers of a model's state dict."""
    kept = {unwrapped_name(model, name) for name in model.state_dict()}
    buffers = ((unwrapped_name(model, name), one) for name, one in model.named_buffers())
    return {name: values_digest({name: one}) for name, one in buffers if name in kept}


def values_digest(tensors: Mapping[str, Tensor]) -> str | None:
    """Digest (hex) of names, shapes and values (as fp32) of tensors of any dtype and layout.

    None without any values.
    """
    real = {key: torch.view_as_real(t) if t.is_complex() else t for key, t in tensors.items()}
    numels = {name: one.numel() for name, one in real.items()}
    if not sum(numels.values()):
        return None
    [whole] = partition(numels, 1)
    parts = []
    for start, stop in part_ranges(whole.numel):
        part = torch.empty(stop - start, dtype=torch.float32)
        gather_(part, whole, start, real)
        parts.append(part_digest(part))
    shapes = json.dumps({name: list(one.shape) for name, one in real.items()})
    return sha256(f"{shapes} {fragment_digest(parts)}".encode()).hexdigest()
