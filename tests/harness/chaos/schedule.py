"""What happens to which peer, and when: a schedule as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.harness.links.pipe import WORSE

LINK_KINDS = ("partition", "heal", "fast", "move", *WORSE)
KINDS = ("kill", "stop", "cont", "term", "join", "restart", *LINK_KINDS)
# What follows a kind: a pattern, and an example. It is one peer where nothing is said.
FORMS = {"join": ("", ""), "heal": ("", ""), "partition": (r"\d+(,\d+)*(\|\d+(,\d+)*)+", "0,1|2,3")}
FORMS |= {kind: (r"\d+ \S+", f"1 {example}") for kind, (_, example, _) in WORSE.items()}
# In which states of a peer a fault can happen, and its state then.
STATES: dict[str, tuple[tuple[str, ...], str]] = {
    "kill": (("runs", "stopped"), "ended"),
    "term": (("runs",), "ended"),
    "stop": (("runs",), "stopped"),
    "cont": (("stopped",), "runs"),
    "restart": (("ended",), "runs"),
}


class ScheduleError(ValueError):
    """A schedule cannot be meant; one line."""


@dataclass(frozen=True)
class ScheduledFault:
    """`groups` are the sides of a partition; `value` is a rate, a delay or a loss, such as
    `2mbit`."""

    at: float
    kind: str
    peers: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    value: str = ""

    def __str__(self) -> str:
        words = [self.kind, *map(str, self.peers)]
        if self.groups:
            words.append("|".join(",".join(map(str, group)) for group in self.groups))
        return " ".join([*words, self.value]).strip()

    @property
    def named(self) -> tuple[int, ...]:
        """Peers that the others may notice."""
        return self.peers or tuple(peer for group in self.groups for peer in group)


def parse(text: str, peers: int) -> list[ScheduledFault]:
    """`30:kill 2, 35:join, 80:partition 0,1|2,3`: what happens, in the order of time.

    A comma ends a fault only before `SECOND:`, because a partition contains commas. Peers are
    numbered from 0; those that join get the next numbers. Raises `ScheduleError` for what cannot
    be.
    """
    parts = [part.strip() for part in re.split(r",\s*(?=\d+(?:\.\d+)?\s*:)", text) if part.strip()]
    faults = sorted((_fault(part) for part in parts), key=lambda fault: fault.at)
    state = dict.fromkeys(range(peers), "runs")
    for fault in faults:
        _follow(fault, state)
    return faults


def _fault(part: str) -> ScheduledFault:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*:\s*([a-z]+)\s*(.*)", part)
    if match is None or match[2] not in KINDS:
        expected = f"SECOND:KIND ..., KIND of {', '.join(KINDS)}"
        raise ScheduleError(f"--schedule: {part!r} is no fault; expected {expected}")
    at, kind, rest = float(match[1]), match[2], match[3].split()
    form, example = FORMS.get(kind, (r"\d+", "1"))
    if not re.fullmatch(form, " ".join(rest)):
        expected = f"{at:g}:{kind} {example}".rstrip()
        raise ScheduleError(f"--schedule: {part!r} is wrong; expected {expected}")
    if kind == "partition":
        sides = tuple(tuple(map(int, side.split(","))) for side in rest[0].split("|"))
        return ScheduledFault(at, kind, groups=sides)
    value = rest[1] if kind in WORSE else ""
    try:
        if value:
            WORSE[kind][2](value)
    except ValueError as error:
        raise ScheduleError(f"--schedule: {part!r}: {error}") from error
    return ScheduledFault(at, kind, tuple(map(int, rest[:1])), value=value)


def _follow(fault: ScheduledFault, state: dict[int, str]) -> None:
    """What a fault makes of who runs; `ScheduleError` where it cannot happen."""
    where = f"--schedule: {fault.at:g}:{fault}"
    if unknown := [peer for peer in fault.named if peer not in state]:
        raise ScheduleError(f"{where}: there is no peer {unknown[0]} then")
    if fault.kind == "join":
        state[len(state)] = "runs"
    before, after = STATES.get(fault.kind, (("runs", "stopped"), None))
    for peer in fault.peers:
        if state[peer] not in before:
            raise ScheduleError(f"{where}: peer {peer} is {state[peer]} then")
        state[peer] = after or state[peer]
