"""Messages: what is valid comes through unchanged; everything else is a `PayloadError`, and no other error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco.admission import RunKey, issue
from diloco.admission.invitation import MAX_CHARACTERS
from diloco.admission.keys import new_key
from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.messages import Message, Refusal, UnknownKind, bulk, decode, encode, expect
from diloco.protocol.messages.base import EVERYBODY, KINDS, MAX_FRAME_BYTES, MAX_RANGES, MAX_UNIT_RANGES
from diloco.protocol.messages.control import MAX_GREETING_BYTES, Greeting, Status
from diloco.protocol.messages.heads import MAX_LINES, Line, Record
from diloco.protocol.messages.watching import MAX_SNAPSHOT_PIECE_BYTES, ManifestReply
from diloco.protocol.numbers import MAX_BYTES, MAX_COUNT, MAX_TOKENS, MIN_RATE
from diloco.protocol.penalties import Offence, offences
from diloco.protocol.shares import MAX_NAME_BYTES, MAX_SHARES, Share, short_name
from tests.support.messages import CLAIM, EXAMPLES, HELLO, RECORD, STATUS, D

# -- what is valid ----------------------------------------------------------------------------------------------------


def sound(share: Share) -> Share:
    """It ends after it began, and its name can be printed."""
    first, last = sorted((share.first_version, share.last_version))
    return share._replace(first_version=first, last_version=last, name=short_name(share.name))


# Fields that have to fit another one.
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "wire_version": st.just(WIRE_VERSION), "marks": st.just(b""), "pushes": st.just(0),
    "sequences": st.from_regex(r"[0-9a-f]{16}-[0-9]{1,15}x[0-9]{1,7}", fullmatch=True),
    "paths": st.lists(st.sampled_from([b"", bytes(64)]), min_size=1, max_size=3),
}  # fmt: skip
hints_of = partial(get_type_hints, include_extras=True)
LIMITS = ("ge", "le", "min_length", "max_length", "pattern")


def valid(hint: Any) -> st.SearchStrategy[Any]:
    """What a field with this annotation may hold; a number without bounds is an error."""
    notes = [one for note in getattr(hint, "__metadata__", ()) for one in getattr(note, "metadata", [note])]
    named = {name: note for note in notes for name in LIMITS if getattr(note, name, None) is not None}
    limits = {name: getattr(note, name) for name, note in named.items()}
    kind = getattr(hint, "__origin__", hint) if notes else hint
    args, least, most = get_args(kind), limits.get("min_length", 0), limits.get("max_length", 600)
    if isinstance(kind, type) and issubclass(kind, Message):
        return messages(kind)
    if "pattern" in limits:  # so many hexadecimal digits
        num_bytes = int(re.findall(r"\{(\d+)\}", limits["pattern"])[0]) // 2
        return st.binary(min_size=num_bytes, max_size=num_bytes).map(bytes.hex)
    if get_origin(kind) is list and least == most == 2:  # a range of sequences
        return st.sets(valid(*args), min_size=2, max_size=2).map(sorted)
    kinds: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        Literal: lambda: st.sampled_from(args),
        UnionType: lambda: st.one_of(*map(valid, args)),
        dict: lambda: st.dictionaries(*map(valid, args), max_size=3),
        list: lambda: st.lists(valid(*args), min_size=least, max_size=min(most, 3)),
        int: lambda: st.integers(limits["ge"], limits["le"]),
        float: lambda: st.just(0.0) | st.floats(max(limits["ge"], MIN_RATE), limits["le"]),
        bytes: lambda: st.binary(min_size=least, max_size=most),
        str: lambda: st.text(max_size=min(most, 1000)),
        Share: lambda: st.builds(Share, *map(valid, hints_of(Share).values())).map(sound),
        Line: lambda: st.builds(Line, *map(valid, hints_of(Line).values())),
    }
    return kinds.get(get_origin(kind) or kind, lambda: st.from_type(kind))()


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    fields = {name: valid(hint) for name, hint in hints_of(kind).items() if name in kind.model_fields}
    fields |= {name: FITTING[name] for name in fields.keys() & FITTING.keys()}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**anchored(values)))


def anchored(fields: dict[str, Any]) -> dict[str, Any]:
    """Of an anchor: as its certificate says, and without shares of later versions."""
    if "record" not in fields:
        return fields
    record, version = fields["record"], 0
    if record is not None:
        fields, version = {**fields, "fragment": record.fragment, "digest": record.digest}, record.version
    return {**fields, "shares": {k: v for k, v in fields["shares"].items() if v.last_version <= version}}


@given(st.one_of([messages(kind) for kind in KINDS.values()]))
def test_every_message_comes_through_unchanged(message: Message) -> None:
    assert decode(encode(message)) == message


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(example) for example in EXAMPLES} == set(KINDS.values())


def test_admission_lets_each_role_begin_these_conversations() -> None:
    may = {role: {kind for kind, message in KINDS.items() if role in message.roles} for role in EVERYBODY}
    watching = {"greeting", "manifest_request", "file_request", "snapshot_request", "probe", "dial_back"}
    hosting = {"hello", "state_request", "part_request"}
    training = {"contribution", "unit_request", "inner_request"}
    everything = watching | hosting | training
    assert may == {
        "observer": watching, "host": watching | hosting, "worker": everything, "contributor": everything,
    }  # fmt: skip
    assert may["worker"] == {kind for kind, message in KINDS.items() if message.place.begins}


# -- what is wrong in one place ---------------------------------------------------------------------------------------

WRONG: dict[type, list[object]] = {
    bool: [None, 0, 1, "true", [True]],
    int: [None, -2, MAX_BYTES + 1, 2**63, 1.0, 1.5, True, "1", b"1", [1], {"a": 1}],
    float: [None, -0.5, 2.0**40 + 1, math.nan, math.inf, True, "0.5", b"0.5", [0.5]],
    str: [None, 1, 0.5, True, b"a", ["a"], {"a": "a"}, "x" * (MAX_FRAME_BYTES // 2 + 1)],
    list: [None, 1, "a", {}, {"a": 1}, [None], [[]], [-1], [b"a"]],
    bytes: [None, 1, "a", [], {}, [b"a"], bytes(MAX_SNAPSHOT_PIECE_BYTES + 1)],
    dict: [None, 1, "a", [], {}, {"kind": "receipt"}],
    tuple: [None, 1, "a", {}, [], [None]],
}
SHARE = [2, 3, 1, 2, "b"]
WRONG_NAMES = (None, 1, b"a", ["a"], "a" * (MAX_NAME_BYTES + 1), "ä" * MAX_NAME_BYTES, "a\nb")
WRONG_SHARES = [
    *([*SHARE[:at], wrong, *SHARE[at + 1 :]] for at in range(4) for wrong in WRONG[int]),
    *([*SHARE[:4], wrong] for wrong in WRONG_NAMES),
    *([], SHARE[:3], [*SHARE, 1], [2, 3, 2, 1, "b"], [2, 3, 1, 3, "b"], None, 1, "abcde"),
]
WRONG_DIGESTS = [D.upper(), D[1:], D + "0", D + "\n", "g" + D[1:], ""]
LONG = "a" * 129
WRONG_MAPS = {
    "contributors": [{"a": -1}, {"a": "1"}, {"a": None}, {LONG: 1}],
    "addresses": [*({"a": one} for one in ("/a", None, {}, [1], ["x" * 257], ["x"] * 17)), {LONG: []}],
    "shares": [*({"a": share} for share in WRONG_SHARES), {LONG: SHARE}],
}


def pack(fields: object) -> bytes:
    return bytes(msgpack.packb(fields, use_bin_type=True))


def fields_of(message: Message) -> dict[str, Any]:
    """What its frame holds, with the fields that have their default."""
    return {"kind": message.kind, **message.model_dump()}


def corruptions(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (field, the fields with that one wrong), also for the messages inside a message."""
    for key, value in fields.items():
        wrong = [*WRONG[type(value)], *(WRONG_DIGESTS if value == D else [])]
        is_map = key in WRONG_MAPS and isinstance(value, dict)
        if is_map:
            wrong = [*(one for one in wrong if one != {}), *WRONG_MAPS[key]]
        if key in ("figures", "record"):
            wrong = [one for one in wrong if one not in (None, {})]  # none, or none of them yet
        yield from ((key, {**fields, key: other}) for other in wrong)
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict) and not is_map:
            for path, broken in corruptions(inner):
                yield f"{key}.{path}", {**fields, key: [broken] if isinstance(value, list) else broken}


