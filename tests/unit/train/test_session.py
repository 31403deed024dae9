"""What a process leaves for the next one: through the disk, and into a protocol core that knows it."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.config import WIRE_VERSION, Config, compose
from diloco.errors import CheckpointError
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.phase_seconds import PhaseSeconds
from diloco.protocol.shares import Share
from diloco.rundir.files import check_same_run
from diloco.swarm.node.saved import Saved
from diloco.train.session import Session, write_address
from tests.support.stub_host import ME, OTHER, StubHost

SHARES = {ME: Share(1, 10, 1, 1, "mine"), OTHER: Share(1, 20, 1, 1)}


def save(session: Session, model: nn.Module, host: StubHost, **made: int) -> Any:
    """Write what a node has at a boundary, as the training loop does; `made` is what it has trained."""
    saved = asyncio.run(host.anchors.snapshot(copies=True))
    made = {"version": 1, "steps": 1, "tokens": 10, "discarded_tokens": 0, "unsent_tokens": 0, **made}
    sync: Any = SimpleNamespace(checkpointing=lambda: nullcontext(saved), **made)
    stream: Any = SimpleNamespace(state=dict)
    session.save(sync, model, torch.optim.SGD(model.parameters()), stream, PhaseSeconds(), (0, 0))
    return sync


def saved_by(host: StubHost, config: Config) -> None:
    save(Session(config), nn.Linear(2, 2), host)


def loaded(config: Config) -> Saved:
    saved = Session(config).outer()
    assert saved is not None
    return saved


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return compose(["experiment=smoke", f"run.dir={tmp_path}"])


def host_of(saved: Saved | None = None, **outer: object) -> StubHost:
    """A node that goes on from there, alone: within the staleness limit it takes contributions from older versions."""

    async def make() -> StubHost:
        return StubHost(OTHER, saved=saved, quorum=1, staleness_limit=4, **outer)

    host = asyncio.run(make())
    if saved is None:
        host.protocol.adopted(0, 1, host.protocol.digests[0], 0.0, shares=SHARES)
        host.own_tokens.was_applied(0, 10)
    else:
        for fragment, version in zip(host.protocol.fragments, saved.versions, strict=True):
            fragment.version = version
        host.protocol.accounts.restore_shares(saved.shares)
    host.protocol.members.remove(OTHER)
    host.protocol.leases.vacate(0)
    for now in (100.0, 110.0):
        host.do(host.protocol.tick(now))
    assert 0 in host.protocol.syncers
    return host


def verdict_on(host: StubHost, base_version: int) -> Any:
    term = host.protocol.syncers[0].term
    header = Contribution(
        base_digest=host.protocol.digests[0], manifest_hash=host.protocol.manifest_hash, fragment=0, term=term,
        base_version=base_version, steps=1, tokens=20,
    )  # fmt: skip
    return host.protocol.offer(OTHER, header)


def test_when_everything_was_down_nothing_is_merged_again(config: Config) -> None:
    """1. The other's contribution from version 0 is in version 1. Everybody is killed, the other before it has that.
    2. Restarted from its checkpoint it trains from version 0 again, and the staleness limit admits what it learned.
    """
    saved_by(host_of(), config)
    saved = loaded(config)
    assert saved.shares == [SHARES] and saved.applied == {0: 10} and saved.applied_tokens == 30
    host = host_of(saved)
    assert verdict_on(host, 0).merged and not verdict_on(host, 0).accepted
    assert verdict_on(host, 1).accepted
    assert [(row.peer_id, row.tokens) for row in host.protocol.accounts.contributions()] == [(OTHER, 20), (ME, 10)]


def test_a_window_that_is_not_full_survives_a_restart(config: Config) -> None:
    host = host_of(optimizer="delayed_nesterov")
    kept = host.replica.states[0]
    kept.pushes, kept.delay = 2, 4
    for number, vector in enumerate(kept.vectors, 1):
        vector.fill_(number)
    saved_by(host, config)
    loaded(config).load_(resumed := host_of(optimizer="delayed_nesterov").replica)
    state = resumed.states[0]
    assert (state.version, state.pushes, state.delay) == (1, 2, 4)
    assert all(map(torch.equal, state.vectors, kept.vectors))


def test_a_run_directory_of_an_older_wire_version_is_used(config: Config) -> None:
    manifest = {**json.loads(config.manifest().to_json()), "wire_version": WIRE_VERSION - 1}
    check_same_run(config, json.dumps(manifest))
    manifest["run"] = {**manifest["run"], "seed": 99}
    with pytest.raises(CheckpointError, match=r"run\.seed: 0 here, 99 there"):
        check_same_run(config, json.dumps(manifest))
    manifest["outer"] = {**manifest["outer"], "audit": 0.02}
    with pytest.raises(
        CheckpointError, match=r"holds a run of another diloco \(.*outer\.audit is not a setting.*; use that"
    ):
        check_same_run(config, json.dumps(manifest))


def test_what_a_winning_history_lacks_is_discarded(config: Config) -> None:
    saved_by(host_of(), config)
    host = host_of(loaded(config))

    async def scene() -> None:
        won = host.state(5, torch.full((6,), 3.0), **{OTHER: Share(5, 50, 1, 5)})
        host.client.answers = {1: won}
        await host.anchors.catch_up(0, [OTHER])

    asyncio.run(scene())
    assert host.protocol.versions == [5] and host.own_tokens.take_lost() == 10 and "discarded" in host.notes


def restored(session: Session, model: nn.Module) -> Any:
    sync, stream = SimpleNamespace(), SimpleNamespace(restore=lambda state: None)
    session.restore(sync, model, torch.optim.SGD(model.parameters()), stream)  # type: ignore[arg-type]
    return sync


def test_what_was_not_sent_is_discarded_by_who_resumes(config: Config) -> None:
    """It is neither in the anchors, from which a resumed peer goes on, nor on its way to anybody."""
    model = nn.Linear(2, 2)
    sync = save(Session(config), model, host_of(), steps=7, tokens=110, discarded_tokens=5, unsent_tokens=10)
    assert sync.discarded_tokens == 5, "this peer may still send them"
    resumed = restored(Session(config), model)
    assert (resumed.steps, resumed.tokens, resumed.discarded_tokens) == (7, 110, 15)


def test_a_checkpoint_that_was_resumed_from_is_let_go(config: Config) -> None:
    """While a file is mapped, its space on the disk is in use even after it is deleted."""
    save(Session(config), model := nn.Linear(2, 2), host_of())
    session = Session(config)
    saved = session.outer()
    restored(session, model)
    assert str(config.run.dir) not in Path("/proc/self/maps").read_text()
    assert saved is not None and saved.anchors[0].isfinite().all(), "what it held is there"


def test_tensors_of_a_checkpoint_are_a_replica_s_own(config: Config) -> None:
    """The same checkpoint can be loaded twice: what the first replica makes of it does not reach the second."""
    saved = asyncio.run(host_of().anchors.snapshot(copies=True))
    one, two = host_of().replica, host_of().replica
    saved.load_(one)
    for vector in (one.anchors[0], one.aggregates[0].master, one.states[0].momentum):
        vector.fill_(9.0)
    saved.load_(two)
    assert not (two.anchors[0] == 9.0).any() and not (two.states[0].momentum == 9.0).any()


def test_a_peer_does_not_join_by_its_own_address_file(config: Config) -> None:
    file, other = config.run.dir / "address", config.run.dir / "other"
    for named, written in ((file, False), (other, True)):
        write_address(compose([f"run.dir={config.run.dir}", f"swarm.initial_peers=['@{named}']"]), "/ip4/1.2.3.4")
        assert file.exists() is written
    write_address(config, "")
    assert file.read_text() == "/ip4/1.2.3.4\n", "a peer that nobody reaches has none"
