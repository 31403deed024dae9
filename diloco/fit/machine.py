"""What training a model takes, and what this machine has: device, precision, threads, memory, seconds per inner step.

Memory is computed before anything is allocated. Per parameter, the device needs 16 bytes (fp32 weights, gradients and
AdamW's two moments); main memory needs 4 for the anchor, and 16 more in fragments held here (master, momentum, sum,
update records). There `outer.flatten` needs 4 more, a quorum 4 more for the anchor from which this peer trains, and a
windowed optimizer 4 more. A fragment that is backed up needs 4 for the momentum, and 4 for the window.
Each sequence adds the activations that autograd keeps; a forward pass over tensors without values adds them up.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from diloco import model as models
from diloco.config import Config, ModelConfig, OuterConfig
from diloco.errors import ConfigError
from diloco.train import devices
from diloco.train.loop import autocast

__all__ = ["GIB", "Machine", "fit_micro_batch", "inspect_machine", "memory_need", "parameters_of", "step_seconds"]

TRAINED_BYTES = 16  # per parameter: weights, gradients, two moments
ANCHOR_BYTES = 4
VECTOR_BYTES = 4
TOKEN_BYTES = 8  # of a batch, which lies in main memory whole
LIBRARIES_BYTES = 600e6  # torch, transformers and hivemind, with their scratch memory
ACTIVATION_SLACK = 1.5  # for gradients of activations and for the allocator's fragmentation
WARMUP_STEPS, TIMED_STEPS = 2, 5
GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """This machine: the device, and the free bytes on it and in main memory (equal if the device is the CPU)."""

    device: torch.device
    name: str
    cores: int
    threads: int
    device_bytes: float
    main_bytes: float
    bf16: bool

    @property
    def shared(self) -> bool:
        """Whether the device uses main memory."""
        return self.device.type in ("cpu", "mps")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that training a model needs: on the device without activations, in main memory, and per sequence."""

    parameters: int
    device_bytes: float
    main_bytes: float
    sequence_bytes: float


