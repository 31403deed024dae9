"""A model that is attached to a swarm, in virtual time: its states, its accounts, and what it does
between rounds."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.swarm import Swarm
from diloco.config import compose
from diloco.errors import ConfigError
from diloco.outer.optimizer import OuterOptimizer, OuterStep
from diloco.rundir.events import EventText
from diloco.rundir.summary import PhaseTimer
from tests.support import loops as support
from tests.support.loops import Direct, LastFlight, Loop, train


@pytest.mark.parametrize("outer", [{}, {"fragments": 2, "overlap": 1}, {"quorum": 2}])
def test_a_loop_of_ones_own_trains_again_after_each_exchange(outer: dict[str, Any]) -> None:
    """Others believe what a peer says of itself: that its round began, and from which heads."""
    seen: list[tuple[bool, bool, int]] = []

    def work(loop: Loop) -> None:
        for _ in range(8):
            loop.step()
            core = loop.node.core.facts
            trains = core.trains_now and not core.says_waits
            seen.append((loop.sync.exchanged, trains, loop.sync.version))
        loop.pass_s(0.5)  # the last word of the other one is here
        if not outer:
            [other] = core.members.all()
            assert other.tips == {0: core.control.tip.key} and core.control.tip.head.number == 2
        loop.pass_s(0.5)

    train("ab", work, sync_every=4, **outer)
    assert {trains for exchanged, trains, _ in seen if exchanged} == {True}
    assert max(version for _, _, version in seen) >= 1


def test_a_swarm_says_its_run_its_peers_and_its_round() -> None:
    texts: list[str] = []

    def work(loop: Loop) -> None:
        loop.step(4)
        texts.append(repr(loop.swarm))

    loops = train("ab", work, sync_every=4)
    assert texts == ["Swarm(run_id='run', peers=2, round=1)"] * 2
    assert repr(loops["a"].swarm).endswith("round=1, left)")


def test_what_is_discarded_of_the_last_contributions_is_counted() -> None:
    """A loop of one's own ends while contributions are on their way."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime: Any = Direct(node := LastFlight())
    swarm = Swarm(run_id="run", identity=Path("a"), sync_every=4, overlap=2, runtime=runtime)
    with swarm.attach(model, optimizer, phases=PhaseTimer()) as sync:
        for _ in range(4):  # the fourth sends, and the sixth would adopt
            optimizer.step()
    assert node.said.index("finish") < node.said.index("leave")
    assert (sync.discarded_tokens, sync.version, sync.applied_tokens) == (7, 3, 30)


@pytest.mark.parametrize(
    ("seeds", "times", "codec"), [("aab", 1, "int8"), ("aab", 1, "e3m0"), ("abc", 0, "int8")]
)
def test_two_peers_that_train_on_the_same_data_are_named_once(
    seeds: str, times: int, codec: str
) -> None:
    def work(loop: Loop) -> None:
        loop.noise = torch.Generator().manual_seed(ord(seeds["abc".index(loop.name)]))
        loop.step(12)

    loops = train("abc", work, sync_every=4, width=2048, codec_up=codec)
    found = [fields for loop in loops.values() for fields in loop.told("same_data")]
    assert len(found) == times
    for fields in found:
        assert (fields["names"], fields["peers"], fields["version"]) == (["a", "b"], ["a", "b"], 1)
        assert fields["cosine"] > 0.9999  # type: ignore[operator]


def test_peers_whose_numbers_stand_for_other_text_are_told_of_each_other() -> None:
    data = {"a": f"{1:016x}-24x16", "b": f"{2:016x}-25x16", "c": f"{1:016x}-24x16", "d": ""}
    loops = train("abcd", lambda loop: loop.step(5), sync_every=4, data=data)
    told = [sorted(fields["peer"] for fields in loops[name].told("other_data")) for name in "abcd"]
    assert told == [["b"], ["a", "c"], ["b"], []]
    lines = [EventText()("other_data", it) for it in loops["a"].told("other_data")]
    line = "b ...b has other data (25 sequences, 00000000; here 24 sequences, 00000000): peers"
    assert len(lines) == 1 and str(lines[0]).startswith(f"{line} share sequences out by ")


def test_who_goes_on_after_the_planned_rounds_is_told_once() -> None:
    def told(rounds: int) -> list[list[dict[str, Any]]]:
        loops = train("ab", lambda loop: loop.step(16), sync_every=4, rounds=rounds)
        return [loop.told("rounds_over") for loop in loops.values()]

    assert told(2) == 2 * [[{"rounds": 2, "version": 3}]] and told(4) == [[], []]


