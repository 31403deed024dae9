"""Whether this machine is needed for something else: used, on battery, or on a link that costs by the byte.

    reading of the machine -> verdict (pure functions) -> Steady (no flapping) -> the peer pauses, or goes on

A verdict of None says that this machine cannot know, and why.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

import psutil

from diloco.config.peer_local import VolunteerConfig

__all__ = [
    "Load",
    "Steady",
    "Verdict",
    "cpu_load",
    "gpu_load",
    "in_use",
    "is_diloco",
    "metered",
    "on_battery",
    "probes",
]

ANSWER_S = 10.0  # for a program that is asked
APART_S = 1.0  # two readings of the load
LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


class Verdict(NamedTuple):
    """Whether a reason to pause holds, and why, in words; None: it cannot be known, and why not."""

    holds: bool | None
    why: str


Probe = Callable[[], list[Verdict]]
"""Looks at the machine; several verdicts are several signs of one reason, of which one is enough."""


def probes(settings: VolunteerConfig, on_gpu: bool) -> dict[str, Probe]:
    """The probes for `volunteer.pause_when`, by reason."""
    known: dict[str, Probe] = {
        "busy": _Busy(settings, on_gpu) if "busy" in settings.pause_when else list,
        "battery": lambda: [on_battery(_battery())],
        "metered": lambda: [metered(_answer("nmcli", "-t", "-f", "GENERAL.METERED,IP4.GATEWAY", "dev", "show"))],
    }
    return {reason: known[reason] for reason in settings.pause_when}


# -- verdicts ---------------------------------------------------------------------------------------------------------


def on_battery(battery: Any) -> Verdict:
    """Of what `psutil.sensors_battery` returns."""
    if battery is None or battery.power_plugged is None:
        return Verdict(None, "battery: the system shows no battery")
    return Verdict(not battery.power_plugged, f"on battery ({battery.percent:.0f} %)")


def metered(shown: str | None) -> Verdict:
    """Of what nmcli shows of each device: whether the way out costs. NetworkManager may have guessed it.

    Only devices with a gateway count. If one of them costs nothing, that is the way out.
    """
    answers: list[str] = []
    for device in (shown or "").split("\n\n"):
        values = dict(line.partition(":")[::2] for line in device.splitlines())
        if values.get("IP4.GATEWAY", "").strip("- "):
            answers.append(values.get("GENERAL.METERED", "").split(" ")[0])
    if "no" in answers or "yes" in answers:
        return Verdict("no" not in answers, "the link is metered")
    return Verdict(None, "metered: NetworkManager (nmcli) does not say whether the link costs")


@dataclass(frozen=True)
class Load:
    """What the CPUs did so far: seconds of all programs together, and of each process of diloco by its id."""

    at: float
    cores: int
    busy_s: float
    own_s: Mapping[int, float] = field(default_factory=dict)


def cpu_load(before: Load, after: Load, limit: float) -> Verdict:
    """Whether programs other than diloco's used more than a part `limit` of all cores between two readings."""
    own_s = sum(max(0.0, spent - before.own_s.get(process, 0.0)) for process, spent in after.own_s.items())
    room_s = (after.at - before.at) * after.cores
    others = max(0.0, after.busy_s - before.busy_s - own_s) / room_s if room_s > 0 else 0.0
    return Verdict(others > limit, f"other programs use {others:.0%} of the CPUs")


def gpu_load(shown: str | None, is_other: Callable[[int], bool], limit: float) -> Verdict:
    """The same for a GPU, of what `nvidia-smi pmon -c 1 -s u` shows: GPU, process, kind, and percent of its time.

    `is_other` says of a process id whether it is another program's.
    """
    if shown is None:
        return Verdict(None, "busy: who uses the GPU is not known without nvidia-smi")
    others = dict[str, float]()
    for line in shown.splitlines():
        cells = line.split()
        if len(cells) > 3 and cells[0].isdigit() and cells[1].isdigit() and is_other(int(cells[1])):
            others[cells[0]] = others.get(cells[0], 0.0) + (float(cells[3]) / 100 if cells[3].isdigit() else 0.0)
    most = max(others.values(), default=0.0)
    return Verdict(most > limit, f"other programs use {most:.0%} of a GPU")


def in_use(idle_s: float | None, limit_s: float) -> Verdict:
    """Whether somebody used keyboard or mouse in the last `limit_s` seconds."""
    if idle_s is None:
        return Verdict(None, "busy: nothing here says when keyboard and mouse were used last")
    return Verdict(idle_s < limit_s, f"somebody used this machine {idle_s:.0f} s ago")