def refusal_of(frame: bytes) -> str:
    with pytest.raises(PayloadError) as caught:
        decode(frame)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_a_wrong_missing_or_extra_field_refuses_the_message(example: Message) -> None:
    assert decode(encode(example)) == example
    fields = fields_of(example)
    for field, broken in corruptions(fields):
        try:
            accepted = decode(pack(broken))
        except PayloadError as error:
            assert len(str(error)) < 500
        else:
            pytest.fail(f"{field} of {accepted!r} was taken from {broken}")
    for missing in ["kind", *(key for key, info in type(example).model_fields.items() if info.is_required())]:
        refusal_of(pack({name: value for name, value in fields.items() if name != missing}))
    assert "extra" in refusal_of(pack({**fields, "extra": 1}))


def test_an_extra_field_is_named_and_many_cost_one_look() -> None:
    """pydantic would list them all, which takes a second for a frame full of them."""
    assert "status.extra" in refusal_of(pack({**fields_of(HELLO), "status": {**STATUS.model_dump(), "extra": 1}}))
    many = {**fields_of(STATUS), **{f"k{number}": 0 for number in range(50_000)}}
    assert refusal_of(pack(many)).endswith("status.k0: no such field is known")


def test_a_kind_that_a_newer_peer_may_know_is_no_offence() -> None:
    with pytest.raises(UnknownKind, match="messages of kind trumpet are not known here; install the same"), offences():
        decode(pack({"kind": "trumpet", "loud": True}))
    with pytest.raises(Offence), offences():
        decode(pack({"kind": "status", "loud": True}))


