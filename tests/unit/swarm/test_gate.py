"""The gate of a peer without a network: settings, what is noted, what is said; and what of it
survives a restart: revocations, first users, the seal of the manifest."""

import asyncio
import errno
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.admission import Admission, Memory, Revoked, RunKey, Token, issue
from diloco.admission.keys import is_sealed, new_key
from diloco.errors import ConfigError
from diloco.messages.base import MEMBERS
from diloco.messages.bulk import Get
from diloco.messages.codec import Message, Refusal, encode
from diloco.messages.control import MAX_GREETING_BYTES, Greeting
from diloco.messages.heads import Line
from diloco.protocol import MAX_REVOKED
from diloco.swarm.rpc.contribution import ContributionHeader
from diloco.swarm.rpc.watch import InfoRequest
from diloco.swarm.wire.gate import Gate, gate_for, message_of, observer_gate
from diloco.swarm.wire.identity import own_id
from diloco.swarm.wire.transport import Refused, Untrusted
from tests.support.core import D, hello
from tests.support.gates import SOON, gate, meet
from tests.support.stub_wire import Pipe

CONTRIBUTION = ContributionHeader(Line(0, "QmAnyone", 5, D, 4, 100, (), 1.5, D))


async def greet(
    one: Gate, peer: str, *said: Message, wire: Pipe | None = None, **options: Any
) -> Pipe:
    """A gate greets a peer that says this; returns what it wrote."""
    wire = wire or Pipe(*said)

    async def opener() -> Any:
        return wire.reader, wire

    await one.greet(peer, opener, **options)
    return wire


async def test_two_gates_of_a_run_know_each_other_after_a_greeting(key: RunKey) -> None:
    alice, bob = gate(key, "QmAlice"), gate(key, "QmBob")
    for error, why, said in (
        (Refused, "go away", Refusal(reason="go away")),
        (ConnectionError, "a run does: expected Greeting, got Info", InfoRequest("manifest")),
        (Untrusted, "the credential belongs to another identity", alice.greeting()),
        (Untrusted, "QmBob is not believed: this run admits invited peers only", Greeting()),
    ):
        with pytest.raises(error, match=why):
            await greet(alice, "QmBob", said)
        assert not alice.trusts("QmBob")
    assert (await greet(alice, "QmBob", bob.greeting())).closed
    assert alice.trusts("QmBob") and alice.role_of("QmBob") == "worker"
    assert not (await greet(alice, "QmBob")).written  # nothing is said twice
    with pytest.raises(asyncio.IncompleteReadError):
        await greet(alice, "QmBob", again=True)


async def test_a_public_run_takes_contributors_and_only_invited_peers_make_its_versions(
    key: RunKey,
) -> None:
    invited = Gate(Admission(issue(key, "run", "worker", SOON), public=True))
    hosts = Gate(Admission(issue(key, "run", "host", SOON), public=True))
    anyone = gate_for("run", key.public.hex(), None, None, public=True)
    invited.me, hosts.me, anyone.me = "QmInvited", "QmHost", "QmAnyone"
    assert anyone.objection("QmInvited", hello()) is not None, "who has not greeted is not known"
    for one in (anyone, hosts):
        await meet(one, invited)
    roles = [invited.role_of(one) for one in ("QmAnyone", "QmHost", "QmNobody")]
    assert roles == ["contributor", "host", None] and anyone.role_of("QmInvited") == "worker"
    assert anyone.authors("QmInvited") and not anyone.authors("QmAnyone")
    assert [invited.authors(f"Qm{one}") for one in ("Invited", "Host", "Anyone")] == [1, 1, 0]
    assert invited.objection("QmAnyone", CONTRIBUTION) is None
    assert Gate().authors("QmAnyone")


def test_a_public_run_needs_a_key_and_its_hosts_an_invitation(key: RunKey) -> None:
    keyless = r"swarm.admit=anyone: a run without a key .* swarm.key_path=run.key"
    with pytest.raises(ConfigError, match=keyless):
        gate_for("run", None, None, None, public=True)
    with pytest.raises(ConfigError, match="whoever hosts a public run is invited; give"):
        gate_for("run", key.public.hex(), None, None, trains=False, public=True)


