"""Seeing a swarm: what a node remembers, how it travels, and what `diloco status` makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import zlib
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from diloco.cli import status as cli_status
from diloco.cli.panels import render
from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError, SwarmError
from diloco.protocol import snapshot as schema
from diloco.protocol.messages import Message, Refusal, encode
from diloco.protocol.messages.control import Hello, Published, Status
from diloco.protocol.messages.watching import MAX_SNAPSHOT_PIECE_BYTES, SnapshotReply
from diloco.protocol.peer import Peer
from diloco.protocol.snapshot import MAX_HISTORY, MAX_PEERS, MAX_TEXT_BYTES, Snapshot, pack, unpack
from diloco.rundir.files import exclusive
from diloco.swarm.client.watch import Visitor
from diloco.swarm.conversations.recorder import ELSEWHERE_S, Recorder
from tests.support.certificates import Nobody
from tests.support.command_line import Typed
from tests.support.fake_swarm import peer_id, snapshot
from tests.support.statuses import status

MANIFEST = "0" * 64
TEXT = '{"model": {"name": "tiny"}}'
ME, OTHER = "a" * 46, "b" * 46


def node() -> Peer:
    return Peer(ME, "me", "run", MANIFEST, ["1" * 64] * 2, Nobody(), device="cpu", planned=[9, 0, 9])


def joined(peer: Peer, other: str = OTHER, name: str = "other", **fields: Any) -> Peer:
    hello = Hello(
        wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name=name, trains=True, holds=True,
        device="gpu", peers=[], status=status(**fields), claims=[],
    )  # fmt: skip
    peer.connected(other, hello, 0.0)
    return peer


def told(peer: Peer, recorder: Recorder, message: Status | Published, now: float) -> None:
    peer.heard(OTHER, message, now)
    recorder.heard(OTHER, message, now)


def published(version: int, fragment: int = 0, **fields: Any) -> Published:
    known = {"term": 1, "digest": "2" * 64, "contributors": [ME, OTHER], "applied_tokens": 100 * version}
    return Published(fragment=fragment, version=version, **{**known, **fields})


def watched(**fields: Any) -> tuple[Peer, Recorder]:
    """A node with one other peer, and what it remembers."""
    peer = joined(node(), **fields)
    return peer, Recorder(peer, TEXT)


def test_a_snapshot_has_the_run_the_peers_and_who_holds_what() -> None:
    peer, recorder = watched(tokens=70, loss=2.5, bytes_sent=4)
    peer.discovered(0.0)
    seen = recorder.snapshot(3.0)
    assert (seen.run.run_id, seen.run.mode, seen.run.model, seen.run.outer_steps) == ("run", "synchronous", "tiny", 9)
    mine, other = seen.peers
    assert (mine.name, mine.device, mine.last_seen_s) == ("me", "cpu", 0.0)
    assert (other.name, other.device, other.loss, other.last_seen_s) == ("other", "gpu", 2.5, 3.0)
    for row in seen.fragments:
        lease = peer.leases.get(row.fragment)
        assert row.syncer == (None if lease is None else lease.holder)
        assert row.backup is None or row.backup != row.syncer
    assert any(row.syncer == ME and row.backup == OTHER for row in seen.fragments)


def test_a_round_is_recorded_once_with_peers_and_seconds() -> None:
    peer, recorder = watched()
    told(peer, recorder, published(1, contributors=[OTHER], staleness=2), 1.0)
    told(peer, recorder, published(1), 1.1)
    told(peer, recorder, status(version=1, rounds=1, seconds=[4.0, 2.0, 1.0, 0.0]), 1.2)
    recorder.heard(ME, status(version=1, rounds=1, seconds=[6.0, 0.0, 1.0, 0.0]), 1.3)
    told(peer, recorder, status(version=1, rounds=1, seconds=[4.0, 2.0, 1.0, 0.0]), 2.0)
    seen = recorder.snapshot(5.0)
    [row] = seen.rounds
    assert (row.live, row.participating, row.merged, row.staleness) == (2, 2, 1, 2)
    assert row.seconds is not None
    assert (row.seconds.compute, row.seconds.wait, row.seconds.comm) == (5.0, 1.0, 1.0)
    assert seen.run.at - row.closed_at == pytest.approx(4.0)
    for term, version in ((1, 2), (1, 2), (2, 2), (1, 3)):  # a successor makes one again
        told(peer, recorder, published(version, term=term), 5.0)
    assert [row.version for row in recorder.snapshot(6.0).rounds] == [1, 2, 2]


def test_the_loss_is_a_mean_whose_history_spans_the_run() -> None:
    peer, recorder = watched()
    for none in (float("nan"), float("inf"), -1.0):
        peer.measured(none, 1, [])
        assert peer.status(figures=True).figures.loss == 0.0
    peer.state = "training"
    peer.measured(3.0, 0, [])
    told(peer, recorder, status(loss=2.0), 1.0)
    told(peer, recorder, status(loss=2.0), 1.5)  # too soon
    [point] = recorder.snapshot(2.0).loss
    assert (point.loss, point.low, point.high) == (2.5, 2.0, 3.0)
    for second in range(2, 5000):
        told(peer, recorder, status(loss=2.0, tokens=second), float(second))
    loss = recorder.snapshot(5000.0).loss
    assert MAX_HISTORY // 4 < len(loss) <= MAX_HISTORY and loss[-1].at - loss[0].at > 4900


def test_what_a_peer_gave_stays_on_the_books() -> None:
    peer, recorder = watched()
    told(peer, recorder, status(tokens=170, discarded=30), 1.0)
    peer.adopted(0, 1, "2" * 64, 2.0, contributors={OTHER: 100})
    peer.lost(OTHER, 3.0, "reset")
    ledger = recorder.snapshot(4.0).ledger
    [row] = ledger.contributions
    assert (row.peer_id, row.name, row.tokens, row.outer_steps) == (OTHER, "other", 100, 1)
    assert (ledger.processed, ledger.applied, ledger.discarded, ledger.in_flight) == (170, 100, 30, 40)


def test_a_peer_that_the_dht_goes_on_naming_is_elsewhere() -> None:
    _, recorder = watched()
    for now in (0.0, ELSEWHERE_S + 1):
        recorder.named({ME: "me", OTHER: "other", "c": "far"}, now)
    assert recorder.snapshot(ELSEWHERE_S).components == [[ME, OTHER]]
    assert recorder.snapshot(ELSEWHERE_S + 1).components == [[ME, OTHER], ["c"]]
    recorder.named({OTHER: "other"}, ELSEWHERE_S + 2)  # its record has run out
    assert recorder.snapshot(ELSEWHERE_S + 2).components == [[ME, OTHER]]


def test_hundreds_of_peers_are_cut_to_what_a_reply_holds() -> None:
    peer = node()
    recorder = Recorder(peer, TEXT)
    for index in range(MAX_PEERS + 7):
        joined(peer, f"{index:046d}", "x" * 128)
    packed = recorder.packed(1.0)
    seen = unpack(b"".join(packed))
    assert (len(seen.peers), seen.left_out, seen.peers[0].peer_id) == (MAX_PEERS, 8, ME)
    assert recorder.packed(1.4) is packed, "one answers all who ask at the same time"
    assert recorder.packed(1.5) is not packed


def test_a_snapshot_comes_in_pieces_and_damage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"".join(pack(snapshot(2)))
    for packed, reason in (
        (whole[:-9], "cut off"),
        (whole + b"x", "cut off"),
        (zlib.compress(bytes(MAX_TEXT_BYTES + 1)), "longer than"),
        (zlib.compress(b"{}"), "run: Field required"),
        (zlib.compress(snapshot(2).model_dump_json().replace('"loss":2', '"loss":"2', 1).encode()), "schema"),
    ):
        with pytest.raises(PayloadError, match=reason):
            unpack(packed)
    sent = snapshot(64)
    assert max(map(len, pack(sent))) <= MAX_SNAPSHOT_PIECE_BYTES
    monkeypatch.setattr(schema, "MAX_SNAPSHOT_PIECE_BYTES", 1000)
    pieces = pack(sent)
    assert len(pieces) > 3 and unpack(b"".join(pieces)) == sent


class Answering:
    """A transport on which every peer says the same; who asks has to open a stream first."""

    def __init__(self, *messages: Message, why: str = "") -> None:
        self.me, self.addresses, self.seeds = "", [], ["12D3KooWseed"]
        self.messages, self.why, self.closed = messages, why, False

    async def open(self, peer: str, protocol: str) -> tuple[Any, Any]:
        if self.why:
            raise ConnectionError(self.why)
        reader = asyncio.StreamReader()
        for message in self.messages:
            frame = encode(message)
            reader.feed_data(len(frame).to_bytes(4, "big") + frame)
        reader.feed_eof()
        return reader, Silent()

    async def close(self) -> None:
        self.closed = True


class Silent:
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


def reply(data: bytes, **fields: Any) -> SnapshotReply:
    return SnapshotReply(**{"wire_version": WIRE_VERSION, "data": data, **fields})


def asked(monkeypatch: pytest.MonkeyPatch, *transports: Answering, times: int = 1) -> Snapshot:
    """The last of so many answers from a visitor that connects to these, one after the other."""
    left = list(transports)

    async def visit(addresses: Any, gate: Any) -> Answering:
        return left.pop(0)

    monkeypatch.setattr("diloco.swarm.wire.libp2p.Libp2p.visit", visit)

    async def ask() -> Snapshot:
        async with Visitor(["/ip4/1.2.3.4/tcp/1/p2p/12D3KooWseed"]) as visitor:
            for _ in range(times - 1):
                await visitor.ask()
                visitor._connected_at = -1e9
                transports[0].why = "gone"
            return await visitor.ask()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        (Answering(why="protocols not supported"), "peer oWseed is no diloco peer; check the address"),
        (Answering(why="dial backoff"), "does not answer"),
        (Answering(reply(b"", wire_version=99)), "cannot be understood: wire version 99 there does not"),
        (Answering(reply(b"junk")), "cannot be understood: a snapshot cannot be inflated"),
        (Answering(Refusal(reason="not for you")), "cannot be understood: refused: not for you"),
        (Answering(*[reply(bytes(2**19), more=True)] * 17), "more than"),
        (Answering(reply(b"x", more=True)), "does not answer"),  # and ends
    ],
)
def test_who_cannot_tell_what_the_swarm_does_is_named(
    monkeypatch: pytest.MonkeyPatch, transport: Answering, reason: str
) -> None:
    with pytest.raises(SwarmError, match=reason) as caught:
        asked(monkeypatch, transport)
    assert str(caught.value).startswith("/ip4/1.2.3.4/tcp/1/p2p/12D3KooWseed: peer") and transport.closed


def test_when_nobody_answers_the_address_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Answering(reply(b"".join(pack(snapshot(2))))) for _ in range(2))
    assert asked(monkeypatch, first, second, times=2).run.run_id == "fake"
    assert first.closed and second.closed


def test_without_an_address_the_one_living_run_is_meant(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
    for directory in (Path("runs/old"), Path("runs/mine"), own_home / "peer-0/runs/mine"):
        (directory / "checkpoints" / "p0").mkdir(parents=True)
        (directory / "address").write_text(place)
    for line in ("status", "dashboard --port 0"):
        assert f"of no run in ./runs or {own_home} a peer runs here" in typed.refused(*line.split())
    with exclusive(Path("runs/mine/checkpoints/p0")), exclusive(own_home / "peer-0/runs/mine/checkpoints/p0"):
        assert cli_status._place(None).resolved().peers == (place,), "two peers of one run"
        with exclusive(Path("runs/old/checkpoints/p0")):
            said = typed.refused("status")
    assert "give the ADDRESS of a peer" in said and "@runs/old/address" in said and "@runs/mine/address" in said


def shown(seen: Snapshot, width: int = 80, rows: int = 1000, lost: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50, color_system=None, _environ={})
    console.print(render(seen, console, rows, lost))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_tables_fit_the_terminal_and_name_everything() -> None:
    parts = ("peers\n", "fragments\n", "rounds\n", "ledger", "contributions\n", "events\n", "loss 5", "worker-04")
    for width in (60, 80, 200):
        lines = shown(snapshot(5), width)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width and all(part in text for part in parts)


def test_what_is_lost_cut_split_or_without_a_syncer_is_said() -> None:
    for count, said in ((1, "  1 peer"), (2, "  2 peers")):
        assert shown(snapshot(count), 200)[0].endswith(said)
    assert "61 more" in "\n".join(shown(snapshot(64), rows=3))
    seen = snapshot(3)
    nobody = [row.model_copy(update={"syncer": None}) for row in seen.fragments]
    seen = seen.model_copy(update={"fragments": nobody, "components": [*seen.components, ["x", "y"]]})
    text = "\n".join(shown(seen, lost="lost, last seen 7 s ago"))
    for part in ("split: 2 more peers", "nobody", "lost, last seen 7 s ago"):
        assert part in text
    alike = seen.model_copy(update={"peers": [row.model_copy(update={"name": "peer"}) for row in seen.peers]})
    assert set(alike.names().values()) == {f"peer-{peer_id(index)[-6:]}" for index in range(3)}


def test_an_event_moves_no_cursor_and_is_not_of_every_round() -> None:
    peer, recorder = watched(name="=\x1b[2J\nroot")
    told(peer, recorder, status(tokens=1), 1.0)
    recorder.note("units", {"base_version": 1, "units": [[0, 8]]}, 1.0)
    recorder.note("join\n", {"name": "\x1b]0;x\x07"}, 1.0)
    seen = recorder.snapshot(1.0)
    assert seen.peers[1].name == "= [2J root"
    assert [(event.kind, event.text) for event in seen.events] == [("join ", "name= ]0;x ")]
    assert not any("\x1b" in line for line in shown(seen))


def test_watching_ends_when_an_answer_takes_the_cancellation() -> None:
    seen, asked = snapshot(2), asyncio.Event()

    class Slow:
        async def ask(self) -> Snapshot:
            assert not asked.is_set(), "it goes on asking"
            asked.set()
            with contextlib.suppress(asyncio.CancelledError):  # as a wait_for does that is just done
                await asyncio.Event().wait()
            return seen

    async def watch() -> None:
        watching = asyncio.ensure_future(cli_status._watch(cast(Visitor, Slow()), seen))
        await asked.wait()
        watching.cancel()
        await watching

    asyncio.run(watch())
