"""When a peer pauses: what the machine shows, what was sent today, what the user says; and how it comes back."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import Config, compose
from diloco.rundir.presence import Presence, pause_file
from diloco.rundir.reporting import Message, Status
from diloco.train import standby as module
from diloco.train.island import Island
from diloco.train.probes import (
    Load,
    Steady,
    Verdict,
    cpu_load,
    gpu_load,
    in_use,
    is_diloco,
    metered,
    on_battery,
    probes,
)
from diloco.train.standby import Standby, Uploads, joins_by


def test_a_laptop_without_mains_is_on_battery() -> None:
    for percent, plugged, holds in ((50.0, True, False), (49.6, False, True)):
        assert on_battery(SimpleNamespace(percent=percent, power_plugged=plugged)) == (holds, "on battery (50 %)")
    for unknown in (None, SimpleNamespace(percent=50.0, power_plugged=None)):
        assert on_battery(unknown) == (None, "battery: the system shows no battery")


@pytest.mark.parametrize(
    ("devices", "holds"),
    [
        ([], None),
        ([("unknown", "192.168.1.1")], None),
        ([("no (guessed)", "192.168.1.1"), ("unknown", "")], False),
        ([("yes (guessed)", "192.168.43.1"), ("no", "")], True),
        ([("yes", "192.168.43.1"), ("no", "--")], True),
        ([("yes", "192.168.43.1"), ("no (guessed)", "192.168.1.1")], False),
    ],
)
def test_a_link_costs_if_every_way_out_does(devices: list[tuple[str, str]], holds: bool | None) -> None:
    text = "\n".join(f"GENERAL.METERED:{costs}\nIP4.GATEWAY:{gateway}\n" for costs, gateway in devices)
    assert metered(text).holds is holds and metered(None).holds is None


def test_the_load_is_that_of_others() -> None:
    """Not what diloco itself computes; on the busiest GPU; and keyboard and mouse count for a while."""
    before = Load(100.0, 4, 1000.0, {7: 50.0, 8: 1.0})
    mine = Load(110.0, 4, 1025.0, {7: 70.0, 9: 5.0})  # 8 has ended, 9 is new: all 25 s are ours
    assert cpu_load(before, mine, 0.01) == (False, "other programs use 0% of the CPUs")
    both = Load(110.0, 4, 1037.0, {7: 70.0, 9: 5.0})
    assert cpu_load(before, both, 0.29) == (True, "other programs use 30% of the CPUs")
    assert cpu_load(before, both, 0.31).holds is False
    assert cpu_load(before, before, 0.1).holds is False
    assert gpu_load(PMON, lambda process: process not in {4711}, 0.15) == (True, "other programs use 20% of a GPU")
    for ours, limit, holds in (({4711}, 0.25, False), ({4711, 4712}, 0.01, False), ({4712}, 0.89, True)):
        assert gpu_load(PMON, lambda process, ours=ours: process not in ours, limit).holds is holds
    assert gpu_load(None, lambda process: True, 0.1).holds is None
    assert in_use(10.0, 300.0) == (True, "somebody used this machine 10 s ago")
    assert in_use(300.0, 300.0).holds is False and in_use(None, 300.0).holds is None


PMON = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       4711     C     90     40      -      -    python
    0       4712     C     20      3      -      -    blender
    1       4713     G      -      -      -      -    Xorg
    1          -     -      -      -      -      -    -
"""


OURS = [
    "/usr/bin/python3 -m diloco join @link", "/opt/venv/bin/python /opt/venv/bin/diloco local", "diloco status",
    "python -m torch.distributed.run --nproc-per-node=2 -m diloco.train --config x",
]  # fmt: skip
FOREIGN = ["vim /home/me/diloco", "python -m http.server", "python train.py diloco", ""]


@pytest.mark.parametrize("line", OURS + FOREIGN)
def test_which_processes_are_ours(line: str) -> None:
    assert is_diloco(line.split()) is (line in OURS)


def test_the_probes_of_this_machine_answer_whatever_it_has() -> None:
    found = probes(compose(["volunteer.pause_when=[busy,battery,metered]"]).volunteer, on_gpu=True)
    assert list(found) == ["busy", "battery", "metered"]
    for probe in found.values():
        assert all(verdict.why and verdict.holds in (True, False, None) for verdict in probe())


