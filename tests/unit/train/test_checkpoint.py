"""What a process leaves for the next one, through the disk."""

import json
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.config import Config, compose
from diloco.errors import CheckpointError
from diloco.messages.snapshot import PhaseSeconds
from diloco.protocol import WIRE_VERSION
from diloco.rundir.files import check_same_run
from diloco.swarm.node.saved import Saved
from diloco.train import checkpoint
from diloco.train.checkpoint import AddressFile, RunCheckpoints
from tests.support.alone import Alone, alone
from tests.support.peers import eventually

WINDOWED = {"optimizer": "delayed_nesterov", "delay": 4, "momentum": 0.5, "quorum": 1}


async def after_two_versions(node: Alone) -> Saved:
    for _ in range(2):
        await node.learn()
    return await node.anchors.snapshot(copies=True)


def save(session: RunCheckpoints, model: nn.Module, saved: Saved, **made: int) -> Any:
    """Write what a node has at a boundary, as the training loop does; `made` is what it has
    trained."""
    made = {"version": 2, "steps": 2, "tokens": 20, "discarded_tokens": 0} | made
    made = {"unsent_tokens": 0, **made}
    sync: Any = SimpleNamespace(checkpointing=lambda: nullcontext(saved), **made)
    stream: Any = SimpleNamespace(state=dict)
    session.save(sync, model, torch.optim.SGD(model.parameters()), stream, PhaseSeconds(), (0, 0))
    return sync


def through_the_disk(saved: Saved, config: Config) -> Saved:
    save(RunCheckpoints(config), nn.Linear(2, 2), saved)
    loaded = RunCheckpoints(config).swarm()
    assert loaded is not None
    return loaded


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return compose(["experiment=smoke", f"run.dir={tmp_path}"])


def test_a_window_that_is_not_full_survives_a_restart(config: Config) -> None:
    saved = alone(after_two_versions, **WINDOWED)
    master, kept = saved.outer[0]
    assert (kept.pushes, kept.delay) == (2, 4) and kept.vectors[1].any()
    loaded = through_the_disk(saved, config)

    async def begun(node: Alone) -> None:
        state = node.replica.states[0]
        assert (state.version, state.pushes, state.delay) == (2, 2, 4)
        assert torch.equal(node.replica.aggregates[0].master, master)
        assert all(map(torch.equal, state.vectors, kept.vectors))

    alone(begun, saved=loaded, **WINDOWED)


def test_an_anchor_that_is_not_what_its_head_says_is_refused(config: Config) -> None:
    saved = alone(after_two_versions)
    saved.anchors[0][0] += 1.0
    text = r"^a checkpoint holds an anchor that is not what its head says; choose"
    with pytest.raises(CheckpointError, match=text):
        through_the_disk(saved, config)


def test_a_run_directory_of_an_older_wire_version_is_used(config: Config) -> None:
    manifest = {**json.loads(config.manifest().to_json()), "wire_version": WIRE_VERSION - 1}
    check_same_run(config, json.dumps(manifest))
    manifest["run"] = {**manifest["run"], "seed": 99}
    with pytest.raises(CheckpointError, match=r"run\.seed: 0 here, 99 there"):
        check_same_run(config, json.dumps(manifest))
    manifest["outer"] = {**manifest["outer"], "audit": 0.02}
    text = r"holds a run of another diloco \(.*outer\.audit is not a setting.*; use that"
    with pytest.raises(CheckpointError, match=text):
        check_same_run(config, json.dumps(manifest))


def restored(session: RunCheckpoints, model: nn.Module) -> Any:
    sync, stream = SimpleNamespace(), SimpleNamespace(restore=lambda state: None)
    session.restore(sync, model, torch.optim.SGD(model.parameters()), stream)  # type: ignore[arg-type]
    return sync


def test_what_was_not_sent_is_discarded_by_who_resumes(config: Config) -> None:
    """It is neither in the anchors, from which a resumed peer goes on, nor on its way to
    anybody."""
    model = nn.Linear(2, 2)
    counts = {"steps": 7, "tokens": 110, "discarded_tokens": 5, "unsent_tokens": 10}
    sync = save(RunCheckpoints(config), model, alone(after_two_versions), **counts)
    assert sync.discarded_tokens == 5, "this peer may still send them"
    resumed = restored(RunCheckpoints(config), model)
    assert (resumed.steps, resumed.tokens, resumed.discarded_tokens) == (7, 110, 15)


def test_a_peer_does_not_join_by_its_own_address_file(config: Config) -> None:
    file, other = config.run.dir / "address", config.run.dir / "other"
    for named, written in ((file, False), (other, True)):
        typed = [f"run.dir={config.run.dir}", f"swarm.initial_peers=['@{named}']"]
        AddressFile(compose(typed)).write("/ip4/1.2.3.4")
        assert file.exists() is written
    AddressFile(config).write("")
    assert file.read_text() == "/ip4/1.2.3.4\n", "a peer that nobody reaches has none"


def test_the_address_file_follows_an_ip_that_this_machine_has_lost(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, here = {"192.168.1.5"}, ["10.0.0.7"]
    monkeypatch.setattr("diloco.train.checkpoint._has_ip", own.__contains__)
    monkeypatch.setattr("diloco.train.checkpoint._outgoing_ip", lambda host: here[0])
    monkeypatch.setattr("diloco.train.checkpoint.FOLLOW_EVERY_S", 0.01)
    path, rest = config.run.dir / "address", "/tcp/4100/p2p/12D3"
    read = lambda: path.read_text().strip()  # noqa: E731
    for router in ("/ip4/203.0.113.7", "/dns/home.example"):  # from the start not its own
        AddressFile(config).write(router + rest)
        assert read() == router + rest
    with closing(AddressFile(config)) as file:
        file.write(f"/ip4/192.168.1.5{rest}")
        file.follow()
        assert read() == f"/ip4/192.168.1.5{rest}"
        own.clear()
        eventually(lambda: read() == f"/ip4/10.0.0.7{rest}", "the new address")
        here[0] = None  # without a network
        file.follow()
        assert read() == f"/ip4/10.0.0.7{rest}"


def test_the_ips_of_this_machine_are_known() -> None:
    assert checkpoint._has_ip("127.0.0.1") and not checkpoint._has_ip("203.0.113.7")
    assert not checkpoint._has_ip("home.example")
    present = checkpoint._outgoing_ip("192.168.1.5")
    assert present is None or checkpoint._has_ip(present)
