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


@pytest.mark.parametrize("bad", ["", "ab", "g" * 64, "A" * 64, "a" * 63 + "\n", "a" * 66, " " * 64])
def test_text_that_is_not_a_digest_is_refused(bad: str) -> None:
    for combine in (fragment_digest, anchor_digest):
        with pytest.raises(PayloadError, match="not a digest"):
            combine([digest(b"a"), bad])
