"""Outer steps without peers: settings, vectors, what travels, and the versions that an author
makes."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.aggregate import MergeResult, Weighted
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import chunks, partition
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


def encoded(one: str | Codec, x: Tensor) -> Tensor:
    """The payload of a chunk, which is left as it is."""
    one, before = CODECS[one] if isinstance(one, str) else one, x.clone()
    payload = torch.full((one.nbytes(x.numel()),), 0xA5, dtype=torch.uint8)
    one.encode(x, payload)
    assert torch.equal(x, before)
    return payload


def payload_of(one: Codec, values: Tensor) -> Tensor:
    """The payload of a whole fragment."""
    return torch.cat([encoded(one, values[start:stop]) for start, stop in chunks(len(values))])


def author(parameters: Mapping[str, Tensor], settings: OuterConfig, fragments: int = 1) -> Replica:
    """A peer that is author of everything, and compares the same values of contributions in every
    run."""
    replica = Replica(
        parameters,
        partition({name: p.numel() for name, p in parameters.items()}, fragments),
        settings,
    )
    replica.rng = random.Random(0)
    for fragment in range(fragments):
        replica.hold(fragment)
    return replica


def weighted(peer: str, payload: Tensor, weight: float = 1.0) -> Weighted:
    """A whole contribution, whose norm `make` measures."""
    return Weighted(peer, payload, math.nan, weight)


def named(payloads: Iterable[Tensor], weights: Sequence[float] | None = None) -> list[Weighted]:
    """Whole contributions of peers p0, p1 and so on; with weight 1 if nothing else is said."""
    return [weighted(f"p{i}", x, weights[i] if weights else 1.0) for i, x in enumerate(payloads)]


def make(
    replica: Replica,
    those: Sequence[Weighted],
    fragment: int = 0,
    step: OuterStep | None = None,
    me: str = "",
    delay: int = 1,
) -> tuple[MergeResult, str]:
    """The next version, which this author has adopted, and the anchor's digest."""
    state, before = replica.states[fragment], [one.payload.clone() for one in those]
    with suppress(PayloadError):  # of which `merge` says the same
        those = [one._replace(norm=replica.payload_norm(fragment, one.payload)) for one in those]
    merged = replica.aggregates[fragment].merge(
        those, step or state.step(state.version, len(those), delay), state, me
    )
    assert all(map(torch.equal, before, (one.payload for one in those)))
    replica.apply_update_(fragment, merged.update, merged.step)
    return merged, replica.digest(fragment)
