"""An heir knows the outer state of a fragment from its updates alone; when the author dies, it goes
on with it."""

import pytest
import torch
from torch import Tensor

from diloco.outer.fragments import partition
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterState, OuterStep
from diloco.outer.replica import Replica
from tests.support.outer import make, named, outer, relative_error

NUMEL = 4096
CODECS = ["fp32", "fp16", "int8", "e3m0"]
DELAY = 4


class Rounds:
    """An author and an heir, and contributions that point the same way for a while, to matrices and
    norms."""

    def __init__(self, codec: str, **settings: object) -> None:
        fixed = {"sync_every": 4, "codec_up": "fp32", "codec_down": codec, "quorum": 1}
        plan = outer(**{**fixed, **settings})
        self.generator = torch.Generator().manual_seed(3)
        start = 0.02 * self.noise()
        start[:400] += 1.0
        pieces = partition({"w": NUMEL}, 1)
        self.author, self.heir = (Replica({"w": start}, pieces, plan) for _ in range(2))
        self.author.hold(0)
        self.heir.follow([0])
        self.drift = self.noise()

    def noise(self) -> Tensor:
        return torch.randn(NUMEL, generator=self.generator)

    def publish(self) -> tuple[Tensor, OuterStep]:
        """The update of the next version, of three contributions, and its step."""
        self.drift = 0.8 * self.drift + 0.6 * self.noise()
        deltas = [0.01 * (self.drift + self.noise()) for _ in range(3)]
        made, _ = make(self.author, named(one.view(torch.uint8) for one in deltas), delay=DELAY)
        return made.update, made.step

    def versions(self, number: int) -> None:
        """The author makes so many versions, which the heir follows."""
        for _ in range(number):
            update, step = self.publish()
            self.heir.apply_update_(0, update, step)
            assert self.heir.digest(0) == self.author.digest(0)


def assert_same(one: OuterState, other: OuterState) -> None:
    """The same version, place in the window, momentum and window."""
    assert (one.version, one.pushes) == (other.version, other.pushes)
    for ours, theirs in zip(one.vectors, other.vectors, strict=True):
        assert relative_error(theirs, ours) <= 1e-6 if theirs.any() else not ours.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_a_backup_knows_the_state_whatever_the_codec_loses(optimizer: str, codec: str) -> None:
    rounds = Rounds(codec, optimizer=optimizer, momentum_warmup=5, lr_by_peers={1: 0.4, 4: 0.8})
    for _ in range(15):
        rounds.versions(1)
        assert_same(rounds.heir.states[0], rounds.author.states[0])
    rounds.heir.hold(0)
    assert_same(rounds.heir.states[0], rounds.author.states[0])
    assert torch.equal(rounds.heir.aggregates[0].master, rounds.author.anchors[0])


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_a_backup_that_begins_late_or_misses_an_update_is_soon_right(optimizer: str) -> None:
    rounds = Rounds("int8", optimizer=optimizer)
    for _ in range(3):
        rounds.publish()
    rounds.heir.anchors[0].copy_(rounds.author.anchors[0])
    for followed in (1, 16, 32):
        rounds.versions(16 if followed > 1 else 1)
        state, true = rounds.heir.states[0], rounds.author.states[0]
        error = relative_error(true.momentum, state.momentum)
        assert (state.version, state.pushes) == (true.version, true.pushes)
        assert error > 0.1 if followed == 1 else error < 1e-4
    rounds.publish()
    rounds.heir.anchors[0].copy_(rounds.author.anchors[0])
    rounds.versions(1)
    assert relative_error(true.momentum, state.momentum) < 0.5
    rounds.heir.hold(0)
    step = state.step(true.version + 1, 3, DELAY)
    state.join_(step)
    assert step.pushes == 0 and state.momentum.any()
    assert not any(further.any() for further in state.vectors[1:]), "the window is not known"


def test_a_backup_follows_what_it_is_backup_of() -> None:
    rounds = Rounds("int8")
    rounds.versions(2)
    momentum = rounds.heir.states[0].momentum
    rounds.heir.follow([0])
    assert rounds.heir.states[0].momentum is momentum and momentum.any()
    rounds.heir.follow([])
    rounds.author.follow([])
    assert not rounds.heir.states and rounds.author.states, "it is author"
