"""Fragments: every element of every parameter is in exactly one, and travels once. Digests name
what is in them."""

import struct
from itertools import pairwise

import pytest
import torch
from blake3 import blake3
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import ConfigError, PayloadError
from diloco.outer import digest as digests
from diloco.outer.digest import PART, part_digest, part_digests
from diloco.outer.fragments import BLOCK, Fragment, gather_, partition, scatter_

LAYOUTS = ("contiguous", "transposed", "channels_last", "every_other", "reversed_dims")


def make_parameter(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """Zeros of that shape in a memory layout that needs care, where the shape allows it."""
    if layout == "transposed" and len(shape) >= 2:
        return torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)
    if layout == "channels_last" and len(shape) == 4:
        return torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last)
    if layout == "every_other" and len(shape) >= 1:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    if layout == "reversed_dims":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    return torch.zeros(shape, dtype=dtype)


def number_elements_(parameters: dict[str, Tensor]) -> int:
    """Gives every element its place in the concatenation as its value (small enough to be exact in
    bfloat16)."""
    first = 0
    for parameter in parameters.values():
        numbers = torch.arange(first, first + parameter.numel()) % 251
        parameter.copy_(numbers.view(parameter.shape))
        first += parameter.numel()
    return first


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    count = draw(st.integers(1, 5))
    parameters = {}
    for i in range(count):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
        prefixes = ["", "model.layers.0.", "model.layers.1.", "encoder.h.10.", "1."]
        prefix = draw(st.sampled_from(prefixes))
        parameters[f"{prefix}p{i}"] = make_parameter(shape, draw(st.sampled_from(LAYOUTS)), dtype)
    return parameters


@settings(max_examples=60)
@given(models(), st.sampled_from(["contiguous", "strided"]), st.data())
def test_every_element_is_in_one_fragment_and_moved_once(
    parameters: dict[str, Tensor], pattern: str, data: st.DataObject
) -> None:
    total = most = number_elements_(parameters)
    if pattern == "strided":
        most = len({name.rpartition(".")[0] for name in parameters if "." in name})
        assume(most > 0)
    count = data.draw(st.integers(1, min(most, 20)))
    visits = {name: torch.zeros(p.numel(), dtype=torch.int) for name, p in parameters.items()}
    found = []
    for fragment in partition({name: p.numel() for name, p in parameters.items()}, count, pattern):
        assert fragment.numel > 0
        drawn = data.draw(st.lists(st.integers(0, fragment.numel), max_size=4))
        cuts = sorted({0, fragment.numel, *drawn})
        for start, stop in pairwise(cuts):
            for _, piece in fragment.locate(start, stop):
                visits[piece.name][piece.start : piece.stop] += 1
            out = torch.full((stop - start,), torch.nan)
            gather_(out, fragment, start, parameters)
            found.append(out)
            scatter_(parameters, fragment, start, out + 1)
    assert all((count == 1).all() for count in visits.values())
    # a second gathering or scattering would have seen or made a value that is one higher
    expected, together = (torch.arange(total) % 251).float(), torch.cat(found)
    if pattern == "strided":
        assert torch.equal(together.sort().values, expected.sort().values)
    else:
        assert torch.equal(together, expected)
    scattered = torch.cat([p.reshape(-1).float() for p in parameters.values()])
    assert torch.equal(scattered, expected + 1)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 10 * BLOCK), min_size=1, max_size=20), st.integers(1, 40))
def test_fragments_are_balanced_contiguous_and_cut_at_blocks(
    numels: list[int], fragments: int
) -> None:
    total = sum(numels)
    if total < fragments:
        return
    parts = partition({str(i): numel for i, numel in enumerate(numels)}, fragments)
    assert [part.index for part in parts] == list(range(fragments))
    sizes = [part.numel for part in parts]
    assert sum(sizes) == total
    if total >= fragments * BLOCK:
        assert all(size % BLOCK == 0 for size in sizes[:-1])
        assert max(sizes) - min(sizes) < 2 * BLOCK
    else:
        assert max(sizes) - min(sizes) <= 1


def names_of(parts: tuple[Fragment, ...]) -> list[list[str]]:
    return [[piece.name for piece in part.slices] for part in parts]


