"""What `diloco join` says beforehand of a machine that is slower than the others."""

from __future__ import annotations

import re

import pytest

from diloco.config import OuterConfig
from diloco.fit.prospects import prospects

QUORUM = {"quorum": 1, "staleness_limit": 10}


@pytest.mark.parametrize(
    ("settings", "step_s", "says"),
    [
        ({}, 0.5, "^a round of 20 inner steps takes 10 s here, and 10 s elsewhere .median of 3.$"),
        ({}, 1.0, "the others wait for this machine"),
        ({}, 20.0, "contributes to one outer step in 40, 0.83 % of the swarm's tokens; what it learned is merged late"),
        ({}, 20.0, "outer=async suits such a machine"),
        ({"overlap": 2}, 20.0, "discards what comes late: this machine would learn in vain"),
        (QUORUM, 20.0, "about 40 rounds late, and this run refuses what is over 10 late"),
        (QUORUM, 2.0, "nobody waits for it, and it gives 7.7 % of the swarm's tokens"),
        ({**QUORUM, "dylu": True}, 20.0, "it takes 5 of 20 inner steps a round, and gives 0.83 %"),
    ],
)
def test_a_machine_is_compared_with_the_others(settings: dict[str, object], step_s: float, says: str) -> None:
    outer = OuterConfig(method="diloco", sync_every=20, **settings)  # type: ignore[arg-type]
    assert re.search(says, "\n".join(prospects(outer, step_s, [2.0, 2.0, 2.0])))


def test_nothing_is_said_where_nobody_trains() -> None:
    assert prospects(OuterConfig(method="diloco", sync_every=20), 1.0, []) == []
