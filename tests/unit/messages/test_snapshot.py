"""A snapshot comes through whole, in pieces; nothing else is taken for one, and no text in it moves
a cursor."""

import json
import random
import zlib
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.errors import PayloadError
from diloco.messages import snapshot as schema

SAID = "a\x1b[2J\nb"
PEER = schema.PeerRow(
    peer_id="12D3",
    name="ann",
    state="training",
    device="cpu",
    trains=True,
    authors=True,
    version=3,
    version_lag=0,
    inner_step=1,
    target_steps=4,
    steps_per_s=0.5,
    last_seen_s=0.1,
    seconds=schema.PhaseSeconds(1.0),
    tokens=100,
    loss=2.5,
    bytes_sent=4,
    bytes_received=5,
    addresses=["/ip4/1.2.3.4"],
)
CONTRIBUTOR = schema.Standing("12D4", "ann", 2, 90, 8, 1, 3, "cpu", 40, 9.0)
SEEN = schema.Snapshot(
    schema.RunInfo("run", "synchronous", "tiny", None, 1000, 3, 90, 1e9, "12D3"),
    [PEER],
    [schema.FragmentRow(0, 3, 90, "ab" * 8, "12D3", None, 2, "alone")],
    [schema.Round(0, 3, 2, 2, 1, 0, schema.PhaseSeconds(1.0, 2.0), 1e9)],
    schema.LedgerTotals(100, 90, 4, 6, [CONTRIBUTOR]),
    [schema.LossPoint(1e9, 90, 2.5, 2.0, 3.0)],
    [schema.LoggedEvent(1e9, "join", "peer=12D4")],
    1,
    [(3, "Once", "upon\na")],
)


POINT = {"at": 1, "tokens": 1, "loss": 1, "low": 1, "high": 1}


def packed(**fields: Any) -> bytes:
    return zlib.compress(json.dumps({**json.loads(SEEN.json()), **fields}).encode())


def test_a_snapshot_comes_through_unchanged() -> None:
    assert schema.unpack_snapshot(b"".join(schema.pack_snapshot(SEEN))) == SEEN
    shown = json.loads(SEEN.json(indent=2))
    assert shown["peers"][0]["seconds"] == {"compute": 1.0, "wait": 0.0, "comm": 0.0, "outer": 0.0}
    assert b"\n" in SEEN.json(indent=2) and b"\n" not in SEEN.json()


def test_a_crowd_comes_in_pieces() -> None:
    rng = random.Random(0)
    places = [[rng.randbytes(128).hex() for _ in range(16)] for _ in range(9)]
    crowd = [replace(PEER, addresses=place) for place in places]
    pieces = schema.pack_snapshot(replace(SEEN, peers=crowd * (schema.MAX_PEERS // 9)))
    assert all(len(piece) <= schema.MAX_PIECE_BYTES for piece in pieces)
    assert len(schema.unpack_snapshot(b"".join(pieces)).peers) == schema.MAX_PEERS // 9 * 9


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut off"),
        (b"nonsense", "incorrect header"),
        (packed()[:-3], "cut off"),
        (packed() + b"x", "cut off"),
        (zlib.compress(bytes(schema.MAX_PACKED_BYTES + 1)), "longer than"),
        (zlib.compress(b"[" * 100_000), "Expected|recursion"),
        (zlib.compress(b'"\xff"'), "utf-8|UTF-8|Expected"),
        (packed(left_out=-1), "Expected `int` >= 0"),
        (packed(left_out=True), "Expected `int`, got `bool`"),
        (packed(peers=[1] * 1_000_000), "Expected `array` of length|Expected `object`"),
        (packed(loss=[{**POINT, "at": float("nan")}]), "malformed|invalid"),
        (packed(loss=[{**POINT, "loss": 1e9}]), "Expected `float` <="),
        (packed(fragments=[{"state": "asleep"}]), "Invalid enum value 'asleep'"),
        (packed(events=[{"at": 1, "kind": "x" * 129, "text": ""}]), "length <= 128"),
    ],
)
def test_what_is_no_snapshot_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(PayloadError, match=why) as caught:
        schema.unpack_snapshot(content)
    assert len(str(caught.value)) < 300


def test_no_text_of_a_peer_moves_a_cursor() -> None:
    wild = replace(
        SEEN,
        run=replace(SEEN.run, run_id=SAID, model=SAID),
        peers=[replace(PEER, name=SAID, device=SAID)],
        fragments=[replace(SEEN.fragments[0], next=SAID, author=SAID)],
        events=[schema.LoggedEvent(1e9, SAID, SAID)],
        ledger=replace(SEEN.ledger, contributions=[replace(CONTRIBUTOR, name=SAID)]),
        samples=[(1, SAID, SAID)],
    )
    raw = json.loads(wild.json())
    raw["peers"][0]["name"] = raw["events"][0]["text"] = SAID
    for seen in (wild, schema.unpack_snapshot(zlib.compress(json.dumps(raw).encode()))):
        assert "\\u001b" not in seen.json().decode() and seen.peers[0].name == "a [2J b"
        assert seen.samples == [(1, "a [2J\nb", "a [2J\nb")], "which may have lines"


def test_equal_names_are_told_apart_by_the_end_of_the_id() -> None:
    assert SEEN.names() == {"12D3": "ann-12D3", "12D4": "ann-12D4"}
    assert replace(SEEN, peers=[]).names() == {"12D4": "ann"}
