"""The gate of a peer without a network: settings, what is noted, what is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import PeerID

from diloco.admission import Admission, Revoked, RunKey, issue
from diloco.admission.keys import MAX_REVOKED, new_key
from diloco.errors import ConfigError
from diloco.protocol.limits import REFUSALS
from diloco.protocol.messages import Message, Refusal, encode
from diloco.protocol.messages.base import MAX_FRAME_BYTES
from diloco.protocol.messages.control import MAX_GREETING_BYTES, Greeting, Hello, Status
from diloco.protocol.messages.watching import ManifestRequest
from diloco.swarm.wire.gate import Gate, GuardedP2P, gate_for, watching
from diloco.swarm.wire.transport import Disbelieved, Refused
from tests.support.gates import SOON, Wire, gate, meet


async def greet(one: Gate, peer: str, *said: Message) -> Wire:
    wire = Wire(*said)

    async def opener() -> Any:
        return wire.reader, wire

    await one.greet(peer, opener)
    return wire


def test_two_gates_of_a_run_know_each_other_after_a_greeting(key: RunKey) -> None:
    async def work() -> None:
        alice, bob = gate(key, "QmAlice"), gate(key, "QmBob")
        with pytest.raises(Refused, match="go away"):
            await greet(alice, "QmBob", Refusal(reason="go away"))
        with pytest.raises(
            ConnectionError, match="does not greet as a peer of a run does: expected Greeting, got Manif"
        ):
            await greet(alice, "QmBob", ManifestRequest())
        with pytest.raises(Disbelieved, match="QmBob is not believed: the credential belongs to another identity"):
            await greet(alice, "QmBob", alice._greeting())
        with pytest.raises(Disbelieved, match="QmBob is not believed: this run admits invited peers only"):
            await greet(alice, "QmBob", Greeting())
        assert not alice.believes("QmBob")
        assert (await greet(alice, "QmBob", bob._greeting())).closed
        assert alice.believes("QmBob") and alice.role_of("QmBob") == "worker"
        assert not (await greet(alice, "QmBob")).written  # nothing is said twice
        with pytest.raises(asyncio.IncompleteReadError):
            await alice.greet("QmBob", lambda: _of(Wire()), again=True)

    asyncio.run(work())


async def _of(wire: Wire) -> Any:
    return wire.reader, wire


def test_an_open_gate_lets_everybody_in_and_says_nothing() -> None:
    one = Gate()
    assert one.believes("QmAnybody") and one.call_objection("QmAnybody") is None
    assert one.objection("QmAnybody", ManifestRequest()) is None
    assert one._greeting() == Greeting() and one.evidence() == [] and one.run_key is None
    assert one.expel() == {} and one.lapsed() is None and one.revocations is None


def test_a_host_that_says_it_trains_is_refused(key: RunKey) -> None:
    door, host = gate(key, "QmDoor"), gate(key, "QmHost", "host")
    asyncio.run(greet(door, "QmHost", host._greeting()))
    known: dict[str, Any] = {"wire_version": 1, "run_id": "run", "manifest_hash": "0" * 64, "name": "host", "peers": []}
    known |= {"holds": True, "status": Status(state="training", versions=[1]), "claims": []}
    assert door.objection("QmHost", Hello(trains=False, **known)) is None
    hello = Hello(trains=True, **known)
    assert "role host does not allow training" in str(door.objection("QmHost", hello))


def test_strangers_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[str, str]] = []
    one, now = Gate(), 1000.0
    one.on_refused = lambda peer, why: noted.append((peer, why))
    monkeypatch.setattr("diloco.swarm.wire.gate.time.time", lambda: now)
    for _ in range(100):
        one.refused("QmSame", "why")
    assert noted == [("QmSame", "why")]
    for number in range(1000):
        one.refused(f"Qm{number}", "why")
    assert len(noted) == REFUSALS
    one.refused("QmOther", "the invitation expired 3 days ago")
    assert noted[-1] == ("QmOther", "the invitation expired 3 days ago"), "another reason is not hidden by that"
    now += 61.0
    one.refused("QmSame", "why")
    assert noted[-1] == ("QmSame", "why (981 more were not noted)")


def test_the_settings_of_a_peer_make_its_gate(key: RunKey, tmp_path: Path) -> None:
    path, public, token = str(tmp_path / "run.key"), key.public.hex(), issue(key, "run", "worker", SOON)
    assert gate_for("run", None, None, None).admission is None
    for made in (gate_for("run", public, token.to_text(), None), gate_for("run", None, None, path)):
        assert made.run_key == public and made._greeting().credential
    for trains, role in ((True, "worker"), (False, "host")):
        for made in (
            gate_for("run", public, token.to_text(), None, trains),
            gate_for("run", public, None, path, trains),
        ):
            made.me, door = "QmMe", gate(key, "QmDoor")
            asyncio.run(greet(door, "QmMe", made._greeting()))
            assert door.role_of("QmMe") == role
    for wrong, complaint in (
        (("run", public, None, None), f"run.key={public} is the key of a run that admits invited peers only; give"),
        (("other", None, token.to_text(), None), "swarm.token is for run.id=run, and this is run.id=other"),
        (("run", "ab" * 32, token.to_text(), None), f"run.key={'ab' * 32} is not the key that signed swarm.token"),
    ):
        with pytest.raises(ConfigError) as caught:
            gate_for(*wrong)
        assert str(caught.value).startswith(complaint)


def test_the_owner_s_peers_begin_with_what_is_revoked_already(key: RunKey, tmp_path: Path) -> None:
    revoked = Revoked.sign(key, "run", 4, ["0" * 16], [])
    revoked.remember(tmp_path / "run.key", "run")
    made = gate_for("run", None, None, str(tmp_path / "run.key"))
    assert made.revocations is not None and made.revocations.number == 4
    made.me, door = "QmMe", gate(key, "QmDoor")
    heard: list[int] = []
    door.on_revoked = lambda said: heard.append(said.number)
    asyncio.run(meet(door, made))
    assert heard == [4] and door.revocations == made.revocations


@pytest.mark.parametrize("caller_knows", [True, False])
def test_the_longest_list_of_what_is_revoked_goes_once_from_whoever_has_it_to_the_other(
    key: RunKey, caller_knows: bool
) -> None:
    caller, callee = gate(key, "QmCaller"), gate(key, "QmCallee")
    knows, hears = (caller, callee) if caller_knows else (callee, caller)
    tokens, peers = ([f"{number:0{digits}x}" for number in range(MAX_REVOKED)] for digits in (16, 52))
    assert knows.admission is not None and knows.admission.revoke(Revoked.sign(key, "run", 7, tokens, peers))
    nbytes = asyncio.run(meet(caller, callee))
    assert hears.revocations == knows.revocations and hears.revocations is not None
    assert nbytes > len(encode(hears.revocations)) > 10 * MAX_GREETING_BYTES
    assert asyncio.run(meet(caller, callee)) < 2 * MAX_GREETING_BYTES


def test_a_peer_that_is_called_by_one_that_knows_it_is_revoked_hears_of_it(key: RunKey) -> None:
    caller, callee = gate(key, "QmCaller"), gate(key, "QmCallee")
    assert caller.admission is not None and caller.admission.revoke(Revoked.sign(key, "run", 1, [], ["QmCallee"]))
    with pytest.raises(Disbelieved, match="the owner of the run has revoked the invitation of this peer"):
        asyncio.run(meet(caller, callee))
    assert "revoked the invitation of this peer" in str(callee.lapsed())


# -- how much is read of strangers ------------------------------------------------------------------------------------


class Claiming(Wire):
    """Says only how long a frame would be."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(nbytes.to_bytes(4, "big"))
        self.reader.feed_eof()


