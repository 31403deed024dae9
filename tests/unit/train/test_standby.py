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

# -- what the machine shows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("battery", "holds"),
    [
        (None, None),
        (SimpleNamespace(percent=50.0, power_plugged=None), None),
        (SimpleNamespace(percent=50.0, power_plugged=True), False),
        (SimpleNamespace(percent=49.6, power_plugged=False), True),
    ],
)
def test_a_laptop_without_mains_is_on_battery(battery: object, holds: bool | None) -> None:
    verdict = on_battery(battery)
    assert verdict.holds is holds
    assert verdict.why == ("on battery (50 %)" if holds is not None else "battery: the system shows no battery")


def device(costs: str, gateway: str) -> str:
    return f"GENERAL.METERED:{costs}\nIP4.GATEWAY:{gateway}\n"


@pytest.mark.parametrize(
    ("devices", "holds"),
    [
        ([], None),
        ([device("unknown", "192.168.1.1")], None),
        ([device("no (guessed)", "192.168.1.1"), device("unknown", "")], False),
        ([device("yes (guessed)", "192.168.43.1"), device("no", "")], True),
        ([device("yes", "192.168.43.1"), device("no", "--")], True),
        ([device("yes", "192.168.43.1"), device("no (guessed)", "192.168.1.1")], False),
    ],
)
def test_a_link_costs_if_every_way_out_does(devices: list[str], holds: bool | None) -> None:
    assert metered("\n".join(devices)).holds is holds
    assert metered(None).holds is None


def test_the_load_of_others_leaves_out_what_diloco_itself_computes() -> None:
    before = Load(100.0, 4, 1000.0, {7: 50.0, 8: 1.0})
    mine = Load(110.0, 4, 1025.0, {7: 70.0, 9: 5.0})  # 8 has ended, 9 is new: all 25 s are ours
    assert cpu_load(before, mine, 0.01) == (False, "other programs use 0% of the CPUs")
    both = Load(110.0, 4, 1037.0, {7: 70.0, 9: 5.0})
    assert cpu_load(before, both, 0.29) == (True, "other programs use 30% of the CPUs")
    assert cpu_load(before, both, 0.31).holds is False
    assert cpu_load(before, before, 0.1).holds is False


PMON = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       4711     C     90     40      -      -    python
    0       4712     C     20      3      -      -    blender
    1       4713     G      -      -      -      -    Xorg
    1          -     -      -      -      -      -    -
