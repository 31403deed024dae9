"""Codecs: exact scales, bounded errors, refused extremes, and a wire format that stays as it is."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import DivergedError, PayloadError
from diloco.outer import payloads
from diloco.outer.codecs import CODECS, LIMIT
from diloco.outer.fragments import BLOCK, partition
from diloco.outer.replica import Replica
from tests.support.extensions import INT6, registering
from tests.support.outer import encoded, gaussian, outer, relative_error

# those that publish, and those that lose most
ALL, LESS = CODECS.names(True), CODECS.names(False)
SIZES = (1, 2, 3, 5, 63, 65, 129, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 131)
each_codec = pytest.mark.parametrize("name", [*CODECS, "int6"])


def decoded(name: str, payload: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), torch.nan)
    CODECS[name].decode(payload, out)
    return out


def round_trip(name: str, x: Tensor) -> Tensor:
    return decoded(name, encoded(name, x), x.numel())


@pytest.fixture(autouse=True, scope="module")
def own_codec() -> Iterator[None]:
    """A codec of a user's keeps the contract, too."""
    with registering(INT6):
        yield


in_blocks = pytest.mark.parametrize("name", ["int8", "e3m0"])


def blocks(x: Tensor) -> list[np.ndarray]:
    return [x[start : start + BLOCK].double().numpy() for start in range(0, x.numel(), BLOCK)]


def published(name: str, master: Tensor, anchor: Tensor) -> Tensor:
    """The update that moves the anchor towards the master; it is made and applied here, and changes
    nothing else."""
    update = torch.empty(CODECS[name].nbytes(master.numel()), dtype=torch.uint8)
    before = master.clone(), anchor.clone()
    CODECS[name].encode_update(master, anchor, update)
    assert torch.equal(anchor, before[1])
    sent = update.clone()
    CODECS[name].apply_update_(anchor, update)
    assert torch.equal(master, before[0]) and torch.equal(update, sent)
    return update


def assert_refused(name: str, payload: Tensor, numel: int, message: str) -> None:
    """Whatever is done with the payload says so, before anything changes."""
    target, one = gaussian(numel, seed=3), CODECS[name]
    before = target.clone()
    for operation in (
        lambda: one.decode(payload, target),
        lambda: one.accumulate_(target, payload, 2.0),
        *([lambda: one.apply_update_(target, payload)] if name in ALL else []),
    ):
        with pytest.raises(PayloadError, match=message):
            operation()
    assert torch.equal(target, before)


# -- what travels ----------------------------------------------------------------------------------

SOME = [1.0, -0.5, 0.0, 0.3]


@pytest.mark.parametrize(
    ("name", "values", "payload"),
    [
        ("fp32", SOME, bytes.fromhex("0000803f 000000bf 00000000 9a99993e")),
        ("fp16", SOME, bytes.fromhex("003c 00b8 0000 cd34")),
        # 2**-6 is the scale for a largest magnitude of 1: codes 64, -32, 0, round(19.2)
        ("int8", SOME, bytes([256 - 6, 64, 256 - 32, 0, 19])),
        # top level 2**0 is k=7: nibbles 7, 8+6, 0, and 0.3 goes to 0.25 which is k=5
        ("e3m0", SOME, bytes([0, 0x07, 0x5E])),
        # Mean 0, sigma 2.5: below -3.75, below 0, below 3.75, the rest. Levels -4, -1.5, 1.5, 4;
        # codes 0, 1, 1, 2, 2, 3 in quarters (0, 1), (1, 2), (2, 3), ().
        ("stat2", [-4.0, -2.0, -1.0, 1.0, 2.0, 4.0], bytes.fromhex("80c0 c0bf c03f 8040 24 39")),
        # 129 elements keep three: -8 at 1, 2 at 127, 3 at 128. The mean magnitude is 13/3, so
        # levels are 2.5 and 8.
        (
            "topk",
            [0.5, -8.0, *[0.5] * 125, 2.0, 3.0],
            bytes.fromhex("2040 0041")
            + (1 | 127 << 12 | 128 << 24).to_bytes(5, "little")
            + bytes([3]),
        ),
    ],
)
def test_the_wire_format_stays(name: str, values: list[float], payload: bytes) -> None:
    assert bytes(encoded(name, torch.tensor(values)).tolist()) == payload


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("fp32", "f5a004648ea8dbd9"),
        ("fp16", "e7d754111e3b1d6a"),
        ("int8", "f8863e1528d5e189"),
        ("e3m0", "e73ee924fb438ce2"),
        ("stat2", "cd2a81a8b25bfcfb"),
        ("topk", "8f2af96086960b68"),
    ],
)
def test_several_blocks_travel_as_they_always_did(name: str, known: str) -> None:
    """Each part of a payload has all blocks in order, the last one short."""
    # no two magnitudes are equal
    x = (torch.arange(2 * BLOCK + 131) * 7919 % 16381 - 8190 + 0.25) / 64
    assert sha256(encoded(name, x).numpy().tobytes()).hexdigest()[:16] == known


