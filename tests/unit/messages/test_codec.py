"""Messages: what is valid comes through unchanged; everything else is a `PayloadError` at once, and
no other error."""

import math
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as with_fields

from diloco.errors import PayloadError
from diloco.messages.base import EVERYBODY, MAX_FRAME_BYTES, Message, Refusal
from diloco.messages.bulk import (
    MAX_PARTS,
    UPDATE_PARTS,
    Get,
    No,
    PartHeader,
    RecordHeader,
    Values,
    Waiting,
)
from diloco.messages.codec import REMEDY, OtherVersion, UnknownKind, decode, encode, expect, kinds
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
from diloco.protocol import WIRE_VERSION
from diloco.swarm.mailbox.objects import Box, Letter
from diloco.swarm.rpc.contribution import ContributionHeader, Got
from diloco.swarm.rpc.inner_state import MAX_MOMENTS, InnerHeader, InnerRequest
from diloco.swarm.rpc.probe import Probe, ProbeReply
from diloco.swarm.rpc.watch import InfoRequest, Piece
from diloco.swarm.wire.lane import Door

D = "ab" * 32
TIPS_SAID = {0: (7, D), 3: (9, D)}
STATUS = Status(tips=TIPS_SAID, steps=4, units=((1, 5),), figures=Figures(tokens=3, loss=2.5))
PLACES = {"a": ["/ip4/1.2.3.4/tcp/1"]}
HELLO = Hello(WIRE_VERSION, "run", D, "ann", True, True, STATUS, addresses=PLACES)
LINE = Line(0, "a", 5, D, 4, 100, ((0, 4),), 1.5, D, "ann", b"signature")


