"""Each file of scripts/examples is run as its first lines say: a starter, and a second peer at the
printed address."""

import re
from pathlib import Path

import pytest

from tests.support.peers import command, summary_of
from tests.support.places import EXAMPLES
from tests.support.slow import slow

DATA = re.compile(
    r"^first (?:batch|conversation|file): (.+)$|in an order of its own \((seed \d+)\)$",
    re.MULTILINE,
)


def anchors(output: str, directory: Path) -> str:
    """What a peer printed at its end; of a command it is in the run's directory."""
    if match := re.search(r"anchors (\w{64})$", output.strip()):
        return match[1]
    [file] = directory.rglob("summary.json")
    return str(summary_of(file.parent)["peers"][0]["anchor_digest"])


# One loop of its own and one of a library; the others are played each night.
@pytest.mark.parametrize(
    "file", [one if one.stem in ("plain_torch", "trainer") else slow(one) for one in EXAMPLES]
)
@pytest.mark.usefixtures("own_home")
def test_two_peers_of_an_example_have_different_data_and_end_with_the_same_model(
    file: Path, tmp_path: Path
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with command(str(file), directory=places[0]) as starter:
        with command(str(file), starter.address(), directory=places[1]) as joiner:
            pair = [starter.done(), joiner.done()]
            one, other = (DATA.findall(peer.stdout + peer.stderr)[0] for peer in pair)
    homes = (places[0], tmp_path / "home")  # who joins by a command keeps its run at home
    here, there = (anchors(peer.stdout, at) for peer, at in zip(pair, homes, strict=True))
    assert here == there and one != other
