"""Keys, invitations, credentials and revocations: what is believed, by whom, and until when."""

import base64
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.admission import Admission, Credential, Revoked, RunKey, Token, issue
from diloco.admission.gatekeeper import MAX_OBSERVERS, TOLERANCE_S
from diloco.admission.invitation import ROLES
from diloco.admission.keys import new_key
from diloco.errors import ConfigError
from diloco.protocol import MAX_CHARACTERS, MAX_REVOKED, Role

KEY, OTHER_KEY = RunKey(new_key()), RunKey(new_key())
NOW, DAY = 1_800_000_000, 86400
ALICE = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
BOB = "QmZXuaYC6UBKw1mwPzS7mVVDDqY1mWxzkRhxDjsVMRDfdj"


def token(
    role: Role = "worker",
    expires_at: int = NOW + DAY,
    peer: str = "",
    run: str = "run",
    key: RunKey = KEY,
) -> Token:
    return issue(key, run, role, expires_at, peer)


@pytest.fixture
def door() -> Admission:
    """A peer of the run that nobody has come to."""
    return Admission(token())


tokens = st.builds(
    token,
    role=st.sampled_from(ROLES),
    expires_at=st.integers(0, 2**63),
    peer=st.sampled_from(("", ALICE, BOB)),
    run=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
)


@given(tokens)
def test_a_token_and_its_credential_come_through_unchanged(one: Token) -> None:
    assert Token.from_text(one.to_text()) == one
    text = one.credential(ALICE)
    credential = Credential.from_text(text)
    assert credential.grant == one.grant and credential.proves(ALICE)
    assert credential.to_text() == text
    assert len(one.to_text()) < MAX_CHARACTERS / 2 and len(text) < MAX_CHARACTERS / 2


def test_a_text_with_any_bit_or_character_changed_is_refused(door: Admission) -> None:
    one = token()
    raw = decoded(one.to_text())
    for bit in range(8 * len(raw)):
        with pytest.raises(ConfigError, match="invitation"):
            Token.from_text(encoded(flipped(raw, bit)))
    typed, text = one.to_text(), one.credential(ALICE)
    for changed in (typed[:-1], typed + "A", typed + "=", " " + typed, typed + "\n"):
        with pytest.raises(ConfigError):
            Token.from_text(changed)
    raw = decoded(text)
    bits = [encoded(flipped(raw, bit)) for bit in range(8 * len(raw))]
    letters = [text[:at] + one + text[at + 1 :] for at in range(len(text)) for one in "A_-9"]
    for changed in {*bits, *letters} - {text}:
        assert door.admit(ALICE, changed, NOW) and door.role_of(ALICE, NOW) is None, changed
    assert door.admit(ALICE, text, NOW) is None


def test_a_token_is_read_from_a_file_with_it_or_a_link(tmp_path: Path) -> None:
    one, file = token(), tmp_path / "invitation"
    text, address = one.to_text(), f"ip4/1.2.3.4/tcp/1/p2p/{ALICE}"
    link = f"diloco://{address}?token={text}"
    typed = f"# mine\r\n\r\ndiloco join /{address} 'swarm.token={text}'"
    quoted = f"\n\u201c{text}\u201d "
    for content in (f"{text}\n", f"{link}\n", quoted, f"{link}\n{link}", typed):
        file.write_bytes(content.encode("utf-16" if content == quoted else "utf-8-sig"))
        file.chmod(0o600)
        assert Token.read(f"@{file}") == Token.read(one.to_text()) == one
    assert one.to_text() not in repr(one) and one.grant.token_id in repr(one)
    file.write_text(f"{one.to_text()}\n{token().to_text()}")
    with pytest.raises(ConfigError, match=r"=@.*invitation holds 2 tokens; leave one of them the"):
        Token.read(f"@{file}")
    with pytest.raises(ConfigError, match=r"swarm\.token=@.*missing cannot be read: No such file"):
        Token.read(f"@{tmp_path}/missing")
    with pytest.raises(ConfigError, match=r"has 100000 characters; at most 1024 are") as caught:
        Token.from_text("A" * 100_000)
    assert "AAAA" not in str(caught.value), "unread, and never repeated"
    with pytest.raises(ConfigError, match="--run=a b is no run id"):
        token(run="a b")
    with pytest.raises(ConfigError, match="--bind=me is no peer id"):
        token(peer="me")


