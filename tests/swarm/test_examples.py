"""Each file of scripts/examples is run as its first lines say: a starter, and a second peer at the
printed address."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.peers import Command, command, eventually
from tests.support.places import EXAMPLES
from tests.support.slow import slow

SLOW_S = 280.0  # a busy machine; a laptop takes a tenth of it


DATA = re.compile(
    r"^first (?:batch|conversation|file): (.+)$|in an order of its own \((seed \d+)\)$",
    re.MULTILINE,
)


def printed_address(starter: Command) -> str:
    def found() -> str | None:
        text = starter.stdout + starter.stderr
        assert starter.process.poll() is None, text
        match = re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+(?=['\n])", text)
        return match and match[0]

    return eventually(found, "an address")


def ended(peer: Command) -> str:
    assert peer.wait(SLOW_S) == 0, f"{peer.stdout}\n{peer.stderr}"
    return peer.stdout


def anchors(output: str, directory: Path) -> str:
    """What a peer printed at its end; of a command it is in the run's directory."""
    if match := re.search(r"anchors (\w{64})$", output.strip()):
        return match[1]
    [summary] = directory.rglob("summary.json")
    return str(json.loads(summary.read_text())["peers"][0]["anchor_digest"])


# One loop of its own and one of a library; the others are played each night.
@pytest.mark.parametrize(
    "file", [one if one.stem in ("plain_torch", "trainer") else slow(one) for one in EXAMPLES]
)
def test_two_peers_of_an_example_have_different_data_and_end_with_the_same_model(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(places[1] / "home"))
    with command(str(file), directory=places[0]) as starter:
        with command(str(file), printed_address(starter), directory=places[1]) as joiner:
            outputs = [ended(one) for one in (starter, joiner)]
            one, other = (DATA.findall(peer.stdout + peer.stderr)[0] for peer in (starter, joiner))
    here, there = (anchors(*both) for both in zip(outputs, places, strict=True))
    assert here == there
    assert one != other
