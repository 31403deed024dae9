"""A volunteer's way into a swarm: what it is told, what it keeps, and what its machine makes of the
run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.admission.keys import RunKey
from diloco.errors import SwarmError
from diloco.swarm.client.ask import inspect_swarm, parse_manifest
from tests.support.joining import OTHER
from tests.support.peers import (
    SMOKE,
    Command,
    Crowd,
    begin_together,
    command,
    dead_port,
    diloco,
    eventually,
    together,
)

pytestmark = pytest.mark.usefixtures("own_home")

SHAPES = {"a": (40, 30), "b": (77,)}


@pytest.fixture
def crowd(tmp_path: Path) -> Any:
    swarm = Crowd(tmp_path, SHAPES)
    yield swarm
    swarm.close()


@contextmanager
def starting(directory: Path, *settings: str) -> Iterator[Command]:
    """A peer that has an address, with its run in `starter`; Ctrl+C ends it."""
    begin = (
        "-m",
        "diloco",
        "train",
        *SMOKE,
        "run.dir=starter",
        "budget.outer_steps=4000",
        "eval.every=0",
    )
    with command(*begin, *settings, directory=directory) as starter:
        eventually(lambda: (directory / "starter" / "address").exists(), "an address")
        yield starter
        starter.process.send_signal(signal.SIGINT)
        starter.done()


def contributes(guest: Command) -> Command:
    """A volunteer that is told to leave once it has contributed."""
    eventually(lambda: "first contribution: in outer step" in guest.stdout, "a first contribution")
    guest.process.send_signal(signal.SIGINT)
    return guest


def test_a_look_finds_all_peers_through_one_and_says_what_is_wrong_with_the_others(
    crowd: Crowd,
) -> None:
    first, second = crowd.start(2)
    dead = f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{OTHER}"
    other = first.address.replace(first.peer_id, OTHER)
    seen = inspect_swarm([dead, other, first.address], None, 2**18)
    assert seen.manifest_text == "{}"
    assert {peer.peer for peer in seen.peers} == {first.peer_id, second.peer_id}
    assert set(seen.addresses) == {first.address, second.address}
    assert seen.silent == {dead: "nobody listens on that port", other: "another peer answers there"}
    for peer in seen.peers:
        assert (
            abs(peer.ahead_s) <= peer.round_trip_s and peer.up_bytes_per_s and peer.down_bytes_per_s
        )
        assert peer.reply.observed.startswith("/ip4/127.0.0.1/tcp/")
    with pytest.raises(
        SwarmError, match=rf"{dead} cannot be reached: nobody listens .* nor {other}: another peer"
    ):
        inspect_swarm([dead, other])


def test_a_peer_that_nobody_can_call_trains_and_is_no_author(crowd: Crowd) -> None:
    first = crowd.peer(min_peers=3).start()
    dead = f"/ip4/127.0.0.1/tcp/{dead_port()}"
    # and these two do not meet, or they would wait for three, too
    mute = crowd.peer(first.address, reachable="no")
    wrong = crowd.peer(first.address, announce=[dead])
    together(mute.start, wrong.start)
    assert mute.node.addresses == [] and mute.view.address == ""
    [said] = wrong.said("unreachable")
    assert f"{dead}: nobody listens on that port" in said["advice"]
    assert "'swarm.announce=[/ip4/127.0.0.1" in said["advice"]
    begin_together(first, mute, wrong, authors=[first])
    together(*(lambda peer=peer: peer.round(0.1) for peer in (first, mute, wrong)))
    assert first.authors() == [0, 1, 2, 3] and mute.authors() == wrong.authors() == []
    assert (
        first.digest == mute.digest == wrong.digest
        and len(first.node.core.facts.control.tip.head.counted) == 3
    )


def test_two_commands_make_a_swarm_of_two(tmp_path: Path) -> None:
    with starting(tmp_path) as starter:
        lines = eventually(
            lambda: [one for one in starter.stdout.splitlines() if one.startswith("diloco join ")],
            "it",
        )
        with command("-m", *lines[0].split(), directory=tmp_path) as guest:
            contributes(guest).done()
    said = [line.split("] ")[1].split(":")[0] for line in guest.stdout.splitlines() if "] " in line]
    stages = [
        one
        for one in said
        if one in ("connect", "manifest", "machine", "data", "first contribution")
    ]
    assert stages == ["connect", "manifest", "machine", "data", "first contribution"]
    [run_dir] = (tmp_path / "home" / "diloco" / "peer-0" / "runs").iterdir()
    [mine] = json.loads((run_dir / "summary.json").read_text())["peers"]
    assert mine["tokens"] > 0


@pytest.mark.slow
def test_ranks_of_torchrun_join_as_one_peer(tmp_path: Path) -> None:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "diloco",
        "join",
    ]
    with starting(tmp_path):
        with command(
            *torchrun, "@starter/address", "train.device=cpu", directory=tmp_path
        ) as guest:
            contributes(guest).wait()  # torchrun calls it a failure when Ctrl+C has ended its ranks
    assert "machine: 2 x CPU" in guest.stdout and "tokens from this peer" in guest.stdout
    rows = (tmp_path / "starter" / "contributions.csv").read_text().splitlines()[1:]
    assert len(rows) == 2, "the starter, and the volunteer"


def test_a_volunteer_joins_a_closed_run_by_a_link_in_a_file(tmp_path: Path) -> None:
    RunKey.create(tmp_path / "run.key")
    with starting(tmp_path, "swarm.key_path=run.key", "run.id=closed"):
        invite = ("invite", "--key", "run.key", "--run", "closed", "@starter/address")
        (tmp_path / "link").touch(0o600)
        (tmp_path / "link").write_text(diloco(*invite, directory=tmp_path).done().stdout)
        with command("-m", "diloco", "join", "@link", directory=tmp_path) as guest:
            contributes(guest).done()
    [memory] = (tmp_path / "home" / "diloco" / "peer-0" / "runs" / "closed" / "refusals").iterdir()
    seal = json.loads(memory.read_text())["seal"]
    manifest = parse_manifest((tmp_path / "starter" / "manifest.json").read_text())
    assert seal == RunKey.read(tmp_path / "run.key").seal("closed", manifest.hash())