@st.composite
def chunk_values(draw: st.DrawFn) -> Tensor:
    numel = draw(st.one_of(st.integers(1, 40), st.sampled_from(SIZES)))
    scale = 2.0 ** draw(st.integers(-140, 60))
    x = gaussian(numel, draw(st.integers(0, 1000)), scale)
    x[torch.rand(numel, generator=torch.Generator().manual_seed(1)) < 0.1] = 0.0
    return x


# Of largest magnitudes; each begins a block of its own, and so does the number below it.
EDGES = [1.0, 0.75, 127.5 / 128, 1.5 - 2**-11, 1.5 - 2**-12, 1.5, 2 - 2**-23, 1 + 2**-23]
EDGES = torch.tensor(EDGES)
EDGES = torch.cat([EDGES, torch.nextafter(EDGES, torch.zeros(8))]).repeat_interleave(BLOCK)
EDGES.view(-1, BLOCK)[:, 1:] *= -0.5


@example(EDGES)
@settings(max_examples=100)
@given(chunk_values())
def test_int8_is_the_nearest_multiple_of_the_smallest_scale(x: Tensor) -> None:
    for block, got in zip(blocks(x), blocks(round_trip("int8", x)), strict=True):
        largest = np.abs(block).max()
        scale = 2.0**-126
        while np.rint(largest / scale) > 127:
            scale *= 2
        assert np.array_equal(got, np.rint(block / scale) * scale)


