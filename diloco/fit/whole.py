"""How a machine with several accelerators takes part: as one peer that trains on all of them, or as a peer on each.

A peer on each is the rule: peers need nothing of each other, and each contributes what it learns. One peer of all of
them (an island) is for a model that does not fit one device, and for what there is only once: the link, main memory,
an identity.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from diloco.config import Config
from diloco.errors import ConfigError
from diloco.fit.volunteer import with_settings
from diloco.train import devices
from diloco.train.devices import Accelerator
from diloco.train.machine import GIB, machine_at
from diloco.train.memory import MemoryNeed, Split, memory_need, parameters_of
from diloco.train.planning import Exchange, Link, predict

__all__ = ["BUSY", "Layout", "has_several", "lay_out", "layout_of", "utilization_of"]

BUSY = 0.9  # utilization below which peers that share a link wait too much

Need = Callable[[Split], MemoryNeed]


@dataclass(frozen=True)
class Layout:
    """The devices that are used; `peers` of them, each of `split.ranks` processes, which take `need`; `why` follows
    "because".
    """

    devices: tuple[Accelerator, ...]
    peers: int
    split: Split
    need: MemoryNeed
    why: str

    @property
    def text(self) -> str:
        """One line."""
        count, name = len(self.devices), self.devices[0].name
        kind = "each has some rows of all parameters" if self.split.sharded else "each has the whole model"
        how = "one peer on each" if self.peers > 1 else f"one peer on all of them, {kind}"
        if count == 1:
            how = "one peer on this one"
        return f"{count} x {name}: {how}, because {self.why}"

    @property
    def nbytes(self) -> float:
        """What all of them take, with one sequence at a time."""
        on_devices = len(self.devices) * (self.need.device_bytes + self.need.sequence_bytes)
        return on_devices + self.peers * self.need.main_bytes

    def fit(self, config: Config, typed: Collection[str]) -> Config:
        """The configuration of each peer, with precision and threads; each process finds its own micro-batch."""
        machine = machine_at(torch.device("cpu"))
        chosen: dict[str, object] = {"train.threads": max(1, machine.threads // len(self.devices))}
        if self.split.ranks > 1:
            chosen["train.parallel"] = "fsdp" if self.split.sharded else "ddp"
        chosen = {key: value for key, value in chosen.items() if key not in typed}
        return with_settings(_in_precision(config, self.devices, typed), chosen)


def lay_out(
    there: Sequence[Accelerator],
    need: Need,
    main_bytes: float,
    batch_size: int,
    parallel: str = "auto",
    single: str = "",
    utilization: float = 1.0,
) -> Layout:
    """The layout of a peer, or of several, on these devices.

    Args:
        there: the devices.
        need: what a peer of so many processes takes; `device_bytes` and `sequence_bytes` are of each of them.
        main_bytes: free in main memory.
        parallel: train.parallel, which asks for an island if it is not auto.
        single: why there may be one peer only, in words; empty if there may be several.
        utilization: of peers that share the link, one on each device.

    Raises `ConfigError` if the model does not fit even all devices together, or if one peer cannot share its batch.
    """
    one, smallest = need(Split()), min(device.free_bytes for device in there)
    peers_on_each = Layout(tuple(there), len(there), Split(), one, "the model fits one, and each contributes by itself")
    fits_one = one.device_bytes + one.sequence_bytes <= smallest
    ranks = max(count for count in range(1, len(there) + 1) if batch_size % count == 0)
    island = tuple(sorted(there, key=lambda device: -device.free_bytes)[:ranks])
    if parallel == "fsdp" or (parallel == "auto" and not fits_one):
        return _sharded(island, need, one, batch_size, fits_one)
    why = single
    if parallel == "ddp":
        why = "train.parallel=ddp asks for it"
    elif not single and ranks > 1 and len(there) * one.main_bytes > main_bytes:
        most = int(main_bytes / one.main_bytes)
        why = f"{main_bytes / GIB:.1f} GiB of main memory are free, which is enough for {most} of {len(there)} peers"
    elif not single and ranks > 1 and utilization < BUSY:
        why = f"{len(there)} peers would share the link, and train {utilization:.0%} of the time"
    return Layout(island, 1, Split(ranks), need(Split(ranks)), why) if why else peers_on_each


def _sharded(island: tuple[Accelerator, ...], need: Need, one: MemoryNeed, batch_size: int, fits_one: bool) -> Layout:
    ranks, smallest = len(island), min(device.free_bytes for device in island)
    wanted = one.device_bytes + one.sequence_bytes
    why = "train.parallel=fsdp asks for it"
    if not fits_one:
        why = f"the model needs {wanted / GIB:.1f} GiB, and one of them has {smallest / GIB:.1f}"
    split = Split(ranks, sharded=True)
    together = need(split)
    wanted = together.device_bytes + together.sequence_bytes
    if wanted > smallest:
        raise ConfigError(
            f"this machine is too small for the run's model of {one.parameters / 1e6:.4g}M parameters: on {ranks} "
            f"devices it needs {wanted / GIB:.1f} GiB of each, and {smallest / GIB:.1f} GiB are free; end other "
            f"programs, or use a larger machine (inner.batch_size={batch_size} can be shared by {ranks})"
        )
    return Layout(island, 1, split, together, why)


def layout_of(
    config: Config, typed: Collection[str], peers: int, link: Link | None, paces: Sequence[float]
) -> Layout | None:
    """The layout on this machine's accelerators of a volunteer in a swarm of so many other peers; None if there is one
    device to use, or none.

    `link` is this machine's and `paces` are the others' inner steps per second, where they are known.
    """
    if not has_several(config.train.device):
        return None
    there = devices.survey()
    config = _in_precision(config, there, typed)
    machine = replace(machine_at(torch.device("cpu")), device=torch.device(there[0].kind), device_bytes=0.0)
    utilization = 1.0
    if link is not None and paces:
        exchange = Exchange.of(config.outer, parameters_of(config.model), peers + len(there))
        utilization = utilization_of(exchange, link, 1 / statistics.median(paces), len(there))
    return lay_out(
        there, lambda split: memory_need(config, machine, peers + 1, split), machine.main_bytes,
        config.inner.batch_size, config.train.parallel, _only_one(config, typed), utilization,
    )  # fmt: skip


def has_several(setting: str) -> bool:
    """Whether train.device leaves the choice among several accelerators."""
    kind, count = devices.counted()
    return count > 1 and setting in ("auto", kind)


def _in_precision(config: Config, there: Sequence[Accelerator], typed: Collection[str]) -> Config:
    """The configuration with the precision that suits all of these devices, unless it is `typed`."""
    if "train.precision" in typed:
        return config
    native = {device.precision for device in there}
    shared = native.pop() if len(native) == 1 else "fp32" if "fp32" in native else "fp16"
    return with_settings(config, {"train.precision": shared})


def _only_one(config: Config, typed: Collection[str]) -> str:
    """Why this machine can be one peer only, if it can."""
    for key in ("swarm.identity_path", "run.name", "data.shard"):
        if key in typed:
            return f"{key} is that of one peer"
    return "an invitation admits one peer" if config.run.key is not None and config.swarm.key_path is None else ""


def utilization_of(exchange: Exchange, link: Link, step_s: float, peers: int) -> float:
    """The utilization of so many peers that share a link, where each takes an inner step in `step_s` seconds.

    Its latency is left out: one peer waits for that as long as several do.
    """
    return predict(exchange, Link(link.bits_per_s / peers), step_s).utilization
