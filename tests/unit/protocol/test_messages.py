"""Messages: what is valid comes through unchanged; everything else is a `PayloadError`, and no other error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

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
from diloco.protocol.messages import Message, Refusal, UnknownKind, decode, encode, expect
from diloco.protocol.messages.base import (
    EVERYBODY,
    KINDS,
    MAX_FRAME_BYTES,
    MAX_RANGES,
    MAX_UNIT_RANGES,
    Place,
)
from diloco.protocol.messages.bulk import (
    MAX_MOMENTS,
    MAX_PARTS,
    Contribution,
    InnerHeader,
    InnerRequest,
    PartList,
    PartRequest,
    Receipt,
    Signed,
    StateHeader,
    StateRequest,
    UnitGrant,
    UnitRequest,
    Verdict,
)
from diloco.protocol.messages.control import (
    MAX_GREETING_BYTES,
    Claim,
    Figures,
    Greeting,
    Hello,
    Published,
    Revocations,
    Status,
)
from diloco.protocol.messages.heads import MAX_LINES, Head, Line, Record
from diloco.protocol.messages.watching import (
    MAX_PROBE_BYTES,
    MAX_SNAPSHOT_PIECE_BYTES,
    DialBack,
    DialBackReply,
    FileReply,
    ManifestReply,
    ManifestRequest,
    Probe,
    ProbeReply,
    SnapshotReply,
    SnapshotRequest,
)
from diloco.protocol.numbers import MAX_BYTES, MAX_COUNT, MAX_LOSS, MAX_TOKENS, MIN_RATE
from diloco.protocol.penalties import Offence, offences
from diloco.protocol.shares import MAX_NAME_BYTES, MAX_SHARES, Share, short_name
from tests.support.messages import CLAIM, EXAMPLES, HELLO, RECORD, STATUS, D

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
counts = st.integers(0, MAX_COUNT)
terms = st.integers(1, MAX_COUNT)
fragments = st.integers(0, 2**20 - 1)
names = st.text(max_size=128)
rates = st.just(0.0) | st.floats(MIN_RATE, MAX_LOSS)
states = st.sampled_from(["starting", "ready", "training", "exchanging", "leaving", "done"])
units = st.lists(st.tuples(counts, counts).filter(lambda unit: unit[0] < unit[1]).map(list), max_size=3)
statuses = st.builds(
    Status,
    state=states,
    versions=st.lists(counts, max_size=5),
    inner_step=counts,
    target_steps=counts,
    steps_per_s=rates,
    tokens=counts,
    units=units,
    figures=st.none()
    | st.builds(
        Figures,
        discarded=counts,
        loss=rates,
        bytes_sent=counts,
        bytes_received=counts,
        rounds=counts,
        seconds=st.lists(rates, max_size=4),
    ),
)
word = {"cursor": counts, "open": units}
claims = st.builds(Claim, fragment=fragments, term=terms, version=counts, digest=digests, **word)
revocations = st.builds(
    Revocations,
    number=terms,
    token_ids=st.lists(st.binary(min_size=8, max_size=8).map(bytes.hex), max_size=3),
    peer_ids=st.lists(names, max_size=3),
    signature=st.binary(min_size=64, max_size=64).map(bytes.hex),
)
published = {"fragment": fragments, "term": terms, "version": counts, "digest": digests}
shared = {"applied_tokens": counts, **word}
raw = st.binary(min_size=32, max_size=32)
signatures = st.binary(max_size=600)
lines = st.builds(
    Line, names, counts, raw, st.integers(1, 2**40 - 1), st.integers(1, 2**48 - 1), counts, rates, raw, signatures
)
heads = st.builds(
    Head,
    fragment=fragments,
    term=terms,
    version=terms,
    author=names,
    digest_before=digests,
    digest=digests,
    lines=raw,
    shares=raw,
    state=raw,
    applied_tokens=counts,
    signature=signatures,
    **word,
)
records = st.builds(Record, head=heads, lines=st.lists(lines, max_size=3), more=st.integers(0, 8))
described = records.map(lambda record: {"fragment": record.fragment, "digest": record.digest, "record": record})
short_names = st.text(max_size=MAX_NAME_BYTES).map(short_name)
shares = st.tuples(counts, counts, counts, counts, short_names).map(
    lambda share: Share(*share[:2], *sorted(share[2:4]), share[4])
)
ANY = st.one_of(
    statuses,
    claims,
    st.builds(
        Hello,
        wire_version=st.just(WIRE_VERSION),
        run_id=names,
        manifest_hash=digests,
        name=names,
        trains=st.booleans(),
        holds=st.booleans(),
        device=names,
        peers=st.lists(names, max_size=3),
        status=statuses,
        claims=st.lists(claims, max_size=3),
    ),
    st.builds(Published, staleness=counts, contributors=st.lists(names, max_size=3), **published, **shared),
    st.builds(Signed, line=lines),
    heads,
    records,
    st.builds(
        lambda named, outer, shares: StateHeader(
            **named, outer=outer, shares={k: v for k, v in shares.items() if v.last_version <= named["record"].version}
        ),
        described,
        st.booleans(),
        st.dictionaries(names, shares, max_size=3),
    ),
    st.builds(
        Contribution,
        manifest_hash=digests,
        fragment=fragments,
        term=terms,
        base_version=counts,
        base_digest=digests,
        steps=st.integers(1, MAX_COUNT),
        tokens=st.integers(1, MAX_TOKENS),
        units=units,
    ),
    st.builds(
        Verdict,
        accepted=st.booleans(),
        first_chunk=counts,
        record_follows=st.booleans(),
        reason=st.text(max_size=512),
        version=counts,
        term=counts,
    ),
    st.builds(Receipt),
    st.builds(
        StateRequest,
        manifest_hash=digests,
        fragment=fragments,
        have_version=st.integers(-1, MAX_COUNT),
        outer=st.booleans(),
        in_parts=st.booleans(),
    ),
    st.builds(
        lambda named, parts: PartList(**named, parts=parts), described, st.lists(digests, min_size=1, max_size=3)
    ),
    st.builds(
        PartRequest, manifest_hash=digests, fragment=fragments, digest=digests, part=st.integers(0, MAX_PARTS - 1)
    ),
    st.builds(StateHeader, fragment=fragments, digest=digests, outer=st.booleans()),
    st.builds(InnerRequest, manifest_hash=digests),
    st.builds(
        InnerHeader,
        names=st.lists(st.text(max_size=32), max_size=3),
        numels=st.lists(counts, max_size=3),
        steps=st.lists(st.integers(1, MAX_COUNT), max_size=3),
    ),
    st.builds(UnitRequest, manifest_hash=digests, wanted=st.integers(1, 2**20), has=units),
    st.builds(UnitGrant, units=units),
    st.builds(ManifestRequest),
    st.builds(ManifestReply, text=st.text(max_size=1000)),
    st.builds(SnapshotRequest),
    st.builds(FileReply, data=st.binary(max_size=1000), more=st.booleans()),
    st.builds(SnapshotReply, wire_version=st.just(WIRE_VERSION), data=st.binary(max_size=1000), more=st.booleans()),
    st.builds(Probe, sends=st.integers(0, MAX_PROBE_BYTES), wants=st.integers(0, MAX_PROBE_BYTES)),
    st.builds(
        ProbeReply,
        wire_version=counts,
        run_id=names,
        name=names,
        unix_s=st.floats(0, 2**39),
        addresses=st.lists(names, max_size=3),
        known=st.lists(names, max_size=3),
        observed=st.text(max_size=256),
    ),
    st.builds(DialBack, addresses=st.lists(names, max_size=3)),
    st.builds(DialBackReply, reached=st.lists(names, max_size=3), why=st.text(max_size=512), observed=names),
    st.builds(Refusal, reason=st.text(max_size=2048)),
    revocations,
    st.builds(Greeting, credential=st.text(max_size=1024), revoked=counts),
)

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
WRONG_SHARES = [
    *([*SHARE[:at], wrong, *SHARE[at + 1 :]] for at in range(4) for wrong in WRONG[int]),
    *(
        [*SHARE[:4], wrong]
        for wrong in (None, 1, b"a", ["a"], "a" * (MAX_NAME_BYTES + 1), "ä" * MAX_NAME_BYTES, "a\nb")
    ),
    *([], SHARE[:3], [*SHARE, 1], [2, 3, 2, 1, "b"], [2, 3, 1, 3, "b"], None, 1, "abcde"),
]
DIGESTS = [D.upper(), D[1:], D + "0", D + "\n", "g" + D[1:], ""]


def pack(fields: object) -> bytes:
    return bytes(msgpack.packb(fields, use_bin_type=True))


def fields_of(message: Message) -> dict[str, Any]:
    """What its frame holds, with the fields that have their default."""
    return {"kind": message.kind, **message.model_dump()}


def corruptions(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (field, the fields with that one wrong), also for the messages inside a message."""
    for key, value in fields.items():
        wrong = [*WRONG[type(value)], *(DIGESTS if value == D else [])]
        if key == "contributors" and isinstance(value, dict):
            wrong = [*(one for one in wrong if one != {}), {"a": -1}, {"a": "1"}, {"a": None}, {"a" * 129: 1}]
        if key == "addresses" and isinstance(value, dict):
            said: list[Any] = ["/a", None, {}, [1], ["x" * 257], ["x"] * 17]
            wrong = [*(one for one in wrong if one != {}), *({"a": one} for one in said), {"a" * 129: []}]
        if key in ("figures", "record"):
            wrong = [one for one in wrong if one not in (None, {})]  # none, or none of them yet
        if key == "shares":
            wrong = [
                *(one for one in wrong if one != {}),
                *({"a": share} for share in WRONG_SHARES),
                {"a" * 129: SHARE},
            ]
        yield from ((key, {**fields, key: other}) for other in wrong)
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict) and key not in ("addresses", "contributors", "shares"):
            for path, broken in corruptions(inner):
                yield f"{key}.{path}", {**fields, key: [broken] if isinstance(value, list) else broken}


