"""Contributors that lie: the honest peers of a whole swarm of production peers lose next to nothing
by it.

One peer lies from the third version on, and is honest in everything else. What judging alone
promises is in `tests/unit/outer/test_robust.py`, numbers at their bounds in `test_fuzz.py`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.rpc.inner_state import InnerState
from diloco.swarm.wire.streams import PeerStream
from tests.harness.fuzz.crowd import lying
from tests.harness.fuzz.lives import Life, PeerSpec
from tests.harness.fuzz.virtual import virtual_swarm
from tests.support.stories import DrivenCrowd

BEGIN, VERSIONS = 3, 16
ELEMENTS = 400
NOISE = 0.5  # of a gradient, in standard deviations per value
LOSS = 1.75  # times that of the honest peers alone: honest swarms differ by up to 1.6
SECONDS = 1.5, 30.0  # times theirs, and more


class Swarm(DrivenCrowd):
    """Five peers that learn a target from noisy gradients; `liar` is one of them that makes no
    versions."""

    def __init__(self, loop: VirtualLoop, peers: str, outer: dict[str, Any], adamw: bool) -> None:
        settings = {"sync_every": 4, "fragments": 1, "lr": 0.7, "momentum": 0.5, **outer}
        super().__init__(loop, 0, settings, elements=ELEMENTS)
        self.goal, self.adamw = VERSIONS, adamw
        self.target = 1.0 + 0.5 * torch.sin(torch.arange(float(ELEMENTS)))
        for name in peers:
            self.start(PeerSpec(name), min_peers=len(peers))
            self.run_until(self.all_ready)
        self.run_until(
            lambda: all(self.facts(name).control.tip.head.number >= BEGIN for name in peers)
        )
        facts = self.facts("a")
        authors = facts.author_of(facts.control), facts.second(facts.control)
        self.liar = [name for name in peers if name not in authors][-1]

    def _parameters(self) -> Tensor:
        return torch.zeros(ELEMENTS)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if not self.adamw:
            return super().optimizer(model)
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def gradient(self, life: Life, w: Tensor, r: random.Random) -> Tensor:
        noise = torch.randn(w.numel(), generator=torch.Generator().manual_seed(r.getrandbits(62)))
        return w.detach() - self.target + NOISE * noise

    def finish(self, *liars: str) -> tuple[float, float]:
        """Until all honest peers are done, with one model; their loss (1 at the start), and when
        that was."""
        honest = [name for name in self.lives if name not in liars]
        self.run_until(lambda: all(self.lives[name].ended for name in honest))
        assert {self.lives[name].ended for name in honest} == {"done"}, self.failures
        assert len({self.facts(name).control.tip.head.id for name in honest}) == 1
        distance = (self.node(honest[0]).replica.anchors[0] - self.target) ** 2
        return float(distance.mean() / (self.target**2).mean()), self.loop.seconds

    def unharmed(self) -> set[str]:
        """The honest peers end as well, and nearly as early, as they do alone; which events of
        theirs name the liar."""
        (loss, seconds), alone = self.finish(self.liar), calm()
        assert loss <= LOSS * alone[0] and seconds <= SECONDS[0] * alone[1] + SECONDS[1]
        told = [line.split(maxsplit=3) for line in self.story if f"'{self.liar}'" in line]
        return {kind for _, name, kind, _ in told if name != self.liar}


@contextmanager
def swarm_of(peers: str = "abcde", adamw: bool = False, **outer: Any) -> Iterator[Swarm]:
    with virtual_swarm(64, 128) as loop:
        yield Swarm(loop, peers, outer, adamw)


@cache
def calm() -> tuple[float, float]:
    """Loss and seconds of the honest peers alone."""
    with swarm_of("abcd") as swarm:
        return swarm.finish()


@pytest.mark.parametrize(
    ("factor", "accused"),
    [(-10.0, "left_out"), (-1.0, "left_out"), (100.0, "clipped"), (1e6, "clipped")],
)
def test_what_is_sent_as_learned_harms_nobody(factor: float, accused: str) -> None:
    with swarm_of() as swarm:
        replica = swarm.node(swarm.liar).replica
        replica.up = lying(replica.up, factor)
        assert accused in swarm.unharmed()


def test_what_was_learned_once_is_not_merged_again_and_again() -> None:
    with swarm_of() as swarm:
        replica, first = swarm.node(swarm.liar).replica, dict[int, Tensor]()
        capture = replica.capture

        def captures(fragment: int) -> Tensor:
            return first.setdefault(fragment, capture(fragment))

        replica.capture = captures  # type: ignore[method-assign]
        assert "left_out" in swarm.unharmed()


NO_PAYLOADS = {
    "no number": lambda payload: torch.full_like(payload, 0xFF),
    "another shape": lambda payload: torch.cat([payload, payload]),
}


@pytest.mark.parametrize("bent", NO_PAYLOADS.values(), ids=NO_PAYLOADS)
def test_bytes_that_are_no_payload_are_refused(bent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calm()  # before streams are bent
    with swarm_of(codec_up="fp32") as swarm:
        send = PeerStream.send_payload

        async def sends(self: PeerStream, payload: Tensor) -> None:
            lies = (swarm.loop.owner or "").startswith(f"{swarm.liar}.")
            await send(self, bent(payload) if lies else payload)

        monkeypatch.setattr(PeerStream, "send_payload", sends)
        assert "refused" in swarm.unharmed()


def test_a_newcomer_is_not_thrown_far_by_the_moments_that_it_gets() -> None:
    with swarm_of(adamw=True) as swarm:

        def lie(honest: InnerState) -> InnerState:
            sizes = zip(honest.layout.names, honest.layout.numels, strict=True)
            large = ((0.0 if name.endswith("_sq") else 1e6, numel) for name, numel in sizes)
            values = torch.cat([torch.full((numel,), value) for value, numel in large])
            return replace(honest, steps=(1000,) * len(honest.steps), values=values)

        for life in swarm.living():  # whom the newcomer asks is drawn
            context = swarm.node(life.name).context
            context.inner_state = lambda told=context.inner_state: lie(told())
        newcomer = swarm.start(PeerSpec("n"))
        swarm.run_until(lambda: newcomer.began)
        swarm.run_for(1.5)
        assert any(line.split()[1:3] == ["n", "inner_state"] for line in swarm.story)
        replica = swarm.node("n").replica
        assert float((replica.local.tensors["w"].detach() - replica.anchors[0]).abs().max()) <= 2.0
