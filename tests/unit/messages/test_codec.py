"""Messages: what is valid comes through unchanged; everything else is a `PayloadError` at once, and
no other error."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.messages.base import EVERYBODY, MAX_FRAME_BYTES, Message, Refusal
from diloco.messages.bulk import MAX_PARTS, Get, No, PartHeader, RecordHeader, Values
from diloco.messages.codec import OtherVersion, UnknownKind, decode, encode, expect, kinds
from diloco.messages.control import (
    MAX_GREETING_BYTES,
    Answer,
    Dealt,
    Figures,
    Greeting,
    Hello,
    Lease,
    Offer,
    Revocations,
    Status,
    Welcome,
)
from diloco.messages.fields import MAX_LINES, MAX_RANGES, MAX_UNIT_RANGES
from diloco.messages.heads import MAX_LATE, MAX_LEDGER, Book, Entry, Head, Line
from diloco.messages.snapshot import MAX_PIECE_BYTES
from diloco.swarm.rpc.contribution import ContributionHeader, Got
from diloco.swarm.rpc.inner_state import MAX_MOMENTS, InnerHeader, InnerRequest
from diloco.swarm.rpc.probe import Probe, ProbeReply
from diloco.swarm.rpc.watch import InfoRequest, Piece

D = "ab" * 32
STATUS = Status(
    tips={0: (7, D), 3: (9, D)}, steps=4, units=((1, 5),), figures=Figures(tokens=3, loss=2.5)
)
HELLO = Hello(
    WIRE_VERSION, "run", D, "ann", True, True, STATUS, addresses={"a": ["/ip4/1.2.3.4/tcp/1"]}
)
LINE = Line(0, "a", 5, D, 4, 100, ((0, 4),), 1.5, D, "ann", b"signature")
PLAIN = {"kind": "status"}


def pack(fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def with_(message: Message, **fields: Any) -> bytes:
    """The frame of a message with other fields, valid or not."""
    return pack({**msgspec.msgpack.decode(encode(message), strict=False), **fields})


def nested(depth: int) -> bytes:
    return b"\x82\xa4kind\xa6status\xa4tips" + b"\x91" * depth


def over(kind: str, **fields: Any) -> bytes:
    return pack({"kind": kind, **fields})


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "cut off": (encode(HELLO)[:-3], "truncated"),
    "something after it": (encode(STATUS) + b"\x00", "trailing"),
    "no map": (pack([1, 2]), "Expected `object`"),
    "no kind": (pack({"steps": 1}), "missing required field `kind`"),
    "a kind that is no text": (pack({"kind": 5}), "Expected `str`"),
    "a kind with a line break": (pack({"kind": "re\neipt"}), "no kind is called re eipt"),
    "a kind as long as a frame": (pack({"kind": "x" * 900_000}), "no kind is called xxx"),
    "an unknown field": (with_(STATUS, **{"lo\nud": 1}), "status: .*unknown field `lo ud`"),
    "an unknown field inside": (
        with_(STATUS, figures={"kind": "figures", "loud": 1}),
        "unknown field `loud`",
    ),
    "50,000 unknown fields": (
        pack({**PLAIN, **{f"k{n}": 0 for n in range(50_000)}}),
        "unknown field `k0`",
    ),
    "a missing field": (over("ask"), "missing required field `what`"),
    "true for a number": (with_(STATUS, steps=True), r"Expected `int`, got `bool` - at `\$.steps`"),
    "a float for a number": (with_(STATUS, steps=1.0), "Expected `int`, got `float`"),
    "text for a number": (with_(STATUS, steps="1"), "Expected `int`, got `str`"),
    "none for a number": (with_(STATUS, steps=None), "Expected `int`, got `None`"),
    "a negative number": (with_(STATUS, steps=-1), "Expected `int` >= 0"),
    "a number out of bounds": (with_(STATUS, steps=2**63), "Expected `int` <= "),
    "NaN": (with_(STATUS, steps_per_s=math.nan), "Expected `float`"),
    "infinity": (with_(STATUS, steps_per_s=math.inf), "Expected `float`"),
    "NaN in an array": (
        with_(Offer(LINE), line=[*msgspec.structs.astuple(LINE)[:7], math.nan, D]),
        "Expected `float`",
    ),
    "an array that is too long": (
        with_(Offer(LINE), line=[*msgspec.structs.astuple(LINE), 1]),
        "Expected `array`",
    ),
    "a digest that is none": (over("ask", what=D + "\n"), "matching regex"),
    "too many ranges": (
        with_(STATUS, units=[[2 * n, 2 * n + 1] for n in range(2000)]),
        "Expected `array` of length",
    ),
    "a range of three": (with_(STATUS, units=[[1, 2, 3]]), "Expected `array` of length 2"),
    "a map that is too long": (
        with_(STATUS, tips={n: 0 for n in range(100_000)}),
        "Expected `object` of length",
    ),
    "a map that announces 4 billion": (
        b"\x82\xa4kind\xa6status\xa4tips\xdf\xff\xff\xff\xff",
        "truncated|length",
    ),
    "a list that announces 4 billion": (
        b"\x82\xa4kind\xa6status\xa5hears\xdd\xff\xff\xff\xff",
        "truncated|length",
    ),
    "a million wrong items": (
        b"\x82\xa4kind\xa6status\xa5hears\xdd\x00\x0f\x00\x00" + b"\x01" * 0xF0000,
        "Expected",
    ),
    "a million items": (
        b"\x82\xa4kind\xa6status\xa5hears\xdd\x00\x0f\x00\x00" + b"\xa0" * 0xF0000,
        "of length <=",
    ),
    "text that is no UTF-8": (b"\x82\xa4kind\xa3ask\xa4what\xa2\xff\xff", "utf-8"),
    "a key that is no UTF-8": (b"\x82\xa4kind\xa3ask\xa2\xff\xff\xa0", "utf-8|unknown field"),
    "a key that is no text": (pack({"kind": "ask", 1: 2}), "Expected `str`"),
    "nested deeply": (nested(100_000), "Expected|recursion"),
    "nested deeply in what is unknown": (b"\x82\xa1x" + b"\x91" * 900_000, "recursion"),
    "an extension": (
        pack({**PLAIN, "steps": msgspec.msgpack.Ext(5, b"data")}),
        "Expected `int`, got `ext`",
    ),
    "a wrong timestamp": (
        b"\x82\xa4kind\xa6status\xa5steps\xc7\x0c\xff" + b"\xff" * 12,
        "Expected `int`, got `ext`",
    ),
    "more than a frame": (bytes(MAX_FRAME_BYTES + 1), "over the limit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_at_once_and_shortly(name: str) -> None:
    frame, why = WRONG[name]
    begun_at = time.perf_counter()
    with pytest.raises(PayloadError, match=why) as caught:
        decode(frame)
    assert time.perf_counter() - begun_at < 0.1
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
    assert not isinstance(caught.value, UnknownKind | OtherVersion)


BOOK = Book(
    {"": Entry(0, 0), "a": Entry(5, 100, 1, 1, 1, "ann")}, (D,), ((0, 4),), 1, 2, (1.0, 0.5, 0.0)
)
HEAD = Head(0, 1, D, "a", "b", ((LINE, 1.0),), 2, 100, D, D, b"signature")
EXAMPLES = [
    STATUS,
    HELLO,
    Figures(3, 1, 2.5, 4, 5, 1, [1.0] * 4),
    Offer(LINE, 2.0),
    Answer(0, "a", 5, "want", 7),
    Welcome(),
    Lease("a", 3, ((1, 5),)),
    Dealt("a", ((1, 5),)),
    Greeting("x", 3, "ab" * 8),
    Refusal("no"),
    No(),
    Got(),
    Values(),
    Revocations(1, ["ab" * 8], ["a"], "ab" * 64),
    ContributionHeader(LINE, 7),
    Get(0, (7, D), D, 3),
    RecordHeader(HEAD, 2),
    PartHeader(HEAD, BOOK, (D,)),
    InnerRequest(),
    InnerHeader(["0.w.exp_avg"], [3], [1]),
    InfoRequest(D),
    Probe(1, 2, ["/ip4/1.2.3.4"]),
    Piece(WIRE_VERSION, b"x" * MAX_PIECE_BYTES, True, "ab" * 64),
    ProbeReply(WIRE_VERSION, "run", "ann", 1.5, ["/a"], ["b"], "/ip4", ["/a"], "why"),
]
OTHER = [None, -2, 2**63, 1.5, math.nan, "x" * 2000, b"x" * 2000, [[]], [None], [-1], {"a": None}]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_comes_through_unchanged_and_a_wrong_missing_or_extra_field_refuses_it(
    message: Message,
) -> None:
    assert decode(encode(message)) == message
    fields = msgspec.msgpack.decode(encode(message), strict=False)
    named = [info.name for info in msgspec.structs.fields(message) if info.required]
    broken = [
        {key: value for key, value in fields.items() if key != name} for name in ("kind", *named)
    ]
    broken += [
        {**fields, key: wrong} for key in fields for wrong in OTHER if not fits(wrong, fields[key])
    ]
    for one in [*broken, {**fields, "extra": 1}]:
        with pytest.raises(PayloadError):
            pytest.fail(f"{decode(pack(one))} was taken"[:200])


def fits(wrong: object, right: object) -> bool:
    """Another value of that type, which may be good, or none where that is the default."""
    if wrong is None:
        return isinstance(right, dict | list)
    return type(wrong) is type(right) and isinstance(wrong, str | bytes | float) and wrong == wrong


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(example) for example in EXAMPLES} == set(kinds().values())


def test_the_largest_messages_fit_their_frames() -> None:
    """Of honest peers: a whole state of as many peers, parts and contributions as there may be."""
    peer, ranges = "Q" * 52, [(2**49 + 2 * at, 2**49 + 2 * at + 1) for at in range(MAX_RANGES)]
    line = Line(
        0,
        peer,
        2**50,
        D,
        2**40,
        2**50,
        tuple(ranges[:MAX_UNIT_RANGES]),
        1e30,
        D,
        "n" * 24,
        b"s" * 560,
    )
    head = Head(0, 2**40, D, peer, peer, ((line, 1e30),) * MAX_LINES, 1, 2**50, D, D, b"s" * 560)
    ledger = {
        f"{at:052}": Entry(2**50, 2**50, 2**40, 2**40, 2**40, "n" * 24) for at in range(MAX_LEDGER)
    }
    book = Book(ledger, (D,) * MAX_LATE, tuple(ranges), 2**40, 1, (1e30, 1e30, 1e30))
    names = [f"0.{index}.exp_avg_sq" for index in range(MAX_MOMENTS)]
    for message in (
        RecordHeader(head),
        PartHeader(head, book, (D,) * MAX_PARTS),
        InnerHeader(names, [2**40] * MAX_MOMENTS, [2**40] * MAX_MOMENTS),
    ):
        assert decode(encode(message)) == message
        assert len(encode(message)) < MAX_FRAME_BYTES


def test_a_broadcast_is_encoded_once() -> None:
    assert encode(STATUS) is encode(STATUS)
    assert encode(InfoRequest("manifest")) != encode(InfoRequest("snapshot"))


def test_a_kind_that_a_newer_peer_may_know_is_told_from_nonsense() -> None:
    with pytest.raises(
        UnknownKind, match="messages of kind trumpet are not known here; install the same"
    ):
        decode(pack({"kind": "trumpet", "loud": True}))


@pytest.mark.parametrize("first", [HELLO, Piece(WIRE_VERSION, b"")])
def test_another_wire_version_is_refused_by_that_whatever_else_is_in_it(first: Message) -> None:
    text = (
        "wire version 11 there does not fit 12 here; install the same diloco version on both sides"
    )
    for other in ({}, {"status": 5, "data": 5}, {"unknown": 1}):
        with pytest.raises(OtherVersion) as caught:
            decode(with_(first, wire_version=11, **other))
        assert str(caught.value) == text
    with pytest.raises(PayloadError, match="Expected `int`, got `str`") as nonsense:
        decode(with_(first, wire_version="x"))
    assert not isinstance(nonsense.value, OtherVersion)


def test_a_conversation_expects_one_kind_or_a_refusal() -> None:
    assert expect(STATUS, Status) is STATUS
    for message, why in (
        (STATUS, "expected Hello, got Status"),
        (Refusal("the model\ndiffers"), "refused: the model d"),
    ):
        with pytest.raises(PayloadError, match=why):
            expect(message, Hello)


def test_text_that_people_read_moves_no_cursor() -> None:
    said = "a\x1b[2J\nb"
    probed = ProbeReply(WIRE_VERSION, said, said, 1.0, [], [], said, [], said)
    for message, fields in (
        (Refusal(said), ["reason"]),
        (probed, ["run_id", "name", "observed", "why"]),
    ):
        assert {getattr(decode(encode(message)), field) for field in fields} == {"a [2J b"}


def test_admission_lets_each_role_begin_these_conversations() -> None:
    for kind, message in kinds().items():
        assert message.place.begins == bool(message.roles), kind
    may = {
        role: {kind for kind, message in kinds().items() if role in message.roles}
        for role in EVERYBODY
    }
    watching, hosting = {"greeting", "ask", "probe"}, {"hello", "push", "get"}
    everything = watching | hosting | {"inner_request"}
    assert may == {
        "observer": watching,
        "host": watching | hosting,
        "worker": everything,
        "contributor": everything,
    }


def test_a_refusal_and_a_greeting_fit_the_frame_of_a_stranger() -> None:
    longest = Greeting(credential="x" * 2048, revoked=2**40, instance="a" * 16)
    assert max(len(encode(longest)), len(encode(Refusal("x" * 2048)))) < MAX_GREETING_BYTES
