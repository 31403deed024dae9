"""What survives a restart: revocations, first users, the seal of the manifest. Also: who is
believed."""

from __future__ import annotations

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
from diloco.swarm.rpc.watch import InfoRequest
from diloco.swarm.wire.gate import Gate, gate_for, observer_gate
from diloco.swarm.wire.identity import own_id
from diloco.swarm.wire.transport import Untrusted
from tests.support.gates import gate, meet

NOW = int(time.time())
SOON = NOW + 3600
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