@pytest.mark.parametrize("state", ["float64", "bfloat16", "meta", "deterministic"])
def test_what_torch_is_set_to_means_nothing_inside(state: str) -> None:
    def change(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        torch.set_grad_enabled(False)
        if state == "meta":
            torch.set_default_device("meta")  # in this thread
        elif state == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            torch.set_default_dtype(getattr(torch, state))
        return {}

    def anchors(**more: Any) -> set[str]:
        torch.manual_seed(0)
        loops = train("ab", lambda loop: loop.step(9), sync_every=4, codec_down="int8", **more)
        return {loop.sync.anchor_digest() for loop in loops.values()}

    expected = anchors()
    try:
        assert anchors(attach=change) == expected and len(expected) == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_what_is_written_back_beside_the_optimizer_is_an_error(share: float) -> None:
    """Such as an average of the parameters; a part of what was given may go: weights are clipped,
    or decay."""

    def work(loop: Loop) -> None:
        for _ in range(12):
            before = [one.clone() for one in loop.sync.parameters.values()]
            loop.step()
            if loop.sync.exchanged:
                for one, kept in zip(loop.sync.parameters.values(), before, strict=True):
                    one.detach().copy_(kept.lerp(one, share))

    said = "^model: between two steps, something went back to the parameters of be"
    with pytest.raises(ConfigError, match=said) if share < 0.5 else nullcontext():
        train("ab", work, sync_every=4, lr=0.1, momentum=0.0)


@pytest.mark.parametrize(("scale", "exchanges"), [(0.0, 1), (10.0, 0)])
def test_an_optimizer_with_masters_is_named_after_one_exchange(
    scale: float, exchanges: int
) -> None:
    """Its steps write copies into the model that know nothing of the swarm. To join is an exchange,
    too, where the parameters of peers differ."""

    def with_masters(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own = optimizer.param_groups[0]["params"]
        masters = {one: one.detach().mul_(scale).clone() for one in own}

        def write_back(*_: object) -> None:
            for one, master in masters.items():
                assert one.grad is not None
                one.detach().copy_(master.sub_(one.grad, alpha=0.1))

        optimizer.register_step_post_hook(write_back)
        return {}

    versions: list[int] = []

    def work(loop: Loop) -> None:
        loop.noise = torch.Generator().manual_seed(ord(loop.name))
        for _ in range(24):
            loop.step()
            versions.append(loop.sync.version)

    said = "^optimizer=SGD returns to a copy of the parameters that it keeps: a step took back "
    with pytest.raises(ConfigError, match=said):
        train("ab", work, sync_every=12, width=64, lr=0.7, attach=with_masters)
    assert max(versions) == exchanges


def test_of_different_plans_the_longest_counts_for_all_from_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, seen, rates = {"a": 2, "b": 6, "c": 4}, set(), OuterOptimizer.rates

    def watched(optimizer: OuterOptimizer, step: OuterStep) -> tuple[float, float]:
        if optimizer.settings.rounds is not None:  # else it is a bound that no plan changes
            seen.add((step.version, optimizer.settings.rounds))
        return rates(optimizer, step)

    monkeypatch.setattr(OuterOptimizer, "rates", watched)
    monkeypatch.setattr(
        support, "Swarm", lambda **settings: Swarm(**settings, rounds=plans[settings["name"]])
    )
    loops = train("abc", lambda loop: loop.step(12), sync_every=4)
    assert seen == {(0, 6), (1, 6), (2, 6)}
    assert not any(loop.told("rounds_over") for loop in loops.values())


# -- between two rounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_minute_of_checkpointing_costs_no_contribution(slow: str) -> None:
    """Nor does one of evaluating. One of the two is syncer; what is written stays one version,
    whoever is slow."""

    def work(loop: Loop) -> None:
        for _ in range(12):
            loop.step()
            if loop.sync.exchanged and loop.name == slow:
                with loop.sync.anchored():
                    loop.pass_s(60.0)
                with loop.sync.checkpointing() as saved:
                    tensors = [*saved.anchors]
                    for master, state in saved.outer.values():
                        tensors += [master, *state.vectors]
                    before = [tensor.clone() for tensor in tensors]
                    loop.pass_s(60.0)
                    assert all(map(torch.equal, tensors, before))
                    assert list(saved.tips) == [f.tip for f in loop.node.core.facts.fragments]
        assert loop.sync.version == 3

    for loop in train("ab", work, sync_every=4, fragments=2).values():
        assert loop.told("missing") == loop.told("discarded") == []
        assert loop.sync.tokens == 12 and loop.sync.applied_tokens == 24


@pytest.mark.parametrize("outer", [{}, {"overlap": 2}, {"quorum": 1}])
def test_an_interrupted_peer_can_evaluate_the_anchor(outer: dict[str, Any]) -> None:
    """After it has left."""

    def work(loop: Loop) -> None:
        loop.step(9)
        loop.sync.interrupt()
        loop.step()
        assert loop.sync.interrupted

    def values() -> torch.Tensor:
        return torch.cat([parameter.flatten() for parameter in sync.parameters.values()])

    sync = train("a", work, sync_every=4, **outer)["a"].sync
    assert sync.node is not None
    local = values()
    with sync.anchored():
        if outer:  # at a barrier they differ from it only in the middle of a round
            assert torch.equal(
                values().sort().values, sync.node.node.replica.anchors[0].sort().values
            )
            assert not torch.equal(values(), local)
    assert torch.equal(values(), local)


def test_the_settings_of_the_outer_step_are_one_object_from_the_run_to_the_tensors() -> None:
    config = compose(["experiment=smoke"])

    def work(loop: Loop) -> None:
        assert loop.sync.outer is loop.node.replica.settings is config.outer

    assert config.manifest().outer is config.outer
    train("a", work, outer=config.outer)
