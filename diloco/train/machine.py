"""The memory that training needs, before anything is allocated, and seconds per inner step.

`memory_rows` is the table, `memory_need` its sum, `fit_micro_batch` what fits; where that was too
much, the loop halves it. Each sequence that is computed at a time adds activations, about 36
vectors per layer and token.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from diloco import model as models
from diloco.attach import devices
from diloco.attach.ranks import RankGroup
from diloco.config import Config, ModelConfig, OuterConfig
from diloco.core.settings import ProtocolSettings
from diloco.errors import ConfigError
from diloco.model.cross_entropy import CHUNK_BYTES, CPU_CHUNK_BYTES
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import CHUNK
from diloco.outer.optimizer import OUTER_OPTIMIZERS
from diloco.text import human_count
from diloco.train.gradients import autocast, base_form, check_base, to_device
from diloco.train.optimizer import moment_numel

GIB = 2**30
FP32 = 4
TOKEN_BYTES = 8  # of a batch, which lies in main memory whole
LIBRARIES_BYTES = 600e6  # torch, transformers and hivemind, with their scratch memory
# of a chunk's logits: themselves, their gradient and its copy in a narrower dtype
CHUNK_COPIES = 2.5
# fp32 vectors of the hidden size that a layer keeps of a token. In fp32: what autograd keeps of
# llama models of 5M to 1B parameters, and half of it again for gradients of activations and the
# allocator's fragmentation. Beside 16 bits an H100 took 14.6 at its peak (150M), 10.4 (400M), and
# 8.5 for a LoRA of the default targets (1B), as inputs of frozen layers are not kept.
ACTIVATION_VECTORS, MIXED_VECTORS, LORA_VECTORS = 36.0, 16.0, 10.0
NATIVE: dict[bool, devices.Precision] = {True: "bf16", False: "fp32"}  # with an accelerator
BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "nf4": models.NF4_BYTES}
INPUT_VECTORS = 1.5  # of a layer that is recomputed
# of fp32 and CHUNK elements: two that are read from an accelerator, and two that are written to it
STAGING_BUFFERS = 4
COPIED = ("anchors", "what the codec lost", "master and momentum as author")  # for a checkpoint
# updates that a peer keeps for others, if they are less than an anchor
RECORDS = ProtocolSettings.records
STREAM_BLOCKS = 2  # of fp32 and CHUNK elements, for each contribution and update that is under way
WARMUP_STEPS, TIMED_STEPS = 2, 5

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """A line of the table: bytes on the `device`, in `main` memory, or `spare`, without which
    training is slower. A row without `per_parameter` does not depend on the size of the model."""

    what: str
    where: str
    nbytes: float
    per_parameter: float | None


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that training needs, on each device without activations, and that it uses if free."""

    parameters: int
    device_bytes: float
    main_bytes: float
    sequence_bytes: float
    spare_bytes: float = 0.0


def memory_rows(
    config: Config,
    peers: int,
    num_ranks: int = 1,
    sharded: bool = False,
    accelerator: bool | None = None,
) -> list[Row]:
    """List the memory of a peer in a swarm of `peers`, by default here, without activations.

    Each of its `num_ranks` has all parameters, or rows of them if `sharded`. Raises `ConfigError`
    as `model.build`.
    """
    accelerator = bool(devices.count_devices()[1]) if accelerator is None else accelerator
    config = _resolved(config, NATIVE[accelerator])
    return list(_rows(config, peers, num_ranks, sharded, accelerator))


def _changed(config: Config, group: str, **settings: object) -> Config:
    changed = getattr(config, group).model_copy(update=settings)
    return config.model_copy(update={group: changed})


def _resolved(config: Config, native: devices.Precision) -> Config:
    is_auto = config.train.precision == "auto"
    return _changed(config, "train", precision=native) if is_auto else config


