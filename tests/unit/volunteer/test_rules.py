"""What a worker does next, in virtual time."""

from dataclasses import dataclass, field, replace

import pytest

from diloco.errors import ConfigError
from diloco.volunteer.rules import (
    GOOD_S,
    LEAVING_S,
    LONGEST_PAUSE_S,
    QUIET_S,
    RESERVE_BYTES,
    Action,
    MachineFacts,
    State,
    allows,
    decide,
)

NIGHT = {"hour": 23.0}


@dataclass
class Machine:
    """Carries out what the rules decide; a peer trains until something happens to it."""

    when: str = ""
    disk_bytes: int | None = None
    state: State = field(default_factory=State)
    now: float = 1.6e9
    facts: MachineFacts = field(default_factory=MachineFacts)
    done: list[Action] = field(default_factory=list)

    def look(self, **facts: object) -> Action:
        """One decision, with these facts from now on."""
        self.facts = replace(self.facts, **facts)  # type: ignore[arg-type]
        self.state, action = decide(self.now, self.state, self.facts, self.when, self.disk_bytes)
        self.facts = replace(self.facts, code=None)
        if action is Action.START:
            self.facts = replace(self.facts, running=True, error="")
        self.done.append(action)
        return action

    def train(self, seconds: float) -> None:
        """A peer makes steps for so long."""
        self.look(joined=True)
        self.now += seconds
        assert self.look() is Action.WAIT and self.facts.running

    def ends(self, code: int, error: str = "") -> Action:
        """The peer ends."""
        return self.look(running=False, code=code, error=error)

    def until_started(self) -> float:
        """Seconds until the next peer is started."""
        begin = self.now
        while self.look() is not Action.START:
            self.now += 0.5
            assert self.now < begin + 2 * LONGEST_PAUSE_S
        return self.now - begin


def test_after_each_of_ten_kills_it_is_back_after_growing_pauses() -> None:
    worker, pauses = Machine(), []
    assert worker.look() is Action.START
    for _ in range(10):
        worker.train(5.0)
        assert worker.ends(-9) is Action.WAIT
        pauses.append(worker.until_started())
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    worker.train(GOOD_S)
    worker.ends(-9)
    assert worker.until_started() == 1, "ten good minutes forgive what was before"
    assert worker.state.starts == 12


def test_a_clock_that_is_set_back_holds_nothing_up() -> None:
    worker = Machine()
    worker.look()
    worker.ends(-9)
    worker.now -= 86_400
    assert worker.look() is Action.START


def test_a_full_disk_is_cleaned_and_training_goes_on_twice() -> None:
    worker = Machine(disk_bytes=20 * 10**9)
    worker.look()
    for full, empty in (
        ({"used": 21 * 10**9}, {"used": 10**9}),
        ({"free": 10**6}, {"free": 10**12}),
    ):
        worker.train(GOOD_S)
        assert worker.look(**full) is Action.LEAVE
        assert worker.ends(0) is Action.CLEAN
        assert worker.look(**empty) is Action.START, "it had nothing to wait for"
    assert worker.done.count(Action.CLEAN) == 2


@pytest.mark.parametrize(
    ("full", "text"),
    [
        ({"used": 21 * 10**9}, "21.0 GB after cleaning, and --disk is 20.0 GB; give more"),
        ({"free": RESERVE_BYTES - 1}, "free after cleaning; make room"),
    ],
)
def test_a_disk_that_stays_full_ends_the_worker_in_one_line(
    full: dict[str, object], text: str
) -> None:
    worker = Machine(disk_bytes=20 * 10**9)
    worker.look()
    worker.train(60.0)
    assert worker.ends(2, "cannot write step-1") is Action.WAIT, "no disk is full"
    assert worker.look(**full) is Action.CLEAN
    assert worker.look() is Action.END
    assert (worker.state.phase, worker.state.code) == ("ended", 2)
    assert worker.state.why.endswith(text)


def test_a_full_disk_before_the_first_step_is_no_wrong_setting() -> None:
    worker = Machine()
    worker.look()
    assert worker.look(running=False, code=2, free=0) is Action.CLEAN
    assert worker.look(free=10**12) is Action.WAIT and worker.until_started() > 0


def test_after_a_reboot_it_begins_at_once_whatever_it_did() -> None:
    """The processes in its file are dead; pauses and times are those of another boot."""
    worker = Machine()
    worker.look()
    worker.train(5.0)
    for _ in range(9):
        worker.ends(-9)
        worker.until_started()
    worker.ends(-9)
    after = Machine(state=worker.state.resumed(worker.now), now=worker.now)
    assert after.look() is Action.START
    assert (after.state.starts, after.state.pause_s, after.state.joined) == (11, 0.0, True)
    assert after.ends(3, "the swarm cannot be reached") is Action.WAIT, "the network comes later"


@pytest.mark.parametrize("code", [2, 3])
def test_an_address_that_was_never_right_ends_it_with_the_line_of_its_peer(code: int) -> None:
    worker = Machine()
    worker.look()
    assert worker.ends(code, "nobody there") is Action.END
    assert (worker.state.why, worker.state.code) == ("nobody there", code)


def test_a_run_that_is_over_ends_it() -> None:
    worker = Machine()
    worker.look()
    worker.train(5.0)
    assert worker.ends(0) is Action.END and worker.state.code == 0


def test_a_stop_lets_its_peer_leave_and_kills_one_that_does_not() -> None:
    for seconds, last in ((1.0, Action.WAIT), (LEAVING_S, Action.KILL)):
        worker = Machine()
        worker.look()
        assert worker.look(stop=True) is Action.LEAVE
        worker.now += seconds
        assert worker.look() is last
        assert worker.ends(0 if last is Action.WAIT else -9) is Action.END
        left = "left the swarm" if last is Action.WAIT else "ended with -9"
        assert worker.state.why == f"stopped, its peer {left}"
    assert Machine().look(stop=True) is Action.END


@pytest.mark.parametrize(
    ("when", "yes", "no"),
    [
        ("22-07", {"hour": 23.9}, {"hour": 7.0}),
        ("22-07", {"hour": 6.99}, {"hour": 21.99}),
        ("9:30-17", {"hour": 9.5}, {"hour": 9.4}),
        ("plugged-in", {"plugged_in": True}, {"plugged_in": False}),
        ("plugged-in", {"plugged_in": True}, {"plugged_in": None}),
        ("idle", {"quiet_s": QUIET_S + 1}, {"quiet_s": 0.0}),
        ("idle", {"quiet_s": QUIET_S + 1}, {"quiet_s": None}),
    ],
)
def test_outside_its_time_it_leaves_and_comes_back(
    when: str, yes: dict[str, object], no: dict[str, object]
) -> None:
    worker = Machine(when)
    assert worker.look(**no) is Action.WAIT and worker.state.why == f"--when {when}"
    assert worker.look(**yes) is Action.START
    worker.train(5.0)
    assert worker.look(**no) is Action.LEAVE
    assert worker.ends(0) is Action.WAIT
    assert worker.look(**yes) is Action.START, "a pause is no crash"


def test_a_peer_that_trains_needs_no_more_quiet_minutes() -> None:
    worker = Machine("idle")
    worker.look(quiet_s=QUIET_S + 1)
    assert worker.look(quiet_s=15.0) is Action.WAIT


@pytest.mark.parametrize("when", ["night", "25-3", "7", "22-07-09", "Idle", "22-22"])
def test_what_is_no_time_is_refused_in_one_line(when: str) -> None:
    with pytest.raises(ConfigError, match=f"--when={when} is no time to train; write idle"):
        allows(when, MachineFacts())
