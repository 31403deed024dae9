"""Audits: no honest syncer is accused, whatever the settings; and what a syncer alters is found."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.audit import FORGOTTEN, Deviation, audit, memory, obstacle, parts, pick, versions_until
from diloco.outer.fragments import BLOCK, CHUNK, partition
from diloco.outer.merkle import LEAF
from diloco.outer.optimizer import OuterStep
from diloco.outer.recompute import Counted, Seen
from tests.support.audits import Syncer
from tests.support.outer import outer

pytestmark = pytest.mark.slow

NUMELS = {"embed.weight": 700, "layer.weight": LEAF + BLOCK, "layer.bias": 77}
QUORUM = {"quorum": 1, "staleness_limit": 5}
MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "barrier rda": {"merge": "rda"},
    "quorum": QUORUM,
    "quorum none": {**QUORUM, "robust": "none"},
    "quorum rda": {**QUORUM, "merge": "rda"},
    "delayed": {**QUORUM, "optimizer": "delayed_nesterov"},
    "delayed c": {**QUORUM, "optimizer": "delayed_nesterov", "delay_c": 0.1},
    "delayed barrier": {"optimizer": "delayed_nesterov"},
    "no momentum": {"momentum": 0.0},
    "warm-up": {"momentum_warmup": 6, "lr_by_peers": {1: 0.4, 4: 0.8}},
}
UP, DOWN = ["int8", "e3m0", "stat2"], ["int8", "e3m0", "fp16", "fp32"]


def settings_of(mode: str, up: str = "int8", down: str = "int8", **others: object) -> OuterConfig:
    fixed = {"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0, "codec_up": up, "codec_down": down}
    return outer(**{**fixed, **MODES[mode], **others})


def one_leaf(mode: str = "barrier", **others: object) -> Syncer:
    return Syncer(settings_of(mode, **others), {"layer.weight": LEAF})  # type: ignore[arg-type]


def only_last(log: Sequence[Seen]) -> list[Seen]:
    """What a member knows that asked for the contributions to the newest version only."""
    return [*(replace(seen, counted=None) for seen in log[:-1]), log[-1]]


def found(syncer: Syncer, log: Sequence[Seen], part: int = 0) -> Deviation | None:
    where = syncer.places[part]
    return audit(where, syncer.settings, syncer.anchor[where.start : where.stop], log)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=3)
@given(st.sampled_from(UP), st.sampled_from(DOWN), st.integers(0, 2**31), st.data())
def test_an_honest_syncer_is_never_accused(mode: str, up: str, down: str, seed: int, data: st.DataObject) -> None:
    syncer = Syncer(settings_of(mode, up, down), NUMELS, seed)
    assert obstacle(syncer.settings) is None
    for _ in range(data.draw(st.integers(1, 8))):
        peers, delay = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
        syncer.version(peers, delay=delay, reverse=data.draw(st.booleans()))
    begin = data.draw(st.integers(0, len(syncer.logs[0]) - 1))
    for part, log in enumerate(syncer.logs):
        assert found(syncer, log[begin:], part) is None
        assert found(syncer, only_last(log[begin:]), part) is None


@pytest.mark.parametrize("mode", ["barrier", "delayed", "delayed barrier"])
@pytest.mark.parametrize("momentum", ["zeros", "stale"])
@pytest.mark.parametrize("master", ["goes on", "at the anchor"])
@pytest.mark.parametrize("down", ["e3m0", "fp32"])
def test_an_honest_heir_is_not_accused(mode: str, momentum: str, master: str, down: str) -> None:
    """Whatever it has of the outer state."""
    syncer = one_leaf(mode, down=down)
    for version in range(7):
        if version == 1:
            older = syncer.held.state.clone()
        if version == 4:
            syncer.held.state.momentum.copy_(older.momentum * (momentum == "stale"))
            if master != "goes on":
                syncer.held.master.copy_(syncer.anchor)
        syncer.version(3, delay=2, new_syncer=version == 4)
        assert version < 4 or found(syncer, only_last(syncer.logs[0])) is None
    assert found(syncer, syncer.logs[0]) is None


@pytest.mark.parametrize("mode", ["barrier", "barrier rda", "quorum"])
def test_sums_in_another_order_and_precision_are_honest(mode: str) -> None:
    """As hardware that fuses products with sums, or none that does, would round them."""
    syncer = one_leaf(mode)
    for _ in range(6):
        off = 1 + 2.0**-24 * torch.randn(LEAF, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
        syncer.version(4, lie=lambda master, off=off: master * off)  # half an ulp more or less
    assert found(syncer, syncer.logs[0]) is None


def moved_by(syncer: Syncer) -> float:
    """How far a usual version moves an element."""
    before = syncer.anchor.clone()
    syncer.version(4, delay=4)
    return float((syncer.anchor - before).pow(2).mean().sqrt())


@pytest.mark.parametrize(("mode", "down"), [*((mode, "int8") for mode in MODES), *(("barrier", down) for down in DOWN)])
def test_a_bias_of_a_tenth_of_the_usual_movement_is_proved(mode: str, down: str) -> None:
    syncer = one_leaf(mode, down=down)
    # Updates that carry values do not say how far the first of them moved the anchor.
    versions = 8 if down in ("int8", "e3m0") else 24
    usual = max(moved_by(syncer) for _ in range(versions))
    syncer.version(4, delay=4, lie=lambda master: master + 0.1 * usual)
    deviation = found(syncer, only_last(syncer.logs[0]))
    assert deviation is not None and deviation.version == versions
    assert "of fragment 0 moved by" in deviation.why and "its contributions give" in deviation.why


def test_a_log_proves_it_once_what_it_lacks_is_forgotten() -> None:
    syncer = one_leaf()
    for _ in range(40):
        usual = moved_by(syncer)
    syncer.version(4, lie=lambda master: master + 0.1 * usual)
    log = only_last(syncer.logs[0])
    steps = [seen.step for seen in log]
    enough = next(length for length in range(1, 40) if memory(syncer.settings, steps[-length:]) <= FORGOTTEN)
    assert 15 <= enough <= 20
    assert found(syncer, log[-enough - 1 :]) is not None
    assert found(syncer, log[-2:]) is None, "it cannot know the momentum"
    assert memory(syncer.settings, steps) == 0.0, "a log from version 0 on knows everything"


@pytest.mark.parametrize("altered", ["left out", "weights", "payload", "coarse", "scale"])
def test_a_head_that_misstates_what_was_merged_is_a_deviation(altered: str) -> None:
    syncer = one_leaf()
    for _ in range(3):
        syncer.version(4)
    log = only_last(syncer.logs[0])
    assert log[-1].counted is not None
    counted, update = list(log[-1].counted), log[-1].update.clone()
    match altered:
        case "left out":
            counted.pop()
        case "weights":
            counted[0] = replace(counted[0], weight=counted[0].weight + 1)
        case "scale":
            counted[0] = replace(counted[0], scale=0.9)
        case "payload":
            counted[0] = Counted(counted[1].payload, counted[0].weight)
        case "coarse":  # exponents so large that any value rounds to zero
            update[:4], update[4:] = 20, 0
    deviation = found(syncer, [*log[:-1], replace(log[-1], counted=counted, update=update)])
    assert deviation is not None
    if altered == "coarse":
        assert deviation.why == "int8 payload holds a block with a larger exponent than its values need"


def test_a_made_up_residual_passes_once_but_does_not_add_up() -> None:
    """A syncer may say that the update before lost half a step of each element, whatever it lost. An audit of several
    versions in a row knows that half a step was published since.
    """
    syncer = one_leaf("no momentum")
    for _ in range(2):
        syncer.version(4)

    def half_a_step_more(master: Tensor) -> Tensor:
        exponents = syncer.logs[0][-1].update[:4].view(torch.int8)
        return syncer.anchor + 0.49 * torch.ldexp(torch.ones(4), exponents).repeat_interleave(BLOCK)

    for _ in range(3):
        syncer.version(4, lie=half_a_step_more)
        assert found(syncer, only_last(syncer.logs[0])) is None
    in_a_row = [replace(seen, counted=None) for seen in syncer.logs[0][:2]] + syncer.logs[0][2:]
    deviation = found(syncer, in_a_row)
    assert deviation is not None and deviation.version > 2


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"flatten": 0.5}, "outer.flatten=0.5 mixes all values of a matrix"),
        ({"robust": "none"}, "outer.robust=none with outer.codec_up=int8 adds up chunks as they arrive"),
        ({"codec_up": "fp16"}, "outer.robust=auto with outer.codec_up=fp16 adds up chunks as they arrive"),
    ],
)
def test_settings_that_cannot_be_audited_are_named(others: dict[str, Any], why: str) -> None:
    assert str(obstacle(settings_of("barrier", **others))).startswith(why)


@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize("numel", [1, LEAF, CHUNK + 5, 2 * CHUNK])
def test_the_parts_cover_a_fragment_and_lie_in_its_chunks(merge: str, numel: int) -> None:
    [fragment] = partition({"w": numel}, 1)
    found_parts = parts(fragment, settings_of("barrier", merge=merge))
    assert [part.start for part in found_parts] == [0, *(part.stop for part in found_parts[:-1])]
    assert found_parts[-1].stop == numel
    assert all(part.start // CHUNK == (part.stop - 1) // CHUNK for part in found_parts)
    assert all(part.start % LEAF == 0 for part in found_parts)


@pytest.mark.parametrize(("count", "share", "members"), [(56, 0.02, 4), (2200, 0.01, 4), (5, 1.0, 2), (3, 1.0, 1)])
def test_all_members_together_pick_that_share_of_the_parts(count: int, share: float, members: int) -> None:
    rng, rounds = random.Random(1), 4000
    picked = Counter(part for _ in range(rounds * members) for part in pick(count, share, members, rng))
    assert sum(picked.values()) / rounds == pytest.approx(share * count, rel=0.05)
    assert set(picked) == set(range(count)) or rounds * share < 100
    assert all(0 <= part < count for part in picked)


@pytest.mark.parametrize(("count", "altered", "share"), [(56, 1, 0.04), (2200, 22, 0.01), (100, 1, 0.02)])
@pytest.mark.parametrize("certainty", [0.5, 0.95])
def test_a_liar_is_found_when_the_formula_says(count: int, altered: int, share: float, certainty: float) -> None:
    """In 200 seeded runs each; three members audit, and the fourth is the syncer, who does not audit itself."""
    members, found_after = 4, []
    for seed in range(200):
        rng = random.Random(seed)
        for version in range(1, 10**6):
            lies = set(rng.sample(range(count), altered))
            if any(lies & set(pick(count, share * members / (members - 1), members, rng)) for _ in range(members - 1)):
                found_after.append(version)
                break
    stated = versions_until(certainty, count, altered, share)
    within = sum(versions <= stated for versions in found_after) / len(found_after)
    assert within >= certainty - 3 * math.sqrt(certainty * (1 - certainty) / 200)


def test_the_memory_of_a_window_is_its_last_momentum_step() -> None:
    delayed = settings_of("delayed")
    steps = [OuterStep(version, 1, version % 4, 4) for version in range(4, 84)]
    assert memory(delayed, steps[:3]) == 1.0
    left = [memory(delayed, steps[: 4 * momentum_steps]) for momentum_steps in range(1, 21)]
    assert left[-1] < FORGOTTEN and all(later < 0.6 * earlier for earlier, later in pairwise(left))