@pytest.mark.parametrize("role", ROLES)
def test_an_invited_peer_is_in_until_its_invitation_expires(door: Admission, role: Role) -> None:
    assert door.role_of(ALICE, NOW) is None
    assert door.admit(ALICE, token(role).credential(ALICE), NOW) is None
    assert door.role_of(ALICE, NOW) == role and door.expel(NOW) == {}
    late = NOW + DAY + TOLERANCE_S + 1
    assert door.role_of(ALICE, late - 2) == role and door.role_of(ALICE, late) is None
    assert list(door.expel(late)) == [ALICE] and door.expel(late) == {}


def test_strangers_are_told_why_and_what_to_do(door: Admission) -> None:
    shown = token().credential(ALICE)
    expired = token(expires_at=NOW - 3 * DAY)
    cases = {
        "": "this run admits invited peers only; ask its owner for a link",
        "garbage!": "the credential cannot be read: it has characters",
        shown: "the credential belongs to another identity",
        token(key=OTHER_KEY).credential(BOB): "is signed by another key than that of this run",
        token(run="other").credential(BOB): "is for run.id=other, and this is run.id=run",
        expired.credential(BOB): "the invitation expired 3 days ago",
        token(peer=ALICE).credential(BOB): f"the invitation is bound to peer {ALICE}",
    }
    for text, reason in cases.items():
        assert reason in str(door.admit(BOB, text, NOW))
        assert door.role_of(BOB, NOW) is None
    assert door.admit(ALICE, shown, NOW) is None  # a replay uses nothing up
    assert door.admit(BOB, token(peer=BOB).credential(BOB), NOW) is None


def test_a_grant_that_the_run_key_did_not_sign_is_worthless(door: Admission) -> None:
    good, forged = token(role="observer"), token(key=OTHER_KEY)
    for grant in (replace(forged.grant, run_key=KEY.public), replace(good.grant, role="worker")):
        said = door.admit(BOB, Token(grant, forged._seed).credential(BOB, "worker"), NOW)
        assert "signature of the invitation is wrong" in str(said)


def test_a_token_belongs_to_its_first_identity(door: Admission) -> None:
    shared = token()
    for _ in range(2):  # it came back
        assert door.admit(ALICE, shared.credential(ALICE), NOW) is None
        assert "in use by another identity" in str(door.admit(BOB, shared.credential(BOB), NOW))


def test_looking_at_a_swarm_uses_no_invitation_up(door: Admission) -> None:
    shared = token()
    assert door.admit(BOB, shared.credential(BOB, "observer"), NOW) is None
    assert door.role_of(BOB, NOW) == "observer"
    assert door.admit(ALICE, shared.credential(ALICE), NOW) is None


def test_nobody_shows_itself_in_a_role_above_its_own(door: Admission) -> None:
    for granted in ROLES:
        for shown in ROLES[: ROLES.index(granted)]:
            assert door.admit(ALICE, token(granted).credential(ALICE, shown), NOW)
            assert door.role_of(ALICE, NOW) is None


def test_a_role_allows_what_names_it(door: Admission) -> None:
    for peer, role in ((ALICE, "host"), (BOB, "observer")):
        assert door.admit(peer, token(role).credential(peer), NOW) is None  # type: ignore[arg-type]
    members: frozenset[Role] = frozenset({"worker", "host"})
    refused = door.objection(ALICE, "contribution", {"worker"}, NOW)
    assert "role host does not allow contribution" in str(refused)
    assert door.objection(ALICE, "hello", members, NOW) is None
    assert "role observer does not allow hello" in str(door.objection(BOB, "hello", members, NOW))
    assert door.objection(BOB, "probe", members | {"observer"}, NOW) is None
    assert "admits invited peers only" in str(door.objection("QmStranger", "probe", members, NOW))


