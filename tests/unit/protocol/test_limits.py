"""How much one peer may ask of another: the table of `protocol.limits`, and where it is applied."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.admission import Admission, RunKey, issue
from diloco.admission.keys import new_key
from diloco.config.address import same_subnet, scope
from diloco.protocol import limits
from diloco.protocol.actions import Note
from diloco.protocol.limits import Bucket, Buckets, Dials, EventLines, Newest, frame_bytes
from diloco.protocol.membership import AddressBook
from diloco.protocol.messages import encode
from diloco.protocol.messages.base import MAX_FRAME_BYTES, MAX_NAMED
from diloco.protocol.messages.bulk import Verdict
from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.peer import Peer
from diloco.sim.virtual_time import virtual_time
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p
from tests.support.certificates import MANIFEST, Nobody
from tests.support.gates import Wire
from tests.support.listener import Listener, hello, status
from tests.support.scenes import played
from tests.support.stub_host import OTHER
from tests.support.stub_wire import Host, Pipe, contribution, framed

NOW = 1000.0


def listening(scene: Callable[[Listener], Awaitable[None]]) -> Callable[[], None]:
    """A test that plays a scene with a mesh in virtual time."""

    async def work() -> None:
        listener = Listener()
        await scene(listener)
        await listener.context.tasks.close(5.0)
        await listener.mesh.close()

    def test() -> None:
        with virtual_time() as loop:
            loop.run_until_complete(work())

    return test


# -- the table --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=12))
def test_no_more_is_taken_out_of_a_bucket_than_flowed_in(steps: list[tuple[float, float]]) -> None:
    bucket, now, taken = Bucket(per_s=2.0, burst=5.0), NOW, 0.0
    for gap_s, amount in steps:
        now += gap_s
        taken += amount if bucket.take(now, amount) else 0.0
        assert taken <= 5.0 + 2.0 * (now - NOW) + 1e-6


def test_buckets_take_bounded_memory_and_full_ones_go_first() -> None:
    buckets: Buckets[str] = Buckets(per_s=0.001, burst=1.0)
    assert buckets.take("greedy", NOW)
    for number in range(2 * limits.MAX_PEERS):
        buckets.of(str(number), NOW)
    assert len(buckets._by_key) <= limits.MAX_PEERS and not buckets.take("greedy", NOW)


def test_an_older_stream_of_a_stranger_makes_room() -> None:
    """First one of the same stranger."""
    newest: Newest[int] = Newest()
    over = [one for number in range(limits.STRANGERS_OF_ONE + 2) for one in newest.add("a", number)]
    assert over == [0, 1]
    over = [one for number in range(100, 100 + limits.STRANGERS) for one in newest.add(f"p{number}", number)]
    assert over == [2, 3, 4, 5], "of the same peer, and no more than it takes"
    newest.remove(100)
    assert newest.add("z", 999) == []


def test_peers_that_others_name_are_called_so_many_at_a_time() -> None:
    dials = Dials()
    dials.hear(f"p{number}" for number in range(10_000))
    assert len(dials) == limits.MAX_WAITING_DIALS
    assert len(dials.due(NOW)) == limits.DIALS_AT_ONCE and dials.due(NOW) == []
    assert dials.due(NOW + 1)[0] == f"p{limits.DIALS_AT_ONCE:.0f}" and len(dials.due(NOW + 2)) == limits.DIALS_PER_S


def test_lines_of_one_peer_hide_none_of_another() -> None:
    """And those left out are counted."""
    lines, most = EventLines(), int(limits.LINES)
    written = [lines.suppressed("claim", "liar", NOW) for _ in range(2000)]
    assert written == [0] * most + [None] * (2000 - most)
    assert lines.suppressed("claim", "honest", NOW) == 2000 - most
    assert lines.suppressed("lost", "liar", NOW) == 0, "another kind"
    many = [lines.suppressed("join", f"p{number}", NOW) for number in range(500)]
    assert sum(one is not None for one in many) == 400, "identities cost nothing"


@pytest.mark.parametrize(("fragments", "closed"), [(1, False), (1024, True)])
def test_honest_messages_of_large_swarms_fit_their_frames(fragments: int, closed: bool) -> None:
    hello_bytes, control_bytes = frame_bytes(fragments, closed)
    peers = [f"12D3KooW{number:044d}" for number in range(MAX_NAMED)]
    places = {peer: [f"/dns4/{'x' * 60}/tcp/4100/p2p/{peer}"] * 4 for peer in peers}
    said = status().model_copy(update={"versions": [2**40] * fragments, "units": [[2**49, 2**50]] * 64})
    claims = [Claim(fragment=0, term=2**40, version=2**40, digest="0" * 64)] * fragments
    message = hello(*claims, name="n" * 128, peers=peers, addresses=places, status=said)
    assert len(encode(message)) < hello_bytes <= MAX_FRAME_BYTES
    published = Published(
        fragment=0, term=1, version=1, digest="0" * 64, contributors=[*peers, *peers], applied_tokens=0,
        open=[[2**49 + 2 * at, 2**49 + 2 * at + 1] for at in range(1024)],
    )  # fmt: skip
    assert max(len(encode(said)), len(encode(published))) < control_bytes


def test_peers_of_a_large_swarm_name_different_others() -> None:
    named = set()
    for me in "abcd":
        peer = Peer(me, me, "run", MANIFEST, ["1" * 64], Nobody())
        for number in range(MAX_NAMED + 200):
            peer.members.join(f"p{number}", hello(status=status(fragments=1)), 0.0)
        assert len(peer.hello().peers) == MAX_NAMED
        named |= set(peer.hello().peers)
    assert len(named) > MAX_NAMED + 180


# -- streams ----------------------------------------------------------------------------------------------------------


@listening
async def test_who_opens_control_streams_without_end_gets_a_few(listener: Listener) -> None:
    answered = [await listener.hear(framed(hello())) for _ in range(100)]
    assert sum(map(bool, answered)) == 30


@listening
async def test_a_flood_on_a_control_stream_is_read_slowly(listener: Listener) -> None:
    """And it writes few lines."""
    context = listener.context
    context.carry_out = lambda actions: [  # type: ignore[assignment,func-returns-value]
        context.note(one.kind, **one.fields) for one in actions if isinstance(one, Note)
    ]
    claims = [Claim(fragment=0, term=term, version=0, digest="1" * 64) for term in range(1, 2001)]
    begun_at = context.now()
    await listener.hear(framed(hello()), *map(framed, claims))
    assert context.now() - begun_at == pytest.approx((2000 - 1080) / 108, abs=0.1), "1080 may come at once"
    assert sum(said["peer"] == OTHER for said in listener.said("claim")) <= limits.LINES + 1


# -- copies -----------------------------------------------------------------------------------------------------------


@played
async def test_all_readers_share_a_copy_and_there_are_few() -> None:
    host = Host()
    donor = host.server.anchors
    await donor.freeze(0)
    assert not donor._kept, "forgotten with its readers"
    held = [await donor.freeze(0)]
    assert await donor.freeze(0) is held[0]
    for version in range(1, 10):
        host.protocol.fragments[0].digest = f"{version:064d}"
        try:
            held.append(await donor.freeze(0))
        except Exception as error:
            assert "versions of fragment 0 are being read here" in str(error)
    assert len(held) == len(donor._kept) == limits.COPIES


@played
async def test_a_new_contribution_ends_the_stream_of_the_one_before() -> None:
    """With a quorum each stream holds a whole payload; a peer that restarted has left streams behind."""
    host, whole = Host(quorum=2, staleness_limit=4), contribution(torch.zeros(6))

    class Half(Pipe):
        closed = False

        def __init__(self) -> None:
            super().__init__(b"")
            self.reader = asyncio.StreamReader()
            self.reader.feed_data(whole[:-4])

        def close(self) -> None:
            self.closed = True
            if not self.reader.at_eof():
                self.reader.feed_eof()

    pipes, serving = [Half() for _ in range(3)], []
    for pipe in pipes:
        serving.append(asyncio.ensure_future(host.server.serve(OTHER, pipe.reader, pipe)))
        while not pipe.written:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
    assert isinstance(pipes[2].messages()[0], Verdict)
    assert [pipe.closed for pipe in pipes] == [True, True, False] and len(host.context.contributing) == 1
    pipes[2].close()
    await asyncio.gather(*serving)
    assert not host.context.contributing


# -- strangers and hearsay --------------------------------------------------------------------------------------------


@played
async def test_strangers_hold_few_streams_and_the_invited_get_in() -> None:
    key = RunKey(new_key())
    door = Gate(Admission(issue(key, "run", "worker", 2**40)))
    wires = []
    for number in range(3 * limits.STRANGERS):
        wire = Wire()
        wire.reader = asyncio.StreamReader()  # it says nothing
        wires.append((wire, asyncio.ensure_future(door.welcome(f"Qm{number}", wire.reader, wire))))
        await asyncio.sleep(0)
    assert sum(not wire.closed for wire, _ in wires) == limits.STRANGERS
    invited = Gate(Admission(issue(key, "run", "worker", 2**40)))
    invited.me = "QmInvited"
    wire = Wire(invited._greeting())
    await door.welcome("QmInvited", wire.reader, wire)
    assert door.believes("QmInvited") and wire.written
    for _, task in wires:
        task.cancel()


def at(peer: str, host: str) -> str:
    return f"/ip4/{host}/tcp/4100/p2p/{peer}"


@pytest.mark.parametrize(
    ("own", "seeds", "called"),
    [
        ([], ["203.0.113.9"], ["8.8.8.8"]),
        (["192.168.1.5", "127.0.0.1"], ["8.8.4.4"], ["8.8.8.8", "192.168.1.77"]),
        ([], ["10.1.2.3"], ["8.8.8.8", "10.9.9.9", "192.168.1.77"]),
        ([], ["127.0.0.1"], ["8.8.8.8", "127.0.0.1"]),
    ],
    ids=["none", "own subnet", "LAN", "this machine"],
)
def test_nobody_in_a_private_network_is_called_on_hearsay(own: list[str], seeds: list[str], called: list[str]) -> None:
    me, other = "Qm" + "A" * 44, "Qm" + "B" * 44
    libp2p = Libp2p(type("P2P", (), {"peer_id": type("Id", (), {"to_base58": lambda self: me})()})(), [], Gate())  # type: ignore[arg-type]
    libp2p.addresses = [at(me, host) for host in own]
    libp2p._ranges |= {scope(at(other, seed)) for seed in seeds if scope(at(other, seed)) != "LAN" or "10." in seed}
    book = AddressBook()
    book.may_call = libp2p.may_call
    hosts = ["8.8.8.8", "127.0.0.1", "192.168.1.77", "10.9.9.9"]
    book.hear("teller", {other: [at(other, host) for host in hosts]})
    assert sorted(book.of(other)) == sorted(at(other, host) for host in called)
    book.hear(other, {other: [at(other, "127.0.0.1")]})
    assert book.of(other) == (at(other, "127.0.0.1"),), "of itself it may say what it likes"


def test_subnets_are_compared_by_their_numbers() -> None:
    say: Callable[[str], str] = lambda host: f"/ip{6 if ':' in host else 4}/{host}/tcp/1"  # noqa: E731
    assert same_subnet(say("10.0.0.1"), say("10.0.0.250")) and not same_subnet(say("10.0.0.1"), say("10.0.1.1"))
    assert same_subnet(say("fd00::1"), say("fd00::2")) and not same_subnet(say("fd00::1"), say("10.0.0.1"))
    assert not same_subnet(say("127.0.0.1"), say("127.0.0.2")) and not same_subnet("/dns/a/tcp/1", say("10.0.0.1"))
