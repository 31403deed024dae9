"""When a host that was started with --until-done ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco.config import compose
from diloco.train.host import Host


@pytest.mark.parametrize(
    ("steps", "states", "over"),
    [
        (0, [], False),  # nobody has come yet
        (0, ["training"], False),
        (3, [], True),
        (3, ["training"], False),  # it has not heard of the last version
        (2, ["done"], False),
        (2, ["leaving"], False),
    ],
)
def test_a_host_ends_with_the_budget_when_nobody_trains(steps: int, states: list[str], over: bool) -> None:
    members = [SimpleNamespace(trains=True, status=SimpleNamespace(state=state)) for state in states]
    everybody = SimpleNamespace(all=lambda: [SimpleNamespace(trains=False), *members])
    protocol = SimpleNamespace(members=everybody, fragments=[SimpleNamespace(steps=steps)], applied_tokens=0)
    protocol.planned = [0, 0, 0]
    host = object.__new__(Host)
    host.manifest, host._used_up = compose(["experiment=smoke"]).manifest(), False
    host.node = SimpleNamespace(protocol=protocol)  # type: ignore[assignment]
    assert host.is_over() is over
    members.clear()
    assert host.is_over() is (over or steps == 3 or "done" in states), "what a peer has said still counts"