def refusal_of(frame: bytes) -> str:
    with pytest.raises(PayloadError) as caught:
        decode(frame)
    return str(caught.value)


@given(ANY)
def test_every_message_comes_through_unchanged(message: Message) -> None:
    assert decode(encode(message)) == message


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(example) for example in EXAMPLES} == set(KINDS.values())


def test_admission_lets_each_role_begin_these_conversations() -> None:
    may = {role: {kind for kind, message in KINDS.items() if role in message.roles} for role in EVERYBODY}
    assert may["observer"] == {
        "greeting", "manifest_request", "file_request", "snapshot_request", "probe", "dial_back",
    }  # fmt: skip
    assert may["host"] - may["observer"] == {
        "hello", "state_request", "part_request", "audit_request", "accusation",
    }  # fmt: skip
    assert may["worker"] - may["host"] == {"contribution", "unit_request", "inner_request"}
    assert may["worker"] == {kind for kind, message in KINDS.items() if message.place.begins}


def test_a_message_that_begins_a_stream_names_its_roles_and_no_two_have_one_name() -> None:
    before = dict(KINDS)
    with pytest.raises(AssertionError, match="names no roles"):

        class _Nobodys(Message, kind="nobodys", place=Place.REQUEST):
            pass

    with pytest.raises(AssertionError, match="two messages are called status"):

        class _Twin(Message, kind="status"):
            pass

    assert before == KINDS


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_one_wrong_field_refuses_the_message(example: Message) -> None:
    assert decode(encode(example)) == example
    for field, broken in corruptions(fields_of(example)):
        try:
            accepted = decode(pack(broken))
        except PayloadError as error:
            assert len(str(error)) < 500
        else:
            pytest.fail(f"{field} of {accepted!r} was taken from {broken}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_a_missing_or_an_extra_field_refuses_the_message(example: Message) -> None:
    fields = fields_of(example)
    required = [key for key, info in type(example).model_fields.items() if info.is_required()]
    for key in [*required, "kind"]:
        refusal_of(pack({name: value for name, value in fields.items() if name != key}))
    assert "extra" in refusal_of(pack({**fields, "extra": 1}))
    assert "status.extra" in refusal_of(pack({**fields_of(HELLO), "status": {**STATUS.model_dump(), "extra": 1}}))


@pytest.mark.parametrize("kind", ["", "a b", "x\n", "é", None, 1, [], {}, b"status", "x" * 100_000])
def test_what_cannot_be_a_kind_is_refused_in_a_short_line(kind: object) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(pack({**STATUS.model_dump(), "kind": kind}))
    assert len(str(caught.value)) < 500 and type(caught.value) is PayloadError


def test_a_kind_that_a_newer_peer_may_know_is_refused_and_is_no_offence() -> None:
    with pytest.raises(UnknownKind, match="messages of kind trumpet are not known here; install the same"), offences():
        decode(pack({"kind": "trumpet", "loud": True}))
    with pytest.raises(Offence), offences():
        decode(pack({"kind": "status", "loud": True}))


def test_a_frame_over_the_limit_is_refused_before_it_is_parsed() -> None:
    frame = encode(ManifestReply(text="x" * (MAX_FRAME_BYTES // 2)))
    assert isinstance(decode(frame), ManifestReply)
    assert "over the limit" in refusal_of(bytes(MAX_FRAME_BYTES + 1))


def test_what_is_read_of_strangers_has_room_for_the_longest_token_and_the_longest_reason() -> None:
    longest = issue(RunKey(new_key()), "r" * 64, "worker", 2**64 - 1, "Q" * 100).credential("Q" * 100)
    for said in (longest, "x" * MAX_CHARACTERS):
        assert len(encode(Greeting(credential=said, revoked=MAX_COUNT))) < MAX_GREETING_BYTES / 2
    assert len(encode(Refusal(reason="x" * 2048))) < MAX_GREETING_BYTES


def test_the_largest_inner_state_has_a_header_that_fits_a_frame() -> None:
    count = MAX_MOMENTS
    header = InnerHeader(
        names=[f"0.{index}.exp_avg_sq" for index in range(count)], numels=[2**34] * count, steps=[2**39] * (count // 2)
    )
    assert len(encode(header)) < MAX_FRAME_BYTES / 2
    for key, value in (("names", "x" * 33), ("names", ""), ("numels", 1), ("steps", 1)):
        too_much = [value] * (1 if len(str(value)) > 32 else count + 1)
        refusal_of(pack({**fields_of(header), key: too_much}))
    refusal_of(pack({**fields_of(header), "steps": [0]}))


def test_the_shares_of_all_peers_fit_a_frame_beside_the_parts_of_the_largest_fragment() -> None:
    peers = [f"12D3KooW{number:044d}" for number in range(MAX_SHARES)]
    share = Share(2**31, MAX_TOKENS, 2**31, 2**31, short_name("n" * 100))
    parts, open_ = [D] * MAX_PARTS, [[2**49 + 2 * at, 2**49 + 2 * at + 1] for at in range(MAX_RANGES)]
    line = RECORD.lines[0]._replace(
        peer=peers[0], base_version=MAX_COUNT, tokens=MAX_TOKENS, total=MAX_TOKENS, signature=b"s" * 560
    )
    named = {"version": 2**31, "applied_tokens": MAX_TOKENS, "open": open_, "author": peers[0]}
    head = RECORD.head.model_copy(update=named)
    record = Record(head=head, lines=[line] * MAX_LINES)
    listed = PartList(fragment=1, digest=D, record=record, parts=parts, shares=dict.fromkeys(peers, share))
    assert decode(encode(listed)) == listed and len(encode(listed)) < MAX_FRAME_BYTES
    refusal_of(pack({**fields_of(listed), "shares": dict.fromkeys([*peers, "one more"], share)}))


def test_a_list_of_parts_is_neither_empty_nor_longer_than_a_frame() -> None:
    listed = PartList(fragment=1, digest=D, parts=[D] * MAX_PARTS)
    assert decode(encode(listed)) == listed and len(encode(listed)) < MAX_FRAME_BYTES
    for parts in ([], [D] * (MAX_PARTS + 1), [D, D[1:]]):
        assert refusal_of(pack({**fields_of(listed), "parts": parts})).startswith("a message does not fit its schema")


@pytest.mark.parametrize(
    "unit", [[1, 1], [2, 1], [1], [1, 2, 3], [-1, 2], [0, MAX_TOKENS + 1], [0.0, 1], [True, 2], ["0", 1]]
)
def test_a_range_of_sequences_is_two_ascending_numbers(unit: list[object]) -> None:
    for example, field in ((STATUS, "units"), (CLAIM, "open"), (UnitGrant(units=[]), "units")):
        refusal_of(pack({**fields_of(example), field: [[4, 5], unit]}))


def test_nobody_has_or_leaves_open_more_ranges_than_a_peer_can_keep_track_of() -> None:
    ranges = [[2 * number, 2 * number + 1] for number in range(MAX_RANGES + 1)]
    for example, field, limit in (
        (STATUS, "units", MAX_UNIT_RANGES),
        (UnitRequest(manifest_hash=D, wanted=1, has=[]), "has", MAX_UNIT_RANGES),
        (CLAIM, "open", MAX_RANGES),
    ):
        decode(pack({**fields_of(example), field: ranges[:limit]}))
        refusal_of(pack({**fields_of(example), field: ranges[: limit + 1]}))
    for wanted in (0, 2**20 + 1):
        refusal_of(pack({**fields_of(UnitRequest(manifest_hash=D, wanted=1, has=[])), "wanted": wanted}))


def test_a_hello_of_another_wire_version_is_refused_by_that_whatever_else_is_in_it() -> None:
    text = f"wire version 1 there does not fit {WIRE_VERSION} here; install the same diloco version on both sides"
    for other in ({}, {"status": 5}, {"unknown": 1}):
        assert refusal_of(pack({**fields_of(HELLO), "wire_version": 1, **other})) == text


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refusal_of(frame)


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_frames_are_refused_or_are_another_valid_message(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut]), bytes(frame) + b"\0"):
        try:
            decode(damaged)
        except PayloadError:
            continue


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["kind", "state"]), inner),
    )
)
def test_any_other_structure_is_refused(structure: object) -> None:
    refusal_of(pack(structure))


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


