"""`Swarm` as its callers type it: arguments, presets, what it says, and different data for each
peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from diloco.attach.arguments import as_typed
from diloco.attach.data_shard import ActivePeers
from diloco.attach.swarm import Swarm
from diloco.config.files import MOST_PARAMETERS
from diloco.errors import ConfigError, JoinError, SwarmError
from diloco.swarm.node.options import RunSpec
from tests.support.loops import Direct, LastFlight, attached, made

ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/QmYMpufpDR5Jw7KpaDaXFfsm7RMHbAE1kdXG6X2mJmHKsZ"


def with_node(node: LastFlight | None = None, **settings: Any) -> Swarm:
    return made(**{"identity": "a", "runtime": Direct(node or LastFlight()), **settings})


def test_one_address_several_and_none_are_a_list() -> None:
    for none in (None, "", [], [""], ()):
        assert made(address=none).network.initial_peers == ()
    for some in (ADDRESS, [ADDRESS, "", ADDRESS]):
        assert made(address=some).network.initial_peers == (ADDRESS,)
    assert made(listen="/ip4/0.0.0.0/tcp/4100").network.listen == ("/ip4/0.0.0.0/tcp/4100",)


def test_a_key_is_named_by_a_text_or_a_path(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "me.key"
    seed = made(identity=str(file)).seed
    assert file.is_file() and made(identity=file).seed == seed and 0 <= seed < 2**32
    with made() as one, made() as other:
        assert len({one.seed, other.seed, seed}) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sync_evry": 4},
            (
                "sync_evry is neither an argument of Swarm nor a setting of the outer step; did you"
                " mean"
            ),
        ),
        (
            {"outer": "asinc"},
            "preset=asinc is not a choice .did you mean async..; expected one of async, ",
        ),
        (
            {"method": "data_parallel"},
            "method=data_parallel: a Swarm makes outer steps; diloco train has the other",
        ),
        (
            {"address": "localhost:4100"},
            "address=localhost:4100 is not valid; expected a list, each an address with",
        ),
        ({"min_peers": 0}, "min_peers=0 is out of range; expected a whole number >= 1"),
        ({"sync_every": None}, "sync_every is missing; expected a whole number >= 1"),
    ],
)
def test_a_mistake_is_named_as_it_was_typed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        made(**settings)
    assert "\n" not in str(caught.value) and "swarm." not in str(caught.value)


def test_settings_of_the_outer_step_come_from_several_places() -> None:
    """A preset is below `outer`, and that below the keywords; the size of a model decides on its
    fragments."""
    swarm = Swarm(run_id="run", preset="streaming", outer={"lr": 0.5, "mixing": 0.25}, lr=0.6)
    assert (swarm.outer.sync_every, swarm.outer.pattern, swarm.outer.overlap) == (100, "strided", 5)
    assert (swarm.outer.lr, swarm.outer.mixing) == (0.6, 0.25)
    assert made(preset="async", quorum=None, dylu=False).outer.barrier
    assert Swarm(run_id="run", outer={"sync_every": 4, "lr": 0.5}).outer == made(lr=0.5).outer
    swarm = with_node(preset="async", sync_every=4)
    attached(swarm)
    assert swarm.outer.fragments == 1
    assert swarm._resolved_outer.of(3 * MOST_PARAMETERS - 5).fragments == 3
    assert made(preset="async", fragments=2)._resolved_outer.of(10 * MOST_PARAMETERS).fragments == 2
    assert made(outer="async", fragments=2).outer == made(preset="async", fragments=2).outer
    network = {"listen": "/ip4/0.0.0.0/tcp/4100", "min_peers": 2}
    assert (
        made(network=network).network
        == made(**network).network
        == made(network=made(**network).network).network
    )


def test_errors_of_the_swarm_name_the_arguments() -> None:
    unreachable = f"={ADDRESS} cannot be reached; check that a peer is running there"
    with pytest.raises(JoinError) as caught, as_typed():
        raise SwarmError(f"swarm.initial_peers{unreachable}")
    assert str(caught.value).startswith(f"address{unreachable}; if it had made all")
    assert str(caught.value).endswith("before this peer came, start it with min_peers=2")
    for key, argument in (
        ("swarm.identity_path", "identity"),
        ("swarm.listen", "listen"),
        ("swarm.token", "token"),
    ):
        with pytest.raises(ConfigError, match=f"^{argument}=x holds no private key$"), as_typed():
            raise ConfigError(f"{key}=x holds no private key")
    with pytest.raises(SwarmError, match=r"^swarm\.listen=x"), as_typed(False):
        raise SwarmError("swarm.listen=x")


@pytest.mark.parametrize("kind", ["ConfigError", "JoinError", "DivergedError"])
def test_an_error_that_ends_a_program_is_one_line(kind: str) -> None:
    """Whoever made the program; a bug has a traceback."""
    code = (
        f"from diloco.errors import *\ntry:\n    1 / 0\nfinally:\n    raise {kind}('nobody"
        " is\\nthere')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "diloco: error: nobody is there\n")
    code = (
        f"from diloco.errors import *\ntry:\n    raise {kind}('x')\nexcept {kind}:\n    raise"
        " PayloadError('y')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 2


def test_another_model_is_one_line() -> None:
    def spec(model: nn.Module, name: str, **outer: float) -> RunSpec:
        shapes = {key: list(one.shape) for key, one in model.named_parameters()}
        content = {
            "model": {"name": name},
            "outer": outer,
            "parameters": shapes,
            "frozen_parameters": None,
        }
        return RunSpec("run", "", json.dumps(content))

    here, there = spec(nn.Linear(2, 2), "Linear", lr=0.5), spec(nn.LSTM(2, 2), "LSTM", lr=0.7)
    said = [
        "the model is LSTM there, Linear here, with other parameters",
        "outer.lr is 0.7 there, 0.5 here",
    ]
    assert here.differences(there.manifest_text) == said
    wider = spec(nn.Linear(2, 3), "Linear", lr=0.5)
    assert here.differences(wider.manifest_text)[0] == "parameters.bias is [3] there, [2] here"


def test_a_peer_says_how_others_join_and_who_comes(capsys: pytest.CaptureFixture[str]) -> None:
    node = LastFlight()
    node.addresses, node.version = [ADDRESS], 0
    swarm = with_node(node, min_peers=3).open()
    sync = attached(swarm).open()
    for kind, name, live in (
        ("join", "anna", 2),
        ("join", "peer", 3),
        ("lost", "anna", 2),
        ("leave", "peer", 1),
    ):
        swarm._heard(kind, {"peer": "QmABCDEFGH", "name": name, "live": live, "why": "silent"})
    pair = {"peers": ["QmABCDEFGH", "QmME"], "names": ["peer", "anna"], "cosine": 0.99991}
    swarm._heard("same_data", {"fragment": 0, "version": 1, **pair})
    swarm._heard("takeover", {"fragment": 0})
    swarm._heard("rounds_over", {"rounds": 12, "version": 13})
    swarm.close()
    assert sync.view.closed
    assert capsys.readouterr().err.splitlines() == [
        f"diloco: others join with address='{ADDRESS}'",
        "diloco: waiting for 2 of 3 peers",
        "diloco: anna joined, 2 peers now",
        "diloco: waiting for 1 of 3 peers",
        "diloco: peer ...CDEFGH joined, 3 peers now",
        "diloco: anna vanished (silent), 2 peers now",
        "diloco: peer ...CDEFGH left, 1 peer now",
        (
            "diloco: peer ...CDEFGH and anna train on the same data (cosine of what they contribute"
            " 0.9999), so together they learn what one learns; give each peer other data:"
            " swarm.shard(dataset), or a seed of its own (swarm.seed)"
        ),
        (
            "diloco: rounds=12 are over, and training goes on with the last outer momentum; plan as"
            " many as there are exchanges: rounds=max_steps / sync_every"
        ),
        "diloco: done after 0 inner steps, at outer step 0; 0 B sent",
        "diloco: it made no inner step; was there any data?",
    ]


def test_a_peer_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Who met nobody is told how to wait."""
    with with_node() as swarm, attached(swarm):
        pass
    hint = (
        "diloco: no other peer came; with min_peers=2 the first peer waits for a second one before"
        " it trains"
    )
    assert capsys.readouterr().err.splitlines()[-1] == hint
    with with_node(address=ADDRESS) as swarm, attached(swarm):
        pass
    assert hint not in capsys.readouterr().err