def test_a_reason_ends_when_it_has_been_gone_for_a_while() -> None:
    steady = Steady(60.0)
    assert steady.update(True, 0.0)
    assert [steady.update(False, at) for at in (30.0, 59.0)] == [True, True]
    assert steady.update(True, 59.5) and steady.update(False, 119.0)
    assert not steady.update(False, 120.0)
    assert not steady.update(True, 150.0), "it has only just ended"
    assert steady.update(True, 180.0)
    assert steady.update(None, 200.0) and not steady.update(None, 240.0), "what cannot be known does not hold"


@given(st.lists(st.tuples(st.floats(0.1, 50), st.booleans()), max_size=60), st.floats(0, 100))
def test_each_state_lasts_for_the_least_time(readings: list[tuple[float, bool]], settle_s: float) -> None:
    steady, now, before, changes = Steady(settle_s), 0.0, False, []
    for passed, holds in readings:
        now += passed
        if steady.update(holds, now) != before:
            before = not before
            changes.append(now)
            assert holds is before, "it changes by a reading that says so"
    assert all(later - earlier >= settle_s for earlier, later in pairwise(changes))


def test_bytes_are_counted_over_restarts_until_midnight(tmp_path: Path) -> None:
    today, file = [date(2026, 11, 23)], tmp_path / "identity.sent.json"

    def restarted() -> Uploads:
        return Uploads(file, 1000, lambda: today[0], lambda: 0.0)

    uploads = restarted()
    uploads.begin_session()
    uploads.count(300)
    uploads.count(700)
    uploads.begin_session()
    uploads.count(299)
    assert uploads.nbytes == 999 and not uploads.spent
    uploads.keep()
    again = restarted()
    assert again.nbytes == 999 and not again.spent
    again.count(1)
    assert again.spent
    again.keep()
    assert restarted().spent
    today[0] = date(2026, 11, 24)
    assert not restarted().spent and not again.spent and again.nbytes == 0
    again.count(501)
    assert again.nbytes == 500, "only what was sent since"


def test_a_count_of_bytes_is_kept_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that cannot be read counts as nothing."""
    now = [0.0]
    uploads = Uploads(tmp_path / "sent", 1e9, lambda: date(2026, 11, 23), lambda: now[0])
    uploads.count(10)
    uploads.count(20)
    assert json.loads((tmp_path / "sent").read_text()) == {"day": "2026-11-23", "bytes": 10}
    now[0] = 11.0
    uploads.count(30)
    assert json.loads((tmp_path / "sent").read_text())["bytes"] == 30
    Uploads(tmp_path / "nowhere" / "sent", 1e9).keep()  # as where a disk is full
    assert "until then what is sent is not counted over a restart" in caplog.text
    for content in ("", "[1]", '{"day": "2026-11-23", "bytes": "many"}', '{"bytes": -5}', "\xff"):
        (tmp_path / "sent").write_text(content, encoding="latin-1")
        assert Uploads(tmp_path / "sent", 1, lambda: date(2026, 11, 23)).spent is False


def standby(tmp_path: Path, *typed: str, **options: Any) -> Standby:
    return Standby(settings(tmp_path, *typed), tmp_path / "me.key", **options)


def settings(tmp_path: Path, *typed: str) -> Config:
    return compose([f"run.dir={tmp_path}", *typed])


def test_a_user_and_a_budget_say_when(tmp_path: Path) -> None:
    """An older word is forgotten."""
    pause_file(tmp_path).touch()
    mine = standby(tmp_path)
    assert mine.reason() == "" and not pause_file(tmp_path).exists()
    pause_file(tmp_path).touch()
    assert mine.reason() == "diloco pause"
    with Presence(tmp_path, "other", "run") as other:
        other.hear(Status(state="paused"))
        assert standby(tmp_path).reason() == "diloco pause", "another peer pauses there"
    today = date.today().isoformat()
    (tmp_path / "me.sent.json").write_text(json.dumps({"day": today, "bytes": 5_100_000_000}))
    spent = standby(tmp_path, "swarm.upload_per_day=5e9").reason()
    assert spent == "5.1 GB sent today, of swarm.upload_per_day=5e+09; until midnight"
    assert standby(tmp_path, "swarm.upload_per_day=6e9").reason() == ""


def test_probes_are_asked_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be known is said once."""
    unknown = Verdict(None, "busy: no keyboard")
    verdicts = {"busy": [Verdict(False, "calm"), unknown], "battery": [Verdict(True, "10 %")]}
    asked: list[str] = []

    def probe(reason: str) -> Callable[[], list[Verdict]]:
        return lambda: (asked.append(reason), verdicts[reason])[1]

    monkeypatch.setattr(module, "probes", lambda settings, on_gpu: {reason: probe(reason) for reason in verdicts})
    now = [0.0]
    typed = ("volunteer.pause_when=[busy,battery]", "volunteer.settle_s=10")
    mine = standby(tmp_path, *typed, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        assert mine.reason() == mine.reason() == "10 %"
        assert asked == ["busy", "battery"]
        verdicts |= {"busy": [Verdict(True, "a game"), unknown], "battery": [Verdict(True, "9 %")]}
        now[0] = 5.0
        assert mine.reason() == "10 %; a game"
    assert caplog.text.count("volunteer.pause_when: busy: no keyboard; so this is no reason to pause") == 1
    verdicts["busy"] = verdicts["battery"] = [Verdict(False, "")]
    for now[0], why in ((10.0, "10 %; a game"), (15.0, "")):
        assert mine.reason() == why


def test_only_rank_0_asks_and_none_where_all_would_wait(tmp_path: Path) -> None:
    pausing, alike = standby(tmp_path, leads=False), standby(tmp_path, "outer=data_parallel")
    pause_file(tmp_path).touch()
    assert pausing.reason() == alike.reason() == ""


def test_a_peer_does_not_join_by_its_own_address_file(tmp_path: Path) -> None:
    for entry, found in ((f"@{tmp_path}/address", True), (f"@{tmp_path}/other", False)):
        assert joins_by(settings(tmp_path, f"swarm.initial_peers=['{entry}']"), tmp_path / "address") is found
    assert not joins_by(settings(tmp_path), tmp_path / "address")


ALONE = Island(torch.device("cpu"))


class Session:
    """Stands for what a session trains with: bytes that it sent, and whether it was interrupted."""

    def __init__(self, sent: int) -> None:
        self.sent, self.looked, self.interrupted = sent, threading.Semaphore(0), threading.Event()
        self.addresses = ["/ip4/127.0.0.1/tcp/4242/p2p/Qm1"]
        self.view: Any = SimpleNamespace(node=self)
        self.interrupt = self.interrupted.set

    @property
    def traffic(self) -> SimpleNamespace:
        self.looked.release()
        return SimpleNamespace(bytes_sent=self.sent)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)


