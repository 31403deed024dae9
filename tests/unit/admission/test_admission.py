"""Keys, invitations, credentials and revocations: what is believed, by whom, and until when."""

from __future__ import annotations

import base64
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.admission import ROLES, Admission, Credential, Grant, Revoked, Role, RunKey, Token, issue
from diloco.admission.gatekeeper import MAX_OBSERVERS, TOLERANCE_S
from diloco.admission.invitation import MAX_CHARACTERS
from diloco.admission.keys import MAX_REVOKED, new_key
from diloco.errors import ConfigError, PayloadError

KEY, OTHER_KEY = RunKey(new_key()), RunKey(new_key())
NOW, DAY = 1_800_000_000, 86400
PEERS = ("QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51", "QmZXuaYC6UBKw1mwPzS7mVVDDqY1mWxzkRhxDjsVMRDfdj")
ALICE, BOB = PEERS


def token(
    role: Role = "worker", expires_at: int = NOW + DAY, peer: str = "", run: str = "run", key: RunKey = KEY
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
    peer=st.sampled_from(("", *PEERS)),
    run=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
)


# -- text -------------------------------------------------------------------------------------------------------------


@given(tokens)
def test_a_token_and_its_credential_come_through_unchanged(one: Token) -> None:
    assert Token.from_text(one.to_text()) == one
    text = one.credential(ALICE)
    credential = Credential.from_text(text)
    assert credential.grant == one.grant and credential.proves(ALICE) and credential.to_text() == text
    assert len(one.to_text()) < MAX_CHARACTERS / 2 and len(text) < MAX_CHARACTERS / 2


def test_a_token_with_any_bit_flipped_is_refused() -> None:
    raw = decoded(token().to_text())
    for bit in range(8 * len(raw)):
        with pytest.raises(ConfigError, match="invitation"):
            Token.from_text(encoded(flipped(raw, bit)))


def test_a_credential_with_any_bit_flipped_admits_nobody(door: Admission) -> None:
    raw = decoded(token().credential(ALICE))
    for bit in range(8 * len(raw)):
        assert door.admit(ALICE, encoded(flipped(raw, bit)), NOW), bit
        assert door.role_of(ALICE, NOW) is None
    assert door.admit(ALICE, encoded(raw), NOW) is None


def test_a_text_with_any_character_changed_is_refused(door: Admission) -> None:
    text, invitation = token().credential(ALICE), token().to_text()
    for at in range(len(text)):
        for other in "A_-9":
            if text[at] != other:
                assert door.admit(ALICE, text[:at] + other + text[at + 1 :], NOW)
    for changed in (invitation[:-1], invitation + "A", invitation + "=", " " + invitation, invitation + "\n"):
        with pytest.raises(ConfigError):
            Token.from_text(changed)


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_any_bytes_are_a_credential_or_an_error_of_ours(raw: bytes) -> None:
    for text in (encoded(raw), raw.decode("latin-1")):
        try:
            Credential.from_text(text)
        except PayloadError as error:
            assert len(str(error)) < 200
        with pytest.raises(ConfigError):
            Token.from_text(text)


@given(st.binary(max_size=200))
def test_any_bytes_after_the_version_are_a_grant_or_an_error_of_ours(raw: bytes) -> None:
    try:
        grant, rest = Grant.from_bytes(b"\x01" + raw)
    except PayloadError:
        return
    assert grant.to_bytes() + rest == b"\x01" + raw and not grant.signed


def test_a_long_text_is_refused_unread_and_never_repeated() -> None:
    with pytest.raises(ConfigError, match=r"has 100000 characters; at most 1024 are read") as caught:
        Token.from_text("A" * 100_000)
    assert "AAAA" not in str(caught.value)


