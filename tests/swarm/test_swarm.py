"""Nodes over real libp2p streams on loopback: rounds and refusals."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.dht.node import DHTNode
from torch import Tensor

from diloco.errors import SwarmError
from tests.support.peers import Crowd, Trainee, eventually, seeded, together
from tests.support.slow import slow

# two of them over one chunk
SHAPES = {"embed": (300, 1000), "layer": (37, 13), "norm": (5,), "head": (1000, 300)}
SMALL = {"embed": (60, 100), "layer": (37, 13), "norm": (5,)}
ROUNDS = 3
# Each step rounds the anchor by half an ulp, 2.4e-7 below 8. The momentum is made of how far the
# anchor moved, so each later step repeats beta / (1 + beta) of that: all in all at most 3 * 2.4e-7
# / (1 - 0.9 / 1.9).
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


def train(crowd: Crowd, peers: list[Trainee], rounds: int, tokens: list[int]) -> None:
    """So many rounds, all peers at once."""

    def work(index: int, peer: Trainee) -> None:
        for round_ in range(rounds):
            peer.round(step_of(index, round_, crowd.shapes), tokens[index])

    together(*(lambda pair=pair: work(*pair) for pair in enumerate(peers)))


def reference(crowd: Crowd, tokens: list[int], rounds: int) -> dict[str, Tensor]:
    """torch.optim.SGD with Nesterov momentum on the token-weighted mean, in float64."""
    start, rates = seeded(crowd.shapes, 0), (crowd.outer["lr"], crowd.outer["momentum"])
    parameters = {name: value.double().requires_grad_() for name, value in start.items()}
    outer = torch.optim.SGD(parameters.values(), *rates, nesterov=True)
    for round_ in range(rounds):
        steps = [step_of(peer, round_, crowd.shapes) for peer in range(len(tokens))]
        for name, parameter in parameters.items():
            pairs = zip(tokens, steps, strict=True)
            weighted = torch.stack([count * step[name].double() for count, step in pairs])
            parameter.grad = weighted.sum(0) / sum(tokens)
        outer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("fragments", "codec", "tolerance"),
    [(7, "fp32", ROUNDED), (4, "int8", 4e-3), slow(1, "e3m0", 4e-2)],
)
def test_four_peers_end_with_one_anchor_that_nesterov_on_the_weighted_mean_gives(
    crowds: Any, fragments: int, codec: str, tolerance: float
) -> None:
    crowd = crowds(SHAPES, fragments=fragments, codec_up=codec, codec_down=codec)
    peers, tokens = crowd.start(4), [100, 200, 300, 50]
    train(crowd, peers, ROUNDS, tokens)
    crowd.finish(*peers)
    assert len({peer.digest for peer in peers}) == 1
    assert {tuple(peer.versions) for peer in peers} == {(ROUNDS,) * fragments}
    assert {peer.node.clock()[1] for peer in peers} == {ROUNDS * sum(tokens)}
    assert sorted(one for peer in peers for one in peer.authors()) == [*range(fragments)]
    for name, expected in reference(crowd, tokens, ROUNDS).items():
        for peer in peers:  # the local parameters are the anchor
            here = peer.parameters[name].double()
            torch.testing.assert_close(here, expected, rtol=0, atol=tolerance)


def test_a_copy_of_a_running_peer_is_refused_until_that_has_ended(
    crowds: Any, tmp_path: Path
) -> None:
    """As with a copied run directory or machine image. Its old address, where nobody is, stands in
    nobody's way."""
    crowd, key = crowds(), tmp_path / "copy.key"
    first, second = crowd.start(2)
    own = first.node._options.identity_path
    said = (
        f"^swarm.initial_peers=.* has the identity of this peer; .* than swarm.identity_path={own}"
    )
    with pytest.raises(SwarmError, match=said) as caught:
        crowd.peer(first.address, identity_path=own).start()
    assert caught.value.exit_code == 3
    shutil.copy(second.node._options.identity_path, key)
    said = "refused this peer: its identity is in use by a running peer; give"
    with pytest.raises(SwarmError, match=said):
        crowd.peer(first.address, identity_path=key).start()
    train(crowd, [first, second], 2, [100, 100])
    assert first.digest == second.digest and first.versions == [2] * 4
    second.close()  # without a goodbye
    again = crowd.peer(second.address, first.address, identity_path=key).start()
    eventually(lambda: again.members.get(first.peer_id), "the first peer to take it in")


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
