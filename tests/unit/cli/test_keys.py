"""The commands of a run's owner, as they are typed; and what a peer says about who can join."""

import io
import logging
import re
import stat
import time
from pathlib import Path

import pytest
from rich.console import Console

from diloco.admission import Revoked, RunKey, Token, issue
from diloco.cli import Options, _from_stdin, guest_arguments, keys
from diloco.config import compose
from diloco.config.address import Address
from diloco.dashboard.live import print_who_can_join
from diloco.errors import ConfigError
from diloco.rundir.reporting import Ready, log_lines
from tests.support.command_line import Typed
from tests.support.peers import dead_port

PEER = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{PEER}"
INVITE, REVOKE = (f"{command} --key k --run mine" for command in ("invite", "revoke"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    RunKey.create(tmp_path / "k")
    return tmp_path


@pytest.fixture
def link(place: Path) -> str:
    """An invitation, which is in a file as well."""
    token = issue(RunKey.read(place / "k"), "mine", "worker", int(time.time()) + 3600).to_text()
    (place / "link").write_text(f"diloco:/{ADDRESS}?token={token}\n")
    return f"diloco:/{ADDRESS}?token={token}"


def test_a_key_invites_and_its_public_half_is_for_the_run(place: Path, typed: Typed) -> None:
    public = typed("keygen")
    assert re.fullmatch(r"[0-9a-f]{64}\n", public) and "swarm.key_path=run.key" in typed.err
    assert stat.S_IMODE((place / "run.key").stat().st_mode) == 0o600
    assert compose(["swarm.key_path=run.key"]).run.key == public.strip()
    text = typed("invite", "--key", "run.key", "--run", "mine", "--expires", "2w")
    grant = Token.from_text(text.strip()).grant
    assert (grant.run_id, grant.role, grant.peer) == ("mine", "worker", "")
    assert grant.run_key.hex() == public.strip()
    assert abs(grant.expires_at - time.time() - 14 * 86400) < 3600
    assert typed.err.startswith(f"token {grant.token_id}: worker of mine until ")
    assert "UTC, for the first peer that uses it\nit is a secret" in typed.err
    joins = "diloco join ADDRESS swarm.token="
    assert f"{joins}@FILE (chmod 600 FILE), or {joins}-" in typed.err


def test_a_home_that_no_shell_expands_is_the_home(
    place: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setenv("HOME", str(place / "home"))
    (place / "home").mkdir()
    typed("keygen", "~/run.key")
    typed("invite", "--key=~/run.key", "--run=mine", "--out=~/link.txt")
    assert sorted(one.name for one in (place / "home").iterdir()) == ["link.txt", "run.key"]
    assert not (place / "~").exists()


def test_an_invitation_with_an_address_is_the_whole_link(place: Path, typed: Typed) -> None:
    options = ["invite", "--key", "k", "--run", "mine", "--role", "host", "--bind", PEER]
    (place / "address").write_text(ADDRESS + "\n")
    for address in (ADDRESS, f"diloco:/{ADDRESS}?token=old", f"diloco:/{ADDRESS}", "@address"):
        link = typed(*options, address)
        parsed = Address.parse(link.strip())
        assert parsed.peers == (ADDRESS,) and f"UTC, for {PEER}\n" in typed.err
        assert "diloco join @FILE (chmod 600 FILE), or diloco join - and paste it" in typed.err
        grant = Token.from_text(parsed.token or "").grant
        assert (grant.role, grant.peer) == ("host", PEER)
    (place / "link").write_text(link)
    (place / "link").chmod(0o600)
    assert compose(["swarm.token=@link"]).run.key == grant.run_key.hex()


def test_an_invitation_in_a_file_is_for_its_owner_alone(place: Path, typed: Typed) -> None:
    options = ["invite", "--key", "k", "--run", "mine", ADDRESS, "--out"]
    assert typed(*options, "link.txt") == ""
    assert stat.S_IMODE((place / "link.txt").stat().st_mode) == 0o600
    assert "diloco join @link.txt (chmod 600 link.txt), or diloco join - and paste it" in typed.err
    found, given = guest_arguments("@link.txt", Options(()))
    assert found.resolved().peers == (ADDRESS,) and compose(given).run.key is not None
    wrong = {"link.txt": "File exists", "no/link.txt": "No such file or directory"}
    for file, why in wrong.items():
        said = f"diloco: error: --out={file} cannot be written: {why}; name a new file\n"
        assert typed.refused(*options, file) == said


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("keygen k", "FILE=k cannot be written: File exists; name a new file"),
        ("invite --key none --run mine", "--key=none cannot be read: No such file or directory"),
        (f"{INVITE} --expires 7", "--expires=7 is no duration; expected one such"),
        (f"{INVITE} --bind me", "--bind=me is no peer id"),
        (f"{REVOKE} {ADDRESS}", "p2p/QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51 is nei"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    place: Path, typed: Typed, line: str, complaint: str
) -> None:
    assert complaint in typed.refused(*line.split())


def test_what_is_revoked_is_kept_also_if_no_peer_is_left(
    place: Path, link: str, typed: Typed
) -> None:
    token = link.rpartition("?token=")[2]
    token_id = Token.from_text(token).grant.token_id
    ids = [keys._token_id(what) for what in (link, token, token_id, PEER)]
    assert ids == [token_id, token_id, token_id, None]
    said = "1 token and 0 peers revoked in mine (list 1); peers that start with k have it\n"
    assert typed(*REVOKE.split(), token_id) == said
    typed(*REVOKE.split(), f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{PEER}", "0" * 16, PEER, code=3)
    assert "cannot be reached" in typed.err
    assert "; list 2 is kept beside k, and peers that start" in typed.err
    revoked = Revoked.remembered(RunKey.read(place / "k"), place / "k", "mine")
    assert (revoked.number, revoked.peer_ids) == (2, (PEER,))
    assert set(revoked.token_ids) == {"0" * 16, token_id}
    (place / "k.revoked.json").write_text('{"mine": [1, ["00')
    said = "restore it from a copy, as without it those whom you revoked come in again"
    assert said in typed.refused(*REVOKE.split(), "0" * 16)


def test_a_link_may_come_from_a_file_or_from_stdin(
    place: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = link.rpartition("?token=")[2]
    assert Address.read("@link") == Address(("@link",), "@link")
    assert token not in str(guest_arguments("@link", Options(())))
    (place / "address").write_text(ADDRESS)
    for other in ("@address", "@later", ADDRESS):
        assert Address.read(other) == Address((other,))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{link}\n{token}\n"))
    assert Address.read("-") == Address((ADDRESS,), token)
    assert _from_stdin("swarm.token=-") == f"swarm.token='{token}'" and _from_stdin("a=-") == "a=-"
    with pytest.raises(ConfigError, match=r"^ADDRESS=- stands for a line on stdin, and none came"):
        Address.read("-")


OPEN = "open run: anyone who can reach this peer can join"
CLOSED = "closed run: invited peers only, by key abababababababab"
BOTH = "swarm.listen=[/ip4/127.0.0.1/tcp/0,/ip4/0.0.0.0/tcp/1]"


@pytest.mark.parametrize(
    ("overrides", "key", "text", "red"),
    [
        ("swarm=network", None, OPEN, True),
        (BOTH, None, OPEN, True),
        ("", None, "open run, on this machine only", False),
        ("swarm=network", "ab" * 32, CLOSED, False),
        ("swarm=network outer=data_parallel", None, "", False),
    ],
)
def test_whoever_starts_a_peer_is_told_who_can_join(
    overrides: str, key: str | None, text: str, red: bool, caplog: pytest.LogCaptureFixture
) -> None:
    screen, config = io.StringIO(), compose(overrides.split())
    keyed = config.model_copy(update={"run": config.run.model_copy(update={"key": key})})
    print_who_can_join(Console(file=screen, force_terminal=True, width=300), keyed)
    assert text in screen.getvalue() and ("\x1b[1;31m" in screen.getvalue()) is red
    assert screen.getvalue().count("\n") == bool(text)
    caplog.set_level(logging.INFO)
    log_lines(keyed)(Ready(first=True))
    said = [(one.levelno, one.getMessage()[: len(text)]) for one in caplog.records][:-2]
    assert said == [(logging.WARNING if red else logging.INFO, text)] * bool(text)
