"""A loop with a learning rate schedule, or with a wrapper of torch, has the same rates and ends at
the same parameters as a swarm of one and without a swarm; and so does one that is stopped at an
exchange and goes on from its checkpoint.

All are equal bit by bit; the loop without a swarm rounds as an exchange does, `a - (a - p)`. The
session that goes on leaves the steps of its schedule to `attach`; the others take them themselves.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import SWALR
from torch.utils.checkpoint import checkpoint
from transformers import Adafactor
from transformers.optimization import (
    TYPE_TO_SCHEDULER_FUNCTION,
    AdafactorSchedule,
    get_scheduler,
)

from diloco.errors import ConfigError
from scripts.families import WORKS, Member, refused, works_with
from scripts.families._sides import (
    STEPS,
    Ended,
    Side,
    batch,
    compare,
    loss_of,
    make_group,
    network,
    play_alone,
    play_both,
    values,
)

SOURCES = ("torch", "transformers")
RATE = 0.02
COMPILER = "aot_eager"  # all of torch.compile but the making of kernels
Optimizer = torch.optim.Optimizer
# What a schedule of torch is told beside its optimizer.
TOLD: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": [lambda step: 0.9**step, lambda step: 1 / (1 + step)]},
    "MultiplicativeLR": {"lr_lambda": [lambda step: 0.9, lambda step: 0.95]},
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 9], "gamma": 0.3},
    "ConstantLR": {"total_iters": 6},
    "LinearLR": {"total_iters": 10},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 6},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.02, "step_size_up": 3},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": 0.03, "total_steps": STEPS + 1},
    "PolynomialLR": {"total_iters": 12, "power": 2.0},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 0.1},
}
METRIC = {"ReduceLROnPlateau", "reduce_lr_on_plateau", "greedy"}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 0.001},
    "cosine_warmup_with_min_lr": {"min_lr": 0.001},
    "warmup_stable_decay": {"num_decay_steps": 5},
}


def members() -> Iterator[Member]:
    torchs = [name for name in of_torch.__all__ if name != "LRScheduler"]
    for kind, names in {
        "torch": [*torchs, "SWALR"],
        "transformers": [*(one.value for one in TYPE_TO_SCHEDULER_FUNCTION), "AdafactorSchedule"],
        "wrapper": list(WRAPPERS),
    }.items():
        for name in names:
            yield Member(f"{kind}: {name}", kind)


def schedule_of(kind: str, name: str, optimizer: Any) -> Any:
    """One of each class and function, of which all rates differ."""
    if kind == "transformers":
        if name == "AdafactorSchedule":
            return AdafactorSchedule(optimizer)
        more = OF_TRANSFORMERS.get(name, {})
        return get_scheduler(name, optimizer, 3, STEPS, scheduler_specific_kwargs=more)
    if name in ("SequentialLR", "ChainedScheduler"):
        first = of_torch.LinearLR(optimizer, 0.1, 1.0, 4)
        parts: list[Any] = [first, of_torch.ExponentialLR(optimizer, 0.9)]
        if name == "ChainedScheduler":
            return of_torch.ChainedScheduler(parts, optimizer)
        return of_torch.SequentialLR(optimizer, parts, milestones=[4])
    if name == "SWALR":
        return SWALR(optimizer, swa_lr=0.001, anneal_epochs=5)
    return getattr(of_torch, name)(optimizer, **TOLD[name])


# -- wrappers --------------------------------------------------------------------------------------

Step = Callable[[Any, Any, Tensor], Tensor]  # of a model and its optimizer, with a batch


def step(model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
    loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _autocast(model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Scaled:
    """A step with a GradScaler; the gradients of every `skipped`-th one are infinite."""

    def __init__(self, skipped: int = 0) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self._skipped, self._count = skipped, 0

    def __call__(self, model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
        self._count += 1
        loss = loss_of(model, inputs)
        self._scaler.scale(loss).backward()
        if self._skipped and self._count % self._skipped == 0:
            next(model.parameters()).grad.fill_(torch.inf)
        self._scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()
        return loss.detach()


def _checkpointed(model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
    outputs: Any = checkpoint(model, inputs, use_reentrant=False)
    loss = (outputs - inputs.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _adamw(model: nn.Module, **more: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=RATE, **more)


def _shard(model: Any, in_bf16: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))
    dtypes: Any = {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**dtypes if in_bf16 else {})
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def _wrapped(name: str) -> tuple[Any, Any, Step]:
    """A model, its optimizer, and how a step is taken."""
    model: Any = network()
    if name in ("weight_norm", "spectral_norm"):
        getattr(nn.utils.parametrizations, name)(model[-1])
    if name.startswith("torch.compile"):
        torch._dynamo.reset()  # each side compiles its own, however often there was one before
        if name.endswith("a step"):
            return model, _adamw(model), torch.compile(step, backend=COMPILER)
        return torch.compile(model, backend=COMPILER), _adamw(model), step
    if name == "Module.compile":
        model.compile(backend=COMPILER)
    if name == "checkpoint_wrapper":
        model = checkpoint_wrapper(model)
    if name == "DataParallel":
        model = nn.DataParallel(model)
    if name in ("DDP", "FSDP1", "ZeroRedundancyOptimizer") or name.startswith("FSDP2"):
        make_group()
    if name in ("DDP", "ZeroRedundancyOptimizer"):
        model = DistributedDataParallel(model)
    if name == "ZeroRedundancyOptimizer":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE), step
    if name == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if name.startswith("FSDP2"):
        _shard(model, "bf16" in name)
    more = {one: True for one in ("fused", "foreach", "capturable") if name == f"AdamW({one})"}
    return model, _adamw(model, **more), WRAPPERS[name]()


WRAPPERS: dict[str, Callable[[], Step]] = {
    "torch.compile": lambda: step,
    "torch.compile of a step": lambda: step,
    "Module.compile": lambda: step,
    "checkpoint": lambda: _checkpointed,
    "checkpoint_wrapper": lambda: step,
    "DDP": lambda: step,
    "DataParallel": lambda: step,
    "FSDP1": lambda: step,
    "FSDP2": lambda: step,
    "FSDP2 with bf16": lambda: step,
    "ZeroRedundancyOptimizer": lambda: step,
    "autocast": lambda: _autocast,
    "GradScaler": Scaled,
    "GradScaler that skips": partial(Scaled, 4),
    "AdamW(fused)": lambda: step,
    "AdamW(foreach)": lambda: step,
    "weight_norm": lambda: step,
    "spectral_norm": lambda: step,
}


# -- the oracles -----------------------------------------------------------------------------------


def _made(kind: str, name: str) -> tuple[Any, Any, Step, Any]:
    optimizer: Any
    if kind == "wrapper":
        model, optimizer, take = _wrapped(name)
        return model, optimizer, take, of_torch.CosineAnnealingLR(optimizer, STEPS)
    model = network()
    first, *others = model.parameters()
    groups: Any = [{"params": [first]}, {"params": others, "lr": RATE / 2}]
    if name == "AdafactorSchedule":
        optimizer = Adafactor(model.parameters())
    else:
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.8)
    return model, optimizer, step, schedule_of(kind, name, optimizer)


def _train(
    kind: str, name: str, side: Side, folder: str = "", end: int = STEPS, steps_it: bool = True
) -> Ended:
    """Train up to a step, with a folder from the checkpoint in it, if there is one."""
    model, optimizer, take, schedule = _made(kind, name)
    followed = [] if name in METRIC else [schedule]
    rates, losses, steps = list[list[float]](), list[float](), list[int]()
    # those that a GradScaler skips are none
    optimizer.register_step_post_hook(lambda *_: steps.append(0))
    own = {"checkpoints": folder} if folder else {}
    with side.attached(model, optimizer, *followed, **own) as swarm:
        begin = swarm.state.get("batches", 0) if folder else 0
        for number in range(begin, end):
            before = len(steps)
            losses.append(float(take(model, optimizer, batch(number))))
            if name != "AdafactorSchedule":  # whose rates are for display; Adafactor has its own
                rates.append([group["lr"] for group in optimizer.param_groups])
            if steps_it and len(steps) > before:
                schedule.step(*([losses[-1]] if name in METRIC else []))
        if folder:
            swarm.save(batches=end)
    return {"steps": len(steps), "rates": rates, "losses": losses, "model": values(model)}


def _check_resumed(kind: str, name: str) -> None:
    """In two sessions as in one; rates and losses are those of the second half."""
    half = STEPS // 2
    whole = play_alone(partial(_train, kind, name, folder="whole"))
    play_alone(partial(_train, kind, name, folder="stopped", end=half))
    rest = play_alone(partial(_train, kind, name, folder="stopped", steps_it=False))
    whole |= {key: whole[key][half:] for key in ("rates", "losses")}
    whole["steps"] -= half
    compare("after a restart: ", whole, rest)


def play(name: str) -> str:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kind, _, name = name.partition(": ")
    try:
        play_both(partial(_train, kind, name))
    except ConfigError as error:
        return refused(error)
    if name in METRIC:
        return works_with("schedulers=[], as it follows a metric")
    if "GradScaler" not in name:  # whose own state is not in our checkpoints
        _check_resumed(kind, name)
    return WORKS