@pytest.mark.parametrize("nbytes", [MAX_GREETING_BYTES + 1, MAX_FRAME_BYTES, 2**32 - 1])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_greeting_that_says_it_is_too_long_is_refused_before_it_is_read(
    key: RunKey, nbytes: int, is_open: bool
) -> None:
    async def work() -> None:
        one, noted = Gate() if is_open else gate(key, "QmOne"), list[str]()
        one.on_refused = lambda peer, why: noted.append(why)
        calling = Claiming(nbytes)
        await one.welcome("QmStranger", calling.reader, calling)
        assert noted == [f"a frame of {nbytes} bytes is over the limit of {MAX_GREETING_BYTES}"]
        assert calling.closed and not calling.written
        answering = Claiming(nbytes)
        with pytest.raises(ConnectionError, match="over the limit of"):
            await one.greet("QmStranger", lambda: _of(answering))
        assert answering.closed

    asyncio.run(work())


def test_a_stream_of_a_stranger_is_ended_after_a_refusal_however_much_comes_on_it(key: RunKey) -> None:
    async def work() -> None:
        one, wire = gate(key, "QmOne"), Wire()
        wire.reader = asyncio.StreamReader()
        wire.reader.feed_data(bytes(1000 * MAX_GREETING_BYTES))

        async def handler(*arguments: Any) -> None:
            raise AssertionError("a stranger has a stream")

        await one.serve("QmStranger", wire.reader, wire, handler)
        assert wire.closed and b"invited peers only" in wire.written
        wire.reader.feed_eof()
        assert len(await wire.reader.read()) > 998 * MAX_GREETING_BYTES

    asyncio.run(work())


