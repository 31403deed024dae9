"""Seeing a swarm from outside: how a visitor asks, and what `diloco status` makes of the answer."""

import asyncio
import io
from dataclasses import replace as with_state
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from diloco.cli import status as command
from diloco.dashboard.tables import render
from diloco.errors import ConfigError, SwarmError
from diloco.messages.codec import Message, Refusal, encode
from diloco.messages.snapshot import LoggedEvent, Snapshot, pack_snapshot
from diloco.protocol import WIRE_VERSION
from diloco.rundir.files import exclusive
from diloco.swarm.client.watch import SwarmWatcher
from diloco.swarm.rpc.watch import Piece
from diloco.volunteer.rules import State
from diloco.volunteer.worker import Worker
from tests.support.command_line import Typed
from tests.support.fake_swarm import peer_id, snapshot

ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


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


def reply(*pieces: bytes, version: int = WIRE_VERSION) -> list[Message]:
    return [*(Piece(version, piece, more=True) for piece in pieces), Piece(version, b"")]


def asked(monkeypatch: pytest.MonkeyPatch, *transports: Answering, times: int = 1) -> Snapshot:
    """The last of so many answers from a visitor that connects to these, one after the other."""
    left = list(transports)

    async def visit(addresses: Any, gate: Any) -> Answering:
        return left.pop(0)

    monkeypatch.setattr("diloco.swarm.wire.libp2p.Libp2p.client", visit)

    async def ask() -> Snapshot:
        async with SwarmWatcher(["/ip4/1.2.3.4/tcp/1/p2p/12D3KooWseed"]) as visitor:
            for _ in range(times - 1):
                await visitor.ask()
                visitor._connected_at = -1e9
                transports[0].why = "gone"
            return await visitor.ask()

    return asyncio.run(ask())


UNCLEAR = "cannot be understood: "


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        (Answering(why="protocols not supported"), "peer oWseed is no diloco peer; check the addr"),
        (Answering(why="dial backoff"), "does not answer"),
        (Answering(*reply(b"", version=99)), f"{UNCLEAR}wire version 99 there does not"),
        (Answering(Refusal(reason="not for you")), f"{UNCLEAR}refused: not for you"),
        (Answering(*reply(*[bytes(2**19)] * 17)), "more than"),
        (Answering(*reply(b"x")[:1]), "does not answer"),  # and ends
    ],
)
def test_who_cannot_tell_what_the_swarm_does_is_named(
    monkeypatch: pytest.MonkeyPatch, transport: Answering, reason: str
) -> None:
    with pytest.raises(SwarmError, match=reason) as caught:
        asked(monkeypatch, transport)
    assert str(caught.value).startswith("/ip4/1.2.3.4/tcp/1/p2p/12D3KooWseed: peer")
    assert transport.closed


def test_when_nobody_answers_the_address_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Answering(*reply(*pack_snapshot(snapshot(2)))) for _ in range(2))
    assert asked(monkeypatch, first, second, times=2).run.run_id == "fake"
    assert first.closed and second.closed


def test_without_an_address_the_one_living_run_is_meant(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    mine, old, joined = Path("runs/mine"), Path("runs/old"), own_home / "peer-0/runs/mine"
    for directory in (old, mine, joined):
        (directory / "checkpoints" / "p0").mkdir(parents=True)
        (directory / "address").write_text(ADDRESS)
    for line in ("status", "dashboard --port 0"):
        assert f"of no run in ./runs or {own_home} a peer runs here" in typed.refused(*line.split())
    with exclusive(mine / "checkpoints/p0"), exclusive(joined / "checkpoints/p0"):
        assert command._place(None).resolved().peers == (ADDRESS,), "two peers of one run"
        moved = ADDRESS.replace("127.0.0.1", "192.168.1.5")  # it had this one elsewhere
        for directory in (mine, joined):
            (directory / "address").write_text(moved)
        assert command._place(None).resolved().peers == (moved, ADDRESS)
        with exclusive(old / "checkpoints/p0"):
            said = typed.refused("status")
    for part in ("give the ADDRESS of a peer", "@runs/old/address", "@runs/mine/address"):
        assert part in said


def test_without_an_address_the_swarm_of_a_worker_that_waits_is_meant(
    own_home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (source := tmp_path / "address").write_text(ADDRESS)
    worker = Worker(own_home / "worker", ("-m", "diloco", "join", f"@{source}"))
    worker.directory.mkdir(parents=True)
    waits = State("waiting", "--when=idle: others use this machine")
    with exclusive(worker.directory / "lock"):
        with_state(worker, state=waits).write()
        assert command._place(None).resolved().peers == (ADDRESS,)
    assert "--when=idle" in capfd.readouterr().err
    with_state(worker, state=State("ended")).write()
    with pytest.raises(ConfigError, match="a peer runs here"):
        command._place(None)


def shown(seen: Snapshot, width: int = 80, rows: int = 1000, lost: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50, color_system=None, _environ={})
    console.print(render(seen, console, rows, lost))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_tables_fit_the_terminal_and_name_everything() -> None:
    parts = ["peers\n", "fragments\n", "rounds\n", "ledger", "board ", "events\n"]
    for width in (60, 80, 200):
        lines = shown(snapshot(5), width)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width
        assert all(part in text for part in (*parts, "loss 5", "worker-04"))


def test_what_is_lost_cut_or_without_an_author_is_said() -> None:
    for count, said in ((1, "  1 peer"), (2, "  2 peers")):
        assert shown(snapshot(count), 200)[0].endswith(said)
    assert "61 more" in "\n".join(shown(snapshot(64), rows=3))
    seen = snapshot(3)
    alone = [replace(row, author=None, state="alone") for row in seen.fragments]
    text = "\n".join(shown(replace(seen, fragments=alone), lost="lost, last seen 7 s ago"))
    assert all(part in text for part in ("alone", "nobody", "lost, last seen 7 s ago"))
    alike = replace(seen, peers=[replace(row, name="peer") for row in seen.peers])
    assert set(alike.names().values()) == {f"peer-{peer_id(index)[-6:]}" for index in range(3)}


def test_the_peers_are_counted_by_the_way_that_bulk_bytes_take_to_them() -> None:
    seen = snapshot(4)
    ways = ("", "direct", "daemon", "direct")
    rows = [replace(row, bulk=way) for row, way in zip(seen.peers, ways, strict=True)]
    seen = replace(seen, peers=rows, run=replace(seen.run, answered_by=peer_id(0)))
    assert "peers  (bulk bytes from worker-00: 2 direct, 1 daemon)" in shown(seen)


def test_an_event_names_peers_and_moves_no_cursor() -> None:
    said = LoggedEvent(1e9, "join\n", f"peer={peer_id(1)} name=\x1b]0;x\x07")
    lines = shown(replace(snapshot(2), events=[said]))
    assert lines[-2].endswith("ago  join   peer=worker-01 name= ]0;x")
    assert not any("\x1b" in one for one in lines)