def test_a_token_is_read_from_a_file_that_holds_it_or_a_whole_link(tmp_path: Path) -> None:
    one, file = token(), tmp_path / "invitation"
    for content in (one.to_text() + "\n", f"diloco://ip4/1.2.3.4/tcp/1/p2p/{ALICE}?token={one.to_text()}\n"):
        file.write_text(content)
        file.chmod(0o600)
        assert Token.read(f"@{file}") == one
    assert Token.read(one.to_text()) == one
    with pytest.raises(ConfigError, match=r"swarm\.token=@.*missing cannot be read: No such file"):
        Token.read(f"@{tmp_path}/missing")
    assert one.to_text() not in repr(one) and one.grant.token_id in repr(one)


def test_an_invitation_to_no_run_or_for_no_peer_is_not_issued() -> None:
    with pytest.raises(ConfigError, match="--run=a b is no run id"):
        token(run="a b")
    with pytest.raises(ConfigError, match="--bind=me is no peer id"):
        token(peer="me")


# -- who is in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_an_invited_peer_is_in_with_its_role_until_it_expires(door: Admission, role: Role) -> None:
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
        token(run="other").credential(BOB): "the invitation is for run.id=other, and this is run.id=run",
        expired.credential(BOB): "the invitation expired 3 days ago",
        token(peer=ALICE).credential(BOB): f"the invitation is bound to peer {ALICE}",
    }
    for text, reason in cases.items():
        assert reason in str(door.admit(BOB, text, NOW))
        assert door.role_of(BOB, NOW) is None
    assert door.admit(ALICE, shown, NOW) is None  # a replay uses nothing up
    assert door.admit(BOB, token(peer=BOB).credential(BOB), NOW) is None


def test_a_grant_that_the_run_key_did_not_sign_is_worth_nothing(door: Admission) -> None:
    good, forged = token(role="observer"), token(key=OTHER_KEY)
    for grant in (replace(forged.grant, run_key=KEY.public), replace(good.grant, role="worker")):
        assert "signature of the invitation is wrong" in str(
            door.admit(BOB, Token(grant, forged._seed).credential(BOB, "worker"), NOW)
        )


def test_a_token_is_its_first_identity_s_and_another_one_is_refused(door: Admission) -> None:
    shared = token()
    assert door.admit(ALICE, shared.credential(ALICE), NOW) is None
    assert "in use by another identity" in str(door.admit(BOB, shared.credential(BOB), NOW))
    assert door.admit(ALICE, shared.credential(ALICE), NOW) is None  # it came back


def test_who_uses_a_token_is_also_learnt_from_public_records(door: Admission) -> None:
    shared = token()
    for nonsense in ("", "x", shared.credential(ALICE)[:-2], token(key=OTHER_KEY).credential(ALICE)):
        door.witness(ALICE, nonsense, NOW)
    door.witness(BOB, shared.credential(ALICE), NOW)  # a record that lies
    door.witness(ALICE, shared.credential(ALICE), NOW)
    assert door.role_of(ALICE, NOW) is None
    assert "in use by another identity" in str(door.admit(BOB, shared.credential(BOB), NOW))


def test_looking_at_a_swarm_uses_no_invitation_up(door: Admission) -> None:
    shared = token()
    assert door.admit(BOB, shared.credential(BOB, "observer"), NOW) is None
    assert door.role_of(BOB, NOW) == "observer"
    assert door.admit(ALICE, shared.credential(ALICE), NOW) is None


@pytest.mark.parametrize(("granted", "shown"), [("observer", "worker"), ("observer", "host"), ("host", "worker")])
def test_nobody_shows_itself_in_a_role_above_its_own(door: Admission, granted: Role, shown: Role) -> None:
    assert door.admit(ALICE, token(granted).credential(ALICE, shown), NOW)
    assert door.role_of(ALICE, NOW) is None


def test_a_role_allows_what_names_it(door: Admission) -> None:
    for peer, role in ((ALICE, "host"), (BOB, "observer")):
        assert door.admit(peer, token(role).credential(peer), NOW) is None  # type: ignore[arg-type]
    members: frozenset[Role] = frozenset({"worker", "host"})
    assert "role host does not allow contribution" in str(door.objection(ALICE, "contribution", {"worker"}, NOW))
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
    assert [door.role_of(visitor, NOW) for visitor in visitors[:4]] == [None, None, None, "observer"]
    assert door.role_of(ALICE, NOW) == "worker"


