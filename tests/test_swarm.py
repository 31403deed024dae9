"""Nodes over real libp2p streams on loopback: rounds, joiners, deaths, handovers, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.errors import SwarmError
from diloco.outer.replica import OuterState
from tests.swarm_helpers import Crowd, Trainee, eventually, seeded, together

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(90)]

SHAPES = {"embed": (300, 1000), "layer": (37, 13), "norm": (5,), "head": (1000, 300)}  # two of them over one chunk
SMALL = {"embed": (60, 100), "layer": (37, 13), "norm": (5,)}
ROUNDS = 3


@pytest.fixture
def crowds(tmp_path: Path) -> Iterator[Any]:
    """Makes swarms that are closed in the end, whatever happened."""
    made: list[Crowd] = []

    def make(shapes: Any = SMALL, **outer: Any) -> Crowd:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Crowd(directory, shapes, **outer))
        return made[-1]

    yield make
    for crowd in made:
        crowd.close()


def step_of(peer: int, round_: int, shapes: Any = SMALL) -> dict[str, Tensor]:
    """What the inner steps of a peer subtract in a round."""
    return {name: 0.01 * value for name, value in seeded(shapes, 1000 + 10 * peer + round_).items()}


def train(crowd: Crowd, peers: list[Trainee], rounds: range, tokens: list[int] | None = None) -> None:
    """These rounds, all peers at once."""

    def work(index: int, peer: Trainee) -> None:
        for round_ in rounds:
            peer.round(step_of(index, round_, crowd.shapes), tokens[index] if tokens else 100)

    together(*(lambda pair=pair: work(*pair) for pair in enumerate(peers)))


def reference(crowd: Crowd, tokens: list[int], rounds: int) -> dict[str, Tensor]:
    """torch.optim.SGD with Nesterov momentum on the token-weighted mean, in float64; it moves parameters by up to 0.2."""
    parameters = {name: value.double().requires_grad_() for name, value in seeded(crowd.shapes, 0).items()}
    outer = torch.optim.SGD(parameters.values(), crowd.outer["lr"], crowd.outer["momentum"], nesterov=True)
    for round_ in range(rounds):
        steps = [step_of(peer, round_, crowd.shapes) for peer in range(len(tokens))]
        for name, parameter in parameters.items():
            weighted = [count * step[name].double() for count, step in zip(tokens, steps, strict=True)]
            parameter.grad = sum(weighted[1:], weighted[0]) / sum(tokens)
        outer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


class Background:
    """A job in a thread; its failure is what the test is interested in."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._job = job
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error

    def error(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._error


def outer_of(peers: list[Trainee]) -> dict[int, OuterState]:
    """Outer states by fragment, whoever holds them."""
    return {fragment: state for peer in peers for fragment, state in dict(peer.replica.outer).items()}


def everyone_got(sender: Trainee, syncers: list[Trainee]) -> bool:
    """Whether the sender's contributions to all fragments of these syncers are whole."""
    collecting = [syncer for peer in syncers for syncer in peer.node.protocol.syncers.values()]
    return all(syncer.has_arrived(sender.peer_id) for syncer in collecting)


# -- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [1, 4, 7])
@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-6), ("int8", 4e-3), ("e3m0", 4e-2)])
def test_four_peers_end_with_one_anchor_that_nesterov_on_the_weighted_mean_gives(
    crowds: Any, fragments: int, codec: str, tolerance: float
) -> None:
    crowd = crowds(SHAPES, fragments=fragments, codec_up=codec, codec_down=codec)
    peers, tokens = crowd.start(4), [100, 200, 300, 50]
    train(crowd, peers, range(ROUNDS), tokens)
    crowd.finish(*peers)
    assert len({peer.digest for peer in peers}) == 1
    assert {tuple(peer.node.protocol.versions) for peer in peers} == {(ROUNDS,) * fragments}
    assert {peer.node.protocol.applied_tokens for peer in peers} == {ROUNDS * sum(tokens)}
    assert sorted(fragment for peer in peers for fragment in peer.holds()) == list(range(fragments))
    for name, expected in reference(crowd, tokens, ROUNDS).items():
        for peer in peers:  # the local parameters are the anchor
            torch.testing.assert_close(peer.parameters[name].double(), expected, rtol=0, atol=tolerance)


def test_the_same_int8_run_twice_gives_the_same_bits_whatever_the_order_of_arrival(crowds: Any) -> None:
    digests = set()
    for _ in range(2):
        crowd = crowds(fragments=3, codec_up="int8", codec_down="int8")
        peers = crowd.start(3)
        train(crowd, peers, range(ROUNDS))
        crowd.finish(*peers)
        digests |= {peer.digest for peer in peers}
    assert len(digests) == 1


# -- joining and leaving ----------------------------------------------------------------------------------------------


