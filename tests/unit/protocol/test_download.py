"""The plan of a download: whatever donors do, every part comes once, and only what they broke comes again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.download import MAX_DONORS, PartPlan

DIGESTS = [f"{part:064x}" for part in range(12)]
WRONG = "f" * 64


def asked(plan: PartPlan, *candidates: str) -> dict[str, int | None]:
    """The next part of each of the candidates that a stream is opened to."""
    return {donor: plan.next_part(donor) for donor in plan.recruit(candidates)}


@settings(max_examples=40)
@given(st.data(), st.integers(1, 12), st.integers(1, 7))
def test_deaths_and_lies_end_with_every_part_once(data: st.DataObject, num_parts: int, num_donors: int) -> None:
    donors, wanted = [f"d{i}" for i in range(num_donors)], DIGESTS[:num_parts]
    had = data.draw(st.lists(st.sampled_from([None, WRONG, *wanted]), max_size=num_parts))
    plan = PartPlan(wanted, had)
    here = {part for part, digest in enumerate(had) if digest == wanted[part]}
    under_way: dict[str, int | None] = {}
    verified, fetched, wasted = Counter(here), Counter[int](), Counter[int | None]()
    honest = data.draw(st.sampled_from(donors))  # one donor is always there, else nobody could end it
    out: set[str] = set()
    while not plan.complete:
        for donor in plan.recruit(data.draw(st.permutations(donors))):
            assert donor not in out and donor not in under_way
            under_way[donor] = None
        assert 0 < len(under_way) <= MAX_DONORS
        for donor, part in under_way.items():
            if part is None and (part := plan.next_part(donor)) is not None:
                assert part not in [*under_way.values(), *verified]
                under_way[donor] = part
                fetched[part] += 1
        donor = data.draw(st.sampled_from(sorted(under_way)))
        part = under_way[donor]
        if donor == honest and part is None:
            continue
        match "right" if donor == honest else data.draw(st.sampled_from(["right", "dies", "lies"])):
            case "right" if part is not None:
                assert plan.arrived(donor, wanted[part])
                verified[part] += 1
                under_way[donor] = None
                continue
            case "lies" if part is not None:
                assert not plan.arrived(donor, WRONG)
                plan.exclude(donor)
                out.add(donor)
            case _:
                plan.lost(donor)
        wasted[part] += part is not None
        del under_way[donor]
    assert verified == Counter(range(num_parts))
    assert fetched == Counter(part for part in range(num_parts) if part not in here) + wasted
    assert plan.held() == wanted


def test_a_lost_donor_is_asked_again_if_it_brought_something() -> None:
    """After the others; a liar never."""
    plan = PartPlan(DIGESTS)
    assert asked(plan, *"ab") == {"a": 0, "b": 1}
    assert plan.arrived("a", DIGESTS[0])
    plan.lost("a")
    plan.lost("b")
    assert plan.recruit("abc") == ["c", "a"], "a brought a part, b none"
    plan.lost("a")
    assert plan.recruit("ab") == [], "it brought nothing the second time"

    assert plan.next_part("c") == 1 and plan.arrived("c", DIGESTS[1]) and plan.next_part("c") == 2
    assert not plan.arrived("c", DIGESTS[3])
    plan.exclude("c")
    assert plan.recruit("c") == [] and asked(plan, "d") == {"d": 2}


def test_parts_that_did_not_change_are_kept_for_another_version() -> None:
    plan = PartPlan(DIGESTS[:3])
    asked(plan, *"abc")
    assert plan.arrived("a", DIGESTS[0]) and plan.arrived("c", DIGESTS[2])
    newer = PartPlan([DIGESTS[0], DIGESTS[1], WRONG], plan.held())
    assert asked(newer, *"abc") == {"a": 1, "b": 2}
    assert PartPlan(DIGESTS[:2], DIGESTS).complete
