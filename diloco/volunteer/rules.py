"""The next action of a worker: a function of the time, its state and what its machine shows.

    waiting -> training -> leaving -> waiting    a pause (`--when`), or a disk to clean
                        -> waiting               a crash: again after 1, 2, 4 ... 300 s
                        -> ended                 the run is over, or going on is of no use

Sans-IO: `diloco.volunteer.supervisor` finds the facts and carries out the actions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum, auto

from diloco.errors import ConfigError, SwarmError
from diloco.text import human_bytes

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
GOOD_S = 600.0  # after so long without a crash the next pause is the first one again
LEAVING_S = 120.0  # a peer that has not left by then is killed
QUIET_S = 300.0  # how long others leave the CPU alone before `idle` begins
RESERVE_BYTES = 10**8  # free space below which a disk is full
_HOURS = re.compile(r"([01]?\d|2[0-3])(?::([0-5]\d))?-([01]?\d|2[0-3])(?::([0-5]\d))?")


class Action(Enum):
    """The next action of the supervisor."""

    WAIT = auto()
    START = auto()
    LEAVE = auto()  # tell the peer to leave
    KILL = auto()
    CLEAN = auto()  # delete checkpoints and caches; the swarm has the model
    END = auto()


@dataclass(frozen=True)
class MachineFacts:
    """The present state of the machine.

    `code` and `error` are exit code and last error of a peer that has ended since the last facts,
    `joined` that the last one has made an inner step, `stop` that somebody ends the worker, `hour`
    the local time (0 to 24), `quiet_s` for how long others have used little of the CPU, `used` and
    `free` the bytes in the worker's directory and on its disk. None is not known.
    """

    running: bool = False
    code: int | None = None
    error: str = ""
    joined: bool = False
    stop: bool = False
    hour: float = 0.0
    plugged_in: bool | None = None
    quiet_s: float | None = None
    used: int = 0
    free: int = 1 << 62


@dataclass(frozen=True)
class State:
    """The memory of a worker. Times are unix seconds."""

    phase: str = "waiting"
    why: str = ""
    code: int = 0  # exit code, if it has ended
    since: float = 0.0  # of the phase
    next_at: float = 0.0  # no peer is started before
    pause_s: float = 0.0  # the last one after a crash
    starts: int = 0  # of peers, in all
    joined: bool = False  # True once a peer has made an inner step
    cleaned: bool = False  # and no peer has trained for `GOOD_S` since

    def resumed(self, now: float) -> State:
        """Return the state with which a supervisor begins, also after a crash or a reboot."""
        return State(since=now, starts=self.starts, joined=self.joined)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.phase, self.why))) + f" ({self.starts} starts)"


def allows(when: str, facts: MachineFacts) -> bool:
    """Return True if a peer may train now; what is not known is no reason to.

    `when` is "" (always), idle, plugged-in, or hours such as 22-07; `ConfigError` for another.
    """
    if when == "plugged-in":
        return facts.plugged_in is True
    if when == "idle":
        return facts.quiet_s is not None and facts.quiet_s > (0 if facts.running else QUIET_S)
    if not when:
        return True
    match = _HOURS.fullmatch(when)
    numbers = [int(part or 0) for part in match.groups()] if match else [0] * 4
    begin, end = numbers[0] + numbers[1] / 60, numbers[2] + numbers[3] / 60
    if begin == end:
        example = "write idle, plugged-in, or hours of the day such as 22-07 or 22:30-7"
        raise ConfigError(f"--when={when} is no time to train; {example}")
    return (facts.hour - begin) % 24 < (end - begin) % 24


def decide(
    now: float, state: State, facts: MachineFacts, when: str = "", disk_bytes: int | None = None
) -> tuple[State, Action]:
    """Return the next state, and what to do now; its directory may hold `disk_bytes`."""
    state = replace(state, joined=state.joined or facts.joined)
    full, allowed = _full(facts, disk_bytes), allows(when, facts)
    if facts.running:
        if state.phase == "leaving":
            return state, Action.KILL if now - state.since >= LEAVING_S else Action.WAIT
        if facts.stop or full or not allowed:
            return replace(state, phase="leaving", since=now), Action.LEAVE
        good = now - state.since >= GOOD_S
        return replace(state, cleaned=state.cleaned and not good), Action.WAIT
    if facts.code is not None:
        state = _after(now, state, facts, bool(full))
    if state.phase != "ended" and facts.stop:
        why = state.why if facts.code is not None else "it was waiting"
        state = replace(state, phase="ended", why=f"stopped, {why}", since=now)
    elif state.phase != "ended" and full and state.cleaned:
        state = replace(state, phase="ended", why=full, code=ConfigError.exit_code, since=now)
    if state.phase == "ended":
        return state, Action.END
    if full:
        return replace(state, phase="waiting", why="makes room", cleaned=True), Action.CLEAN
    if not allowed:
        return replace(state, phase="waiting", why=f"--when {when}"), Action.WAIT
    if now < state.next_at <= now + LONGEST_PAUSE_S:  # else the clock was set
        return state, Action.WAIT
    started = replace(state, phase="training", why="", since=now, starts=state.starts + 1)
    return started, Action.START


def _after(now: float, state: State, facts: MachineFacts, full: bool) -> State:
    """Return the state after the end of a peer."""
    code, error = facts.code, f" ({facts.error})" if facts.error else ""
    if state.phase == "leaving":
        why = "its peer left the swarm" if code == 0 else f"its peer ended with {code}{error}"
        return replace(state, phase="waiting", why=why, next_at=now)
    if code == 0:
        why = "the run is over, or somebody else has ended its peer"
        return replace(state, phase="ended", why=why, since=now)
    lasting = code in (ConfigError.exit_code, SwarmError.exit_code)
    if lasting and not (state.joined or full):  # an address or a setting that was never right
        return replace(state, phase="ended", why=facts.error, code=code or 0, since=now)
    before_s = 0.0 if now - state.since >= GOOD_S else state.pause_s
    pause_s = min(LONGEST_PAUSE_S, 2 * before_s or FIRST_PAUSE_S)
    why = f"its peer ended with {code}{error}; again in {pause_s:.0f} s"
    return replace(state, phase="waiting", why=why, next_at=now + pause_s, pause_s=pause_s)


def _full(facts: MachineFacts, disk_bytes: int | None) -> str:
    """Say what is full although it was cleaned, and the remedy; "" if nothing is."""
    if disk_bytes is not None and facts.used > disk_bytes:
        used, most = human_bytes(facts.used), human_bytes(disk_bytes)
        return f"its directory holds {used} after cleaning, and --disk is {most}; give more"
    if facts.free < RESERVE_BYTES:
        return f"its disk has {human_bytes(facts.free)} free after cleaning; make room"
    return ""
