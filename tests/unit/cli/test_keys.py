"""The commands of a run's owner, as they are typed; and what a peer says about who can join."""

from __future__ import annotations

import io
import logging
import re
import stat
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.admission import Revoked, RunKey, Token, issue
from diloco.cli import keys
from diloco.cli.commands.common import _from_stdin, guest
from diloco.cli.main import main
from diloco.cli.table import say_who_can_join
from diloco.config import compose
from diloco.config.address import Address
from diloco.errors import ConfigError
from diloco.rundir.reporting import log_lines
from tests.support.peers import free_port

PEER = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{PEER}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


def test_a_key_invites_and_its_public_half_is_what_the_run_gets(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, public, hint = typed(capsys, "keygen")
    assert code == 0 and re.fullmatch(r"[0-9a-f]{64}\n", public) and "swarm.key_path=run.key" in hint
    assert stat.S_IMODE((place / "run.key").stat().st_mode) == 0o600
    assert compose(["swarm.key_path=run.key"]).run.key == public.strip()
    code, text, described = typed(capsys, "invite", "--key", "run.key", "--run", "mine", "--expires", "2w")
    grant = Token.from_text(text.strip()).grant
    assert code == 0 and (grant.run_id, grant.role, grant.peer) == ("mine", "worker", "")
    assert grant.run_key.hex() == public.strip() and abs(grant.expires_at - time.time() - 14 * 86400) < 60
    assert described.startswith(f"token {grant.token_id}: worker of mine until ")
    assert "UTC, for the first peer that uses it\nit is a secret" in described
    assert "diloco join ADDRESS swarm.token=@FILE (chmod 600 FILE), or diloco join ADDRESS swarm.token=-" in described


def test_an_invitation_with_an_address_is_the_whole_link(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "keygen", "k")
    options = ["--key", "k", "--run", "mine", "--role", "host", "--bind", PEER]
    for address in (ADDRESS, f"diloco:/{ADDRESS}?token=old", f"diloco:/{ADDRESS}"):
        code, link, described = typed(capsys, "invite", *options, address)
        parsed = Address.parse(link.strip())
        assert code == 0 and parsed.peers == (ADDRESS,) and f"UTC, for {PEER}\n" in described
        assert "diloco join @FILE (chmod 600 FILE), or diloco join - and paste it" in described
        grant = Token.from_text(parsed.token or "").grant
        assert (grant.role, grant.peer) == ("host", PEER)
        (place / "link").write_text(link)
        (place / "link").chmod(0o600)
        (place / "address").write_text(ADDRESS + "\n")
        assert Address.parse(typed(capsys, "invite", *options, "@address")[1].strip()).peers == (ADDRESS,)
        assert compose(["swarm.token=@link"]).run.key == grant.run_key.hex()


def test_an_invitation_that_goes_into_a_file_is_for_its_owner_alone_and_joins_from_there(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(capsys, "keygen", "k")
    options = ["invite", "--key", "k", "--run", "mine", ADDRESS, "--out", "link.txt"]
    code, printed, described = typed(capsys, *options)
    assert (code, printed) == (0, "") and stat.S_IMODE((place / "link.txt").stat().st_mode) == 0o600
    assert "diloco join @link.txt (chmod 600 link.txt), or diloco join - and paste it" in described
    found, given = guest("@link.txt", [])
    assert found.resolved().peers == (ADDRESS,) and compose(given).run.key is not None
    assert typed(capsys, *options)[0::2] == (
        2, "diloco: error: --out=link.txt cannot be written: File exists; name a new file\n"
    )  # fmt: skip
    assert typed(capsys, *options[:-1], "no/link.txt")[2] == (
        "diloco: error: --out=no/link.txt cannot be written: No such file or directory; name a file in a directory of "
        "yours\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["keygen", "k"], "FILE=k exists, and may be the key of a run"),
        (["invite", "--run", "mine"], "Missing option '--key'"),
        (["invite", "--key", "k", "--run", "mine", "@none"], "ADDRESS=@none cannot be read: No such file"),
        (["invite", "--key", "none", "--run", "mine"], "--key=none cannot be read: No such file or directory"),
        (["invite", "--key", "k", "--run", "mine", "--expires", "7"], "--expires=7 is no duration; expected one such"),
        (["invite", "--key", "k", "--run", "mine", "--expires", "0d"], "--expires=0d is no duration"),
        (["invite", "--key", "k", "--run", "mine", "--expires", "999w"], "--expires=999w is no duration"),
        (["invite", "--key", "k", "--run", "mine", "--role", "boss"], "'boss' is not one of 'worker', 'host'"),
        (["invite", "--key", "k", "--run", "mine", "--bind", "me"], "--bind=me is no peer id"),
        (["invite", "--key", "k", "--run", "a/b"], "--run=a/b is no run id"),
        (["invite", "--key", "k", "--run", "mine", "nowhere"], "ADDRESS=nowhere cannot be used"),
        (["revoke", "--key", "k", "--run", "mine"], "Missing argument '[ADDRESS] WHAT...'"),
        (
            ["revoke", "--key", "k", "--run", "mine", ADDRESS],
            "p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51 is nei",
        ),
        (["revoke", "--key", "k", "--run", "mine", ADDRESS, "x"], "x is neither a token id (16 hexadecimal digits"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    typed(capsys, "keygen", "k")
    code, out, error = typed(capsys, *arguments)
    assert (code, out) == (2, "") and complaint in error and error.count("\n") == 1


def test_what_is_revoked_may_be_given_as_id_token_or_link(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "keygen", "k")
    link = typed(capsys, "invite", "--key", "k", "--run", "mine", ADDRESS)[1].strip()
    token = link.rpartition("?token=")[2]
    found = {keys._token_id(what) for what in (link, token, Token.from_text(token).grant.token_id)}
    assert found == {Token.from_text(token).grant.token_id}
    assert keys._token_id(PEER) is None


def test_what_is_revoked_is_kept_also_if_no_peer_is_left(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "keygen", "k")
    owner = ("revoke", "--key", "k", "--run", "mine")
    assert typed(capsys, *owner, "0" * 16)[:2] == (
        0, "1 token and 0 peers revoked in mine (list 1); peers that start with k have it\n"
    )  # fmt: skip
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{PEER}"
    code, _, error = typed(capsys, *owner, dead, "1" * 16, PEER)
    assert code == 3 and "cannot be reached" in error and "; list 2 is kept beside k, and peers that start" in error
    revoked = Revoked.remembered(RunKey.read(place / "k"), place / "k", "mine")
    assert (revoked.number, revoked.token_ids, revoked.peer_ids) == (2, ("0" * 16, "1" * 16), (PEER,))


def test_a_list_that_cannot_be_read_is_not_to_be_deleted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed(capsys, "keygen", "k")
    (place / "k.revoked.json").write_text('{"mine": [1, ["00')
    code, _, error = typed(capsys, "revoke", "--key", "k", "--run", "mine", "0" * 16)
    assert code == 2 and "restore it from a copy, as without it those whom you revoked come in again" in error


def test_a_link_may_come_from_a_file_or_from_stdin(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = issue(RunKey.create(place / "k"), "mine", "worker", int(time.time()) + 60).to_text()
    (place / "link").write_text(f"diloco:/{ADDRESS}?token={token}\n")
    assert Address.read("@link") == Address(("@link",), "@link") and token not in str(guest("@link", []))
    (place / "address").write_text(ADDRESS)
    for other in ("@address", "@later", ADDRESS):
        assert Address.read(other) == Address((other,))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"diloco:/{ADDRESS}?token={token}\n{token}\n"))
    assert Address.read("-") == Address((ADDRESS,), token)
    assert _from_stdin("swarm.token=-") == f"swarm.token='{token}'" and _from_stdin("a=-") == "a=-"
    with pytest.raises(ConfigError, match=r"^ADDRESS=- stands for a line on stdin, and none came"):
        Address.read("-")


def test_a_token_file_that_others_can_read_joins_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = issue(RunKey.create(place / "k"), "mine", "worker", int(time.time()) + 60).to_text()
    (place / "link").write_text(f"diloco:/{ADDRESS}?token={token}\n")
    (place / "link").chmod(0o644)
    for command in ("join", "status", "doctor"):
        code, _, error = typed(capsys, command, "@link")
        assert code in (2, 3) and "swarm.token=link holds a secret" in error and "chmod 600 link" in error


@pytest.mark.parametrize(
    ("overrides", "key", "text", "red"),
    [
        (["swarm=network"], None, "open run: anyone who can reach this peer can join", True),
        (["swarm.listen=[/ip4/127.0.0.1/tcp/0,/ip4/0.0.0.0/tcp/1]"], None, "open run: anyone", True),
        ([], None, "open run, on this machine only", False),
        (["swarm=network"], "ab" * 32, "closed run: invited peers only, by key abababababababab", False),
        (["swarm=network", "outer=data_parallel"], None, "", False),
    ],
)
def test_whoever_starts_a_peer_is_told_who_can_join(
    overrides: list[str], key: str | None, text: str, red: bool, caplog: pytest.LogCaptureFixture
) -> None:
    screen = io.StringIO()
    config = compose(overrides)
    say_who_can_join(Console(file=screen, force_terminal=True, width=300), config, key)
    assert text in screen.getvalue() and ("\x1b[1;31m" in screen.getvalue()) is red
    assert screen.getvalue().count("\n") == bool(text)
    caplog.set_level(logging.INFO)
    keyed = config.model_copy(update={"run": config.run.model_copy(update={"key": key})})
    log_lines(keyed)({"t": "ready", "address": "", "first": True})
    assert [(line.levelno, line.getMessage()[: len(text)]) for line in caplog.records] == [
        (logging.WARNING if red else logging.INFO, text)
    ] * bool(text)