@example(EDGES)
@settings(max_examples=100)
@given(chunk_values())
def test_e3m0_is_the_nearest_of_seven_powers_of_two_and_zero(x: Tensor) -> None:
    payload = encoded("e3m0", x)
    tops = 2.0 ** payload.numpy()[: -(-x.numel() // BLOCK)].view(np.int8).astype(float)
    found = blocks(decoded("e3m0", payload, x.numel()))
    for block, got, top in zip(blocks(x), found, tops, strict=True):
        largest = np.abs(block).max()
        assert largest < 1.5 * top
        assert largest >= (0.75 - 2**-11) * top or top == 2.0**-120
        levels = np.concatenate([[0.0], top * 2.0 ** np.arange(-6, 1)])
        nearest = np.abs(np.abs(block)[:, None] - levels).min(axis=1)
        # Rounding to half on the way moves the middle between two levels by at most 2**-11.
        slack = 2.0**-10 * np.maximum(np.abs(block), top * 2.0**-6)
        assert np.all(np.abs(block - got) <= nearest + slack)
        assert np.all((got == 0) | (np.sign(got) == np.sign(block)))


@each_codec
def test_accumulate_adds_weight_times_the_decoded_values(name: str) -> None:
    acc = gaussian(numel := 2 * BLOCK + 131, seed=1)
    payload = encoded(name, gaussian(numel, scale=0.01))
    before, atol = payload.clone(), 1e-5 if name in ALL else 1e-4
    expected = acc.double() + 12345.5 * decoded(name, payload, numel).double()
    CODECS[name].accumulate_(acc, payload, 12345.5)
    torch.testing.assert_close(acc.double(), expected, rtol=1e-6, atol=atol)
    assert torch.equal(payload, before)


@each_codec
def test_a_payload_may_lie_anywhere_in_a_larger_message(name: str) -> None:
    x, offset = gaussian(BLOCK + 5), 1
    expected = encoded(name, x)
    message = torch.zeros(offset + expected.numel() + 1, dtype=torch.uint8)
    inner = message[offset : offset + expected.numel()]
    CODECS[name].encode(x, inner)
    assert torch.equal(inner, expected) and not message[:offset].any() and message[-1] == 0
    assert torch.equal(decoded(name, inner, x.numel()), decoded(name, expected, x.numel()))
    # torch wants the address aligned, and the offset from where its storage starts
    for start in range(offset + 1):
        raw = bytearray(message.numpy().tobytes())
        storage = torch.frombuffer(raw, dtype=torch.uint8, offset=start)
        received = storage[offset - start : -1]
        assert torch.equal(decoded(name, received, x.numel()), decoded(name, expected, x.numel()))


# -- updates ---------------------------------------------------------------------------------------


@in_blocks
def test_a_displacement_is_added_with_a_single_rounding(name: str) -> None:
    before, numel = gaussian(3 * BLOCK + 9), 3 * BLOCK + 9
    anchor, master = before.clone(), before + gaussian(numel, seed=1, scale=1e-3)
    # float64 holds these sums exactly
    displacement = decoded(name, published(name, master, anchor), numel).double()
    expected = (before.double() + displacement).float()
    assert torch.equal(anchor.view(torch.int32), expected.view(torch.int32))
    assert float((master - anchor).abs().max()) < 1e-3


@in_blocks
def test_hardware_that_flushes_subnormals_gives_the_same(name: str) -> None:
    anchor = gaussian(BLOCK + 9, scale=1e-30)
    # a subnormal product would show
    payload = encoded(name, gaussian(BLOCK + 9, seed=1, scale=1e-36))

    def work(flush: bool) -> Tensor | None:
        supported, result = torch.set_flush_denormal(flush), anchor.clone()
        CODECS[name].apply_update_(result, payload)
        return result if supported or not flush else None

    plain, flushed = (ThreadPoolExecutor(1).submit(work, flush).result() for flush in (False, True))
    assert not torch.equal(plain, anchor)  # the setting belongs to the thread
    assert flushed is None or torch.equal(flushed, plain)


# -- extremes --------------------------------------------------------------------------------------


@each_codec
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 3e38])
@pytest.mark.parametrize("position", [0, BLOCK + 2])
def test_a_diverged_model_is_not_sent(name: str, bad: float, position: int) -> None:
    x = gaussian(BLOCK + 3)
    x[position] = bad
    payload = torch.empty(CODECS[name].nbytes(x.numel()), dtype=torch.uint8)
    diverged = rf"diverged: a value of .* cannot be sent \({name} carries"
    with pytest.raises(DivergedError, match=diverged):
        CODECS[name].encode(x, payload)
    if name in ALL:
        with pytest.raises(DivergedError):
            CODECS[name].encode_update(x, torch.zeros_like(x), payload)


@pytest.mark.parametrize("name", ["fp32", "int8", "e3m0"])
def test_magnitudes_up_to_the_limit_are_sent(name: str) -> None:
    x = torch.tensor([LIMIT, -LIMIT, 0.0, float(np.nextafter(np.float32(LIMIT), np.float32(0)))])
    assert relative_error(x, round_trip(name, x)) < 0.01
    acc = torch.zeros(4)
    CODECS[name].accumulate_(acc, encoded(name, x), 2.0**50)
    assert acc.isfinite().all()


def test_half_refuses_values_that_would_become_infinite() -> None:
    assert round_trip("fp16", torch.tensor([65504.0, -65504.0])).tolist() == [65504, -65504]
    for value in (65505.0, 65520.0, -1e9):
        with pytest.raises(DivergedError, match="65504"):
            encoded("fp16", torch.tensor([value]))


@each_codec
def test_a_payload_of_the_wrong_length_is_refused(name: str) -> None:
    payload = encoded(name, gaussian(BLOCK + 1))
    for wrong in (payload[:-1], payload[:0], torch.cat([payload, payload[:1]])):
        message = f"{name} payload of {BLOCK + 1} elements has {wrong.numel()} bytes"
        assert_refused(name, wrong, BLOCK + 1, message)