async def test_the_settings_of_a_peer_make_its_gate(key: RunKey, tmp_path: Path) -> None:
    path, public = str(tmp_path / "run.key"), key.public.hex()
    token, watch = (issue(key, "run", role, SOON).to_text() for role in ("worker", "observer"))  # type: ignore[arg-type]
    assert gate_for("run", None, None, None).admission is None
    for made in (gate_for("run", public, token, None), gate_for("run", None, None, path)):
        assert made.run_key == public and made.greeting().credential
    for trains, role in ((True, "worker"), (False, "host")):
        for credential in ((token, None), (None, path)):
            made, door = gate_for("run", public, *credential, trains), gate(key, "QmDoor")
            made.me = "QmMe"
            await greet(door, "QmMe", made.greeting())
            assert door.role_of("QmMe") == role
    wrong = "ab" * 32
    for settings, complaint in (
        (("run", public, None), f"^run.key={public} is the key of a run that admits invited peers"),
        (("other", None, token), "^swarm.token is for run.id=run, and this is run.id=other"),
        (("run", wrong, token), f"^run.key={wrong} is not the key that signed swarm.token"),
        (("run", None, watch), "^swarm.token allows to watch only; ask"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            gate_for(*settings, None)


@pytest.mark.parametrize("caller_knows", [True, False])
async def test_the_longest_list_of_what_is_revoked_is_sent_once(
    key: RunKey, caller_knows: bool
) -> None:
    caller, callee = gate(key, "QmCaller"), gate(key, "QmCallee")
    knows, hears = (caller, callee) if caller_knows else (callee, caller)
    tokens, peers = ([f"{n:0{digits}x}" for n in range(MAX_REVOKED)] for digits in (16, 52))
    longest = Revoked.sign(key, "run", 7, tokens, peers)
    assert knows.admission is not None and knows.admission.revoke(longest)
    nbytes = await meet(caller, callee)
    assert hears.admission is not None and hears.admission.revoked == knows.admission.revoked
    assert nbytes > len(encode(message_of(hears.admission.revoked))) > 10 * MAX_GREETING_BYTES
    assert await meet(caller, callee) < 2 * MAX_GREETING_BYTES


async def test_a_peer_hears_from_who_calls_it_that_it_is_revoked(key: RunKey) -> None:
    caller, callee = gate(key, "QmCaller"), gate(key, "QmCallee")
    revoked = Revoked.sign(key, "run", 1, [], ["QmCallee"])
    assert caller.admission is not None and caller.admission.revoke(revoked)
    with pytest.raises(Untrusted, match="owner of the run has revoked the invitation of this peer"):
        await meet(caller, callee)
    assert "revoked the invitation of this peer" in str(callee.lapsed())


async def test_a_stream_of_a_stranger_ends_after_a_refusal(key: RunKey) -> None:
    one, wire = gate(key, "QmOne"), Pipe()
    wire.reader = asyncio.StreamReader()  # its end has not come
    wire.reader.feed_data(bytes(1000 * MAX_GREETING_BYTES))

    async def handler(*arguments: Any) -> None:
        raise AssertionError("a stranger has a stream")

    await one.serve("QmStranger", wire.reader, wire, handler)
    assert wire.closed and b"invited peers only" in wire.written
    wire.reader.feed_eof()
    assert len(await wire.reader.read()) > 998 * MAX_GREETING_BYTES


async def test_a_visitor_is_an_observer_whatever_it_was_given(key: RunKey, tmp_path: Path) -> None:
    door, token = gate(key, "QmDoor"), issue(key, "run", "worker", SOON).to_text()
    owner = observer_gate("run", None, str(tmp_path / "run.key"))
    for visitor in (observer_gate("", token), owner):
        visitor.me = f"Qm{id(visitor)}"
        await meet(visitor, door)
        assert door.role_of(visitor.me) == "observer"
        assert door.forbids(visitor.me, "a DHT call", MEMBERS) is not None
        assert door.objection(visitor.me, InfoRequest("manifest")) is None
        for asked in (Get(0, (0, D)), CONTRIBUTION, hello()):
            assert "role observer does not allow" in str(door.objection(visitor.me, asked))
    assert observer_gate("run", None).admission is None
    stranger = Gate(Admission(issue(RunKey(new_key()), "run", "worker", SOON)))
    with pytest.raises(Untrusted, match="signed by another key"):
        await greet(door, "QmC", stranger.greeting())


NOW = int(time.time())
HASH = "5e" * 32
ALICE = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
BOB = "QmZXuaYC6UBKw1mwPzS7mVVDDqY1mWxzkRhxDjsVMRDfdj"
KEY = RunKey(new_key())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "refusals" / "me.json"


def invitation(role: Any = "worker", key: RunKey = KEY) -> Token:
    return issue(key, "run", role, SOON)


def door(path: Path, key: RunKey = KEY) -> Admission:
    """A peer of the run that is started, perhaps again."""
    return Admission(invitation(key=key), Memory(path, f"run/{key.public.hex()}"))


def test_the_revoked_and_copied_links_stay_out_after_a_restart(path: Path) -> None:
    first, link, other = door(path), invitation(), invitation()
    assert first.admit(ALICE, link.credential(ALICE), NOW) is None
    assert first.revoke(Revoked.sign(KEY, "run", 3, [other.grant.token_id], []))
    again = door(path)
    assert "in use by another identity" in str(again.admit(BOB, link.credential(BOB), NOW))
    assert "has revoked the invitation" in str(again.admit(BOB, other.credential(BOB), NOW))
    assert again.admit(ALICE, link.credential(ALICE), NOW) is None and again.revoked.number == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_list_in_the_file_counts_only_if_its_owner_signed_it(path: Path) -> None:
    assert door(path).revoke(Revoked.sign(KEY, "run", 3, [], [ALICE]))
    content = json.loads(path.read_text())
    content["revoked"]["peer_ids"] = [BOB]
    path.write_text(json.dumps(content))
    assert door(path).revoked.number == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"scope": "run/x", "revoked": 1}'])
def test_a_damaged_memory_is_named_before_anybody_is_let_in(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"me\.json keeps whom this peer refuses, and is damaged"):
        Memory(path, "run/x")


def test_only_the_owner_seals_a_manifest_and_peers_pass_it_on(tmp_path: Path) -> None:
    key = RunKey.create(tmp_path / "run.key")
    owner = gate_for("run", None, None, str(tmp_path / "run.key"), manifest_hash=HASH)
    seal = owner.memory.seal
    assert is_sealed(key.public, "run", HASH, seal)
    assert not owner.sealed(HASH[::-1], seal)
    for wrong in (seal[::-1], "", "no hex", KEY.seal("run", HASH)):
        assert not owner.sealed(HASH, wrong)
    assert not is_sealed(key.public, "other", HASH, seal)
    token = invitation(key=key).to_text()

    def guest(manifest_hash: str = HASH) -> Gate:
        memory = tmp_path / "guest.json"
        return gate_for("run", None, token, None, True, manifest_hash, memory)

    one = guest()
    one.learn_seal(HASH, KEY.seal("run", HASH))
    assert one.memory.seal == guest().memory.seal == ""
    one.learn_seal(HASH, seal)
    assert one.memory.seal == guest().memory.seal == seal and guest("00" * 32).memory.seal == ""
    assert Gate().sealed(HASH, "") and Gate().memory.seal == ""


async def test_who_may_only_watch_is_no_source_of_a_manifest() -> None:
    liar, joiner = gate(KEY, "QmLiar", "observer"), observer_gate("", invitation().to_text())
    joiner.me = "QmJoiner"
    with pytest.raises(Untrusted, match="its invitation allows to watch only"):
        await meet(joiner, liar)
    assert not joiner.trusts("QmLiar")
    member = gate(KEY, "QmMember")
    await meet(joiner, member)
    assert joiner.trusts("QmMember")
    assert member.objection("QmJoiner", InfoRequest("manifest")) is None


def test_a_key_or_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key, token = tmp_path / "run.key", tmp_path / "token"
    RunKey.create(key)
    token.write_text(invitation().to_text())
    for path, mode, setting, given in (
        (key, 0o640, "swarm.key_path", (None, str(key))),
        (token, 0o604, "swarm.token", (f"@{token}", None)),
    ):
        path.chmod(mode)
        why = f"{setting}={path} holds a secret, and other users of this machine can read it"
        with pytest.raises(ConfigError, match=f"{why}; chmod 600 {path}$"):
            gate_for("run", None, *given)


def test_where_chmod_has_no_effect_a_secret_is_used_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on FAT, or on a drive of Windows."""

    def chmod(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    RunKey.create(tmp_path / "run.key")
    (tmp_path / "token").write_text(invitation().to_text())
    for name in ("run.key", "token"):
        (tmp_path / name).chmod(0o777)
    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(os, "fchmod", chmod)
    for _ in range(2):
        gate_for("run", None, None, f"{tmp_path}/run.key")
        gate_for("run", None, f"@{tmp_path}/token", None)
        own_id(tmp_path / "identity.key")
    [record] = caplog.records
    said = "is on a file system without modes: others may read the secrets there"
    assert record.getMessage() == f"{tmp_path} {said}"
