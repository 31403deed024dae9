"""What this machine can do for a model: device, precision, threads, and how much of a batch its memory takes at a time.

Memory is counted before anything is allocated, in bytes per parameter: on the device 16 (fp32 weights, gradients and
AdamW's two moments); in main memory 4 for the anchors, and 12 for each fragment held (master, momentum, sum). What a
sequence adds are the activations that autograd keeps, which a forward pass over tensors without values adds up.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diloco import model as models
from diloco.config import Config
from diloco.errors import ConfigError
from diloco.fit.measure import parameters_of, without_values
from diloco.train.island import Island

__all__ = ["Machine", "Need", "fit", "free_memory", "look_at_machine", "need_of"]

TRAINED_BYTES = 16  # per parameter: weights, gradients, two moments
ANCHOR_BYTES = 4
HELD_BYTES = 12
LIBRARIES_BYTES = 600e6  # torch, transformers and hivemind themselves, with their scratch memory
ACTIVATION_SLACK = 1.5  # gradients of activations, and what the allocator loses to fragments
GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What was found: the device, and free bytes on it and in main memory (the same for the CPU)."""

    device: torch.device
    name: str
    cores: int
    threads: int
    device_bytes: float
    main_bytes: float
    bf16: bool

    @property
    def shared(self) -> bool:
        """Whether device and host share one memory."""
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Need:
    """What a model needs, in bytes: on the device without activations, in main memory, and per sequence."""

    parameters: int
    device_bytes: float
    main_bytes: float
    sequence_bytes: float


def look_at_machine(device: str, threads: int | None = None) -> Machine:
    """The machine as it is now; `device` as in train.device.

    Raises:
        ConfigError: train.device names a device that is not there.
    """
    chosen = Island.from_environment(device).device
    cores = _cores()
    main = free_memory()
    if chosen.type == "cuda":
        free, _ = torch.cuda.mem_get_info(chosen)
        name, bf16 = torch.cuda.get_device_name(chosen), torch.cuda.is_bf16_supported(including_emulation=False)
        return Machine(chosen, name, cores, threads or cores, float(free), main, bf16)
    busy = os.getloadavg()[0]
    idle = max(1, cores // 2, round(cores - busy))
    return Machine(chosen, "CPU", cores, threads or min(cores, idle), main, main, False)


def _cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period or 100_000)))


def free_memory() -> float:
    """Bytes of main memory that this process may still take, by the kernel and by the limit of its container."""
    lines = (_read("/proc/meminfo") or "").splitlines()
    free = next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), float("inf"))
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit.isdigit() and used.isdigit():
        lines = (_read("/sys/fs/cgroup/memory.stat") or "").splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file")), 0)
        free = min(free, int(limit) - int(used) + cache)  # the kernel drops caches first
    return free


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def need_of(config: Config, machine: Machine, held_fragments: int = 1) -> Need:
    """What training this configuration needs; activations are counted exactly only where they may matter.

    Raises:
        ConfigError: as for `diloco.model.build`.
    """
    parameters = parameters_of(config.model)
    held = min(1.0, held_fragments / config.outer.fragments)
    main = LIBRARIES_BYTES + parameters * (ANCHOR_BYTES + HELD_BYTES * held)
    need = Need(parameters, parameters * TRAINED_BYTES, main, _rough_bytes(config))
    roomy = need.device_bytes + need.main_bytes + config.inner.batch_size * need.sequence_bytes
    if roomy < min(machine.device_bytes, machine.main_bytes) / 2:
        return need
    return replace(need, sequence_bytes=sequence_bytes(config))


def _rough_bytes(config: Config) -> float:
    """Rather more than a sequence's activations: of each layer some 40 vectors, and the logits with their gradients."""
    if config.model.path is not None:
        return math.inf
    shape = models.config_of(config.model).get_text_config()
    layers, width = getattr(shape, "num_hidden_layers", 0), getattr(shape, "hidden_size", 0)
    return float(config.data.sequence_length * (160 * layers * width + 24 * shape.vocab_size) or math.inf)


def sequence_bytes(config: Config) -> float:
    """Bytes of activations that one sequence keeps until its gradients are there.

    Adds up what autograd keeps of a forward pass without values; for a model of which that cannot be had, estimates.
    """
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    try:
        with FakeTensorMode():
            model = without_values(config.model, "cpu")
            tokens = torch.zeros(1, config.data.sequence_length, dtype=torch.int64)  # (1, T)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                models.loss(model, tokens)
    except Exception as error:  # layers that branch on values raise whatever they like
        logger.debug("the activations of %s are estimated: %r", config.model.name, error)
        return _rough_bytes(config)
    # Views share a storage, and a transposed weight is a view of a parameter.
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage()._cdata, None)
    return ACTIVATION_SLACK * sum(storages.values())


def fit(need: Need, machine: Machine, batch_size: int) -> int:
    """Sequences that the machine computes at a time: the batch in the fewest parts of equal size that fit.

    Raises:
        ConfigError: not even one does; says by how much memory it is too small.
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


def _too_small(need: Need, wanted: float, free: float, where: str) -> ConfigError:
    return ConfigError(
        f"this machine is too small for the run's model of {need.parameters / 1e6:.4g}M parameters: it needs "
        f"{wanted / GIB:.1f} GiB of {where}, and {free / GIB:.1f} GiB are free, {(wanted - free) / GIB:.1f} GiB too "
        "little; end other programs, or join from a larger machine"
    )
