"""`diloco doctor`: every check ends in a line."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.cli import doctor as module
from diloco.cli.doctor import Check, Doctor
from diloco.config import compose
from diloco.swarm.client.ask import SwarmInfo
from diloco.swarm.rpc.probe import ProbeReply, ProbeResult
from diloco.train.machine import inspect_machine
from diloco.volunteer.peer import PeerDirectory

ID = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
PLACE = f"/ip4/203.0.113.7/tcp/4100/p2p/{ID}"
ASK = "diloco.swarm.client.ask"
THEIRS = compose(["experiment=smoke", "inner.batch_size=3"]).manifest().to_json()


def swarm_of(
    manifest: str, ahead_s: float = 0.0, silent: dict[str, str] | None = None
) -> SwarmInfo:
    told = {"run_id": "r", "name": "n1", "unix_s": 0.0, "addresses": [PLACE], "known": []}
    reply = ProbeReply(wire_version=1, **told)
    result = ProbeResult("p", reply, 0.04, ahead_s)
    return SwarmInfo(manifest, [result], silent or {})


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """A doctor whose network is made up; the machine is this one."""
    config = compose(["experiment=smoke", f"run.dir={tmp_path}/not/yet", "train.device=cpu"])
    text = config.manifest().to_json()
    monkeypatch.setattr(f"{ASK}.inspect_swarm", lambda *_, **__: swarm_of(text))
    monkeypatch.setattr(f"{ASK}.try_to_listen", lambda *_: ([PLACE], True, ""))
    monkeypatch.setattr("diloco.train.machine.step_seconds", lambda *_: 0.25)
    return Doctor(config, PeerDirectory(0, tmp_path, tmp_path / "identity.key"), [PLACE])


def verdicts(doctor: Doctor) -> dict[str, Check]:
    return {check.name: check for check in doctor.checks()}


@pytest.mark.slow
def test_a_healthy_machine_and_swarm_are_all_ok(healthy: Doctor) -> None:
    """There are figures; without an address nothing is asked of a swarm."""
    found = verdicts(healthy)
    assert {check.verdict for check in found.values()} == {"ok"}, found
    assert list(found) == "python swarm manifest clock memory disk port".split()
    measured = {"latency_s": 0.02, "step_s": 0.25}
    assert healthy.figures.items() >= measured.items()
    assert "called back /ip4/203.0.113.7/tcp/4100" in found["port"].text
    alone = verdicts(replace(healthy, addresses=[], _found=None))
    assert not {"manifest", "clock"} & alone.keys() and alone["memory"].verdict == "ok"
    assert "/ip4/203.0.113.7/tcp/4100 (LAN)" in alone["port"].text


NEWER = '{"wire_version": 99}'


@pytest.mark.parametrize(
    ("name", "change", "verdict", "text", "remedy", "swarm"),
    [
        ("clock", {"ahead_s": -9.0}, "failed", "9.0 s behind the swarm's", "timedatectl", True),
        ("swarm", {}, "ok", "answered by 1, 20 ms away: n1", "", False),
        ("swarm", {"silent": {PLACE: "no answer"}}, "warning", f"{PLACE}: no answer", "", False),
        ("manifest", {"manifest": "{"}, "failed", "manifest", "", True),
        ("manifest", {"manifest": NEWER}, "failed", "has wire version 99", "install", True),
        ("memory", {"manifest": THEIRS}, "ok", "a batch of 3 at once", "", False),
        ("port", {}, "warning", "", "forward the port", False),
    ],
)
def test_what_is_wrong_with_the_way_to_a_swarm_is_said(
    name: str,
    change: dict[str, Any],
    verdict: str,
    text: str,
    remedy: str,
    swarm: bool,
    healthy: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"manifest": healthy.config.manifest().to_json(), **change}
    hidden = ([PLACE], False, "forward the port")
    monkeypatch.setattr(f"{ASK}.inspect_swarm", lambda *_, **__: swarm_of(**there))
    monkeypatch.setattr(f"{ASK}.try_to_listen", lambda *_: hidden)
    check = verdicts(healthy)[name]
    assert (check.verdict, check.swarm) == (verdict, swarm)
    assert text in check.text and remedy in check.remedy


def test_disk_port_and_memory_are_those_that_join_takes(
    healthy: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, asked = tmp_path / "volunteer", list[Any]()
    small = replace(inspect_machine("cpu"), main_bytes=1e6)
    full.mkdir()
    healthy.directory = PeerDirectory(0, full, full / "identity.key")

    def usage(place: Path) -> SimpleNamespace:
        return SimpleNamespace(free=1000 if full in [place, *place.parents] else 10**15)

    def listen(peers: Any, addresses: Any, *_: Any) -> tuple[list[str], bool, str]:
        asked.append(addresses)
        return [PLACE], True, ""

    monkeypatch.setattr("shutil.disk_usage", usage)
    monkeypatch.setattr(f"{ASK}.try_to_listen", listen)
    monkeypatch.setattr("diloco.train.machine.inspect_machine", lambda *_: small)
    found = verdicts(healthy)
    assert found["disk"].verdict == "failed" and f"0.0 GiB free in {full}, " in found["disk"].text
    memory = found["memory"]
    assert memory.verdict == "failed" and "too small" in memory.text and not memory.swarm
    assert asked == [("/ip4/0.0.0.0/tcp/0",)]


def test_the_exit_code_says_on_which_side_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_home: Path
) -> None:
    here, there = Check("a", "failed", "x"), Check("b", "failed", "y", "do it", swarm=True)
    for found, code in (([Check("c", "warning", "y", "z")], 0), ([here, there], 2), ([there], 3)):
        monkeypatch.setattr(Doctor, "checks", lambda self, found=found: iter(found))
        assert (
            module.run_checks(compose(), None, True)
            == module.run_checks(compose(), None, False)
            == code
        )
        said, _, shown = capsys.readouterr().out.rpartition("}\n")
        report = json.loads(said + "}")
        assert [check["name"] for check in report["checks"]] == [check.name for check in found]
        assert report["exit"] == code
        assert all(check.verdict in shown and check.remedy in shown for check in found)