def test_a_hello_of_another_wire_version_is_refused_by_that() -> None:
    """Whatever else is in it."""
    text = f"wire version 1 there does not fit {WIRE_VERSION} here; install the same diloco version on both sides"
    for other in ({}, {"status": 5}, {"unknown": 1}):
        assert refusal_of(pack({**fields_of(HELLO), "wire_version": 1, **other})) == text


# -- sizes ------------------------------------------------------------------------------------------------------------

RANGES = [[2 * number, 2 * number + 1] for number in range(MAX_RANGES + 1)]
WRONG_RANGE = ([1, 1], [2, 1], [1], [1, 2, 3], [-1, 2], [0, MAX_TOKENS + 1], [0.0, 1], [True, 2], ["0", 1])
WRONG_RANGES = [[[4, 5], one] for one in WRONG_RANGE]
PARTS = bulk.PartList(fragment=1, digest=D, parts=[D])
REQUEST, GRANT = bulk.UnitRequest(manifest_hash=D, wanted=1, has=[]), bulk.UnitGrant(units=[])
MOMENTS = bulk.InnerHeader(
    names=[f"0.{index}.exp_avg_sq" for index in range(bulk.MAX_MOMENTS)],
    numels=[2**34] * bulk.MAX_MOMENTS, steps=[2**39] * (bulk.MAX_MOMENTS // 2),
)  # fmt: skip
ONE_MORE = bulk.MAX_MOMENTS + 1


@pytest.mark.parametrize(
    ("example", "field", "most", "wrong"),
    [
        (PARTS, "parts", [D] * bulk.MAX_PARTS, [[], [D] * (bulk.MAX_PARTS + 1), [D, D[1:]]]),
        (STATUS, "units", RANGES[:MAX_UNIT_RANGES], [RANGES[: MAX_UNIT_RANGES + 1], *WRONG_RANGES]),
        (REQUEST, "has", RANGES[:MAX_UNIT_RANGES], [RANGES[: MAX_UNIT_RANGES + 1]]),
        (REQUEST, "wanted", 2**20, [0, 2**20 + 1]),
        (GRANT, "units", RANGES[:MAX_RANGES], [RANGES, *WRONG_RANGES]),
        (CLAIM, "open", RANGES[:MAX_RANGES], [RANGES, *WRONG_RANGES]),
        (MOMENTS, "names", MOMENTS.names, [["x" * 33], [""] * ONE_MORE]),
        (MOMENTS, "numels", MOMENTS.numels, [[1] * ONE_MORE]),
        (MOMENTS, "steps", MOMENTS.steps, [[1] * ONE_MORE, [0]]),
    ],
    ids=["parts", "units", "has", "wanted", "grant", "open", "names", "numels", "steps"],
)
def test_a_field_at_its_limit_fits_and_over_it_is_refused(example: Message, field: str, most: Any, wrong: Any) -> None:
    longest = decode(pack({**fields_of(example), field: most}))
    assert getattr(longest, field) == most and len(encode(longest)) < MAX_FRAME_BYTES
    for one in wrong:
        assert refusal_of(pack({**fields_of(example), field: one})).startswith("a message does not fit its schema")


def test_the_largest_messages_fit_their_frames() -> None:
    """The longest token and reason of a stranger, and the shares of all peers beside all parts of a fragment."""
    longest = issue(RunKey(new_key()), "r" * 64, "worker", 2**64 - 1, "Q" * 100).credential("Q" * 100)
    for text in (longest, "x" * MAX_CHARACTERS):
        assert len(encode(Greeting(credential=text, revoked=MAX_COUNT))) < MAX_GREETING_BYTES / 2
    assert len(encode(Refusal(reason="x" * 2048))) < MAX_GREETING_BYTES
    assert len(encode(MOMENTS)) < MAX_FRAME_BYTES / 2

    peers = [f"12D3KooW{number:044d}" for number in range(MAX_SHARES)]
    share = Share(2**31, MAX_TOKENS, 2**31, 2**31, short_name("n" * 100))
    open_ = [[2**49 + 2 * at, 2**49 + 2 * at + 1] for at in range(MAX_RANGES)]
    line = RECORD.lines[0]._replace(
        peer=peers[0], base_version=MAX_COUNT, tokens=MAX_TOKENS, total=MAX_TOKENS, signature=b"s" * 560
    )
    named = {"version": 2**31, "applied_tokens": MAX_TOKENS, "open": open_, "author": peers[0]}
    record = Record(head=RECORD.head.model_copy(update=named), lines=[line] * MAX_LINES)
    listed = PARTS.model_copy(
        update={"record": record, "parts": [D] * bulk.MAX_PARTS, "shares": dict.fromkeys(peers, share)}
    )
    assert decode(encode(listed)) == listed and len(encode(listed)) < MAX_FRAME_BYTES
    refusal_of(pack({**fields_of(listed), "shares": dict.fromkeys([*peers, "one more"], share)}))


def test_a_frame_over_the_limit_is_refused_before_it_is_parsed() -> None:
    assert isinstance(decode(encode(ManifestReply(text="x" * (MAX_FRAME_BYTES // 2)))), ManifestReply)
    assert "over the limit" in refusal_of(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(("field", "items"), [("versions", [-1]), ("peers", [1]), ("claims", [{}]), ("parts", [""])])
def test_a_long_list_of_wrong_items_costs_one_error(field: str, items: list[object]) -> None:
    """A frame of a million of them would otherwise keep the node busy for seconds, and take a gigabyte."""
    [example] = [example for example in EXAMPLES if field in type(example).model_fields]
    with pytest.raises(ValidationError) as caught:
        type(example).model_validate({**example.model_dump(), field: items * 1000})
    assert caught.value.error_count() <= 5  # those of one item


@pytest.mark.parametrize(("field", "item"), [("addresses", [1]), ("shares", [])])
def test_a_map_that_is_too_long_is_refused_unread(field: str, item: object) -> None:
    example = next(example for example in EXAMPLES if isinstance(fields_of(example).get(field), dict))
    many = {f"{number:05x}": item for number in range(10_000)}
    with pytest.raises(ValidationError) as caught:
        type(example).model_validate({**example.model_dump(), field: many})
    assert caught.value.error_count() == 1 and "a map of 10000 items" in str(caught.value)


# -- what is no message -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        pack(msgpack.Timestamp(1, 2)),
        pack(msgpack.ExtType(5, b"data")),
        pack({**fields_of(STATUS), "tokens": msgpack.Timestamp(1, 2)}),
        pack({1: 2}),
        b"\x91" * 100_000,  # nested deeper than any parser should follow
        b"\xdd\xff\xff\xff\xff" * 1000,  # lists that announce four billion items
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp that does not exist
        b"\xa2\xff\xff",  # a string that is not UTF-8
    ],
)
def test_what_only_msgpack_can_say_is_refused(frame: bytes) -> None:
    refusal_of(frame)


def test_a_conversation_expects_one_kind_or_a_refusal() -> None:
    refusal = Refusal(reason="the model differs")
    assert expect(STATUS, Status) is STATUS and expect(refusal, Refusal).reason == "the model differs"
    for message, why in ((STATUS, "expected Verdict, got Status"), (refusal, "refused: the model differs")):
        with pytest.raises(PayloadError, match=why):
            expect(message, bulk.Verdict)
