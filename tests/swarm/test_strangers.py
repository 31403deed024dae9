"""A closed run over real libp2p streams: who is not invited, or not any more, gets nowhere, and
both sides say why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2

from diloco.admission import Admission, Revoked, Role, RunKey, Token, issue
from diloco.errors import SwarmError
from diloco.messages.base import Message, Refusal
from diloco.messages.bulk import Get
from diloco.swarm.client.ask import revoke
from diloco.swarm.rpc.contribution import ContributionHeader
from diloco.swarm.rpc.inner_state import InnerRequest
from diloco.swarm.rpc.watch import InfoRequest
from diloco.swarm.wire.gate import GREETING, Gate
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BROKEN, BULK, CONTROL, PeerStream, Traffic
from tests.support.peers import Crowd, Trainee, begin_together, eventually, together

SHAPES = {"embed": (60, 100), "norm": (5,)}
RUN = "crowd"
HOUR = 3600


class Club(Crowd):
    """A crowd whose run has a key."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SHAPES, fragments=2)
        self.key = RunKey.create(directory / "run.key")

    def token(
        self, role: Role = "worker", run: str = RUN, life_s: float = HOUR, peer: str = ""
    ) -> Token:
        return issue(self.key, run, role, int(time.time() + life_s), peer)

    def member(self, *initial_peers: str, token: Token | None = None, **options: Any) -> Trainee:
        """A peer with an invitation of its own, not started yet."""
        return self.peer(*initial_peers, gate=Gate(Admission(token or self.token())), **options)


@pytest.fixture(scope="module")
def club(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Club]:
    made = Club(tmp_path_factory.mktemp("club"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def members(club: Club) -> list[Trainee]:
    """Two peers of a closed run that train."""
    first = club.member(min_peers=2).start()
    second = club.member(first.address, min_peers=2).start()
    begin_together(first, second)
    return [first, second]


def refused_by(members: list[Trainee], peer: str) -> str:
    """Why the first of the members refused a peer."""
    return eventually(
        lambda: next(
            (e["why"] for m in members for e in m.said("refused") if e["peer"] == peer), None
        ),
        "the event",
    )


def test_invited_peers_train_together(club: Club, members: list[Trainee]) -> None:
    together(*(lambda peer=peer: peer.round(0.01) for peer in members))  # type: ignore[misc]
    assert {tuple(peer.versions) for peer in members} == {(1, 1)}
    assert {
        peer.node.context.gate.role_of(other.peer_id) for peer, other in (members, members[::-1])
    } == {"worker"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda club: None, "admits invited peers only; ask its owner for a link"),
        (lambda club: club.token(life_s=-HOUR), "the invitation expired 60 minutes ago"),
        (lambda club: club.token("host"), "role host does not allow training"),
    ],
    ids=["none", "expired", "host"],
)
def test_a_stranger_ends_with_a_reason_that_is_an_event_here(
    club: Club, members: list[Trainee], make: Callable[[Club], Token | None], reason: str
) -> None:
    token = make(club)
    gate = Gate() if token is None else Gate(Admission(token))
    stranger = club.peer(members[0].address, gate=gate)
    with pytest.raises(SwarmError, match=reason) as caught:
        stranger.start()
    assert caught.value.exit_code == 3 and str(caught.value).startswith(
        "the swarm refused this peer: "
    )
    assert reason in refused_by(members, gate.me)
    assert all(len(peer.members) == 1 for peer in members)
    stranger.close()


