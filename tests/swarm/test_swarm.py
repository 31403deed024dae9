"""Nodes over real libp2p streams on loopback: rounds and refusals."""

from __future__ import annotations

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


def train(
    crowd: Crowd, peers: list[Trainee], rounds: range, tokens: list[int] | None = None
) -> None:
    """These rounds, all peers at once."""

    def work(index: int, peer: Trainee) -> None:
        for round_ in rounds:
            peer.round(step_of(index, round_, crowd.shapes), tokens[index] if tokens else 100)

    together(*(lambda pair=pair: work(*pair) for pair in enumerate(peers)))


def reference(crowd: Crowd, tokens: list[int], rounds: int) -> dict[str, Tensor]:
    """torch.optim.SGD with Nesterov momentum on the token-weighted mean, in float64."""
    parameters = {
        name: value.double().requires_grad_() for name, value in seeded(crowd.shapes, 0).items()
    }
    outer = torch.optim.SGD(
        parameters.values(), crowd.outer["lr"], crowd.outer["momentum"], nesterov=True
    )
    for round_ in range(rounds):
        steps = [step_of(peer, round_, crowd.shapes) for peer in range(len(tokens))]
        for name, parameter in parameters.items():
            weighted = [
                count * step[name].double() for count, step in zip(tokens, steps, strict=True)
            ]
            parameter.grad = sum(weighted[1:], weighted[0]) / sum(tokens)
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
    train(crowd, peers, range(ROUNDS), tokens)
    crowd.finish(*peers)
    assert len({peer.digest for peer in peers}) == 1
    assert {tuple(peer.versions) for peer in peers} == {(ROUNDS,) * fragments}
    assert {peer.node.clock()[1] for peer in peers} == {ROUNDS * sum(tokens)}
    assert sorted(fragment for peer in peers for fragment in peer.authors()) == list(
        range(fragments)
    )
    for name, expected in reference(crowd, tokens, ROUNDS).items():
        for peer in peers:  # the local parameters are the anchor
            torch.testing.assert_close(
                peer.parameters[name].double(), expected, rtol=0, atol=tolerance
            )


def test_an_identity_of_a_running_peer_is_refused(crowds: Any) -> None:
    crowd = crowds()
    [first] = crowd.start(1)
    own_key = first.node._options.identity_path
    said = (
        "^swarm.initial_peers=.* has the identity of this peer; .* another file than"
        f" swarm.identity_path={own_key}"
    )
    with pytest.raises(SwarmError, match=said) as caught:
        crowd.peer(first.address, identity_path=own_key).start()
    assert caught.value.exit_code == 3


def test_a_copy_of_a_running_peer_is_refused_until_that_has_ended(
    crowds: Any, tmp_path: Path
) -> None:
    """As with a copied run directory or machine image. Its old address, where nobody is, stands in
    nobody's way."""
    crowd, key = crowds(), tmp_path / "copy.key"
    first, second = crowd.start(2)
    shutil.copy(second.node._options.identity_path, key)
    with pytest.raises(
        SwarmError, match=r"refused this peer: its identity is in use by a running peer; give"
    ):
        crowd.peer(first.address, identity_path=key).start()
    train(crowd, [first, second], range(2))
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