def test_functions_take_the_place_of_lines_and_quiet_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    node, heard = LastFlight(), list[str]()
    node.addresses = [ADDRESS]
    with with_node(node, quiet=True) as swarm, attached(swarm):
        swarm._heard("join", {"live": 2})
    assert capsys.readouterr().err == ""
    told = {"on_ready": heard.append, "on_event": lambda kind, fields: heard.append(kind)}
    with with_node(node, **told) as swarm, attached(swarm):
        swarm._heard("join", {"live": 2})
    assert heard == [ADDRESS, "join"] and "joined" not in capsys.readouterr().err


def test_what_was_opened_ends_once() -> None:
    """By `close`, by a with block, or by an error in one."""
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
    assert (
        node.said.count("begin") <= 1 and node.said.count("leave") == node.said.count("close") == 1
    )
    node = LastFlight()
    with pytest.raises(KeyboardInterrupt), with_node(node, quiet=True) as swarm:
        attached(swarm).open()
        raise KeyboardInterrupt
    assert node.said.index("leave") < node.said.index("close")


def test_each_peer_has_the_items_in_its_own_order() -> None:
    one, other = with_node(identity="one"), with_node(identity="other")
    orders = [
        [swarm.shard(list(range(100)))[index] for index in range(100)]
        for swarm in (one, other, one)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] == orders[2] != orders[1]
    assert [*DataLoader(one.shard(list(range(100))), batch_size=None)] == orders[0]