"""


def test_the_load_of_a_gpu_is_that_of_other_processes_on_the_busiest() -> None:
    assert gpu_load(PMON, lambda process: process not in {4711}, 0.15) == (True, "other programs use 20% of a GPU")
    assert gpu_load(PMON, lambda process: process not in {4711}, 0.25).holds is False
    assert gpu_load(PMON, lambda process: process not in {4711, 4712}, 0.01).holds is False
    assert gpu_load(PMON, lambda process: process not in {4712}, 0.89).holds is True
    assert gpu_load(None, lambda process: True, 0.1).holds is None


def test_keyboard_and_mouse_count_for_a_while() -> None:
    assert in_use(10.0, 300.0) == (True, "somebody used this machine 10 s ago")
    assert in_use(300.0, 300.0).holds is False
    assert in_use(None, 300.0).holds is None


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("/usr/bin/python3 -m diloco join @link", True),
        ("/opt/venv/bin/python /opt/venv/bin/diloco local", True),
        ("diloco status", True),
        ("python -m torch.distributed.run --nproc-per-node=2 -m diloco.train --config x", True),
        ("vim /home/me/diloco", False),
        ("python -m http.server", False),
        ("python train.py diloco", False),
        ("", False),
    ],
)
def test_which_processes_are_ours(line: str, ours: bool) -> None:
    assert is_diloco(line.split()) is ours


def test_the_probes_of_this_machine_answer_whatever_it_has() -> None:
    settings = compose(["volunteer.pause_when=[busy,battery,metered]"]).volunteer
    found = probes(settings, on_gpu=True)
    assert list(found) == ["busy", "battery", "metered"]
    for probe in found.values():
        assert all(verdict.why and verdict.holds in (True, False, None) for verdict in probe())


# -- no flapping ------------------------------------------------------------------------------------------------------


def test_a_reason_begins_at_once_and_ends_when_it_has_been_gone_for_a_while() -> None:
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


# -- bytes of a day ---------------------------------------------------------------------------------------------------


def test_bytes_are_counted_over_sessions_and_restarts_until_midnight(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", ["", "[1]", '{"day": "2026-11-23", "bytes": "many"}', '{"bytes": -5}', "\xff"])
def test_a_count_that_cannot_be_read_counts_as_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "sent").write_text(content, encoding="latin-1")
    assert Uploads(tmp_path / "sent", 1, lambda: date(2026, 11, 23)).spent is False


def test_the_count_is_kept_now_and_then_and_a_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    uploads = Uploads(tmp_path / "sent", 1e9, lambda: date(2026, 11, 23), lambda: now[0])
    uploads.count(10)
    uploads.count(20)
    assert json.loads((tmp_path / "sent").read_text()) == {"day": "2026-11-23", "bytes": 10}
    now[0] = 11.0
    uploads.count(30)
    assert json.loads((tmp_path / "sent").read_text())["bytes"] == 30
    Uploads(tmp_path / "nowhere" / "sent", 1e9).keep()
    assert "until then what is sent is not counted over a restart" in caplog.text


# -- why a peer waits -------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, *typed: str) -> Config:
    return compose([f"run.dir={tmp_path}", *typed])


def test_a_user_says_when_and_an_older_word_is_forgotten(tmp_path: Path) -> None:
    config = settings(tmp_path)
    pause_file(tmp_path).touch()
    standby = Standby(config, tmp_path / "identity.key")
    assert standby.reason() == "" and not pause_file(tmp_path).exists()
    pause_file(tmp_path).touch()
    assert standby.reason() == "diloco pause"
    with Presence(tmp_path, "other", "run") as other:
        other.hear(Status(state="paused"))
        assert Standby(config, tmp_path / "identity.key").reason() == "diloco pause", "another peer pauses there"


def test_a_budget_of_bytes_says_how_much_it_was(tmp_path: Path) -> None:
    today = date.today().isoformat()
    (tmp_path / "identity.sent.json").write_text(json.dumps({"day": today, "bytes": 5_100_000_000}))
    standby = Standby(settings(tmp_path, "swarm.upload_per_day=5e9"), tmp_path / "identity.key")
    assert standby.reason() == "5.1 GB sent today, of swarm.upload_per_day=5e+09; until midnight"
    assert Standby(settings(tmp_path, "swarm.upload_per_day=6e9"), tmp_path / "identity.key").reason() == ""


def test_probes_are_asked_now_and_then_and_what_cannot_be_known_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts = {
        "busy": [Verdict(False, "calm"), Verdict(None, "busy: no keyboard")],
        "battery": [Verdict(True, "10 %")],
    }
    asked: list[str] = []

    def probe(reason: str) -> Callable[[], list[Verdict]]:
        return lambda: (asked.append(reason), verdicts[reason])[1]

    monkeypatch.setattr(module, "probes", lambda settings, on_gpu: {reason: probe(reason) for reason in verdicts})
    now = [0.0]
    config = settings(tmp_path, "volunteer.pause_when=[busy,battery]", "volunteer.settle_s=10")
    standby = Standby(config, tmp_path / "identity.key", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        assert standby.reason() == standby.reason() == "10 %"
        assert asked == ["busy", "battery"]
        verdicts["busy"] = [Verdict(True, "a game"), Verdict(None, "busy: no keyboard")]
        verdicts["battery"] = [Verdict(True, "9 %")]
        now[0] = 5.0
        assert standby.reason() == "10 %; a game"
    assert caplog.text.count("volunteer.pause_when: busy: no keyboard; so this is no reason to pause") == 1
    verdicts["busy"] = verdicts["battery"] = [Verdict(False, "")]
    for now[0], why in ((10.0, "10 %; a game"), (15.0, "")):
        assert standby.reason() == why


def test_only_rank_0_asks_and_no_one_pauses_where_all_would_wait(tmp_path: Path) -> None:
    pausing = Standby(settings(tmp_path), tmp_path / "key", leads=False)
    alike = Standby(settings(tmp_path, "outer=data_parallel"), tmp_path / "key")
    pause_file(tmp_path).touch()
    assert pausing.reason() == alike.reason() == ""


def test_a_peer_never_writes_its_address_where_it_reads_that_of_others(tmp_path: Path) -> None:
    for entry, found in ((f"@{tmp_path}/address", True), (f"@{tmp_path}/other", False)):
        assert joins_by(settings(tmp_path, f"swarm.initial_peers=['{entry}']"), tmp_path / "address") is found
    assert not joins_by(settings(tmp_path), tmp_path / "address")


# -- sessions ---------------------------------------------------------------------------------------------------------

ALONE = Island(torch.device("cpu"))
ADDRESS = "/ip4/203.0.113.7/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


class Session:
    """Stands for what a session trains with: bytes that it sent, and whether it was interrupted."""

    def __init__(self, sent: int) -> None:
        self.sent, self.looked = sent, threading.Semaphore(0)
        self.addresses = ["/ip4/127.0.0.1/tcp/4242/p2p/Qm1"]
        self.view: Any = SimpleNamespace(node=self)
        self.interrupted = threading.Event()

    @property
    def traffic(self) -> SimpleNamespace:
        self.looked.release()
        return SimpleNamespace(bytes_sent=self.sent)

    def interrupt(self) -> None:
        self.interrupted.set()


def test_a_session_is_interrupted_when_its_day_is_spent_and_what_leaving_sends_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    standby, session = Standby(settings(tmp_path, "swarm.upload_per_day=100"), tmp_path / "me.key"), Session(99)
    with standby.watching(session):  # type: ignore[arg-type]
        for _ in range(3):
            assert session.looked.acquire(timeout=60)
        assert not session.interrupted.is_set() and standby.why == ""
        session.sent = 100
        assert session.interrupted.wait(60)
    assert standby.why == "100 B sent today, of swarm.upload_per_day=100; until midnight"
    session.sent = 170
    standby.end_session(session)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "me.sent.json").read_text())["bytes"] == 170


def test_who_pauses_says_so_once_and_goes_on_when_the_reason_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    standby, told = Standby(settings(tmp_path), tmp_path / "me.key"), list[Message]()

    def end_it(message: Message) -> None:
        told.append(message)
        pause_file(tmp_path).unlink()

    assert standby.wait(ALONE, end_it) and standby.paused_s == 0.0 and not told
    pause_file(tmp_path).touch()
    assert standby.wait(ALONE, end_it) and standby.paused_s > 0.0
    assert told == [Status(state="paused", why="diloco pause")]


def test_who_pauses_leaves_at_a_signal(tmp_path: Path) -> None:
    standby = Standby(settings(tmp_path), tmp_path / "me.key")
    pause_file(tmp_path).touch()
    assert not standby.wait(ALONE, lambda message: os.kill(os.getpid(), signal.SIGTERM))


def test_who_comes_back_listens_where_it_did(tmp_path: Path) -> None:
    typed = settings(tmp_path, "swarm.listen=[/ip4/0.0.0.0/tcp/0]")
    standby = Standby(typed, tmp_path / "me.key")
    assert standby.coming().swarm == typed.swarm and standby.sessions == 1
    standby.remember(Session(0))  # type: ignore[arg-type]
    assert standby.coming().swarm.listen == ("/ip4/0.0.0.0/tcp/4242",)
    assert standby.forget() and not standby.forget()
    assert standby.coming().swarm == typed.swarm


# -- real peers -------------------------------------------------------------------------------------------------------
