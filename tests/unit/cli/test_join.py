"""A volunteer's way into a swarm: what it is told, what it keeps, and what its machine can do."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.admission.keys import RunKey
from diloco.attach.arguments import remember
from diloco.cli.status import status
from diloco.config import compose
from diloco.errors import ConfigError, SwarmError
from diloco.protocol import WIRE_VERSION
from diloco.rundir.reporting import Ready
from diloco.swarm.client.ask import SwarmInfo, check_clock, parse_manifest
from diloco.swarm.rpc.probe import ProbeReply, ProbeResult
from diloco.swarm.wire.dialing import best_first
from diloco.train.machine import GIB, Machine, MemoryNeed, fit_micro_batch
from diloco.volunteer.peer import (
    known_addresses,
    lock_peer_directory,
    move_aside,
    volunteer_config,
)
from tests.support.errors import error_text

pytestmark = pytest.mark.usefixtures("own_home")

ID = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
PLACE = f"/ip4/203.0.113.7/tcp/4100/p2p/{ID}"
OTHER = "QmczQ58j3TwhWbL1MZkbdSCjM5LQFxyJ85RP1WecJwrcCV"


def found(*ahead_s: float) -> SwarmInfo:
    """What a volunteer's machine has found."""
    reply = ProbeReply(wire_version=1, run_id="r", name="n", unix_s=0.0, addresses=[], known=[])
    results = [ProbeResult(str(n), reply, 0.01, value) for n, value in enumerate(ahead_s)]
    return SwarmInfo("{}", results)


def test_joins_at_once_have_identities_of_their_own(own_home: Path, tmp_path: Path) -> None:
    with lock_peer_directory() as first:
        with lock_peer_directory() as second:
            assert (first.number, second.number) == (0, 1) and first.peer_id != second.peer_id
            assert second.name == second.peer_id[-6:]
        with lock_peer_directory() as third:
            assert third.peer_id == second.peer_id
    with lock_peer_directory() as again:
        assert again.identity == own_home / "peer-0" / "identity.key"
        assert again.peer_id == first.peer_id
    key = tmp_path / "named.key"
    with lock_peer_directory(str(key)) as directory:
        assert directory.identity == key
        with pytest.raises(ConfigError):
            lock_peer_directory(str(key)).__enter__()