def test_a_dht_call_of_a_stranger_is_not_even_parsed(key: RunKey, tmp_path: Path) -> None:
    class Client:
        handlers: dict[str, Any] = {}  # noqa: RUF012

        async def add_unary_handler(self, name: str, handler: Any, balanced: bool) -> None:
            self.handlers[name] = handler

        def close(self) -> None: ...

    class Request:
        parsed: list[bytes] = []  # noqa: RUF012

        @classmethod
        def FromString(cls, request: bytes) -> str:
            cls.parsed.append(request)
            return request.decode()

    class Answer(str):
        def SerializeToString(self) -> bytes:
            return self.encode()

    async def handler(request: str, context: Any) -> Answer:
        return Answer(request.upper())

    async def work() -> None:
        p2p, member = GuardedP2P(), PeerID(b"member")
        p2p._client, p2p.gate, p2p._client_listen_maddr = Client(), gate(key, "QmOne"), {"unix": tmp_path / "none"}
        await p2p.add_protobuf_handler("find", handler, Request, stream_input=False, stream_output=False)
        with pytest.raises(PermissionError, match="invited peers only"):
            await Client.handlers["find"](b"what", PeerID(b"stranger"))
        assert Request.parsed == []
        await greet(p2p.gate, member.to_base58(), gate(key, member.to_base58())._greeting())
        assert await Client.handlers["find"](b"what", member) == b"WHAT"

    asyncio.run(work())


def test_a_visitor_shows_itself_as_observer_whatever_it_was_given(key: RunKey, tmp_path: Path) -> None:
    door = gate(key, "QmDoor")
    token = issue(key, "run", "worker", SOON)
    for me, visitor in (
        ("QmA", watching("", token.to_text())),
        ("QmB", watching("run", None, str(tmp_path / "run.key"))),
    ):
        visitor.me = me
        asyncio.run(meet(visitor, door))
        assert door.role_of(me) == "observer" and door.call_objection(me) is not None
    assert watching("run", None).admission is None
    stranger = Gate(Admission(issue(RunKey(new_key()), "run", "worker", SOON)))
    with pytest.raises(Disbelieved, match="signed by another key"):
        asyncio.run(greet(door, "QmC", stranger._greeting()))