class Range(IterableDataset[int]):
    def __init__(self, items: int = 3000) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.items))


def test_parts_of_different_index_have_nothing_in_common() -> None:
    """A dataset of the library stays one."""
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
    streams = {
        name: swarm.shard(iter(range(3000)) if name == "a" else Range())
        for name, swarm in swarms.items()
    }
    assert list(with_node().shard(Range())) == list(range(3000)), "all of it is a lone peer's"

    def shares(there: str) -> dict[str, set[int]]:
        for name in there:
            swarms[name]._active.are(name, there)  # type: ignore[union-attr]
        return {name: {n for n in range(3000) if swarms[name]._active.owns(n)} for name in there}  # type: ignore[union-attr]

    three, two = shares("abc"), shares("ab")
    for found in (three, two):
        assert (
            set().union(*found.values()) == set(range(3000))
            and sum(map(len, found.values())) == 3000
        )
    assert all(900 < len(items) < 1100 for items in three.values())
    assert three["a"] < two["a"] and three["b"] < two["b"]
    shares("abc")
    assert set(streams["b"]) == three["b"]


@pytest.mark.parametrize("library", ["torch", "datasets"])
def test_workers_of_a_loader_see_who_is_there(library: str) -> None:
    from datasets import Dataset

    data = (
        Range(300)
        if library == "torch"
        else Dataset.from_dict({"n": list(range(300))}).to_iterable_dataset()
    )
    found = []
    for name in "ab":
        swarm = with_node(identity=name)
        stream = swarm.shard(data)
        swarm._active.are(name, "ab")  # type: ignore[union-attr]
        loader = DataLoader(stream, batch_size=None, num_workers=1)
        found.append([int(item if library == "torch" else item["n"]) for item in loader])
    assert all(found) and sorted([*found[0], *found[1]]) == list(range(300))


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        (
            {"train": [1]},
            {},
            r"shard\(dict\): no dataset; give one of its values, such as data\['train'\]",
        ),
        (
            torch.arange(9),
            {},
            r"shard\(Tensor\): rows of an array may hang together, .* take a part with index=0, of",
        ),
        (
            7,
            {},
            (
                r"shard\(int\): it has neither __len__ and __getitem__ nor __iter__; give a dataset"
                r" or an iterable"
            ),
        ),
        (
            [1],
            {"index": 2, "of": 2},
            "index=2, of=2: give both or none; index=0, of=2 is the first of two parts",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(data: Any, settings: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        with_node().shard(data, **settings)
    assert "\n" not in str(caught.value)


def test_what_comes_too_early_is_refused(tmp_path: Path) -> None:
    """An address, and checkpoints after the key was made."""
    model = nn.Linear(2, 1)
    with made(quiet=True) as swarm:
        _ = swarm.seed
        with pytest.raises(
            ConfigError, match=r"^checkpoints=.*name its file with Swarm\(identity=...\)$"
        ):
            swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoints=tmp_path)
        with pytest.raises(
            ConfigError, match=r"^Swarm.address: a peer has none before attach\(...\)$"
        ):
            _ = swarm.address


def test_a_peer_that_is_attached_owns_items_and_has_figures() -> None:
    swarm = with_node(quiet=True)
    swarm.shard(Range())
    assert swarm.figures() == {}
    with swarm, attached(swarm):
        assert swarm._active is not None and swarm._active.owns(5) and swarm.index == 0
        figures = swarm.figures()
    assert (figures["diloco/peers"], figures["diloco/round"], figures["diloco/bytes_sent"]) == (
        1,
        3,
        0,
    )
    assert 0 <= figures["diloco/wait_share"] <= 1 and figures["diloco/tokens_discarded"] == 0
    assert ActivePeers().owns(3), "before anybody is known"
