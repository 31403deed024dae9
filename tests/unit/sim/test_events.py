"""`sim.events`: in what order they happen, who is there at the start, and which are refused."""

from __future__ import annotations

import pytest

from diloco.errors import ConfigError
from diloco.sim.events import SimEvent, parse, starters


def test_events_are_sorted_and_say_who_is_there_at_the_start() -> None:
    planned = parse(["crash:1@20", "join:2@5.5", "join:1@30", "join:7@1"], peers=3)
    assert planned == [
        SimEvent("join", 7, 1),
        SimEvent("join", 2, 5.5),
        SimEvent("crash", 1, 20),
        SimEvent("join", 1, 30),
    ]
    assert starters(planned, peers=3) == [0, 1]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["crash:5@1"], "sim.events: crash:5@1, but peer 5 is not there"),
        (["crash:1@1", "leave:1@2"], "sim.events: leave:1@2, but peer 1 is not there"),
        (
            ["leave:1@2", "join:1@3", "join:1@4"],
            "sim.events: join:1@4, but peer 1 is there already",
        ),
    ],
)
def test_what_cannot_happen_is_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(texts, peers=4)