def test_strided_deals_layers_in_turn_the_rest_to_the_lightest() -> None:
    layers = [f"model.layers.{i}.{name}" for i in range(11) for name in ("a.weight", "b.weight")]
    numels = {"model.embed.weight": 50, **dict.fromkeys(layers, 10), "model.norm.weight": 3}
    numels |= {"model.empty": 0, "head.weight": 50}
    parts = partition(numels, 3, "strided")
    for index, names in enumerate(names_of(parts)):
        found = [int(name.split(".")[2]) for name in names if ".layers." in name]
        assert found == sorted(2 * list(range(index, 11, 3)))
    # Layers weigh 80, 80 and 60: the embedding goes to fragment 2 (110), the norm to 0 (83), the
    # head to 1 (130).
    assert [part.numel for part in parts] == [83, 130, 110]
    ends = names_of(parts)[2][0], names_of(parts)[0][-1], names_of(parts)[1][-1]
    assert ends == ("model.embed.weight", "model.norm.weight", "head.weight")
    pieces = [piece for part in parts for piece in part.slices]
    assert all(piece.start == 0 and piece.stop == numels[piece.name] for piece in pieces)


def test_an_impossible_number_of_fragments_is_refused() -> None:
    for fragments in (0, 9):
        impossible = rf"outer\.fragments={fragments} is not possible; choose 1 to 8"
        with pytest.raises(ConfigError, match=impossible):
            partition({"a": 3, "b": 5}, fragments)
    with pytest.raises(ConfigError, match="no parameters"):
        partition({"empty": 0}, 1)
    numels = {"embed": 100, "layers.0.w": 10, "layers.1.w": 10, "layers.2.w": 0}
    problem = (
        r"outer\.fragments={} is not possible with outer\.pattern=strided, as the model has {}"
        r" layers; choose {}$"
    )
    few = problem.format(3, 2, r"at most 2 fragments, or outer\.pattern=contiguous")
    with pytest.raises(ConfigError, match=few):
        partition(numels, 3, "strided")
    with pytest.raises(ConfigError, match=problem.format(1, 0, r"outer\.pattern=contiguous")):
        partition({"embed": 100}, 1, "strided")


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def test_a_part_digest_is_the_blake3_of_its_little_endian_bytes() -> None:
    values = [1.0, -2.5, 0.0, 3e-40]
    assert part_digest(torch.tensor(values)) == digest(struct.pack("<4f", *values))


def test_digests_combine_upwards_under_labels() -> None:
    parts = (digest(b"a"), digest(b"b"))
    raw = blake3(b"a").digest() + blake3(b"b").digest()
    assert digests.fragment_digest(parts) == digest(b"diloco fragment\0" + raw)
    assert digests.anchor_digest(parts) == digest(b"diloco anchor\0" + raw)


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_hashed_in_order_and_checked_one_by_one(threads: int) -> None:
    flat, before = torch.arange(2.0 * PART + 3), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        before_it = part_digests(flat)
        flat[PART] += 1
        changed = part_digests(flat)
    finally:
        torch.set_num_threads(before)
    ranges = [(0, PART), (PART, 2 * PART), (2 * PART, 2 * PART + 3)]
    assert digests.part_ranges(flat.numel()) == ranges
    assert changed == tuple(part_digest(flat[start:stop]) for start, stop in ranges)
    assert [a == b for a, b in zip(before_it, changed, strict=True)] == [True, False, True]


@pytest.mark.parametrize("bad", ["", "ab", "g" * 64, "A" * 64, "a" * 63 + "\n", "a" * 66, " " * 64])
def test_text_that_is_not_a_digest_is_refused(bad: str) -> None:
    for combine in (digests.fragment_digest, digests.anchor_digest):
        with pytest.raises(PayloadError, match="not a digest"):
            combine([digest(b"a"), bad])


def test_strided_goes_by_numbers_in_one_stack_after_another() -> None:
    """Not by the order of names."""
    numels = dict.fromkeys(("h.10.w", "h.9.w", "h.8.w", "h.8.3.w"), 1)
    found = names_of(partition(numels, 3, "strided"))
    assert found == [["h.8.w", "h.8.3.w"], ["h.9.w"], ["h.10.w"]]
    numels = {f"{stack}.layers.{i}.w": 1 for stack in ("encoder", "decoder") for i in range(3)}
    assert names_of(partition(numels, 2, "strided")) == [
        ["encoder.layers.0.w", "encoder.layers.2.w", "decoder.layers.1.w"],
        ["encoder.layers.1.w", "decoder.layers.0.w", "decoder.layers.2.w"],
    ]
