"""The sequences that a peer trains on: each is taken once, and all ranks of a peer take the
same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from diloco.attach.node_link import NodeLink, RankLeases
from diloco.messages.fields import Units
from diloco.ranges import NONE, count, difference, first, overlaps, union
from diloco.swarm.node.leases import LeasedData

STEPS = st.sampled_from(["lease", "take", "train", "lose"])


@given(st.lists(st.tuples(STEPS, st.integers(1, 9)), max_size=60))
def test_every_sequence_is_taken_once(steps: list[tuple[str, int]]) -> None:
    data, queue, dealt, taken, open_ = LeasedData(), NONE, 0, NONE, NONE
    data.plan_round(8)
    assert data.wanted == 16, "a round more than it trains on"
    for what, number in steps:
        match what:
            case "lease":
                queue, dealt = union(queue, ((dealt, dealt + number),)), dealt + number
                data.set_queue(queue)
            case "take":
                coming, units = data.ahead(number), data.take(number)
                if units is not None:
                    assert coming == units and count(units) == number and not overlaps(units, taken)
                    taken, open_ = union(taken, units), union(open_, units)
            case "train":
                assert data.trained() == open_
                queue, open_ = difference(queue, open_), NONE  # as the core hears of it
                data.set_queue(queue)
            case "lose":
                queue = difference(queue, first(queue, number))  # another peer has trained on it
                data.set_queue(queue)
                open_ = difference(open_, difference(open_, queue))
        assert difference(open_, queue) == NONE


def test_too_few_are_not_taken() -> None:
    data = LeasedData()
    data.set_queue(((3, 5), (9, 10)))
    assert data.take(4) is None and data.ahead(9) == ((3, 5), (9, 10))
    assert data.take(3) == ((3, 5), (9, 10)) and data.take(1) is None


class Link:
    """Of one of the ranks of a peer, which are called one after the other."""

    def __init__(self, data: LeasedData | None, said: list[Any]) -> None:
        self.ranks, self.said = self, said
        self.node = None if data is None else SimpleNamespace(leased=data)

    def broadcast(self, value: Any) -> Any:
        if self.node is not None:
            self.said.append(value)
        return self.said[-1]


@given(st.lists(st.tuples(st.sampled_from(["lease", "take"]), st.integers(1, 6)), max_size=40))
def test_all_ranks_take_the_units_of_rank_0(steps: list[tuple[str, int]]) -> None:
    data, alone, said = LeasedData(), LeasedData(), list[Any]()
    leads, follows = (RankLeases(cast(NodeLink, Link(one, said)), 3) for one in (data, None))
    queue: Units = NONE
    for at, (what, size) in enumerate(steps):
        if what == "lease":
            queue = union(queue, ((10 * at, 10 * at + size),))
            for units in (data, alone):
                units.set_queue(queue)
            continue
        expected = alone.take(size)
        assert leads.take(size) == expected == follows.take(size)
        # After a refusal nothing is known of what comes, as it is not enough.
        coming = NONE if expected is None else alone.ahead(3 * size)
        assert leads.ahead(3 * size) == coming == follows.ahead(3 * size)
        assert count(follows.ahead(size)) <= size
    assert data.trained() == alone.trained()