@pytest.mark.parametrize(("field", "items"), [("versions", [-1]), ("peers", [1]), ("claims", [{}]), ("parts", [""])])
def test_a_long_list_of_wrong_items_costs_one_error(field: str, items: list[object]) -> None:
    """A frame of a million of them would otherwise keep the node busy for seconds, and take a gigabyte."""
    [example] = [example for example in EXAMPLES if field in type(example).model_fields]
    fields = example.model_dump()
    with pytest.raises(ValidationError) as caught:
        type(example).model_validate({**fields, field: items * 1000})
    assert caught.value.error_count() <= 5  # those of one item


@pytest.mark.parametrize(("field", "item"), [("addresses", [1]), ("shares", [])])
def test_a_map_that_is_too_long_is_refused_before_its_items_are_looked_at(field: str, item: object) -> None:
    example = next(example for example in EXAMPLES if isinstance(fields_of(example).get(field), dict))
    many = {f"{number:05x}": item for number in range(10_000)}
    with pytest.raises(ValidationError) as caught:
        type(example).model_validate({**example.model_dump(), field: many})
    assert caught.value.error_count() == 1 and "a map of 10000 items" in str(caught.value)


def test_many_unknown_fields_cost_one_look() -> None:
    """pydantic would list them all, which takes a second for a frame full of them."""
    fields = {**fields_of(STATUS), **{f"k{number}": 0 for number in range(50_000)}}
    assert refusal_of(pack(fields)).endswith("status.k0: no such field is known")


def numbers_in(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (path, schema) of each number in a JSON schema."""
    if schema.get("type") in ("integer", "number"):
        yield where, schema
    for key, value in schema.items():
        for index, part in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(part, dict):
                yield from numbers_in(part, f"{where}.{key}.{index}")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_number_has_bounds(kind: type[Message]) -> None:
    for where, schema in numbers_in(kind.model_json_schema()):
        assert {"minimum", "maximum"} <= schema.keys(), f"{where}: {schema}"


def test_a_conversation_expects_one_kind_and_understands_a_refusal() -> None:
    assert expect(STATUS, Status) is STATUS
    with pytest.raises(PayloadError, match="expected Verdict, got Status"):
        expect(STATUS, Verdict)
    with pytest.raises(PayloadError, match="refused: the model differs"):
        expect(Refusal(reason="the model differs"), Verdict)
    assert expect(Refusal(reason="the model differs"), Refusal).reason == "the model differs"
