"""Nodes over real libp2p streams on loopback: rounds, joiners, deaths, refusals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.dht.node import DHTNode
from torch import Tensor

from diloco.errors import DilocoError, SwarmError
from diloco.outer.held import Held
from tests.support.peers import Crowd, Trainee, eventually, seeded, together
from tests.support.slow import slow

SHAPES = {"embed": (300, 1000), "layer": (37, 13), "norm": (5,), "head": (1000, 300)}  # two of them over one chunk
SMALL = {"embed": (60, 100), "layer": (37, 13), "norm": (5,)}
ROUNDS = 3
# Each step rounds the anchor by half an ulp, 2.4e-7 below 8. The momentum is made of how far the anchor moved, so each
# later step repeats beta / (1 + beta) of that: all in all at most 3 * 2.4e-7 / (1 - 0.9 / 1.9).
ROUNDED = 1.4e-6


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
    """torch.optim.SGD with Nesterov momentum on the token-weighted mean, in float64."""
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


def outer_of(peers: list[Trainee]) -> dict[int, Held]:
    """Outer states by fragment, whoever holds them."""
    return {fragment: state for peer in peers for fragment, state in dict(peer.replica.held).items()}


def payload_bytes(peer: Trainee) -> int:
    """What a peer sends of its pseudo-gradient: everything but the fragments it holds."""
    others = [fragment for fragment in range(len(peer.replica.fragments)) if fragment not in peer.holds()]
    return sum(
        peer.replica.payload_nbytes(fragment, chunk)
        for fragment in others
        for chunk in range(len(peer.replica.chunks[fragment]))
    )


# -- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragments", "codec", "tolerance"), [(7, "fp32", ROUNDED), (4, "int8", 4e-3), slow(1, "e3m0", 4e-2)]
)
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


# -- joining and leaving ----------------------------------------------------------------------------------------------


def test_a_joiner_with_other_parameters_takes_the_swarm_s_and_then_counts(crowds: Any) -> None:
    crowd = crowds(codec_up="int8", codec_down="int8")
    peers = crowd.start(2)
    train(crowd, peers, range(2))
    joiner = crowd.peer(peers[0].address, seed=7).start()
    assert joiner.digest != peers[0].digest
    assert joiner.begin() == 0
    assert joiner.digest == peers[0].digest
    assert (joiner.version, joiner.node.protocol.applied_tokens) == (2, 400)
    for name, parameter in joiner.parameters.items():
        assert torch.equal(parameter, peers[1].parameters[name])
    eventually(lambda: all(peer.sees(joiner, "training") for peer in peers), "the others to hear that it trains")
    train(crowd, [*peers, joiner], range(2, 4))
    crowd.finish(*peers, joiner)
    assert {peer.node.protocol.applied_tokens for peer in (*peers, joiner)} == {400 + 600}
    assert len({peer.digest for peer in (*peers, joiner)}) == 1


# -- without a barrier ------------------------------------------------------------------------------------------------


def test_training_goes_on_while_an_update_is_on_its_way(crowds: Any) -> None:
    crowd = crowds(fragments=2, overlap=3, mixing=0.5, staggered=True)
    peers = crowd.start(2)
    start = {name: value.clone() for name, value in peers[0].parameters.items()}
    for peer, size in zip(peers, (0.1, 0.3), strict=True):
        for parameter in peer.parameters.values():
            parameter.sub_(size)
        peer.call(peer.node.send({0: (1, 100), 1: (1, 100)}))
        for parameter in peer.parameters.values():
            parameter.sub_(1.0)  # inner steps that the contribution does not see
    outcomes = together(*(lambda peer=peer: peer.call(peer.node.receive([0, 1])) for peer in peers))
    assert [(outcome.version, outcome.discarded_tokens) for outcome in outcomes] == [(1, 0)] * 2
    step = 0.7 * 1.9 * 0.2  # Nesterov from rest on the mean of both
    for peer, size in zip(peers, (0.1, 0.3), strict=True):
        for name, parameter in peer.parameters.items():
            expected = 0.5 * (start[name] - step) + 0.5 * (start[name] - size - 1.0)
            torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)
    assert peers[0].digest == peers[1].digest
    crowd.finish(*peers)


def test_sparse_contributions_end_with_one_anchor_on_all_peers(crowds: Any) -> None:
    crowd = crowds(codec_up="topk", codec_down="int8", error_feedback=0.95, lr=1.0, momentum=0.0)
    peers = crowd.start(3)
    train(crowd, peers, range(ROUNDS))
    crowd.finish(*peers)
    assert len({peer.digest for peer in peers}) == 1
    assert {peer.node.protocol.applied_tokens for peer in peers} == {3 * ROUNDS * 100}


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_others_go_on_when_a_peer_dies_amid_a_round_and_take_its_fragments_over(crowds: Any) -> None:
    crowd = crowds(fragments=6)
    victim, *others = crowd.start(4)
    train(crowd, [victim, *others], range(2))
    lost_fragments = victim.holds()
    assert lost_fragments
    sent = victim.node.traffic.bytes_sent + payload_bytes(victim)
    exchanging = Background(lambda: victim.round(step_of(0, 2)))
    eventually(lambda: victim.node.traffic.bytes_sent > sent, "its contributions to be on their way")
    victim.node.context.transport._p2p._child.kill()
    train(crowd, others, range(2, 4))
    crowd.finish(*others)
    victim.close()
    assert isinstance(exchanging.error(), SwarmError)
    assert {tuple(peer.node.protocol.versions) for peer in others} == {(4,) * 6}
    assert len({peer.digest for peer in others}) == 1
    assert [peer.said("lost")[0]["peer"] for peer in others] == [victim.peer_id] * 3
    assert sorted(outer_of(others)) == list(range(6))
    assert all(peer.terms() == {f: 2 if f in lost_fragments else 1 for f in range(6)} for peer in others)
    assert sum(peer.node.protocol.takeovers for peer in others) == len(lost_fragments)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_addresses_that_cannot_be_used_are_named(crowds: Any, tmp_path: Path) -> None:
    crowd = crowds()
    [first] = crowd.start(1)
    own_key = first.node._options.identity_path
    for addresses, options, start in (
        (
            [first.address],
            {"identity_path": own_key},
            f"swarm.identity_path={own_key} is in use by a running peer; give this one another file",
        ),
        (["/ip4/127.0.0.1"], {}, "swarm.initial_peers: '/ip4/127.0.0.1' is not a peer address: it is damaged"),
    ):
        with pytest.raises(DilocoError) as caught:
            crowd.peer(*addresses, **options).start()
        assert str(caught.value).startswith(start)
        assert caught.value.exit_code == (2 if "not a peer address" in start else 3)


def test_a_libp2p_node_that_is_no_peer_of_the_run_is_told_from_one(crowds: Any) -> None:
    async def join_a_stranger() -> None:
        stranger = await DHTNode.create()
        try:
            [address] = [str(one) for one in await stranger.protocol.p2p.get_visible_maddrs()]
            with pytest.raises(SwarmError, match=r"no diloco peer of run\.id=crowd is there"):
                await asyncio.to_thread(crowds().peer(address).start)
        finally:
            await stranger.shutdown()

    asyncio.run(join_a_stranger())
