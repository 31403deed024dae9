"""Attacks by contributions: what is sent as learned, and how much work it is said to be."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.swarm.wire.streams import BROKEN
from diloco.testing.attacks.arena import attack
from diloco.testing.attacks.attacker import Attacker

__all__ = ["ALIE_Z"]

QUORUM = {"quorum": 3, "grace_s": 1.0, "staleness_limit": 2}
ALIE_Z = 1.5  # standard deviations that a little is ("A Little Is Enough", arXiv 1902.06156)


@attack("minus-ten", "", "member", "sends -10 times what it learned, one of five", proof=True)
@attack("minus-ten-of-three", "F21", "member", "sends -10 times what it learned, one of three", proof=True, honest=2)
@attack("minus-ten-quorum", "F21", "member", "sends -10 times what it learned, with a quorum", proof=True, outer=QUORUM)
async def sends_minus_ten(x: Attacker) -> None:
    x.sends(lambda honest, *_: -10.0 * honest)


@attack("sign-flip", "", "member", "sends minus what it learned")
async def flips_signs(x: Attacker) -> None:
    x.sends(lambda honest, *_: -honest)


@attack("a-little", "", "member", "sends the others' mean less 1.5 standard deviations (ALIE)")
async def sends_a_little(x: Attacker) -> None:
    """The mean of what the honest peers learned, less some of their standard deviations."""

    def little(honest: Tensor, fragment: int, chunk: int) -> Tensor:
        theirs = torch.stack(x.learned(fragment, chunk))
        return theirs.mean(0) - ALIE_Z * theirs.std(0)

    x.sends(little)


@attack("zeros", "", "member", "sends zeros")
async def sends_zeros(x: Attacker) -> None:
    x.sends(lambda honest, *_: 0.0 * honest)


@attack("nan", "", "member", "sends bytes that decode to no number", proof=True, outer={"codec_up": "fp32"})
async def sends_nan(x: Attacker) -> None:
    x.sends(lambda honest, *_: honest, garble=lambda payload: payload.fill_(0xFF))


@attack("claims-tokens", "F4", "member", "claims 10^6 times its work, for a direction of its own", proof=True)
async def claims_tokens(x: Attacker) -> None:
    """Claims a million times its work, for a direction of its own."""
    x.status(lambda true: {"steps_per_s": 1e12})
    x.counts(10**6, 10**6)
    _sideways(x)


@attack("claims-eightfold", "F4", "member", "claims 8 times its work, for a direction of its own")
async def claims_eightfold(x: Attacker) -> None:
    """Claims eight times its work, which was held for plausible."""
    x.counts(8, 8)
    _sideways(x)


def _sideways(x: Attacker) -> None:
    """Sends what is orthogonal to the others, as long as may be."""
    r = torch.Generator().manual_seed(0)
    drawn: dict[tuple[int, int], Tensor] = {}

    def orthogonal(honest: Tensor, fragment: int, chunk: int) -> Tensor:
        mean = torch.stack(x.learned(fragment, chunk)).mean(0)
        v = drawn.setdefault((fragment, chunk), torch.randn(len(honest), generator=r))
        v = v - mean * (v @ mean) / (mean @ mean + 1e-12)
        return v * float(2.9 * mean.norm() / (v.norm() + 1e-12))

    x.sends(orthogonal)


@attack("every-number-of-a-contribution", "F8", "member", "claims each number of a contribution at its bound")
async def claims_bounds(x: Attacker) -> None:
    """Each number of a contribution's header in turn at its bound."""
    x.arena.idle.add(x.me)
    most = 2**62 - 1
    bounds: list[dict[str, Any]] = [
        {"age_s": 1.7e308},
        {"steps": 2**40 - 1},
        {"tokens": 2**48 - 1},
        {"base_version": most},
        {"term": most},
        {"units": [[0, most]]},
    ]
    for fields in bounds:
        await asyncio.sleep(4.0)
        try:
            await asyncio.wait_for(x.contribute(**fields), 10.0)
        except (*BROKEN, PayloadError):
            continue