@pytest.mark.usefixtures("impatient")
def test_a_session_is_interrupted_when_its_day_is_spent(tmp_path: Path) -> None:
    """What it sends while it leaves counts, too."""
    mine, session = standby(tmp_path, "swarm.upload_per_day=100"), Session(99)
    with mine.watching(session):  # type: ignore[arg-type]
        for _ in range(3):
            assert session.looked.acquire(timeout=60)
        assert not session.interrupted.is_set() and mine.why == ""
        session.sent = 100
        assert session.interrupted.wait(60)
    assert mine.why == "100 B sent today, of swarm.upload_per_day=100; until midnight"
    session.sent = 170
    mine.end_session(session)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "me.sent.json").read_text())["bytes"] == 170


@pytest.mark.usefixtures("impatient")
def test_who_pauses_says_so_once_and_goes_on_afterwards(tmp_path: Path) -> None:
    mine, told = standby(tmp_path), list[Message]()

    def end_it(message: Message) -> None:
        told.append(message)
        pause_file(tmp_path).unlink()

    assert mine.wait(ALONE, end_it) and mine.paused_s == 0.0 and not told
    pause_file(tmp_path).touch()
    assert mine.wait(ALONE, end_it) and mine.paused_s > 0.0
    assert told == [Status(state="paused", why="diloco pause")]
    pause_file(tmp_path).touch()
    assert not mine.wait(ALONE, lambda message: os.kill(os.getpid(), signal.SIGTERM)), "it leaves at a signal"


def test_who_comes_back_listens_where_it_did(tmp_path: Path) -> None:
    typed = settings(tmp_path, "swarm.listen=[/ip4/0.0.0.0/tcp/0]").swarm
    mine = standby(tmp_path, "swarm.listen=[/ip4/0.0.0.0/tcp/0]")
    assert mine.coming().swarm == typed and mine.sessions == 1
    mine.remember(Session(0))  # type: ignore[arg-type]
    assert mine.coming().swarm.listen == ("/ip4/0.0.0.0/tcp/4242",)
    assert mine.forget() and not mine.forget()
    assert mine.coming().swarm == typed
