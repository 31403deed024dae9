"""`Swarm` as its callers type it: arguments, presets, what it says, and data for each peer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from diloco.attach.arguments import as_typed
from diloco.attach.data_shard import ActivePeers
from diloco.attach.swarm import Swarm
from diloco.config.files import MOST_PARAMETERS, fragments_of
from diloco.errors import ConfigError, JoinError, SwarmError
from diloco.swarm.node.options import RunSpec
from tests.support.loops import Direct, LastFlight, attached, made

ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/QmYMpufpDR5Jw7KpaDaXFfsm7RMHbAE1kdXG6X2mJmHKsZ"


def with_node(node: LastFlight | None = None, **settings: Any) -> Swarm:
    return made(**{"identity": "a", "runtime": Direct(node or LastFlight()), **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sync_evry": 4}, "sync_evry is neither an argument of Swarm nor a .*; did you mean"),
        ({"outer": "asinc"}, "outer=asinc is not a choice .did you mean async..; expected one of"),
        ({"preset": "async"}, "preset is not an argument any more; name the preset with outer="),
        ({"method": "data_parallel"}, "method=data_parallel: a Swarm makes outer steps; diloco tr"),
        ({"address": "localhost:4100"}, "address=localhost:4100 is not valid; expected a list, ea"),
        ({"min_peers": 0}, "min_peers=0 is out of range; expected a whole number >= 1"),
        (
            {"upload_limit": 1e6},
            "upload_limit=1000000.0 could be bits or bytes per second; write 1",
        ),
        ({"sync_every": None}, "sync_every is missing; expected a whole number >= 1"),
    ],
)
def test_a_mistake_is_named_as_it_was_typed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        made(**settings)
    assert "\n" not in str(caught.value) and "swarm." not in str(caught.value)


def test_settings_of_the_outer_step_come_from_several_places() -> None:
    swarm = Swarm(run_id="run", outer="streaming", lr=0.6)
    assert (swarm.outer.sync_every, swarm.outer.pattern, swarm.outer.overlap) == (100, "strided", 5)
    assert swarm.outer.lr == 0.6
    assert made(outer="async", quorum=None, dylu=False).outer.barrier
    assert Swarm(run_id="run", outer={"sync_every": 4, "lr": 0.5}).outer == made(lr=0.5).outer
    swarm = with_node(outer="async", sync_every=4)
    attached(swarm)
    assert swarm.outer.fragments == 1 and swarm._fragments_by_size
    assert fragments_of(3 * MOST_PARAMETERS - 5) == 3
    assert not made(outer="async", fragments=2)._fragments_by_size
    network: dict[str, Any] = {"listen": "/ip4/0.0.0.0/tcp/4100", "min_peers": 2}
    network["upload_limit"] = "8Mbit"
    expected = made(**network).network
    assert made(network=network).network == made(network=expected).network == expected


def test_errors_of_the_swarm_name_the_arguments() -> None:
    unreachable = f"={ADDRESS} cannot be reached; check that a peer is running there"
    with pytest.raises(JoinError) as caught, as_typed():
        raise SwarmError(f"swarm.initial_peers{unreachable}")
    assert str(caught.value).startswith(f"address{unreachable}; if it had made all")
    assert str(caught.value).endswith("before this peer came, start it with min_peers=2")
    for key, argument in (("identity_path", "identity"), ("listen", "listen"), ("token", "token")):
        with pytest.raises(ConfigError, match=f"^{argument}=x holds no private key$"), as_typed():
            raise ConfigError(f"swarm.{key}=x holds no private key")
    with pytest.raises(SwarmError, match=r"^swarm\.listen=x"), as_typed(False):
        raise SwarmError("swarm.listen=x")


def test_another_model_is_one_line() -> None:
    def spec(model: nn.Module, name: str, **outer: float) -> RunSpec:
        shapes = {key: list(one.shape) for key, one in model.named_parameters()}
        content = {"model": {"name": name}, "outer": outer, "parameters": shapes}
        return RunSpec("run", "", json.dumps(content))

    here, there = spec(nn.Linear(2, 2), "Linear", lr=0.5), spec(nn.LSTM(2, 2), "LSTM", lr=0.7)
    assert here.differences(there.manifest_text) == [
        "the model is LSTM there, Linear here, with other parameters",
        "outer.lr is 0.7 there, 0.5 here",
    ]
    wider = spec(nn.Linear(2, 3), "Linear", lr=0.5)
    assert here.differences(wider.manifest_text)[0] == "parameters.bias is [3] there, [2] here"


def test_a_peer_says_how_others_join_and_who_comes(capsys: CaptureFixture[str]) -> None:
    node = LastFlight()
    node.addresses, node.version = [ADDRESS], 0
    swarm = with_node(node, min_peers=3).open()
    sync = attached(swarm).open()
    tell = swarm._program.on_event
    for told in ("join anna 2", "join peer 3", "lost anna 2", "leave peer 1"):
        kind, name, live = told.split()
        tell(kind, {"peer": "QmABCDEFGH", "name": name, "live": int(live), "why": "silent"})
    pair = {"peers": ["QmABCDEFGH", "QmME"], "names": ["peer", "anna"], "cosine": 0.99991}
    tell("same_data", {"fragment": 0, "version": 1, **pair})
    tell("takeover", {"fragment": 0})
    tell("rounds_over", {"rounds": 12, "version": 13})
    swarm.close()
    assert sync.node.closed
    said = [line.removeprefix("diloco: ") for line in capsys.readouterr().err.splitlines()]
    assert said[:7] == [
        f"others join with address='{ADDRESS}'",
        "waiting for 2 of 3 peers",
        "anna joined, 2 peers now",
        "waiting for 1 of 3 peers",
        "peer ...CDEFGH joined, 3 peers now",
        "anna vanished (silent), 2 peers now",
        "peer ...CDEFGH left, 1 peer now",
    ]
    assert said[7].startswith("peer ...CDEFGH and anna train on the same data (cosine of what they")
    assert said[7].endswith("other data: swarm.shard(dataset), or a seed of its own (swarm.seed)")
    assert said[8].startswith("rounds=12 are over, and training goes on with the last outer moment")
    assert said[9:] == [
        "done after 0 inner steps, at outer step 0; 0 B sent",
        "it made no inner step; was there any data?",
    ]


def test_functions_take_the_place_of_lines_and_quiet_has_none(capsys: CaptureFixture[str]) -> None:
    node, heard = LastFlight(), list[str]()
    node.addresses = [ADDRESS]
    with with_node(node, quiet=True) as swarm, attached(swarm):
        swarm._program.on_event("join", {"live": 2})
    assert capsys.readouterr().err == ""
    told = {"on_ready": heard.append, "on_event": lambda kind, fields: heard.append(kind)}
    with with_node(node, **told) as swarm, attached(swarm):
        swarm._program.on_event("join", {"live": 2})
    assert heard == [ADDRESS, "join"] and "joined" not in capsys.readouterr().err


def test_what_was_opened_ends_once() -> None:
    node = LastFlight()
    swarm = with_node(node, quiet=True).open()
    sync = attached(swarm).open()
    assert swarm.attachment is sync and "leave" not in node.said
    sync.close()
    said = list(node.said)
    assert said.index("leave") < said.index("close")
    for one in (sync, swarm, swarm):
        one.close()
    assert node.said == said
    node = LastFlight()
    with with_node(node, quiet=True) as swarm, attached(swarm).open() as sync:
        assert sync.open() is sync and sync._hook is not None
        swarm.close()
    assert node.said.count("leave") == node.said.count("close") == 1
    node = LastFlight()
    with pytest.raises(KeyboardInterrupt), with_node(node, quiet=True) as swarm:
        attached(swarm).open()
        raise KeyboardInterrupt
    assert node.said.index("leave") < node.said.index("close")


def test_each_peer_has_the_items_in_its_own_order() -> None:
    one, other = with_node(identity="one"), with_node(identity="other")
    items = list(range(100))
    orders = [[swarm.shard(items)[index] for index in items] for swarm in (one, other, one)]
    assert sorted(orders[0]) == sorted(orders[1]) == items
    assert orders[0] == orders[2] != orders[1]
    assert [*DataLoader(one.shard(items), batch_size=None)] == orders[0]


class Range(IterableDataset[int]):
    def __init__(self, items: int = 3000) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.items))


def test_parts_of_different_index_have_nothing_in_common() -> None:
    for data in (list(range(10)), Range(10), torch.arange(10)):
        parts = [with_node().shard(data, index=index, of=3) for index in range(3)]
        found = [int(item) for part in parts for item in DataLoader(part, batch_size=None)]
        assert sorted(found) == list(range(10))
    from datasets import Dataset

    data = Dataset.from_dict({"n": list(range(50))})
    orders = [with_node(identity=name).shard(data) for name in "ab"]
    assert isinstance(orders[0], Dataset) and orders[0]["n"] != orders[1]["n"]
    parts = [with_node().shard(data, index=index, of=2) for index in range(2)]
    assert sorted([*parts[0]["n"], *parts[1]["n"]]) == list(range(50))


def test_each_item_of_a_stream_is_one_peers() -> None:
    """Those of a peer that goes become the others', and no others move."""
    swarms = {name: with_node(identity=name) for name in "abc"}
    streams = {name: swarm.shard(Range()) for name, swarm in swarms.items()}
    assert list(with_node().shard(iter(range(9)))) == list(range(9)), "all of it is a lone peer's"
    active: dict[str, Any] = {name: swarm._program.active for name, swarm in swarms.items()}

    def shares(there: str) -> dict[str, set[int]]:
        for name in there:
            active[name].are(name, there)
        return {name: {n for n in range(3000) if active[name].owns(n)} for name in there}

    three, two = shares("abc"), shares("ab")
    for found in (three, two):
        assert sorted(item for items in found.values() for item in items) == list(range(3000))
    assert all(900 < len(items) < 1100 for items in three.values())
    assert three["a"] < two["a"] and three["b"] < two["b"]
    shares("abc")
    assert set(streams["b"]) == three["b"]


