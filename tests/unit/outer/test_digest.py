"""Digests: over the fp32 bytes, in parts, and different for whatever differs."""

from __future__ import annotations

import struct

import pytest
import torch
from blake3 import blake3

from diloco.errors import PayloadError
from diloco.outer.digest import PART, anchor_digest, fragment_digest, part_digest, part_digests, part_ranges


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def test_a_part_digest_is_the_blake3_of_its_little_endian_bytes() -> None:
    values = [1.0, -2.5, 0.0, 3e-40]
    assert part_digest(torch.tensor(values)) == digest(struct.pack("<4f", *values))


def test_digests_combine_upwards_under_labels() -> None:
    parts = (digest(b"a"), digest(b"b"))
    raw = blake3(b"a").digest() + blake3(b"b").digest()
    assert fragment_digest(parts) == digest(b"diloco fragment\0" + raw)
    assert anchor_digest(parts) == digest(b"diloco anchor\0" + raw)


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_hashed_in_order_and_checked_one_by_one(threads: int) -> None:
    flat, before = torch.arange(2.0 * PART + 3), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        digests = part_digests(flat)
        flat[PART] += 1
        changed = part_digests(flat)
    finally:
        torch.set_num_threads(before)
    assert part_ranges(flat.numel()) == [(0, PART), (PART, 2 * PART), (2 * PART, 2 * PART + 3)]
    assert changed == (part_digest(flat[:PART]), part_digest(flat[PART : 2 * PART]), part_digest(flat[2 * PART :]))
    assert [a == b for a, b in zip(digests, changed, strict=True)] == [True, False, True]


def test_every_bit_counts() -> None:
    zero, minus_zero = torch.zeros(5), torch.zeros(5)
    minus_zero[4] = -0.0
    assert torch.equal(zero, minus_zero) and part_digest(zero) != part_digest(minus_zero)
    assert part_digest(torch.zeros(4)) != part_digest(torch.zeros(5))


def test_order_and_number_of_parts_count() -> None:
    a, b = digest(b"a"), digest(b"b")
    assert len({fragment_digest(parts) for parts in [(), (a,), (b,), (a, b), (b, a), (a, a)]}) == 6


def test_hashing_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Spy:
        def __init__(self, data: memoryview) -> None:
            seen.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())

        def hexdigest(self) -> str:
            return ""

    flat = torch.zeros(10)
    monkeypatch.setattr("diloco.outer.digest.blake3", Spy)
    part_digest(flat[3:])
    assert seen == [flat.data_ptr() + 12]


@pytest.mark.parametrize("bad", ["", "ab", "g" * 64, "A" * 64, "a" * 63 + "\n", "a" * 66, " " * 64])
def test_text_that_is_not_a_digest_is_refused(bad: str) -> None:
    for combine in (fragment_digest, anchor_digest):
        with pytest.raises(PayloadError, match="not a digest"):
            combine([digest(b"a"), bad])


def test_more_than_a_part_or_another_dtype_is_our_bug() -> None:
    for part in (torch.zeros(PART + 1), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)):
        with pytest.raises(AssertionError, match="one fp32 vector"):
            part_digest(part)