def _rows(
    config: Config, peers: int, num_ranks: int, sharded: bool, accelerator: bool
) -> Iterator[Row]:
    model, outer, data = _outline(config.model), config.outer, config.data
    numel = models.num_trained(model)
    frozen = models.num_parameters(model) - numel
    precision, shrunk = config.train.precision, 0
    moments = FP32 * moment_numel(model, config.inner) / max(numel, 1)
    part = 1 / num_ranks if sharded else 1.0

    def row(what: str, where: str, per_parameter: float) -> Row:
        return Row(what, where, per_parameter * numel, per_parameter)

    if frozen:
        shrunk = sum(layer.weight.numel() for _, _, layer in models.base_layers(model))
        nbytes = FP32 * frozen - (FP32 - BASE_BYTES[base_form(config, precision)]) * shrunk
        yield Row("weights that are frozen", "device", part * nbytes, None)
        # `build` maps the others from their files
        is_mapped = config.model.adapter == "lora" and (config.model.path or config.model.weights)
        loaded = FP32 * (frozen - (shrunk if is_mapped else 0)) - (0 if accelerator else nbytes)
        yield Row("the same, while they are loaded", "main", max(0.0, loaded), None)
    yield row("weights", "device", FP32 * part)
    yield row("gradients", "device", FP32 * part)
    yield row("inner optimizer", "device", moments * part)
    if sharded:
        gathered = 2 * FP32 * _largest_layer(model)
        yield row("layers that are gathered", "device", gathered / max(numel, 1))
    elif precision != "fp32":
        rounded = models.num_parameters(model) - shrunk
        yield Row(f"weights in {precision}", "device", 2.0 * rounded, None if frozen else 2.0)
    vocabulary = int(models.config_of(config.model).get_text_config().vocab_size)
    logits = FP32 * config.inner.batch_size * data.sequence_length * vocabulary
    if logits > CPU_CHUNK_BYTES:
        yield Row("logits of a chunk", "device", CHUNK_COPIES * min(logits, CHUNK_BYTES), None)
    copied = float(FP32)
    if outer.method == "diloco":
        shares = list(_outer_rows(outer, peers))
        copied = sum(nbytes for share, nbytes in shares if share in COPIED)
        yield from (row(share, "main", nbytes) for share, nbytes in shares if nbytes)
        streams = max(1, 2 * outer.fragments)
        yield Row("blocks of streams", "main", STREAM_BLOCKS * FP32 * CHUNK * streams, None)
        if accelerator:
            yield Row("staging buffers, pinned", "main", STAGING_BUFFERS * FP32 * CHUNK, None)
        if accelerator and outer.overlap and not sharded:
            yield row("a copy of the fragment that is sent", "device", FP32 / outer.fragments)
    yield Row("batch", "main", TOKEN_BYTES * config.inner.batch_size * data.sequence_length, None)
    yield Row("libraries", "main", LIBRARIES_BYTES * num_ranks, None)
    if config.checkpoint.background:
        yield row("a checkpoint, copied before it is written", "spare", copied + moments)