def test_observers_without_number_do_not_fill_the_memory(door: Admission) -> None:
    assert door.admit(ALICE, token().credential(ALICE), NOW) is None
    link = token("observer")
    visitors = [f"Qm{number:09d}".replace("0", "z") for number in range(MAX_OBSERVERS + 3)]
    for visitor in visitors:
        assert door.admit(visitor, link.credential(visitor), NOW) is None
    assert [door.role_of(one, NOW) for one in visitors[:4]] == [None, None, None, "observer"]
    assert door.role_of(ALICE, NOW) == "worker"


def test_a_revoked_token_or_peer_is_out_and_stays_out(door: Admission) -> None:
    one, other = token(), token()
    assert door.admit(ALICE, one.credential(ALICE), NOW) is None
    assert door.admit(BOB, other.credential(BOB), NOW) is None
    assert door.revoke(Revoked.sign(KEY, "run", 1, [one.grant.token_id], []))
    assert door.role_of(ALICE, NOW) is None and door.role_of(BOB, NOW) == "worker"
    revoked = "the owner of the run has revoked the invitation of this peer; ask for a new one"
    assert door.expel(NOW) == {ALICE: revoked}
    assert "revoked" in str(door.admit(ALICE, one.credential(ALICE), NOW))
    assert door.admit(ALICE, token().credential(ALICE), NOW) is None  # invited anew
    assert door.revoke(Revoked.sign(KEY, "run", 2, [one.grant.token_id], [BOB]))
    # a peer that is named stays out
    assert "revoked" in str(door.admit(BOB, token().credential(BOB), NOW))
    assert door.lapsed("QmMe", NOW) is None, "it knows when it is out itself"
    assert "expired" in str(door.lapsed("QmMe", NOW + DAY + TOLERANCE_S + 1))
    assert door.revoke(Revoked.sign(KEY, "run", 3, [door.token.grant.token_id], []))
    assert "revoked" in str(door.lapsed("QmMe", NOW))


def test_only_the_newest_list_of_the_owner_counts(door: Admission) -> None:
    good = Revoked.sign(KEY, "run", 5, ["0" * 16], [ALICE])
    foreign = [(OTHER_KEY, "run"), (KEY, "other")]
    assert not any(door.revoke(Revoked.sign(*one, 9, [], [BOB])) for one in foreign)
    fields: list[dict[str, Any]] = [{"number": 9}, {"peer_ids": (BOB,)}, {"token_ids": ()}]
    fields += [{"signature": "00" * 64}, {"signature": ""}]
    assert not any(door.revoke(replace(good, **one)) for one in fields)
    assert door.revoke(good) and not door.revoke(good)
    assert not door.revoke(Revoked.sign(KEY, "run", 4, [], []))
    assert door.revoked == good


def test_a_list_is_remembered_beside_the_key(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    assert Revoked.remembered(KEY, path, "run").number == 0
    Revoked.sign(KEY, "other", 7, [], [BOB]).remember(path, "other")
    signed = Revoked.sign(KEY, "run", 3, ["0" * 16], [ALICE])
    signed.remember(path, "run")
    assert Revoked.remembered(KEY, path, "run") == signed
    assert Revoked.remembered(KEY, path, "other").peer_ids == (BOB,)
    (tmp_path / "run.key.revoked.json").write_text('{"run": 3}')
    with pytest.raises(ConfigError, match=r"run\.key\.revoked\.json is not what diloco revoke wr"):
        Revoked.remembered(KEY, path, "run")
    with pytest.raises(ConfigError, match=f"more than {MAX_REVOKED} are revoked"):
        Revoked.sign(KEY, "run", 1, [], map(str, range(MAX_REVOKED + 1)))


def test_a_key_is_written_once_for_its_owner_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = RunKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.read(path).public == made.public and len(made.public) == 32
    with pytest.raises(ConfigError, match=r"FILE=.*run\.key cannot be written: File exists; name"):
        RunKey.create(path)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        RunKey.create(tmp_path / "missing" / "run.key")
    with pytest.raises(ConfigError, match=r"swarm\.key_path=.*missing cannot be read: No such fi"):
        RunKey.read(tmp_path / "missing")
    for content in (b"", b"nonsense", b"\0" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--key=.*run\.key holds no run key; diloco keygen"):
            RunKey.read(path, "--key")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)