def is_diloco(command: Sequence[str]) -> bool:
    """Whether a command line is one of ours: `diloco ...`, `python .../diloco ...`, `python -m diloco.train ...`."""
    names = [PurePath(part).name for part in command[:2]]
    if names[:1] == ["diloco"] or (names[1:] == ["diloco"] and names[0].startswith("python")):
        return True
    modules = [command[at + 1] for at, part in enumerate(command[:-1]) if part == "-m"]
    return any(module == "diloco" or module.startswith("diloco.") for module in modules)


# -- no flapping ------------------------------------------------------------------------------------------------------


class Steady:
    """A reason that holds now and then, as one that begins and ends: each state lasts for `settle_s` at least.

    It begins as soon as the reason holds, unless it ended less than `settle_s` ago, and ends when the reason has not
    held for `settle_s`. What cannot be known does not hold.
    """

    def __init__(self, settle_s: float) -> None:
        self.holds = False
        self._settle_s = settle_s
        self._changed_at = self._held_at = -math.inf

    def update(self, holds: bool | None, now: float) -> bool:
        """Takes in a verdict at a time in seconds; returns whether the reason counts."""
        if holds:
            self._held_at = now
        since = self._held_at if self.holds else self._changed_at
        if bool(holds) != self.holds and now - since >= self._settle_s:
            self.holds, self._changed_at = bool(holds), now
        return self.holds


# -- readings ---------------------------------------------------------------------------------------------------------


class _Busy:
    """Compares the load of the CPUs with that of the look before; two looks at nearly one time say nothing of it."""

    def __init__(self, settings: VolunteerConfig, on_gpu: bool) -> None:
        self._settings = settings
        self._on_gpu = on_gpu
        self._before = _load()

    def __call__(self) -> list[Verdict]:
        settings, before, after = self._settings, self._before, _load()
        verdicts = [in_use(_idle_s(), settings.idle_s)]
        if after.at - before.at >= APART_S:
            self._before = after
            verdicts.append(cpu_load(before, after, settings.busy_load))
        if self._on_gpu:
            shown = _answer("nvidia-smi", "pmon", "-c", "1", "-s", "u")

            def is_other(process: int) -> bool:  # ids from outside of this container would be our own, too
                return process not in after.own_s and psutil.pid_exists(process)

            verdicts.append(gpu_load(shown, is_other, settings.busy_load))
        return verdicts


def _load() -> Load:
    times = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")  # guests are in user and nice already
    busy_s = sum(spent for kind, spent in times.items() if kind not in idle)
    return Load(time.monotonic(), psutil.cpu_count() or 1, busy_s, _own())


def _own() -> dict[int, float]:
    """CPU seconds of each process of diloco on this machine, and of what they started."""
    parents, spent_s, own = dict[int, int](), dict[int, float](), {os.getpid()}
    for process in psutil.process_iter(["ppid", "cmdline", "cpu_times"]):
        if process.info["cpu_times"] is None:  # of another user, and the system does not tell
            continue
        parents[process.pid] = process.info["ppid"]
        spent_s[process.pid] = process.info["cpu_times"].user + process.info["cpu_times"].system
        if is_diloco(process.info["cmdline"] or ()):
            own.add(process.pid)
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in own} - own
        grown, own = bool(more), own | more
    return {process: spent_s[process] for process in own & spent_s.keys()}


def _battery() -> Any:
    with suppress(AttributeError, OSError, ValueError):  # a system without the sensor has no such function
        return psutil.sensors_battery()
    return None


def _idle_s() -> float | None:
    """Seconds since keyboard or mouse were used, by the X server, the login manager, and the terminals."""
    known = [idle for idle in (_idle_on_screen_s(), _idle_by_login_s()) if idle is not None][:1]
    with suppress(OSError, psutil.Error):
        for user in psutil.users():
            with suppress(OSError):  # the access time of a terminal is that of its last key
                known.append(max(0.0, time.time() - os.stat(f"/dev/{user.terminal}").st_atime))
    return min(known, default=None)


def _idle_on_screen_s() -> float | None:
    shown = (_answer("xprintidle") or "").strip() if os.environ.get("DISPLAY") else ""
    return float(shown) / 1000 if shown.isdigit() else None


def _idle_by_login_s() -> float | None:
    """Zero while somebody works, as the desktop tells the login manager; None where no desktop has ever told it."""
    shown = _answer("busctl", "get-property", *LOGIND, "IdleHint", "IdleSinceHint")
    hint, since, *_ = [*(line.partition(" ")[2] for line in (shown or "").splitlines()), "", ""]
    if not since.isdigit() or int(since) == 0:
        return None
    return max(0.0, time.time() - int(since) / 1e6) if hint == "true" else 0.0


def _answer(*command: str) -> str | None:
    """What a program writes; None if it is not there, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, env={**os.environ, "LC_ALL": "C"}, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout
