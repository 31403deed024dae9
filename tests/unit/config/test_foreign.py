"""What comes from somebody else: a manifest, what it may ask of a volunteer's machine, and
addresses as people copy them."""

import io
import json
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import redirect_stdout
from hashlib import sha512
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco import hub
from diloco.admission import RunKey, Token
from diloco.cli import join as asking
from diloco.config import Config, Manifest, SwarmConfig, compose
from diloco.config.address import Address, address_error, host_of, reachability
from diloco.config.manifest import check_foreign
from diloco.errors import ConfigError, DataError
from diloco.swarm.client.ask import parse_manifest
from tests.support.errors import error_text

COMMIT = "a1" * 20
ON_THE_HUB = [
    *("data=hub", f"data.name=org/set@{COMMIT}", "data.subset=en"),
    *(f"data.tokenizer=org/words@{COMMIT}", "model=pretrained", f"model.path=org/model@{COMMIT}"),
]


def manifest(*overrides: str, **edits: Any) -> str:
    """The text of a manifest; an edit such as `data__name` changes it in a way that no honest peer
    would."""
    content = json.loads(compose(["experiment=quickstart", *overrides]).manifest().to_json())
    for key, value in edits.items():
        group, name = key.split("__")
        content[group][name] = value
    return json.dumps(content)


def test_a_run_of_this_package_or_of_a_commit_can_be_joined() -> None:
    for overrides in ([], ON_THE_HUB, ["data=text", "data.path=mine/"]):
        assert parse_manifest(manifest(*overrides)).run.id == "quickstart"


NAMES = ("/home/alice/notes", "../notes", "json", "org/../notes")
NO_NAME = " of the run is no name on the Hugging Face hub"
HIDDEN = "of the run holds characters that nobody can see"
PATH = {"model__path": "/home/alice/private", "model__config": {}}
CACHE = "/home/alice/.cache"


@pytest.mark.parametrize(
    ("overrides", "edits", "why"),
    [
        ([], PATH, "model.path=/home/alice/private of the run"),
        *((["data=hub"], {"data__name": name}, f"data.name={name}{NO_NAME}") for name in NAMES),
        ([], {"data__tokenizer": CACHE}, f"data.tokenizer={CACHE}{NO_NAME}"),
        ([], {"data__tokenizer": "org/words"}, "data.tokenizer=org/words of the run has no commit"),
        (["data=hub"], {}, "data.name=allenai/c4 of the run has no commit, so nobody knows what"),
        (ON_THE_HUB, {"data__subset": "\x1b]0;owned\x07"}, HIDDEN),
    ],
)
def test_a_manifest_with_paths_of_ours_is_refused(
    overrides: list[str], edits: dict[str, Any], why: str
) -> None:
    assert why in error_text(ConfigError, parse_manifest, manifest(*overrides, **edits))


def test_a_name_that_is_also_a_path_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "set").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^data\.name=org/set of the run is also a path here"):
        check_foreign(Manifest.from_json(manifest(*ON_THE_HUB)))


def test_nothing_that_was_written_is_interpolated(tmp_path: Path) -> None:
    for text in ("${oc.env:HOME}", "x${bad", "${run.id}"):
        plain = manifest(data__tokenizer=text)
        deep = manifest(model__config={text: 1, "vocab_size": 256})
        for one in (plain, plain.replace("$", "\\u0024"), deep):
            with pytest.raises(ConfigError, match=r"^manifest holds \$\{"):
                Manifest.from_json(one)
    file = tmp_path / "config.yaml"
    file.write_text(compose([]).to_yaml().replace("tokenizer: bytes", "tokenizer: ${oc.env:HOME}"))
    with pytest.raises(ConfigError, match=r"holds \$\{\.\.\.\}, which is resolved in configs/ on"):
        compose([], base=file)


def test_who_starts_a_run_that_nobody_can_join_is_told() -> None:
    def told(*overrides: str) -> bool:
        return any("nobody can join this run" in line for line in compose(overrides).warnings())

    assert told("data=hub", "swarm=network")
    for fine in (["data=hub"], ["swarm=network"], [*ON_THE_HUB, "swarm=network"]):
        assert not told(*fine)


def test_what_will_be_fetched_trained_and_sent_is_shown() -> None:
    def terms(*overrides: str) -> str:
        return "\n".join(asking._terms(compose(overrides), 36_000_000, 2e9, "CPU"))

    shown = terms(*ON_THE_HUB)
    for part in (
        "diloco: anybody may have started it, and anybody may join",
        "org/model at a1a1a1a1a1a1, published by org, 36.0M parameters",
        "org/set at a1a1a1a1a1a1, published by org\n",
        "org/words at a1a1a1a1a1a1, published by org",
        "trains on CPU, in some 2.0 GB of memory; writes to ",
        "parts of the text that it trained on can be read out of that",
    ):
        assert part in shown
    own = terms("data=text", "data.path=diary.txt", f"run.key={'ab' * 32}")
    assert "YOUR files: diary.txt" in own and "tiny, random weights" in own
    assert "its owner has key abababababababab" in own


def test_a_volunteer_agrees_on_a_terminal_or_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked where nothing comes from elsewhere."""
    own = compose(["data=text", "data.path=diary.txt"])

    def ask(typed: str | None, yes: bool = False, config: Config = own) -> str:
        """What is shown; `typed` is the answer on a terminal, None where there is none."""
        stdin = io.StringIO()
        stdin.isatty = lambda: typed is not None  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr(click, "confirm", lambda text, default: typed == "y")
        with redirect_stdout(screen := io.StringIO()):
            asking._ask(config, ["diary.txt"], yes)
        return screen.getvalue()

    assert ask("n", config=compose(["experiment=quickstart"])) == ""
    assert ask("y") == ask(None, yes=True) == "diary.txt\n"
    with pytest.raises(ConfigError, match="nothing was fetched, and this machine has not joined"):
        ask("n")
    with pytest.raises(ConfigError, match=r"no terminal to ask on; if you agree .* add --yes$"):
        ask(None)


def test_files_of_a_commit_are_weighed_before_they_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    sizes = {"config.json": 700, "a.safetensors": 10**18}
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    asked: list[dict[str, Any]] = []

    def info(self: object, name: str, **given: Any) -> SimpleNamespace:
        asked.append(given)
        return SimpleNamespace(siblings=files)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert hub.files_at("model.path", "org/model", COMMIT, ("config.json",)) == tmp_path
    assert asked[-1]["revision"] == COMMIT and asked[-1]["files_metadata"] is True
    with pytest.raises(DataError, match=r"^model\.path: org/model has 10{9}\.0 GB, and .* has ro"):
        hub.files_at("model.path", "org/model", COMMIT, hub.MODEL_FILES)
    with pytest.raises(DataError, match=r"config\.json of org/model has 700 bytes, and no honest"):
        hub.files_at("model.path", "org/model", COMMIT, ("config.json",), 600)


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