def inspect_machine(device: str, threads: int | None = None) -> Machine:
    """This machine with its present load; `device` is the value of train.device. Raises `ConfigError` if this machine
    has no such device.
    """
    chosen = devices.claim(device)
    cores = _cores()
    main = _free_memory()
    if chosen.type != "cpu":
        free = devices.free_bytes(chosen)
        return Machine(chosen, devices.name_of(chosen), cores, threads or cores, free, main, devices.has_bf16(chosen))
    idle = max(1, cores // 2, round(cores - os.getloadavg()[0]))
    return Machine(chosen, "CPU", cores, threads or min(cores, idle), main, main, False)


def _cores() -> int:
    """Cores that the affinity of this process and the quota of its container allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period or 100_000)))


def _free_memory() -> float:
    """Bytes of main memory that the kernel has left and that the limit of this container allows."""
    lines = (_read("/proc/meminfo") or "").splitlines()
    free = next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), float("inf"))
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit.isdigit() and used.isdigit():
        lines = (_read("/sys/fs/cgroup/memory.stat") or "").splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file")), 0)
        free = min(free, int(limit) - int(used) + cache)  # the kernel drops caches before it refuses memory
    return free


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def memory_need(config: Config, machine: Machine) -> MemoryNeed:
    """Memory for training this configuration. Activations are counted exactly only if a rough bound takes half of it.
    Raises `ConfigError` as `diloco.model.build` does.
    """
    parameters = parameters_of(config.model)
    outer_bytes = VECTOR_BYTES * _outer_vectors(config.outer) / config.outer.fragments  # one held, one backed up
    main = LIBRARIES_BYTES + parameters * (ANCHOR_BYTES + outer_bytes)
    main += TOKEN_BYTES * config.inner.batch_size * config.data.sequence_length
    need = MemoryNeed(parameters, parameters * TRAINED_BYTES, main, _rough_bytes(config))
    roomy = need.device_bytes + need.main_bytes + config.inner.batch_size * need.sequence_bytes
    if roomy < min(machine.device_bytes, machine.main_bytes) / 2:
        return need
    return replace(need, sequence_bytes=sequence_bytes(config))


def _outer_vectors(outer: OuterConfig) -> int:
    """Vectors of a fragment's length for one fragment that is held and one that is backed up."""
    held = 4 + (outer.flatten > 0) + (not outer.barrier) + outer.windowed
    return held + 1 + outer.windowed


def _rough_bytes(config: Config) -> float:
    """An upper estimate of a sequence's activations: 40 vectors per layer and token, and the logits with gradients."""
    shape = models.config_of(config.model).get_text_config()
    layers, width = getattr(shape, "num_hidden_layers", 0), getattr(shape, "hidden_size", 0)
    return float(config.data.sequence_length * (160 * layers * width + 24 * shape.vocab_size) or math.inf)


def sequence_bytes(config: Config) -> float:
    """Bytes of activations that autograd keeps for the backward pass of one sequence.

    Counted in a forward pass over tensors without values; estimated if the model cannot run without values.
    """
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    try:
        with FakeTensorMode():
            model = _without_values(config.model, "cpu")
            tokens = torch.zeros(1, config.data.sequence_length, dtype=torch.int64)  # (1, T)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                models.loss(model, tokens)
    except Exception as error:  # layers that branch on values raise various types
        logger.debug("the activations of %s are estimated: %r", config.model.name, error)
        return _rough_bytes(config)
    # Views share a storage, and a transposed weight is a view of a parameter.
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    return ACTIVATION_SLACK * sum(storages.values())


def fit_micro_batch(need: MemoryNeed, machine: Machine, batch_size: int) -> int:
    """The number of sequences to compute at a time: the batch in the fewest equal parts that fit the memory. Raises
    `ConfigError` if not even one sequence fits; the text says how much memory is missing.
    """
    rooms = [(machine.device_bytes, need.device_bytes, str(machine.device))]
    if machine.shared:
        rooms = [(machine.main_bytes, need.device_bytes + need.main_bytes, "main memory")]
    elif need.main_bytes > machine.main_bytes:
        raise _too_small(need, need.main_bytes, machine.main_bytes, "main memory")
    [(free, static, where)] = rooms
    if static + need.sequence_bytes > free:
        raise _too_small(need, static + need.sequence_bytes, free, where)
    most = int((free - static) / max(need.sequence_bytes, 1.0))
    parts = -(-batch_size // max(1, min(batch_size, most)))
    return -(-batch_size // parts)


def _too_small(need: MemoryNeed, wanted: float, free: float, where: str) -> ConfigError:
    return ConfigError(
        f"this machine is too small for the run's model of {need.parameters / 1e6:.4g}M parameters: it needs "
        f"{wanted / GIB:.1f} GiB of {where}, and {free / GIB:.1f} GiB are free, {(wanted - free) / GIB:.1f} GiB too "
        "little; end other programs, or join from a larger machine"
    )


def parameters_of(settings: ModelConfig) -> int:
    """The number of parameters; tied ones count once. Raises `ConfigError` as `diloco.model.build` does."""
    return models.num_parameters(_without_values(settings, "meta"))


def _without_values(settings: ModelConfig, device: str) -> nn.Module:
    """The model without values: on PyTorch's `meta` device, or on any device under `FakeTensorMode`."""
    with torch.device(device):
        return models.outline(settings)


def step_seconds(
    config: Config, micro_batch: int | None = None, warmup: int = WARMUP_STEPS, timed: int = TIMED_STEPS
) -> float:
    """Median seconds of an inner step of this configuration on this machine, on random tokens.

    With a `micro_batch` only that part of a batch is measured, and a step counts as so many parts. Takes the memory of
    training: weights, gradients, AdamW's two moments and the activations of what is measured.
    """
    device = devices.claim(config.train.device)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    model = models.build(config.model, config.run.seed, sequence_length=config.data.sequence_length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    vocabulary = 256 if config.data.tokenizer == "bytes" else model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(config.run.seed)
    batch_size = config.inner.batch_size
    measured = min(batch_size, micro_batch or batch_size)
    shape = (measured, config.data.sequence_length)
    seconds = []
    for _ in range(warmup + timed):
        tokens = torch.randint(vocabulary, shape, generator=generator).to(device)  # (B, T)
        began_at = time.perf_counter()
        with autocast(config, device):
            loss = models.loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # waits for the device
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds[warmup:]) * math.ceil(batch_size / measured)
