"""A joiner equals an incumbent in everything that training reads, and so does a peer that came back.

Production peers train in virtual time, in every mode. Peers join, die as syncers, come back from checkpoints and hand
fragments over. Right before each inner step this looks at what the step reads:

    parameters            each fragment is the anchor whose version and digest the peer will name as its base, and
                          what it has learned since is nothing yet
    learning rate         follows the version and the place in the round, which are those of the other peers
    swarm clock           belongs to the version
    optimizer moments     are a donor's, or the peer's own of its checkpoint; or their absence is an event
    masters               are beside the anchors that their syncers hold; the fuzz's invariants watch that they belong
    data                  no sequence of the common list is in the model twice
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from diloco.config import BudgetConfig, InnerConfig, OuterConfig
from diloco.outer.digest import digest_of
from diloco.outer.fragments import gather_
from diloco.testing.fuzz.crowd import Life
from diloco.train.loop import learning_rate
from diloco.train.progress import DYLU_FLOOR
from tests.support.stories import Story, agreed, story

H = 6
FRAGMENTS = 2
MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "mixing": {"overlap": 1, "mixing": 0.5},
    "overlap": {"overlap": 2},
    "staggered": {"staggered": True, "overlap": 1},
    "grace": {"quorum": 2, "grace_s": 1.0, "staleness_limit": 2},
    "async": {"quorum": 1, "staleness_limit": 12, "optimizer": "delayed_nesterov", "dylu": True},
    "decoupled": {"quorum": 1, "grace_slack": 0.8, "overlap": 2, "staleness_limit": 12, "merge": "rda"},
}
CHANGES = ("join", "resume", "takeover", "hand over")
INNER = InnerConfig(lr=1e-3, batch_size=1, warmup_steps=10)
BUDGET = BudgetConfig(outer_steps=100)


@dataclass(frozen=True)
class Read:
    """What one inner step reads."""

    version: int
    inner_step: int
    target_steps: int
    lr: float
    applied_tokens: int
    loaded: tuple[tuple[int, str], ...]  # version and digest of each fragment's base

    @property
    def progress(self) -> int:
        """Inner steps of the run, as the schedule of the learning rate counts them."""
        return self.version * H + self.inner_step


class Reader:
    """Looks at each life of a story right before each of its inner steps."""

    def __init__(self, swarm: Story) -> None:
        self.swarm = swarm
        self.outer = OuterConfig.parse({"method": "diloco", **swarm.crowd.outer})
        self.reads: dict[str, list[Read]] = {}  # by owner
        self.moments: set[str] = set()
        self.stale: list[str] = []
        on_life = swarm.crowd.on_life

        def observe(life: Life) -> None:
            on_life(life)
            if life.sync is not None:
                life.sync._optimizer.register_step_pre_hook(lambda *_: self._look(life))
                life.sync._optimizer.register_step_post_hook(lambda *_: self._keep(life))

        swarm.crowd.on_life = observe

    def _look(self, life: Life) -> None:
        sync, node = life.sync, life.node
        assert sync is not None and node is not None
        loaded = tuple(node._anchors.loaded)
        clock = sync.version, sync.inner_step, sync.target_steps, learning_rate(sync, INNER, BUDGET, H)
        read = Read(*clock, sync.applied_tokens, loaded)
        if life.owner not in self.reads:
            self._check_moments(life, read)
        before = self.reads.setdefault(life.owner, [])
        for fragment in range(FRAGMENTS):
            if not before or before[-1].loaded[fragment][1] != loaded[fragment][1]:  # a number alone loads nothing
                self._check_parameters(life, fragment, loaded[fragment])
        self._check_clock(life, read)
        before.append(read)

    def _check_parameters(self, life: Life, fragment: int, base: tuple[int, str]) -> None:
        """Right after a fragment was loaded."""
        if self.outer.mixing:
            return
        assert life.node is not None
        replica = life.node.replica
        at, local = replica._local[fragment], torch.empty(replica.fragments[fragment].numel)
        gather_(local, replica.fragments[fragment], 0, local.numel(), replica.parameters)
        if digest_of(local) != base[1]:
            self._say(life, f"fragment {fragment} is not its anchor of version {base[0]}")
        learned = replica._deltas(at, replica.chunks[fragment])
        moved = digest_of(replica.anchors[fragment] if at.base is None else at.base) != base[1]  # see below
        if not moved and any(float(chunk.abs().max()) for chunk in learned):
            self._say(life, f"fragment {fragment} has learned something before its round of version {base[0]}")

    def _check_clock(self, life: Life, read: Read) -> None:
        lowest = min(version for version, _ in read.loaded)
        if self.outer.barrier and read.version != lowest:
            self._say(life, f"at version {read.version}, but its parameters are of version {lowest}")
        if not (DYLU_FLOOR if self.outer.dylu else H) <= read.target_steps <= H:
            self._say(life, f"takes {read.target_steps} inner steps a round")

    def _check_moments(self, life: Life, read: Read) -> None:
        mine = _moments(life)
        own = {} if life.checkpoint is None else life.checkpoint.inner["state"]
        if mine is None:
            told = [line.split()[1:3] for line in self.swarm.crowd.story[self._began(life) :]]
            if read.version > 0 and not own and [life.name, "cold_start"] not in told:
                self._say(life, "has no moments, and does not say so")
        elif mine not in self.moments and mine != _digest([own[key]["momentum_buffer"] for key in sorted(own)]):
            self._say(life, "has moments that nobody had")

    def _began(self, life: Life) -> int:
        """The line of the story at which the life began: after the lives of this name that ended before."""
        ends = [n for n, line in enumerate(self.swarm.crowd.story) if line.split()[1:] == [life.name, "killed"]]
        return ends[-1] if ends else 0

    def _keep(self, life: Life) -> None:
        if (mine := _moments(life)) is not None:
            self.moments.add(mine)

    def _say(self, life: Life, what: str) -> None:
        self.stale.append(f"{self.swarm.loop.seconds:.2f} {life.owner}: {what}")

    # -- at the end ---------------------------------------------------------------------------------------------------

    def living(self) -> dict[str, list[Read]]:
        """What the trainers read that trained to the end, from the end of their first round on."""
        lives = [life for life in self.swarm.crowd.lives.values() if life.member.trains and not life.leaving]
        return {life.name: self.reads[life.owner][H:] for life in lives if life.ended in ("", "done")}


def _moments(life: Life) -> str | None:
    assert life.sync is not None
    state = life.sync._optimizer.state
    kept = [state[p].get("momentum_buffer") for p in life.sync.parameters.values() if p in state]
    return None if not kept or kept[0] is None else _digest(kept)


def _digest(tensors: list[torch.Tensor]) -> str | None:
    return digest_of(torch.cat([one.flatten() for one in tensors])) if tensors else None


def check_together(reads: dict[str, list[Read]], outer: OuterConfig) -> None:
    """Peers that train together read the same at the same place of a round."""
    assert all(reads.values()), {name: len(mine) for name, mine in reads.items()}
    if not outer.lockstep:
        return
    rates, clocks = defaultdict(set), defaultdict(set)
    for mine in reads.values():
        assert all(one.progress < other.progress for one, other in pairwise(mine)), "no step twice"
        for read in mine:
            rates[read.version, read.inner_step].add(read.lr)
            clocks[read.loaded].add((read.version, read.applied_tokens))
    assert all(len(found) == 1 for found in (*rates.values(), *clocks.values()))
    assert len({mine[-1].loaded for mine in reads.values()}) == 1


def happens(swarm: Story, change: str, fresh: str) -> None:
    """One change of the swarm; `fresh` is the name of a peer that nobody knows."""
    assert not swarm.crowd.failures, swarm.crowd.failures
    names = sorted(swarm.nodes())
    victim = swarm.random.choice([name for name in names if swarm.held(name)] or names)
    if change == "join":
        swarm.start(fresh)
    elif len(names) > 1 and change == "hand over":
        swarm.crowd.leave(victim)
    elif len(names) > 1:
        life = swarm.crowd.lives[victim]
        swarm.crowd.crash(victim)
        if change == "resume":
            swarm.run_for(swarm.random.choice([0.1, 8.0]))
            swarm.crowd.start(life.member, checkpoint=life.checkpoint)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_stale_whatever_changes(mode: str) -> None:
    outer = {"sync_every": H, **MODES[mode]}
    with story(1, fragments=FRAGMENTS, outer_steps=None, outer=outer, units=True) as swarm:
        reader = Reader(swarm)
        swarm.begin("abc")
        for change, fresh in zip(CHANGES, "xyzw", strict=True):
            swarm.run_for(3.0 + 4.0 * swarm.random.random())
            happens(swarm, change, fresh)
        swarm.settle()
        swarm.run_for(1.0)
        nodes = swarm.run_to_the_end(outer_steps=12)
        agreed(swarm, nodes)
        assert not reader.stale, "\n".join(reader.stale)
        check_together(reader.living(), reader.outer)
        for node in nodes:
            for fragment, held in node.replica.held.items():
                assert held.anchor is node.replica.anchors[fragment]
                assert float((held.master - held.anchor).abs().max()) < 0.1, "what int8 has not said yet"
        if reader.outer.lockstep:
            assert swarm.dealt(nodes).twice == 0
