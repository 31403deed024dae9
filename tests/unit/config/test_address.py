"""Addresses as people copy them: what is wrong with one is said, and what is right is kept."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha512
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.admission import RunKey, Token
from diloco.config import SwarmConfig, compose
from diloco.config.address import Address, address_error, host_of, reachability
from diloco.errors import ConfigError
from tests.support.errors import error_text

ED25519 = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
RSA = "QmczQ58j3TwhWbL1MZkbdSCjM5LQFxyJ85RP1WecJwrcCV"
TOKEN = b"".join(sha512(bytes([one])).digest() for one in range(4))
SECRET = urlsafe_b64encode(TOKEN).decode().rstrip("=")
GOOD = f"/ip4/203.0.113.7/tcp/4100/p2p/{ED25519}"
OTHER = f"/ip6/2001:db8::7/udp/4100/quic/p2p/{RSA}"


def test_an_address_as_peers_print_it_is_taken() -> None:
    dns = f"/dns/peer.example.org/tcp/1/p2p/{RSA}"
    local = f"/dns4/localhost/tcp/65535/p2p/{ED25519}"
    relayed = f"/ip4/203.0.113.7/tcp/4100/p2p/{RSA}/p2p-circuit/p2p/{ED25519}"
    for address in (GOOD, OTHER, dns, local, relayed):
        assert address_error(address) is None
        assert Address.parse(f"  {address}\n") == Address((address,))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is damaged; one looks like /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo..."),
        ("https://example.org/swarm", "it is the address of a web page"),
        ("203.0.113.7:4100", "it is HOST:PORT; write /ip4/203.0.113.7/tcp/4100/p2p/PEER_ID"),
        ("example.org:4100", "it is HOST:PORT; write /dns/example.org/tcp/4100/p2p/PEER_ID"),
        (GOOD.replace("203.0.113.7", "203.0.113.700"), "'203.0.113.700' is no IP4 address"),
        (GOOD.replace("203.0.113.7", "2001:db8::7"), "'2001:db8::7' does not belong after /ip4"),
        (GOOD.replace("203.0.113.7", "0.0.0.0"), "0.0.0.0 is where a peer listens"),
        (GOOD.replace("4100", "70000"), "port 70000 is not one of 1 to 65535"),
        ("/ip4/203.0.113.7/tcp/4100", "/p2p/PEER_ID is missing at its end"),
        (GOOD[:-3], f"its peer id {ED25519[:-3]} is cut off or damaged"),
        (f"{GOOD}.", "it ends in '.', pasted along; drop it"),
        (f"diloco:/{GOOD}?token=", "its token is damaged or missing"),
    ],
)
def test_a_damaged_address_is_refused_with_what_is_wrong(text: str, why: str) -> None:
    reason = error_text(ConfigError, Address.parse, text)
    assert why in reason and reason.startswith("ADDRESS=")


def test_a_link_holds_several_addresses_and_the_token() -> None:
    address = Address((GOOD, OTHER), "ab.c_D-9")
    assert str(address) == f"diloco:/{GOOD},{OTHER[1:]}?token=ab.c_D-9"
    assert Address.parse(str(address)) == address
    assert Address.parse(f"{GOOD},{OTHER}") == Address((GOOD, OTHER))
    assert Address.parse("@runs/mine/address") == Address(("@runs/mine/address",))


AROUND = ("{}", " {}  ", '"{}"', "\u201c{}\u201d", "\u00ab{}\u00bb", "<{}>", "\u200b{}\ufeff")
AROUND += ("$ diloco join {} --yes", "{} # at home", "diloco: others join with address='{}'")


LINES = st.tuples(st.sampled_from((GOOD, OTHER)), st.sampled_from(AROUND))
ENCODINGS = st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"))
BETWEEN = st.sampled_from(("\n", "\r\n", "\n\n \n", "\n# and\n"))


@given(st.lists(LINES, min_size=1, max_size=4), ENCODINGS, BETWEEN)
def test_a_file_of_any_editor_is_read_as_it_is_meant(
    lines: list[tuple[str, str]], encoding: str, between: str
) -> None:
    with TemporaryDirectory() as directory:
        file = Path(directory, "address")
        text = between.join(around.format(one) for one, around in [*lines, ("", "")])
        file.write_bytes(text.encode(encoding))
        assert Address.read(f"@{file}").resolved().peers == tuple(one for one, _ in lines)
        assert SwarmConfig.parse({"initial_peers": [f" {GOOD}\n"]}).initial_peers == (GOOD,)


def test_a_file_that_holds_something_else_is_named_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "address"
    link, note = f"diloco:/{GOOD}?token={SECRET[:-9]}!", f"{GOOD}\nnothing of the kind: {SECRET}"
    for text in (SECRET, link, note):
        file.write_text(text)
        reason = error_text(ConfigError, lambda: Address.read(f"@{file}").resolved())
        assert reason.startswith(f"ADDRESS=@{file}") and not shared(reason, SECRET)


def shared(text: str, secret: str, length: int = 10) -> bool:
    """Whether so many characters of a secret stand in a text."""
    return any(secret[at : at + length] in text for at in range(len(secret) - length + 1))


@pytest.mark.parametrize("cut", [slice(None), slice(40), slice(-43, None)])
@pytest.mark.parametrize(
    "place",
    ["{}", "@{}", GOOD + "?token={}", "diloco:/" + GOOD + "?tokn={}", "{}!", "'{}", "{0}{0}"],
)
def test_no_error_shows_a_part_of_a_token_wherever_it_was_put(place: str, cut: slice) -> None:
    typed = place.format(SECRET[cut])
    calls: tuple[Callable[[], object], ...] = (
        lambda: SwarmConfig.parse({"initial_peers": [typed]}),
        lambda: Address.read(typed).resolved(),
        lambda: Token.read(typed + "A"),
        lambda: compose([f"swarm.token={typed}?"]),
        lambda: compose([f"swarm.tokn={typed}"]),
        lambda: compose([typed]),
        lambda: RunKey.read(Path(typed)),
    )
    said = [error_text(ConfigError, call) for call in calls[place == "@{}" :]]
    assert not any(shared(text, SECRET) for text in said), said


def test_the_host_of_an_address_and_from_where_it_is_reached() -> None:
    for where, addresses in (
        ("loopback", "/ip4/127.0.0.1/tcp/1 /ip6/::1/tcp/1 /dns/localhost/tcp/1"),
        ("LAN", "/ip4/192.168.1.7/tcp/1 /ip4/100.64.0.3/tcp/1"),
        ("public", "/ip4/8.8.8.8/tcp/1 /dns/example.org/tcp/1"),
    ):
        assert {reachability(address) for address in addresses.split()} == {where}
    assert (host_of(GOOD), host_of("nothing")) == ("203.0.113.7", "")