@pytest.mark.parametrize("library", ["torch", "datasets"])
def test_workers_of_a_loader_see_who_is_there(library: str) -> None:
    from datasets import Dataset

    data: Any = Range(300)
    if library == "datasets":
        data = Dataset.from_dict({"n": list(range(300))}).to_iterable_dataset()
    found = []
    for name in "ab":
        swarm = with_node(identity=name)
        stream = swarm.shard(data)
        active: Any = swarm._program.active
        active.are(name, "ab")
        loader = DataLoader(stream, batch_size=None, num_workers=1)
        found.append([int(item if library == "torch" else item["n"]) for item in loader])
    assert all(found) and sorted([*found[0], *found[1]]) == list(range(300))


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        ({"train": [1]}, {}, r"shard\(dict\): no dataset; give .*, such as data\['train'\]"),
        (torch.arange(9), {}, r"shard\(Tensor\): rows of an array .* take a part with index=0, of"),
        (7, {}, r"shard\(int\): it has no __len__ and __getitem__, nor __iter__; give a dataset"),
        ([1], {"index": 2, "of": 2}, "index=2, of=2: give both or none; index=0, of=2 is the fir"),
    ],
)
def test_what_cannot_be_sharded_is_refused(data: Any, settings: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        with_node().shard(data, **settings)
    assert "\n" not in str(caught.value)


def test_what_comes_too_early_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with made(quiet=True) as swarm:
        _ = swarm.seed
        with pytest.raises(ConfigError, match=r"^checkpoints=.*file with Swarm\(identity=...\)$"):
            swarm.attach(model, optimizer, checkpoints=tmp_path)
        with pytest.raises(ConfigError, match=r"^Swarm.address: .* none before attach\(...\)$"):
            _ = swarm.address


def test_a_peer_that_is_attached_owns_items_and_has_figures() -> None:
    swarm = with_node(quiet=True)
    swarm.shard(Range())
    assert swarm.figures() == {}
    with swarm, attached(swarm):
        active: Any = swarm._program.active
        assert active.owns(5)
        figures = swarm.figures()
    assert 0 <= figures.pop("diloco/wait_share") <= 1 and figures.pop("diloco/bytes_received") == 0
    expected = {"peers": 1, "round": 3, "bytes_sent": 0, "tokens_discarded": 0}
    assert figures == {f"diloco/{name}": value for name, value in expected.items()}
    assert ActivePeers().owns(3), "before anybody is known"