def pack(fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def with_(message: Message, **fields: Any) -> bytes:
    """The frame of a message with other fields, valid or not."""
    return pack({**msgspec.msgpack.decode(encode(message), strict=False), **fields})


def status(**fields: Any) -> bytes:
    return with_(STATUS, **fields)


def offer(*line: Any) -> bytes:
    return with_(Offer(LINE), line=line)


HEARS, TIPS = b"\x82\xa4kind\xa6status\xa5hears", b"\x82\xa4kind\xa6status\xa4tips"
MILLION, BILLIONS = b"\xdd\x00\x0f\x00\x00", b"\xff\xff\xff\xff"
*START, NORM, ROOT, _, _ = msgspec.structs.astuple(LINE)
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "cut off": (encode(HELLO)[:-3], "truncated"),
    "something after it": (encode(STATUS) + b"\x00", "trailing"),
    "no map": (pack([1, 2]), "Expected `object`"),
    "no kind": (pack({"steps": 1}), "missing required field `kind`"),
    "a kind that is no text": (pack({"kind": 5}), "Expected `str`"),
    "a kind with a line break": (pack({"kind": "re\neipt"}), "no kind is called re eipt"),
    "a kind as long as a frame": (pack({"kind": "x" * 900_000}), "no kind is called xxx"),
    "true for a number": (status(steps=True), r"Expected `int`, got `bool` - at `\$.steps`"),
    "infinity": (status(steps_per_s=math.inf), "Expected `float`"),
    "NaN in an array": (offer(*START, math.nan, ROOT), "Expected `float`"),
    "an array that is too long": (offer(*START, NORM, ROOT, "", b"", 1), "Expected `array`"),
    "a digest with a line break": (pack({"kind": "ask", "what": D + "\n"}), "matching regex"),
    "too many ranges": (status(units=[[2 * n, 2 * n + 1] for n in range(2000)]), "of length"),
    "a map that is too long": (status(tips={n: 0 for n in range(100_000)}), "`object` of length"),
    "a map that announces 4 billion": (TIPS + b"\xdf" + BILLIONS, "truncated|length"),
    "a million items": (HEARS + MILLION + b"\xa0" * 0xF0000, "of length <="),
    "text that is no UTF-8": (b"\x82\xa4kind\xa3ask\xa4what\xa2\xff\xff", "utf-8"),
    "a key that is no text": (pack({"kind": "ask", 1: 2}), "Expected `str`"),
    "nested deeply": (TIPS + b"\x91" * 100_000, "Expected|recursion"),
    "nested deeply in what is unknown": (b"\x82\xa1x" + b"\x91" * 900_000, "recursion"),
    "an extension": (status(steps=msgspec.msgpack.Ext(5, b"data")), "Expected `int`, got `ext`"),
    "more than a frame": (bytes(MAX_FRAME_BYTES + 1), "over the limit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_in_one_short_line(name: str) -> None:
    frame, why = WRONG[name]
    with pytest.raises(PayloadError, match=why) as caught:
        decode(frame)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
    assert not isinstance(caught.value, UnknownKind | OtherVersion)


@pytest.mark.parametrize("loud", [1, {"deep": [1] * 1000}, "lo\nud"])
def test_fields_of_a_newer_peer_are_left_out(loud: Any) -> None:
    figures = {"kind": "figures", "loud": loud}
    assert decode(status(loud=loud, figures=figures)) == with_fields(STATUS, figures=Figures())


LEDGER = {"": Entry(0, 0), "a": Entry(5, 100, 1, 1, 1, "ann")}
BOOK = Book(LEDGER, (D,), ((0, 4),), 1, 2, (1.0, 0.5, 0.0))
HEAD = Head(0, 1, D, "a", "b", ((LINE, 1.0),), 2, 100, D, D, b"signature")
EXAMPLES = [
    STATUS,
    HELLO,
    Figures(2.5, 2.7, 40.0, 4, 5, 3, 1, 1, 9.0, [1.0] * 4),
    Offer(LINE),
    Letter(1, "b", b"content"),
    Box(2, True, 5.0, HELLO, Greeting("c", 1), [Letter(1, "", b"")], {0: [(1, D)]}, {0: (1, D)}),
    Answer(0, "a", 5, "want", 7),
    Welcome(),
    Lease("a", 3, ((1, 5),)),
    Dealt("a", ((1, 5),)),
    Greeting("x", 3, "ab" * 8),
    Refusal("no"),
    No(),
    Got(7),
    Values(),
    Revocations(1, ["ab" * 8], ["a"], "ab" * 64),
    ContributionHeader(LINE, 7, 1.5),
    Get(0, (7, D), "", 3, D),
    RecordHeader(HEAD, (D, D), 2, 1),
    Waiting(),
    PartHeader(HEAD, BOOK, (D,)),
    InnerRequest(),
    InnerHeader(["0.w.exp_avg"], [3], [1]),
    InfoRequest(D),
    Probe(["/ip4/1.2.3.4"]),
    Piece(WIRE_VERSION, b"x" * MAX_PIECE_BYTES, True, "ab" * 64),
    ProbeReply(WIRE_VERSION, "run", "ann", 1.5, ["/a"], ["b"], "/ip4", ["/a"], "why"),
    Door(4101, ["192.0.2.1"], b"k" * 32),
]
OTHER = [None, -2, 2**63, 1.5, math.nan, "x" * 2000, b"x" * 2000, [[]], [None], [-1], {-1: None}]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_comes_through_unchanged_and_a_wrong_or_missing_field_refuses_it(
    message: Message,
) -> None:
    assert decode(encode(message)) == message
    fields = msgspec.msgpack.decode(encode(message), strict=False)
    assert decode(extended(encode(message))) == message
    named = [info.name for info in msgspec.structs.fields(message) if info.required]
    broken = list[dict[str, Any]]()
    for name in ("kind", *named):
        broken.append({key: value for key, value in fields.items() if key != name})
    unknown = {info.name for info in msgspec.structs.fields(message) if info.default is None}
    for key, right in fields.items():
        wrongs = (wrong for wrong in OTHER if wrong is not None or key not in unknown)
        broken += [{**fields, key: wrong} for wrong in wrongs if not fits(wrong, right)]
    for one in broken:
        with pytest.raises(PayloadError):
            pytest.fail(f"{decode(pack(one))} was taken"[:200])


def extended(frame: bytes) -> bytes:
    """The message of a newer peer, whose map has one entry more."""
    entries = int.from_bytes(frame[1:3], "big") if frame[0] == 0xDE else frame[0] & 0x0F
    rest = frame[3:] if frame[0] == 0xDE else frame[1:]
    return b"\xde" + (entries + 1).to_bytes(2, "big") + rest + pack("extra") + pack({"deep": [1]})


def fits(wrong: object, right: object) -> bool:
    """Another value of that type, which may be good, or none where that is the default."""
    if wrong is None:
        return isinstance(right, dict | list)
    return type(wrong) is type(right) and isinstance(wrong, str | bytes | float) and wrong == wrong


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(example) for example in EXAMPLES} == set(kinds().values())


def test_the_largest_messages_fit_their_frames() -> None:
    peer, ranges = "Q" * 52, [(2**49 + 2 * at, 2**49 + 2 * at + 1) for at in range(MAX_RANGES)]
    units, name = tuple(ranges[:MAX_UNIT_RANGES]), "n" * 24
    line = Line(0, peer, 2**50, D, 2**40, 2**50, units, 1e30, D, name, b"s" * 560)
    head = Head(0, 2**40, D, peer, peer, ((line, 1e30),) * MAX_LINES, 1, 2**50, D, D, b"s" * 560)
    entry = Entry(2**50, 2**50, 2**40, 2**40, 2**40, name)
    ledger = {f"{at:052}": entry for at in range(MAX_LEDGER)}
    book = Book(ledger, (D,) * MAX_LATE, tuple(ranges), 2**40, 1, (1e30, 1e30, 1e30))
    names = [f"0.{index}.exp_avg_sq" for index in range(MAX_MOMENTS)]
    for message in (
        RecordHeader(head, (D,) * UPDATE_PARTS),
        PartHeader(head, book, (D,) * MAX_PARTS),
        InnerHeader(names, [2**40] * MAX_MOMENTS, [2**40] * MAX_MOMENTS),
    ):
        assert decode(encode(message)) == message
        assert len(encode(message)) < MAX_FRAME_BYTES


def test_a_kind_that_a_newer_peer_may_know_is_told_from_nonsense() -> None:
    why = "messages of kind trumpet are not known here; install the same"
    with pytest.raises(UnknownKind, match=why):
        decode(pack({"kind": "trumpet", "loud": True}))


@pytest.mark.parametrize("first", [HELLO, Piece(WIRE_VERSION, b"")])
def test_another_wire_version_is_refused_by_that_whatever_else_is_in_it(first: Message) -> None:
    text = f"wire version 11 there does not fit {WIRE_VERSION} here; {REMEDY}"
    for other in ({}, {"status": 5, "data": 5}, {"unknown": 1}):
        with pytest.raises(OtherVersion) as caught:
            decode(with_(first, wire_version=11, **other))
        assert str(caught.value) == text
    with pytest.raises(PayloadError, match="Expected `int`, got `str`") as nonsense:
        decode(with_(first, wire_version="x"))
    assert not isinstance(nonsense.value, OtherVersion)


def test_a_conversation_expects_one_kind_or_a_refusal() -> None:
    assert expect(STATUS, Status) is STATUS
    no = Refusal("the\nmodel")
    for message, why in ((STATUS, "expected Hello, got Status"), (no, "refused: the model")):
        with pytest.raises(PayloadError, match=why):
            expect(message, Hello)


def test_text_that_people_read_moves_no_cursor() -> None:
    said = "a\x1b[2J\nb"
    probed = ProbeReply(WIRE_VERSION, said, said, 1.0, [], [], said, [], said)
    texts = ["run_id", "name", "observed", "why"]
    for message, fields in ((Refusal(said), ["reason"]), (probed, texts)):
        assert {getattr(decode(encode(message)), field) for field in fields} == {"a [2J b"}


def test_admission_lets_each_role_begin_these_conversations() -> None:
    for kind, message in kinds().items():
        assert message.place.begins == bool(message.roles), kind
    watching = {"greeting", "ask", "probe"}
    hosting = watching | {"hello", "push", "get"}
    training = hosting | {"inner_request"}
    may = {"observer": watching, "host": hosting, "worker": training, "contributor": training}
    for role in EVERYBODY:
        assert {kind for kind, one in kinds().items() if role in one.roles} == may[role]


def test_a_refusal_and_a_greeting_fit_the_frame_of_a_stranger() -> None:
    longest = Greeting(credential="x" * 2048, revoked=2**40, instance="a" * 16)
    assert max(len(encode(longest)), len(encode(Refusal("x" * 2048)))) < MAX_GREETING_BYTES