# -- revocations ------------------------------------------------------------------------------------------------------


def test_a_revoked_token_or_peer_is_out_and_does_not_come_back(door: Admission) -> None:
    one, other = token(), token()
    assert door.admit(ALICE, one.credential(ALICE), NOW) is None
    assert door.admit(BOB, other.credential(BOB), NOW) is None
    assert door.revoke(Revoked.sign(KEY, "run", 1, [one.grant.token_id], []))
    assert door.role_of(ALICE, NOW) is None and door.role_of(BOB, NOW) == "worker"
    assert door.expel(NOW) == {ALICE: "the owner of the run has revoked the invitation of this peer; ask for a new one"}
    assert "revoked" in str(door.admit(ALICE, one.credential(ALICE), NOW))
    assert door.admit(ALICE, token().credential(ALICE), NOW) is None  # invited anew
    assert door.revoke(Revoked.sign(KEY, "run", 2, [one.grant.token_id], [BOB]))
    assert "revoked" in str(door.admit(BOB, token().credential(BOB), NOW))  # a peer that is named stays out


def test_only_the_owner_s_newest_list_counts(door: Admission) -> None:
    good = Revoked.sign(KEY, "run", 5, ["0" * 16], [ALICE])
    for bad in (
        Revoked.sign(OTHER_KEY, "run", 9, [], [BOB]),
        Revoked.sign(KEY, "other", 9, [], [BOB]),
        replace(good, number=9),
        replace(good, peer_ids=(BOB,)),
        replace(good, token_ids=()),
        replace(good, signature=bytes(64)),
        replace(good, signature=b""),
    ):
        assert not door.revoke(bad)
    assert door.revoke(good) and not door.revoke(good)
    assert not door.revoke(Revoked.sign(KEY, "run", 4, [], []))
    assert door.revoked == good


def test_a_peer_knows_when_it_is_out_itself(door: Admission) -> None:
    assert door.lapsed(ALICE, NOW) is None
    assert "expired" in str(door.lapsed(ALICE, NOW + DAY + TOLERANCE_S + 1))
    door.revoke(Revoked.sign(KEY, "run", 1, [door.token.grant.token_id], []))
    assert "revoked" in str(door.lapsed(ALICE, NOW))


def test_a_list_is_remembered_beside_the_key_and_signed_again(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    assert Revoked.remembered(KEY, path, "run").number == 0
    Revoked.sign(KEY, "other", 7, [], [BOB]).remember(path, "other")
    signed = Revoked.sign(KEY, "run", 3, ["0" * 16], [ALICE])
    signed.remember(path, "run")
    assert Revoked.remembered(KEY, path, "run") == signed
    assert Revoked.remembered(KEY, path, "other").peer_ids == (BOB,)
    (tmp_path / "run.key.revoked.json").write_text('{"run": 3}')
    with pytest.raises(ConfigError, match=r"run\.key\.revoked\.json is not what diloco revoke wrote"):
        Revoked.remembered(KEY, path, "run")


def test_a_list_has_an_end() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_REVOKED} are revoked"):
        Revoked.sign(KEY, "run", 1, [], map(str, range(MAX_REVOKED + 1)))


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_written_once_for_its_owner_only_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    made = RunKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.read(path).public == made.public and len(made.public) == 32
    with pytest.raises(ConfigError, match=r"FILE=.*run\.key exists, and may be the key of a run"):
        RunKey.create(path)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        RunKey.create(tmp_path / "missing" / "run.key")


def test_what_is_no_run_key_is_named_with_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ConfigError, match=r"swarm\.key_path=.*file cannot be read: No such file"):
        RunKey.read(path)
    for content in (b"", b"nonsense", b"\0" * 5000):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=r"--key=.*file holds no run key; diloco keygen makes one"):
            RunKey.read(path, "--key")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)
