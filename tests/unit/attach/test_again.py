"""A program that fails and tries again: its peer has left, and comes back as itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.swarm import Swarm
from diloco.errors import JoinError, SwarmError
from tests.support.loops import Direct, LastFlight

HERE = "/ip4/127.0.0.1/tcp/{}/p2p/QmYMpufpDR5Jw7KpaDaXFfsm7RMHbAE1kdXG6X2mJmHKsZ"


class Network:
    """Where peers of this process come; each has a node of its own."""

    def __init__(self) -> None:
        self.nodes: list[LastFlight] = []
        self.refusals: Iterator[SwarmError] = iter([])
        self.called: list[Any] = []

    def look(self, addresses: Any, identity: Path, gate: object) -> None:
        self.called.append(addresses)
        raise SwarmError("nobody")

    def __call__(self) -> Any:
        node, network = LastFlight(), self
        node.addresses = [HERE.format(4100 + len(self.nodes))]
        node.core.others_at = lambda: [HERE.format(4000)]

        class Runtime(Direct):
            def open(self, *arguments: Any) -> Any:
                for error in network.refusals:
                    raise error
                network.nodes.append(node)
                return node

        return Runtime(node)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr("diloco.attach.swarm.NodeThread", made)
    monkeypatch.setattr("diloco.attach.bootstrap_peers.inspect_swarm", made.look)
    return made


RUNS = count()


def peer(**settings: Any) -> Swarm:
    return Swarm(**{"run_id": f"run {next(RUNS)}", "sync_every": 4, "quiet": True, **settings})


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def attach(swarm: Swarm) -> Any:
    return swarm.attach(*made())


def test_a_second_try_is_the_same_peer_and_calls_whom_it_knew(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the address where it was, if the port is free. Two at once are two, though."""
    keys, heard, run = (
        set(),
        [],
        {"run_id": "again", "on_event": lambda kind, fields: heard.append(kind)},
    )
    for _ in range(2):
        with pytest.raises(RuntimeError), peer(**run) as swarm, attach(swarm):
            keys.add(swarm._key_file())
            raise RuntimeError
    assert len(keys) == 1 and network.called == [[HERE.format(4000)]] and heard == ["alone_again"]
    assert swarm.network.listen == ("/ip4/127.0.0.1/tcp/4100",)
    assert all(node.said.index("leave") < node.said.index("close") for node in network.nodes)
    one, two = peer(**run), peer(**run)
    assert one._key_file() != two._key_file()


def test_who_was_told_an_address_calls_again_for_a_while(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it comes back; the first time, and when it is refused, it ends at once."""
    monkeypatch.setattr("diloco.attach.node_link.AGAIN_S", 0.0)
    silent = SwarmError("swarm.initial_peers=x cannot be reached")
    run = {"run_id": "told", "address": HERE.format(5000)}
    heard: list[str] = []
    network.refusals = iter([silent])
    with pytest.raises(JoinError), peer(**run) as swarm, attach(swarm):
        pass
    with peer(**run) as swarm, attach(swarm):
        pass
    network.refusals = iter([silent, silent])
    with (
        peer(**run, on_event=lambda kind, fields: heard.append(kind)) as swarm,
        attach(swarm) as sync,
    ):
        assert sync.node is network.nodes[-1] and heard == ["calls_again"]
        assert swarm.network.initial_peers == (HERE.format(5000), HERE.format(4000))
    for patience_s, error in ((30.0, SwarmError("the swarm refused this peer")), (0.0, silent)):
        monkeypatch.setattr("diloco.attach.swarm.COME_BACK_S", patience_s)
        network.refusals = iter([error])
        with pytest.raises(JoinError), peer(**run) as swarm, attach(swarm):
            pass


def test_a_peer_that_was_left_attached_leaves_when_the_next_comes(network: Network) -> None:
    """Of the same thread and run, with the same optimizer or another; not if the next one joins at
    it."""
    trained = made()
    for _ in range(2):
        again = peer(run_id="cell")
        again.attach(*trained).open()
    assert ["leave" in node.said for node in network.nodes] == [True, False]
    attach(other := peer(run_id="other")).open()
    attach(joined := peer(run_id="cell", address=network.nodes[1].addresses[0])).open()
    thread = threading.Thread(target=lambda: attach(peer(run_id="cell")).open().close())
    thread.start()
    thread.join()
    assert ["leave" in node.said for node in network.nodes] == [True, False, False, False, True]
    for swarm in (again, other, joined):
        swarm.close()
