"""A closed run over real libp2p streams: who is not invited, or not any more, gets nowhere, and
both sides say why."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2

from diloco.admission import Admission, Revoked, RunKey, Token, issue
from diloco.errors import SwarmError
from diloco.messages.base import Message, Refusal
from diloco.messages.bulk import Get
from diloco.protocol import Role
from diloco.swarm.client.ask import spread_revocations
from diloco.swarm.rpc.contribution import ContributionHeader
from diloco.swarm.rpc.inner_state import InnerRequest
from diloco.swarm.rpc.watch import InfoRequest
from diloco.swarm.wire.gate import GREETING, Gate
from diloco.swarm.wire.lane import LANE
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BROKEN, BULK, CONTROL, PeerStream, Traffic
from tests.support.peers import Crowd, Trainee, begin_together, eventually, together

RUN, HOUR = "crowd", 3600


class ClosedRun(Crowd):
    """A crowd whose run has a key."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"embed": (60, 100), "norm": (5,)}, fragments=2)
        self.key = RunKey.create(directory / "run.key")

    def token(self, role: Role = "worker", life_s: float = HOUR) -> Token:
        return issue(self.key, RUN, role, int(time.time() + life_s))

    def member(self, *initial_peers: str, min_peers: int = 1) -> Trainee:
        """A started peer with an invitation of its own."""
        gate = Gate(Admission(self.token()))
        return self.peer(*initial_peers, gate=gate, min_peers=min_peers).start()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedRun]:
    made = ClosedRun(tmp_path_factory.mktemp("closed"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def members(closed: ClosedRun) -> list[Trainee]:
    """Two peers of a closed run that train."""
    first = closed.member(min_peers=2)
    second = closed.member(first.address, min_peers=2)
    begin_together(first, second)
    return [first, second]


def refused_by(members: list[Trainee], peer: str) -> str:
    """Why the first of the members refused a peer."""

    def told() -> str | None:
        events = (event for one in members for event in one.said("refused"))
        return next((event["why"] for event in events if event["peer"] == peer), None)

    return eventually(told, "the event") or ""


def test_invited_peers_train_together(members: list[Trainee]) -> None:
    together(*(lambda peer=peer: peer.round(0.01) for peer in members))  # type: ignore[misc]
    assert {tuple(peer.versions) for peer in members} == {(1, 1)}
    pairs = (members, members[::-1])
    assert {a.node.context.gate.role_of(b.peer_id) for a, b in pairs} == {"worker"}


@pytest.mark.parametrize(
    ("role", "life_s", "reason"),
    [
        (None, HOUR, "admits invited peers only; ask its owner for a link"),
        ("worker", -HOUR, "the invitation expired 60 minutes ago"),
        ("host", HOUR, "role host does not allow training"),
    ],
    ids=["none", "expired", "host"],
)
def test_a_stranger_ends_with_a_reason_that_is_an_event_here(
    role: Role | None, life_s: float, reason: str, closed: ClosedRun, members: list[Trainee]
) -> None:
    gate = Gate() if role is None else Gate(Admission(closed.token(role, life_s)))
    stranger = closed.peer(members[0].address, gate=gate)
    with pytest.raises(SwarmError, match=f"^the swarm refused this peer: .*{reason}") as caught:
        stranger.start()
    assert caught.value.exit_code == 3
    assert reason in refused_by(members, gate.me)
    assert all(len(peer.members) == 1 for peer in members)
    stranger.close()


def test_a_stranger_hears_nothing_of_model_data_manifest_or_members_on_any_stream(
    members: list[Trainee],
) -> None:
    [member, _] = members
    core = member.node.core
    together(*(lambda peer=peer: peer.round(0.01) for peer in members))  # type: ignore[misc]
    [(line, _), *_] = core.facts.control.tip.head.lines
    asked = (Get(0, (0, "")), InnerRequest(), InfoRequest("manifest"), InfoRequest("snapshot"))
    bulk = (*asked, ContributionHeader(line), None)
    questions: list[tuple[str, Message | None]] = [(BULK, one) for one in bulk]
    questions += [(LANE, None), (CONTROL, core.hello()), (GREETING, core.status())]
    # a credential that was overheard
    overheard = Gate(member.node.context.gate.admission)
    overheard.me = member.peer_id
    questions.append((GREETING, overheard.greeting()))

    async def work() -> tuple[str, list[object], list[str]]:
        stranger = await intruder(member)
        try:
            answers = [await ask(stranger, member.peer_id, *question) for question in questions]
            return stranger.me, answers, await dht_calls(stranger, member)
        finally:
            await stranger.close()

    me, answers, calls = asyncio.run(work())
    kinds = [type(answer) for answer in answers]
    assert kinds == [Refusal] * 8 + [type(None), Refusal], answers
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
    closed: ClosedRun, members: list[Trainee]
) -> None:
    first, second = members
    third = closed.member(first.address, second.address)
    three, token = (*members, third), third.node.context.gate.admission.token
    assert token is not None
    eventually(lambda: all(len(peer.members) == 2 for peer in three), "all to be connected")
    revoked = Revoked.sign(closed.key, RUN, 1, [token.grant.token_id], [])
    visitor = Gate(Admission(issue(closed.key, RUN, "observer", 2**40)))
    assert (
        asyncio.run(spread_revocations([second.address], visitor, closed.key, revoked)) == revoked
    )
    eventually(lambda: third.said("revoked"), "the peer itself to hear of it")
    said = "the owner of the run has revoked the invitation of this peer"
    with pytest.raises(SwarmError, match=said) as caught:
        third.begin()
    assert caught.value.exit_code == 3
    eventually(lambda: all(len(peer.members) == 1 for peer in members), "both to have put it out")
    assert {peer.said("revoked")[0]["number"] for peer in members} == {1}
    assert all("revoked" in refused_by([peer], third.peer_id) for peer in members)
    third.close()
    key = closed.directory / "p9.key"
    again = closed.peer(first.address, gate=Gate(Admission(token)), identity_path=key)
    with pytest.raises(SwarmError, match="revoked"):
        again.start()
    again.close()