def _outer_rows(outer: OuterConfig, peers: int) -> Iterator[tuple[str, float]]:
    """Yield the bytes per parameter that the outer step takes of a peer's main memory."""
    fragments, vectors = outer.fragments, 1 + OUTER_OPTIMIZERS[outer.optimizer].num_buffers
    held = -(-fragments // peers) / fragments
    up, down = (CODECS[name].nbytes(CHUNK) / CHUNK for name in (outer.codec_up, outer.codec_down))
    yield "anchors", FP32
    if not outer.lockstep:  # the anchor moves while this peer trains on from an older one
        yield "anchors of the round under way", FP32
    yield "payloads that are sent", up / (fragments if outer.staggered else 1)
    yield "what the codec lost", FP32 if outer.error_feedback else 0
    yield "newest updates", down * max(1, min(RECORDS, math.ceil(FP32 / down) - 1))
    yield "master and momentum as author", FP32 * (1 + vectors) * held
    yield "contributions, encoded", held * up * peers
    yield "flattening", FP32 / fragments if outer.flatten else 0
    follows = peers > 1 and (outer.momentum > 0 or outer.windowed)
    yield "momentum as the next author", FP32 * vectors * held if follows else 0


def _largest_layer(model: nn.Module) -> int:
    """Count the parameters of the largest layer, or of those outside of layers if more."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [models.num_parameters(layer) for stack in stacks for layer in stack]
    return max([models.num_parameters(model) - sum(layers), *layers])


def parameters_of(settings: ModelConfig) -> int:
    """Count trained parameters; tied ones count once. Raises `ConfigError` as `build`."""
    return models.num_trained(_outline(settings))


def _outline(settings: ModelConfig) -> nn.Module:
    with torch.device("meta"):
        return models.outline(settings)


def memory_need(
    config: Config,
    machine: Machine,
    peers: int | None = None,
    num_ranks: int = 1,
    sharded: bool = False,
) -> MemoryNeed:
    """Sum up the table for this precision; without `peers` there is one for each fragment."""
    config, peers = _resolved(config, machine.precision), peers or config.outer.fragments
    rows = memory_rows(config, peers, num_ranks, sharded, machine.device.type != "cpu")
    memories = ("device", "main", "spare")
    device, main, spare = (sum(r.nbytes for r in rows if r.where == memory) for memory in memories)
    return MemoryNeed(parameters_of(config.model), device, main, sequence_bytes(config), spare)


def sequence_bytes(config: Config) -> float:
    """Estimate the bytes of a sequence's activations; 0 if the config does not say its layers."""
    shape = models.config_of(config.model).get_text_config()
    layers, width = getattr(shape, "num_hidden_layers", 0), getattr(shape, "hidden_size", 0)
    precision = _resolved(config, NATIVE[bool(devices.count_devices()[1])]).train.precision
    is_light = (config.model.adapter, config.model.adapter_targets) == ("lora", ("auto",))
    mixed = LORA_VECTORS if is_light else MIXED_VECTORS
    each = ACTIVATION_VECTORS if precision == "fp32" else mixed
    vectors = each + INPUT_VECTORS * layers if config.train.checkpointing else each * layers
    return float(FP32 * config.data.sequence_length * width * vectors)


# -- what fits -------------------------------------------------------------------------------------


def fit_micro_batch(need: MemoryNeed, machine: Machine, batch_size: int) -> int:
    """Return the sequences to compute at a time: the batch in the fewest equal parts that fit.

    Raises `ConfigError` if not even one sequence does.
    """
    free, static, where = machine.device_bytes, need.device_bytes, str(machine.device)
    if machine.shared:
        free, static = machine.main_bytes, need.device_bytes + need.main_bytes
        where = "main memory"
    elif need.main_bytes > machine.main_bytes:
        raise _too_small(need, need.main_bytes, machine.main_bytes, "main memory")
    if static + need.sequence_bytes > free:
        raise _too_small(need, static + need.sequence_bytes, free, where)
    most = int((free - static) / max(need.sequence_bytes, 1.0))
    parts = -(-batch_size // max(1, min(batch_size, most)))
    return -(-batch_size // parts)


def _too_small(need: MemoryNeed, wanted: float, free: float, where: str) -> ConfigError:
    fixed = min(LIBRARIES_BYTES, need.main_bytes) if where == "main memory" else 0.0
    fits = max(0.0, need.parameters * (free - fixed) / max(wanted - fixed, 1.0))
    other = f", or join a run of at most {human_count(fits)} parameters" if fits > 1e5 else ""
    return ConfigError(
        "this machine is too small for the run's model of"
        f" {human_count(need.parameters)} parameters: it needs {wanted / GIB:.1f} GiB of {where},"
        f" and {free / GIB:.1f} GiB are free, {(wanted - free) / GIB:.1f} GiB too little;"
        f" end other programs, use a larger machine{other}"
    )


def fit_to_memory(config: Config, ranks: RankGroup) -> Config:
    """All ranks: set a micro-batch that fits the memory of all ranks, if none is set.

    Checkpoints are not written in the background where there is no room for a copy. Raises
    `ConfigError` if not one sequence fits.
    """
    alone = config.outer.method == "data_parallel"  # with a batch of its own
    rows = max(1, config.inner.batch_size // (1 if alone else ranks.size))
    # who starts a swarm holds all fragments, until others come
    peers = None if config.swarm.initial_peers else config.swarm.min_peers
    machine, complaint, micro_batch = machine_at(ranks.device, config.train.threads), "", rows
    try:
        check_base(config)
        need = memory_need(config, machine, peers, ranks.size, ranks.sharded)
        micro_batch = fit_micro_batch(need, machine, rows)
        used = need.main_bytes
        if machine.shared:
            used += need.device_bytes + micro_batch * need.sequence_bytes
        if config.checkpoint.background and used + need.spare_bytes > machine.main_bytes:
            text = "training waits for checkpoints: %.1f GiB are not free for a copy"
            logger.warning(text, need.spare_bytes / GIB)
            config = _changed(config, "checkpoint", background=False)
    except ConfigError as error:
        complaint = str(error)
    ranks.raise_first_error(complaint)
    micro_batch = ranks.all_reduce_min(micro_batch)
    if config.train.micro_batch is not None or micro_batch >= rows:
        return config
    return _changed(config, "train", micro_batch=micro_batch)


# -- this machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The device, and the free bytes on it and in main memory (equal if it is the CPU)."""

    device: torch.device
    name: str
    threads: int
    device_bytes: float
    main_bytes: float
    precision: devices.Precision  # native

    @property
    def shared(self) -> bool:
        """True if the device uses main memory."""
        return self.device.type in ("cpu", "mps")


def inspect_machine(device: str, threads: int | None = None) -> Machine:
    """Measure this machine now; `ConfigError` if it lacks `device` (train.device)."""
    return machine_at(devices.pick_device(device), threads)


def machine_at(device: torch.device, threads: int | None = None) -> Machine:
    """Measure the machine for a device that this process has already."""
    cores, main, native = _cores(), free_memory(), devices.native_precision(device)
    if device.type != "cpu":
        free = devices.free_bytes(device)
        return Machine(device, devices.name_of(device), threads or cores, free, main, native)
    idle = max(1, cores // 2, round(cores - os.getloadavg()[0]))
    return Machine(device, "CPU", threads or min(cores, idle), main, main, native)


def _cores() -> int:
    """Count the cores that this process's affinity and its container's quota allow."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period or 100_000)))


def free_memory() -> float:
    """Return the bytes of main memory that the kernel has left and the container's limit allows."""
    # where the kernel does not say more
    free = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit and used and limit.isdigit() and used.isdigit():
        lines = (_read("/sys/fs/cgroup/memory.stat") or "").splitlines()
        # the kernel drops caches before it refuses memory
        caches = (int(line.split()[1]) for line in lines if line.startswith("inactive_file"))
        free = min(free, int(limit) - int(used) + next(caches, 0))
    return free


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None


def step_seconds(config: Config, micro_batch: int | None = None) -> float:
    """Measure the median seconds of an inner step here, on random tokens; with a `micro_batch` only
    that part of a batch is measured, and a step counts as so many parts."""
    device = devices.pick_device(config.train.device)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    length, batch_size = config.data.sequence_length, config.inner.batch_size
    model = models.build(config.model, config.run.seed, sequence_length=length, narrow=True)
    model = to_device(model, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    any_model: Any = model
    num_rows = any_model.get_input_embeddings().weight.shape[0]
    vocabulary = 256 if config.data.tokenizer == "bytes" else num_rows
    generator = torch.Generator().manual_seed(config.run.seed)
    measured = min(batch_size, micro_batch or batch_size)
    seconds = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        tokens = torch.randint(vocabulary, (measured, length), generator=generator).to(device)
        began_at = time.perf_counter()
        with autocast(config, device):
            loss = models.loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds[WARMUP_STEPS:]) * math.ceil(batch_size / measured)