def test_a_stranger_hears_nothing_of_model_data_manifest_or_members_on_any_stream(
    club: Club, members: list[Trainee]
) -> None:
    [member, _] = members
    core = member.node.core
    together(*(lambda peer=peer: peer.round(0.01) for peer in members))  # type: ignore[misc]
    [(line, _), *_] = core.facts.control.tip.head.lines
    questions: list[tuple[str, Message | None]] = [
        (BULK, Get(0, (0, ""))),
        (BULK, InnerRequest()),
        (BULK, InfoRequest("manifest")),
        (BULK, InfoRequest("snapshot")),
        (BULK, ContributionHeader(line)),
        (BULK, None),
        (CONTROL, core.hello()),
        (GREETING, core.status()),
    ]

    async def work() -> tuple[str, list[object], list[str]]:
        stranger = await intruder(member)
        try:
            answers = [
                await ask(stranger, member.peer_id, name, message) for name, message in questions
            ]
            answers.append(await replay(stranger, member))
            return stranger.me, answers, await dht_calls(stranger, member)
        finally:
            await stranger.close()

    me, answers, calls = asyncio.run(work())
    assert all(isinstance(answer, Refusal) or answer is None for answer in answers), answers
    assert [answer is None for answer in answers] == [False] * 7 + [True, False]
    assert "belongs to another identity" in str(answers[-1])
    assert len(calls) == 3 and all("PermissionError" in call for call in calls)
    assert "invited peers only" in refused_by(members, me)
    assert len([event for event in member.said("refused") if event["peer"] == me]) <= 40


async def intruder(member: Trainee) -> Libp2p:
    """A peer that connects and does without greetings."""
    gate = Gate()
    gate.greet = lambda *arguments, **options: asyncio.sleep(0)  # type: ignore[method-assign, assignment]
    return await Libp2p.client([member.address], gate)


async def ask(transport: Libp2p, peer: str, protocol: str, message: Message | None) -> object:
    """What is answered to a first message, or to none."""
    reader, writer = await transport.open(peer, protocol)
    stream = PeerStream(peer, reader, writer, Traffic())
    try:
        if message is not None:
            await stream.send(message)
        return await stream.receive(10)
    except BROKEN:
        return None
    finally:
        stream.close()


async def replay(stranger: Libp2p, member: Trainee) -> object:
    """The answer to a credential that was overheard."""
    gate = Gate(member.node.context.gate.admission)
    gate.me = member.peer_id
    return await ask(stranger, member.peer_id, GREETING, gate._greeting())


async def dht_calls(stranger: Libp2p, member: Trainee) -> list[str]:
    """What the DHT of a member answers to each of its calls."""
    node, failures = await DHTNode.create(p2p=stranger._p2p), []
    stub = node.protocol.get_stub(PeerID.from_base58(member.peer_id))
    for call, request in (
        (stub.rpc_ping, dht_pb2.PingRequest()),
        (stub.rpc_find, dht_pb2.FindRequest()),
        (stub.rpc_store, dht_pb2.StoreRequest()),
    ):
        try:
            await call(request, timeout=10)
        except P2PHandlerError as error:
            failures.append(str(error))
    return failures


def test_a_revoked_peer_is_put_out_at_once_and_ends_with_the_reason(
    club: Club, members: list[Trainee]
) -> None:
    first, second = members
    token = club.token()
    third = club.member(first.address, second.address, token=token).start()
    eventually(
        lambda: all(len(peer.members) == 2 for peer in (*members, third)), "all to be connected"
    )
    revoked = Revoked.sign(club.key, RUN, 1, [token.grant.token_id], [])
    visitor = Gate(Admission(issue(club.key, RUN, "observer", 2**40)))
    spread = revoke([second.address], visitor, club.key, revoked)
    assert asyncio.run(spread) == revoked
    eventually(lambda: third.said("revoked"), "the peer itself to hear of it")
    with pytest.raises(
        SwarmError, match="the owner of the run has revoked the invitation of this peer"
    ) as caught:
        third.begin()
    assert caught.value.exit_code == 3
    eventually(lambda: all(len(peer.members) == 1 for peer in members), "both to have put it out")
    assert {peer.said("revoked")[0]["number"] for peer in members} == {1}
    assert all("revoked" in refused_by([peer], third.peer_id) for peer in members)
    third.close()
    again = club.peer(
        first.address, gate=Gate(Admission(token)), identity_path=club.directory / "p9.key"
    )
    with pytest.raises(SwarmError, match="revoked"):
        again.start()
    again.close()
