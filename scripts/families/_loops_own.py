"""Loops that their users write, in plain torch and around what libraries prepare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from scripts.families._sides import (
    EVERY,
    STEPS,
    Ended,
    Side,
    batch,
    loss_of,
    make_group,
    network,
    values,
)

Optimizer = torch.optim.Optimizer
RATE = 0.02


def schedule_of(optimizer: Optimizer, kind: type) -> Any:
    if kind is SWALR:
        return SWALR(optimizer, swa_lr=0.01, anneal_epochs=STEPS // 2)
    return CosineAnnealingLR(optimizer, T_max=STEPS)


class Torch:
    """Plain torch, and what the other libraries put in the place of its calls."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def prepare(self, model: nn.Module, optimizer: Optimizer, schedule: Any) -> tuple[Any, ...]:
        return model, optimizer, schedule

    def accumulating(self, model: Any, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_batches).backward()

    def clip(self, model: nn.Module, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def save(self, **parts: Any) -> None:
        torch.save({name: part.state_dict() for name, part in parts.items()}, "own.pt")

    def load(self, **parts: Any) -> None:
        saved = torch.load("own.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])


class Accelerated(Torch):
    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        self._own = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)

    def prepare(self, model: nn.Module, optimizer: Optimizer, schedule: Any) -> tuple[Any, ...]:
        prepared: tuple[Any, ...] = self._own.prepare(model, optimizer, schedule)
        return prepared

    def accumulating(self, model: Any, is_last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._own.accumulate(model)
        return context

    def backward(self, loss: Tensor) -> None:
        self._own.backward(loss)

    def clip(self, model: nn.Module, optimizer: Any) -> None:
        if self._own.sync_gradients:
            self._own.clip_grad_norm_(model.parameters(), 0.05)

    def save(self, **parts: Any) -> None:
        self._own.save_state("own")

    def load(self, **parts: Any) -> None:
        self._own.load_state("own")


class OfFabric(Torch):
    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        self._own = Fabric(accelerator="cpu", devices=1)

    def prepare(self, model: nn.Module, optimizer: Optimizer, schedule: Any) -> tuple[Any, ...]:
        return (*self._own.setup(model, optimizer), schedule)

    def accumulating(self, model: Any, is_last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._own.no_backward_sync(model, not is_last)
        return context

    def backward(self, loss: Tensor) -> None:
        self._own.backward(loss / self.micro_batches)

    def clip(self, model: nn.Module, optimizer: Any) -> None:
        self._own.clip_gradients(model, optimizer, max_norm=0.05)

    def save(self, **parts: Any) -> None:
        self._own.save("own.ckpt", parts)

    def load(self, **parts: Any) -> None:
        self._own.load("own.ckpt", parts)


class Sharded(Torch):
    """FSDP2, as torchtitan uses it, of one process."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(micro_batches)
        make_group()

    def prepare(self, model: nn.Module, optimizer: Optimizer, schedule: Any) -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (1,))
        for layer in (*model, model):  # type: ignore[misc]
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        again = torch.optim.AdamW(model.parameters(), lr=RATE)
        return model, again, schedule_of(again, type(schedule))

    def accumulating(self, model: Any, is_last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()


LIBRARIES = {
    "torch": Torch,
    "Accelerate": Accelerated,
    "Fabric": OfFabric,
    "FSDP2": Sharded,
}


def train(library: str, feature: str, side: Side) -> Ended:
    """Let a loop go to its end."""
    own = LIBRARIES[library](2 if feature == "gradient accumulation" else 1)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule: Any = schedule_of(optimizer, SWALR if feature == "SWA" else CosineAnnealingLR)
    model, optimizer, schedule = own.prepare(model, optimizer, schedule)
    averages, rates, losses = Averages(model, feature), list[float](), list[float]()
    with (
        side.attached(model, optimizer, schedule),
        _around(feature, model) as local,
    ):
        for number in range(STEPS * own.micro_batches):
            is_last = number % own.micro_batches == own.micro_batches - 1
            with own.accumulating(model, is_last):
                own.backward(loss_of(model, batch(number)))
                if feature == "clipping" and is_last:
                    own.clip(model, optimizer)
                if is_last or library == "Accelerate":
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if not is_last:
                continue
            local()
            averages.update()
            rates.append(optimizer.param_groups[0]["lr"])
            if (number + 1) % EVERY == 0:
                losses.append(averages.evaluate())
                if feature == "early stopping" and losses[-1] > 0.97 * min([9.0, *losses[:-1]]):
                    break
            if feature == "its own checkpoint" and len(rates) == STEPS // 2:
                own.save(model=model, optimizer=optimizer, schedule=schedule)
                own.load(model=model, optimizer=optimizer, schedule=schedule)
        averages.end()
    return {"rates": rates, "losses": losses, "steps": len(rates)} | averages.ended()


class Averages:
    """An average of the weights, if the feature is one."""

    def __init__(self, model: nn.Module, feature: str) -> None:
        self._model, self._feature = model, feature
        self._own: Any = None
        if feature == "SWA":
            self._own = AveragedModel(model)
        elif "EMA" in feature:
            self._own = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def update(self) -> None:
        if self._own is not None:
            self._own.update_parameters(self._model)

    def evaluate(self) -> float:
        """The loss of held-out data; in each evaluation the average may be in the model."""
        own = {name: one.detach().clone() for name, one in self._model.state_dict().items()}
        self._model.eval()
        if self._feature == "EMA in each evaluation":
            self._put(self._own.module.state_dict())
        with torch.no_grad():
            loss = float(loss_of(self._model, batch(-1)))
        self._put(own)
        self._model.train()
        return loss

    def end(self) -> None:
        """After the last step, while the model is attached."""
        if self._feature == "SWA":
            update_bn(map(batch, range(4)), self._own)
        if self._feature in ("SWA", "EMA at the end"):
            self._put(self._own.module.state_dict())

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for own, other in zip(self._model.state_dict().values(), weights.values(), strict=True):
            own.copy_(other)

    def ended(self) -> Ended:
        ended = {"model": values(self._model)}
        return ended if self._own is None else ended | {"average": values(self._own.module)}


@contextmanager
def _around(feature: str, model: Any) -> Iterator[Any]:
    if feature != "LocalSGD":
        yield lambda: None
        return
    with LocalSGD(Accelerator(cpu=True), model, local_sgd_steps=2) as local:
        yield local.step