def test_a_joiner_with_other_parameters_takes_the_swarm_s_and_then_counts(crowds: Any) -> None:
    crowd = crowds(codec_up="int8", codec_down="int8")
    peers = crowd.start(2)
    train(crowd, peers, range(2))
    joiner = crowd.peer(peers[0].address, seed=7).start()
    assert joiner.digest != peers[0].digest
    assert joiner.begin() == 10
    assert joiner.digest == peers[0].digest
    assert (joiner.version, joiner.node.protocol.applied_tokens) == (2, 400)
    for name, parameter in joiner.parameters.items():
        assert torch.equal(parameter, peers[1].parameters[name])
    train(crowd, [*peers, joiner], range(2, 4))
    crowd.finish(*peers, joiner)
    assert {peer.node.protocol.applied_tokens for peer in (*peers, joiner)} == {400 + 600}
    assert len({peer.digest for peer in (*peers, joiner)}) == 1


def test_a_leaver_hands_its_outer_state_over_bit_for_bit(crowds: Any) -> None:
    crowd = crowds(fragments=5, codec_up="int8", codec_down="e3m0")
    peers = crowd.start(3)
    train(crowd, peers, range(2))
    leaver, *others = peers
    handed = {fragment: (state.master.clone(), state.momentum.clone()) for fragment, state in outer_of([leaver]).items()}
    assert handed and all(bool(momentum.any()) for _, momentum in handed.values())
    kept = [peer.holds() for peer in others]
    leaver.node.leave(False)
    leaver.node.close()
    assert not leaver.said("gave_up_waiting")
    eventually(lambda: sorted(outer_of(others)) == list(range(5)), "the successors to hold everything")
    for fragment, (master, momentum) in handed.items():
        state = outer_of(others)[fragment]
        assert not torch.equal(master, leaver.replica.anchors[fragment]), "there is a residual to hand over"
        assert torch.equal(state.master, master) and torch.equal(state.momentum, momentum)
    assert all(set(before) <= set(peer.holds()) for before, peer in zip(kept, others, strict=True))
    assert [claim["term"] for claim in others[0].said("claim") if claim["fragment"] in handed][-1] == 2
    train(crowd, others, range(2, 3))
    crowd.finish(*others)
    assert others[0].digest == others[1].digest


def test_a_peer_without_accelerator_holds_the_fragments_and_follows(crowds: Any) -> None:
    crowd = crowds(codec_up="int8", codec_down="int8")
    host = crowd.peer(trains=False).start()
    eventually(lambda: host.node.protocol.state == "ready", "the host to hold the model")
    trainers = [crowd.peer(host.address, seed=seed, min_peers=3) for seed in (1, 2)]
    together(*(trainer.start for trainer in trainers))
    together(*(trainer.begin for trainer in trainers))
    assert host.digest == trainers[0].digest == trainers[1].digest
    train(crowd, trainers, range(ROUNDS))
    assert host.holds() == [0, 1, 2, 3] and not trainers[0].holds()
    follower = crowd.peer(host.address, seed=3, trains=False).start()
    crowd.finish(*trainers)
    eventually(lambda: follower.digest == trainers[0].digest, "the second host to follow")
    assert host.digest == trainers[0].digest == trainers[1].digest
    assert (host.version, host.node.protocol.applied_tokens) == (ROUNDS, ROUNDS * 200)
    assert (follower.version, follower.node.protocol.applied_tokens) == (ROUNDS, ROUNDS * 200)


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closes without a word", "loses its daemon"])
def test_others_go_on_when_a_peer_dies_amid_a_round_and_take_its_fragments_over(crowds: Any, end: str) -> None:
    crowd = crowds(fragments=6)
    victim, *others = crowd.start(4)
    train(crowd, [victim, *others], range(2))
    lost_fragments = victim.holds()
    assert lost_fragments
    exchanging = Background(lambda: victim.round(step_of(0, 2)))
    eventually(lambda: everyone_got(victim, others), "its contributions to arrive")
    if end == "closes without a word":
        victim.node.close()
    else:
        victim.node._p2p._child.kill()
    train(crowd, others, range(2, 4))
    crowd.finish(*others)
    victim.node.close()
    assert isinstance(exchanging.error(), ConnectionError)
    assert {tuple(peer.node.protocol.versions) for peer in others} == {(4,) * 6}
    assert len({peer.digest for peer in others}) == 1
    assert [peer.said("lost")[0]["peer"] for peer in others] == [victim.peer_id] * 3
    assert sorted(outer_of(others)) == list(range(6))
    for peer in others:
        terms = {claim["fragment"]: claim["term"] for claim in peer.said("claim")}
        assert terms == {fragment: 2 if fragment in lost_fragments else 1 for fragment in range(6)}
    assert sum(peer.node.protocol.takeovers for peer in others) == len(lost_fragments)