@pytest.mark.parametrize(("name", "lowest", "highest"), [("int8", -126, 58), ("e3m0", -120, 64)])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_exponent_out_of_range_is_refused(
    name: str, lowest: int, highest: int, block: int
) -> None:
    payload = encoded(name, gaussian(2 * BLOCK + 1))
    for exponent in (lowest - 1, highest + 1, -128, 127):
        payload[block] = exponent % 256
        assert_refused(name, payload, 2 * BLOCK + 1, f"outside {lowest}..{highest}")
    for exponent in (lowest, highest):
        payload[block] = exponent % 256
        assert decoded(name, payload, 2 * BLOCK + 1).isfinite().all()


WRONG_INDICES = [(0, 1, 0), (0, 63, 0), (1, 0, 4095), (2, 2, 140), (2, 1, 0)]


@pytest.mark.parametrize(("block", "position", "index"), WRONG_INDICES)
def test_indices_that_repeat_go_back_or_leave_are_refused(
    block: int, position: int, index: int
) -> None:
    x = torch.zeros(2 * BLOCK + 140)  # the last block keeps three
    for start, count in ((0, 64), (BLOCK, 64), (2 * BLOCK, 3)):
        x[start : start + count] = 1.0
    payload = encoded("topk", x)
    at = 3 * 4 + block * 96 + position * 3 // 2
    pair = int(payload[at]) | int(payload[at + 1]) << 8
    pair = (pair & 0x000F | index << 4) if position % 2 else (pair & 0xF000 | index)
    payload[at], payload[at + 1] = pair & 255, pair >> 8
    assert_refused("topk", payload, x.numel(), "topk payload holds indices that do not ascend")


@settings(max_examples=200)
@given(st.sampled_from([*CODECS, "int6"]), st.integers(1, 200), st.data())
def test_any_bytes_decode_to_finite_values_or_are_refused(
    name: str, numel: int, data: st.DataObject
) -> None:
    nbytes = CODECS[name].nbytes(numel)
    raw = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    payload = torch.tensor(list(raw), dtype=torch.uint8)
    target = torch.ones(numel)
    try:
        CODECS[name].decode(payload, target)
    except PayloadError:
        assert torch.equal(target, torch.ones(numel))
    else:
        assert target.isfinite().all() and float(target.abs().max()) <= 2 * LIMIT


# -- use -------------------------------------------------------------------------------------------


def test_threads_do_not_share_buffers() -> None:
    both = threading.Barrier(2)

    def work(seed: int) -> dict[str, set[int]]:
        x, found = gaussian(BLOCK + 1, seed), dict[str, set[int]]()
        for name in ALL:
            assert relative_error(x, round_trip(name, x)) < 0.25
        for (name, _), buffer in payloads._buffers.memory.items():
            found.setdefault(name, set()).add(buffer.data_ptr())
        both.wait(timeout=60)  # memory of a thread that ended may serve the next one
        return found

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, (1, 2))
    assert {"values", "half", "code", "sign"} <= set(one)
    assert not set().union(*one.values()) & set().union(*other.values())


# -- what loses most -------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(["fp16", "int8", "e3m0", *LESS]),
    st.sampled_from(SIZES),
    st.integers(0, 9),
    st.sampled_from([0.9, 1.0]),
)
def test_what_is_sent_and_kept_adds_up_to_what_there_was(
    name: str, numel: int, seed: int, beta: float
) -> None:
    """The contribution and the new residual, to the pseudo-gradient and the old residual."""
    settings = outer(codec_up=name, error_feedback=beta, momentum=0)
    residual, delta = gaussian(numel, seed), gaussian(numel, seed + 1)
    peer = Replica({"w": -delta}, partition({"w": numel}, 1), settings)
    peer.anchors[0].zero_()
    peer.residuals[0] = residual.clone()
    together = decoded(name, peer.capture(0), numel).double() + peer.residuals[0].double()
    there_was = beta * residual.double() + delta.double()
    torch.testing.assert_close(together, there_was, rtol=1e-5, atol=1e-6)
