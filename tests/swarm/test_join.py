"""A volunteer's way into a swarm: what it is told, what it keeps, and what its machine makes of the
run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.admission.keys import RunKey
from diloco.errors import JoinError, SwarmError
from diloco.swarm.client.ask import inspect_swarm, parse_manifest
from tests.support.loops import attached, made
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
OTHER = "QmczQ58j3TwhWbL1MZkbdSCjM5LQFxyJ85RP1WecJwrcCV"


@pytest.fixture
def crowd(tmp_path: Path) -> Any:
    swarm = Crowd(tmp_path, {"a": (40, 30), "b": (77,)})
    yield swarm
    swarm.close()


@contextmanager
def starting(directory: Path, *settings: str) -> Iterator[Command]:
    """A peer that has an address, with its run in `starter`; Ctrl+C ends it."""
    endless = "run.dir=starter budget.outer_steps=4000 eval.every=0"
    with command("-m diloco train", *SMOKE, endless, *settings, directory=directory) as starter:
        starter.sees((directory / "starter" / "address").exists, "an address")
        yield starter
        starter.interrupt()


def contributes(guest: Command) -> Command:
    """A volunteer that has contributed."""
    said = "first contribution: in outer step"
    guest.sees(lambda: said in guest.stdout, "a first contribution")
    return guest


def run_of(home: Path) -> Path:
    [run_dir] = (home / "diloco" / "peer-0" / "runs").iterdir()
    return run_dir


def test_nobody_at_an_address_is_one_line_that_names_it_once() -> None:
    with made(quiet=True) as gone, attached(gone).open():
        address = gone.address
    with made(address=[address, address], quiet=True) as swarm, pytest.raises(JoinError) as caught:
        attached(swarm).open()
    text = str(caught.value)
    silent = f"address={address} cannot be reached: nobody listens on that port; check"
    assert text.startswith(silent) and text.count(address) == 1
    assert text.endswith("start it with min_peers=2") and "\n" not in text


def test_a_look_finds_all_peers_through_one_and_says_what_is_wrong_with_the_others(
    crowd: Crowd,
) -> None:
    first, second = crowd.start(2)
    dead = f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{OTHER}"
    other = first.address.replace(first.peer_id, OTHER)
    seen = inspect_swarm([dead, other, first.address])
    assert seen.manifest_text == "{}"
    assert {peer.peer for peer in seen.peers} == {first.peer_id, second.peer_id}
    assert {*seen.addresses} == {first.address, second.address}
    assert seen.silent == {dead: "nobody listens on that port", other: "another peer answers there"}
    for peer in seen.peers:
        assert abs(peer.ahead_s) <= peer.round_trip_s
        assert peer.reply.observed.startswith("/ip4/127.0.0.1/tcp/")
    said = rf"{dead} cannot be reached: nobody listens .* nor {other}: another peer"
    with pytest.raises(SwarmError, match=said):
        inspect_swarm([dead, other])


def test_a_peer_that_nobody_can_call_trains_and_is_no_author(crowd: Crowd) -> None:
    first = crowd.peer(min_peers=3).start()
    dead = f"/ip4/127.0.0.1/tcp/{dead_port()}"
    # these two do not meet
    mute = crowd.peer(first.address, reachable="no", min_peers=3)
    wrong = crowd.peer(first.address, announce=[dead], min_peers=3)
    together(mute.start, wrong.start)
    assert mute.node.addresses == [] and mute.view.address == ""
    [said] = wrong.said("unreachable")
    assert f"{dead}: nobody listens on that port" in said["advice"]
    assert "'swarm.announce=[/ip4/127.0.0.1" in said["advice"]
    begin_together(first, mute, wrong, authors=[first])
    together(*(lambda peer=peer: peer.round(0.1) for peer in (first, mute, wrong)))
    assert first.authors() == [0, 1, 2, 3] and mute.authors() == wrong.authors() == []
    assert first.digest == mute.digest == wrong.digest
    assert len(first.node.core.facts.control.tip.head.counted) == 3


def test_two_commands_make_a_swarm_of_two(tmp_path: Path) -> None:
    with starting(tmp_path) as starter:
        printed = lambda: [one for one in starter.stdout.splitlines() if "diloco join" in one]  # noqa: E731
        [line, *_] = starter.sees(printed, "a command for others")
        with command("-m", line, directory=tmp_path) as guest:
            contributes(guest).interrupt()
    said = [line.split("] ")[1].split(":")[0] for line in guest.stdout.splitlines() if "] " in line]
    stages = ["connect", "manifest", "machine", "data", "first contribution"]
    assert [one for one in said if one in stages] == stages
    [mine] = json.loads((run_of(tmp_path / "home") / "summary.json").read_text())["peers"]
    assert mine["tokens"] > 0


def test_whoever_is_alone_all_at_once_is_told_and_when_the_other_is_back(tmp_path: Path) -> None:
    with starting(tmp_path) as starter:
        join = f"-m diloco join {(tmp_path / 'starter/address').read_text()}"
        with command(join, directory=tmp_path) as guest:
            contributes(guest).kill()
        starter.says(r"(vanished \(.*\); no other peer can be reached now)")
        with command(join, directory=tmp_path) as guest:
            starter.says(r"(is back, 2 peers now)")
            guest.interrupt()


@pytest.mark.slow
def test_ranks_of_torchrun_join_as_one_peer(tmp_path: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 -m diloco join"
    with starting(tmp_path):
        join = f"{torchrun} @starter/address train.device=cpu"
        with command(join, directory=tmp_path) as guest:
            contributes(guest).process.send_signal(2)
            guest.wait()  # torchrun calls it a failure when Ctrl+C has ended its ranks
    assert "machine: 2 x CPU" in guest.stdout and "tokens from this peer" in guest.stdout
    rows = (tmp_path / "starter" / "contributions.csv").read_text().splitlines()[1:]
    assert len(rows) == 2, "the starter, and the volunteer"


def test_a_volunteer_joins_a_closed_run_by_a_link_in_a_file(tmp_path: Path) -> None:
    RunKey.create(tmp_path / "run.key")
    with starting(tmp_path, "swarm.key_path=run.key run.id=closed"):
        invite = "invite --key run.key --run closed @starter/address"
        (tmp_path / "link").touch(0o600)
        (tmp_path / "link").write_text(diloco(invite, directory=tmp_path).done().stdout)
        with command("-m diloco join @link", directory=tmp_path) as guest:
            contributes(guest).interrupt()
    [memory] = (run_of(tmp_path / "home") / "refusals").iterdir()
    seal = json.loads(memory.read_text())["seal"]
    manifest = parse_manifest((tmp_path / "starter" / "manifest.json").read_text())
    assert seal == RunKey.read(tmp_path / "run.key").seal("closed", manifest.hash())


def test_the_newest_model_is_exported_and_asked_without_joining(tmp_path: Path) -> None:
    settings = "checkpoint.every=1 checkpoint.keep=4000 checkpoint.background=false"
    with starting(tmp_path, settings, "outer.fragments=1"):
        first = tmp_path / "starter" / "checkpoints" / "peer" / "step-00000002"
        eventually(first.exists, "a checkpoint")
        said = diloco("export @starter/address out", directory=tmp_path).done().stdout
        text = diloco(
            "generate @starter/address --tokens 4 --prompt def", directory=tmp_path
        ).done()
        assert text.stdout.startswith("def")
        step = int(said.split("outer step ")[1].split()[0])
        assert step >= 2 and f"| outer step | {step} |" in (tmp_path / "out/README.md").read_text()
        checkpoint = tmp_path / "starter" / "checkpoints" / "peer" / f"step-{step:08d}"
        eventually(checkpoint.exists, "that step's checkpoint")
        [anchor] = load_file(checkpoint / "anchor.safetensors").values()
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(map(Tensor.numel, got.values())) >= anchor.numel() > 0
    values = torch.cat([value.float().flatten() for value in got.values()]).sort().values
    assert torch.isin(anchor.float(), values).all()
    assert not (tmp_path / "home" / "diloco").exists(), "nobody has joined"
