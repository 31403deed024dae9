"""When a host that was started with --until-done ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco.config import compose
from diloco.train.host import Host


@pytest.mark.parametrize(
    ("steps", "trains", "over"),
    [
        (0, [], False),  # nobody has come yet
        (0, [True], False),
        (0, [False], False),  # another host
        (3, [], True),
        (3, [False], True),
        (3, [True], False),  # it has not heard of the last version
    ],
)
def test_a_host_ends_with_the_budget_when_nobody_trains(
    steps: int, trains: list[bool], over: bool
) -> None:
    members = [SimpleNamespace(hello=SimpleNamespace(trains=one)) for one in trains]
    control = SimpleNamespace(tip=SimpleNamespace(head=SimpleNamespace(number=steps, work=0)))
    facts = SimpleNamespace(
        members=SimpleNamespace(all=lambda: members), control=control, planned=(0, 0, 0)
    )
    host = object.__new__(Host)
    host.manifest, host._used_up = compose(["experiment=smoke"]).manifest(), False
    host.node = SimpleNamespace(core=SimpleNamespace(facts=facts))  # type: ignore[assignment]
    assert host.is_over() is over
    members.clear()
    assert host.is_over() is (steps == 3), "what is used up stays so"
