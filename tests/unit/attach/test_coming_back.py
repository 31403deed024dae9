"""A program that fails and tries again: its peer comes back as itself, and calls whom it knew."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import nn

from diloco.attach.arguments import called_again, known_by, remember
from diloco.attach.swarm import Swarm
from diloco.config import SwarmConfig
from diloco.config.manifest import hash_of
from diloco.errors import JoinError, SwarmError
from diloco.swarm.client.ask import SwarmInfo
from tests.support.loops import Direct, LastFlight

TEXT = '{"outer": {"rounds": 7}, "run": {"id": "mine"}}'
OURS = hash_of(TEXT.replace("7", "9"))  # a longer run is the same one
PEER = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
GIVEN, *KNOWN = (f"/ip4/203.0.113.{n}/tcp/4100/p2p/{PEER}" for n in "789")
HERE = "/ip4/127.0.0.1/tcp/{}/p2p/QmYMpufpDR5Jw7KpaDaXFfsm7RMHbAE1kdXG6X2mJmHKsZ"
KEY = Path("identity")


def again(
    monkeypatch: MonkeyPatch, *given: str, known: Sequence[str] = KNOWN, run: str = OURS
) -> Any:
    """What it comes to where the last of those that are called answers; and who was called."""
    called: list[str] = []

    def look(addresses: Sequence[str], identity: Path, gate: object) -> SwarmInfo:
        called.extend(addresses)
        answers: Any = SimpleNamespace(reply=SimpleNamespace(addresses=[addresses[-1]]))
        return SwarmInfo(TEXT, [answers])

    monkeypatch.setattr("diloco.attach.arguments.inspect_swarm", look)
    network = SwarmConfig.parse({"initial_peers": list(given), "listen": ["/ip4/0.0.0.0/tcp/0"]})
    return called_again(network, KEY, "mine", run, known)[0].initial_peers, called


def test_who_comes_back_joins_at_those_that_answer(monkeypatch: MonkeyPatch) -> None:
    """Who joined calls the seeds, too; none of another run is joined."""
    assert again(monkeypatch) == ((KNOWN[-1],), KNOWN)
    assert again(monkeypatch, GIVEN) == ((GIVEN, *KNOWN), [])
    assert again(monkeypatch, known=()) == ((), [])
    assert again(monkeypatch, run="0" * 64) == ((), KNOWN)

    def nobody(*arguments: object, **options: object) -> SwarmInfo:
        raise SwarmError("nobody")

    monkeypatch.setattr("diloco.attach.arguments.inspect_swarm", nobody)
    assert called_again(SwarmConfig.parse({}), KEY, "mine", OURS, KNOWN)[0].initial_peers == ()


def test_a_peer_remembers_whom_it_knew_in_a_run(tmp_path: Path) -> None:
    """The newest first, and of no other run; half a file, or none, is nothing."""
    key, nothing = tmp_path / "identity.key", ([], [])
    assert known_by(key, OURS) == nothing
    remember(key, OURS, [GIVEN], KNOWN[:1])
    remember(key, OURS, [GIVEN], KNOWN[1:])
    assert known_by(key, OURS) == ([GIVEN], KNOWN[::-1]) and known_by(key, "0" * 64) == nothing
    [file] = tmp_path.iterdir()
    wrong = json.dumps({"run": OURS, "own": 3, "others": []})
    for torn in (file.read_text()[:9], "[]", '{"run": "x"}', wrong):
        file.write_text(torn)
        assert known_by(key, OURS) == nothing
    others = ["/ip4/1.2.3.4/tcp/1", KNOWN[0]]  # one has no peer id
    file.write_text(json.dumps({"run": OURS, "own": [], "others": others}))
    assert known_by(key, OURS)[1] == KNOWN[:1]
    remember(tmp_path / "no" / "such" / "place", OURS, [], [])


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
        node.others = [HERE.format(4000)]

        class Runtime(Direct):
            def open(self, *arguments: Any) -> Any:
                for error in network.refusals:
                    raise error
                network.nodes.append(node)
                return node

        return Runtime(node)


@pytest.fixture
def network(monkeypatch: MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr("diloco.attach.swarm.EventLoopThread", made)
    monkeypatch.setattr("diloco.attach.arguments.inspect_swarm", made.look)
    return made


RUNS = count()


def peer(**settings: Any) -> Swarm:
    return Swarm(**{"run_id": f"run {next(RUNS)}", "sync_every": 4, "quiet": True, **settings})


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def attach(swarm: Swarm) -> Any:
    return swarm.attach(*made())


def test_a_second_try_is_the_same_peer_and_calls_whom_it_knew(network: Network) -> None:
    keys, heard = set(), list[str]()
    run = {"run_id": "again", "on_event": lambda kind, fields: heard.append(kind)}
    for _ in range(2):
        with pytest.raises(RuntimeError), peer(**run) as swarm, attach(swarm):
            keys.add(swarm._peer.key_file())
            raise RuntimeError
    assert len(keys) == 1 and network.called == [[HERE.format(4000)]] and heard == ["alone_again"]
    assert swarm.network.listen == ("/ip4/127.0.0.1/tcp/4100",)
    assert all(node.said.index("leave") < node.said.index("close") for node in network.nodes)
    one, two = peer(**run), peer(**run)
    assert one._peer.key_file() != two._peer.key_file()


def test_who_was_told_an_address_calls_again_for_a_while(
    network: Network, monkeypatch: MonkeyPatch
) -> None:
    """When it comes back; the first time, and when it is refused, it ends at once."""
    monkeypatch.setattr("diloco.attach.node_thread.AGAIN_S", 0.0)
    silent, heard = SwarmError("swarm.initial_peers=x cannot be reached"), list[str]()
    run: dict[str, Any] = {"run_id": "told", "address": HERE.format(5000)}
    network.refusals = iter([silent])
    with pytest.raises(JoinError), peer(**run) as swarm, attach(swarm):
        pass
    with peer(**run) as swarm, attach(swarm):
        pass
    network.refusals = iter([silent, silent])
    run["on_event"] = lambda kind, fields: heard.append(kind)
    with peer(**run) as swarm, attach(swarm) as sync:
        assert sync.node.node is network.nodes[-1] and heard == ["calls_again"]
        assert swarm.network.initial_peers == (HERE.format(5000), HERE.format(4000))
    for patience_s, error in ((30.0, SwarmError("the swarm refused this peer")), (0.0, silent)):
        monkeypatch.setattr("diloco.attach.arguments.COME_BACK_S", patience_s)
        network.refusals = iter([error])
        with pytest.raises(JoinError), peer(**run) as swarm, attach(swarm):
            pass


def test_a_peer_that_was_left_attached_leaves_when_the_next_comes(network: Network) -> None:
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


def test_a_peer_listens_where_it_did_if_it_can(tmp_path: Path) -> None:
    """Where any port would do."""
    key = tmp_path / "identity.key"

    def listens(listen: str) -> Sequence[str]:
        network = SwarmConfig.parse({"listen": [listen], "initial_peers": [GIVEN]})
        return called_again(network, key, "mine", OURS, ())[0].listen

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        remember(key, OURS, [HERE.format(port)], [])
        for listen in ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/4100"):
            assert listens(listen) == (listen,)
    assert listens("/ip4/127.0.0.1/tcp/0") == (f"/ip4/127.0.0.1/tcp/{port}",)
