"""Outer steps without peers: settings, vectors, what travels, and the versions that a syncer makes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import codec
from diloco.outer.fragments import chunks, partition
from diloco.outer.held import Held, Judged
from diloco.outer.optimizer import OuterStep
from diloco.outer.payloads import Codec
from diloco.outer.replica import Replica

EXACT = {"codec_up": "fp32", "codec_down": "fp32"}


def outer(**settings: object) -> OuterConfig:
    return OuterConfig.parse({"method": "diloco", "sync_every": 1, **settings})


def gaussian(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((y - x).norm() / x.norm())


# -- what travels -----------------------------------------------------------------------------------------------------


def encoded(one: str | Codec, x: Tensor) -> Tensor:
    """The payload of a chunk, which is left as it is."""
    one, before = codec(one) if isinstance(one, str) else one, x.clone()
    payload = torch.full((one.nbytes(x.numel()),), 0xA5, dtype=torch.uint8)
    one.encode(x, payload)
    assert torch.equal(x, before)
    return payload


def decoded(name: str, payload: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), torch.nan)
    codec(name).decode(payload, out)
    return out


def round_trip(name: str, x: Tensor) -> Tensor:
    return decoded(name, encoded(name, x), x.numel())


def payloads_of(one: Codec, values: Tensor) -> list[Tensor]:
    """The payloads of all chunks."""
    return [encoded(one, values[start:stop]) for start, stop in chunks(len(values))]


# -- versions ---------------------------------------------------------------------------------------------------------


def syncer(parameters: Mapping[str, Tensor], settings: OuterConfig, fragments: int = 1) -> Replica:
    """A peer that is syncer of everything, and compares the same values of contributions in every run."""
    replica = Replica(parameters, partition({name: p.numel() for name, p in parameters.items()}, fragments), settings)
    replica.rng = random.Random(0)
    for fragment in range(fragments):
        replica.hold(fragment)
    return replica


def take(held: Held, peer: str, payloads: list[Tensor], weight: float = 1.0) -> None:
    """A whole contribution, which is left as it is."""
    for chunk, payload in enumerate(payloads):
        before = payload.clone()
        held.put(chunk, peer, payload, weight)
        assert torch.equal(payload, before)


def merge(
    held: Held, step: OuterStep, weights: Mapping[str, float] | None = None, me: str = ""
) -> tuple[Tensor, str, Judged | None]:
    """The update of a version of what was taken in, the anchor's digest, and what each contribution counted."""
    judged = held.judge(weights or dict.fromkeys(held.staged._kept, 1.0), me=me) if held.staged is not None else None
    update = torch.empty(held.down.offsets(held.fragment.numel)[-1], dtype=torch.uint8)
    return update, held.merge_(step, update, judged), judged


def exchange(peers: Sequence[Replica], weights: Sequence[float], version: int = 0) -> None:
    """One outer step of all fragments, of which the first peer is syncer; every peer adopts the update."""
    names = {f"p{number}": weight for number, weight in enumerate(weights)}
    for index, held in peers[0].held.items():
        for peer, (name, weight) in zip(peers, names.items(), strict=True):
            take(held, name, [peer.encode(index, chunk) for chunk in range(len(held.chunks))], weight)
        update, digest, _ = merge(held, OuterStep(version, len(peers)), names)
        for peer in peers[1:]:
            assert peer.apply_update_(index, update) == digest
    for peer in peers:
        peer.load_local_()