@pytest.mark.parametrize("home", ["/dev/null", None])
def test_without_a_home_one_line_names_the_setting(
    home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container may run as a user that nobody knows; what needs no home still works."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    said = error_text(ConfigError, lock_peer_directory().__enter__)
    unusable = "/peer-0: Not a directory; choose another XDG_DATA_HOME"
    none = "this user has no home directory; set XDG_DATA_HOME=DIRECTORY for keys and runs"
    assert said.endswith(unusable if home else none)
    said = error_text(ConfigError, status.callback, None, False, False, None)
    assert "of no run in ./runs" in said


def test_peers_of_a_run_are_remembered(own_home: Path, tmp_path: Path) -> None:
    met, elsewhere = f"/ip4/203.0.113.8/tcp/1/p2p/{OTHER}", PLACE.replace(ID, OTHER[:-1] + "W")
    named = tmp_path / "named.key"
    assert known_addresses([PLACE], named) == []
    with lock_peer_directory() as directory:
        remember(directory.identity, "1" * 64, [], [PLACE, met])
    remember(named, "2" * 64, [], [elsewhere])
    assert known_addresses([PLACE], named) == [met]
    assert known_addresses([met.replace("113.8", "113.9")], named) == [PLACE, met]
    assert known_addresses([elsewhere], named) == []


def test_a_volunteer_takes_the_runs_half_and_keeps_its_own() -> None:
    theirs = compose(["experiment=quickstart", "outer.lr=0.5"]).manifest()
    mine = compose(["train.threads=1", "eval.every=3"])
    local = f"/ip4/127.0.0.1/tcp/4100/p2p/{ID}"
    with lock_peer_directory() as directory:
        config = volunteer_config(mine, theirs, {"train.threads", "eval.every"}, directory, [PLACE])
        default = compose()
        here = volunteer_config(default, default.manifest(), set(), directory, [local])
    assert config.manifest() == theirs and (config.train.threads, config.eval.every) == (1, 3)
    assert config.swarm.initial_peers == (PLACE,) and config.swarm.listen == ("/ip4/0.0.0.0/tcp/0",)
    assert config.run.dir == directory.path / "runs" / "quickstart"
    assert config.run.name == directory.name
    assert here.swarm.listen == ("/ip4/127.0.0.1/tcp/0",), "it is of this machine"
    assert here.eval.every == 0


def test_checkpoints_of_an_earlier_visit_are_moved_aside(tmp_path: Path) -> None:
    config, place = compose([f"run.dir={tmp_path}", "run.name=me"]), tmp_path / "checkpoints"
    move_aside(config)
    for content in ("old", "new"):
        (place / "me").mkdir(parents=True)
        (place / "me" / "state").write_text(content)
        move_aside(config)
    assert [file.name for file in place.iterdir()] == ["me.before"]
    assert (place / "me.before" / "state").read_text() == "new"


def test_the_clock_and_the_version_are_held_against_the_swarm() -> None:
    assert check_clock(found()) is None
    assert check_clock(found(0.2, 0.1, -3600.0)) is None, "most peers agree with it"
    behind = "this machine's clock is 2.1 s behind the swarm's (median of 2)"
    assert check_clock(found(-2.0, -2.2)) == behind
    said = error_text(SwarmError, check_clock, found(3600.0))
    assert "is 3600.0 s ahead of the swarm's (median of 1), and 3 s is the limit" in said
    manifest = compose().manifest()
    newer = {**json.loads(manifest.to_json()), "wire_version": WIRE_VERSION + 1}
    with pytest.raises(ConfigError, match=f"this diloco speaks {WIRE_VERSION}; install the same"):
        parse_manifest(json.dumps(newer))
    with pytest.raises(ConfigError):
        parse_manifest("[]")
    assert parse_manifest(manifest.to_json()) == manifest


ROOMY = Machine(torch.device("cpu"), "CPU", 2, 8 * GIB, 8 * GIB, "fp32")


def test_a_batch_is_cut_into_the_fewest_equal_parts_that_fit() -> None:
    """A machine that is too small for one sequence is told by how much."""
    need = MemoryNeed(1_100_000_000, GIB, GIB, GIB)
    for free, micro_batch in {1: 1, 3: 3, 7: 4, 100: 8}.items():
        assert fit_micro_batch(need, replace(ROOMY, main_bytes=(2 + free) * GIB), 8) == micro_batch
    gpu = replace(ROOMY, device=torch.device("cuda"), device_bytes=4 * GIB, main_bytes=GIB)
    assert fit_micro_batch(need, gpu, 8) == 3
    for machine, said in (
        (replace(ROOMY, main_bytes=2 * GIB), "3.0 GiB of main memory, and 2.0 GiB are free, 1.0"),
        (replace(gpu, device_bytes=GIB), "2.0 GiB of cuda, and 1.0 GiB are free, 1.0"),
        (replace(gpu, main_bytes=GIB / 2), "1.0 GiB of main memory, and 0.5 GiB are free, 0.5"),
    ):
        text = error_text(ConfigError, fit_micro_batch, need, machine, 8)
        assert f"1.1G parameters: it needs {said} GiB too little; " in text
        assert re.search(r" (a run of at most [\d.]+M parameters|use a larger machine)$", text)


def test_an_address_is_printed_as_the_whole_command(tmp_path: Path) -> None:
    addresses = [f"/ip4/{ip}/tcp/4100/p2p/{ID}" for ip in ("127.0.0.1", "192.168.1.7", "8.8.8.8")]
    ordered = best_first(addresses)
    assert ordered == addresses[::-1]
    leads = ("", "or, LAN: ", "or, loopback: ")
    lines = [f"{lead}diloco join {address}" for lead, address in zip(leads, ordered, strict=True)]
    head = "others join with this (public: from anywhere):"
    assert Ready(addresses=tuple(ordered)).invitation() == [head, *lines]
    assert "swarm=network lets others in" in Ready(address=addresses[0]).invitation()[0]
    RunKey.create(tmp_path / "run key")  # a path that has to be quoted
    key = f"'{tmp_path / 'run key'}'"
    closed = compose([f"swarm.key_path={key}", "run.id=mine"]).joining_command
    assert closed == f"diloco invite --key {key} --run mine"
    assert compose([]).joining_command == "diloco join"
    first, line = Ready(address=ordered[0], command=closed).invitation()
    assert "link by which one volunteer joins" in first
    assert line.startswith(f"{closed} /ip4/8.8.8.8/")
