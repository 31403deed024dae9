"""The pages for volunteers are followed word for word by a public machine and two homes.

Each machine is a network namespace. Those at home are behind routers that let nobody in.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.harness.links.links import NETWORK, Links, networks, unavailable
from tests.harness.links.pipe import Shape
from tests.support.pages import DOCS, typed
from tests.support.peers import Command, command, typed_as
from tests.support.places import ROOT

PUBLIC, HOME, OTHER_HOME = range(3)
TRAINS = r" v([1-9]\d*)/"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=f"namespaces: {unavailable()}"),
]


class Machines:
    """Machines with one user each, who types commands of a page."""

    def __init__(self, links: Links, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.links, self.place, self.patch = links, place, patch
        for machine in (PUBLIC, HOME, OTHER_HOME):
            links.add(machine)
            (place / str(machine)).mkdir()

    def type(self, machine: int, line: str, **words: str) -> AbstractContextManager[Command]:
        """Run a command on a machine, with `words` in place of those of the page."""
        for name, value in {**words, "203.0.113.7": f"{NETWORK}.1"}.items():
            line = line.replace(name, value)
        inside = [*self.links.command(machine), sys.executable, "-m", *shlex.split(line)]
        home = self.place / str(machine)
        for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            self.patch.setenv(name, str(home / name))
        return command(line, directory=home, start=typed_as(inside))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    with networks(None, Shape(), homes=True) as links:
        assert isinstance(links, Links)
        yield Machines(links, tmp_path, monkeypatch)


def lines_of(page: Path) -> dict[str, str]:
    """By its first word, the command of a page; of two with one word the first."""
    lines = typed(page)
    return {line.split()[1]: line for line in reversed(lines)}


def test_one_of_two_can_be_reached(machines: Machines) -> None:
    """nat.md, first part; the front page's commands in the home."""
    here, there = lines_of(DOCS / "nat.md"), lines_of(ROOT / "README.md")
    with machines.type(PUBLIC, here["train"]) as starter:
        address = starter.says(r"^diloco join (\S+)")
        given = {"/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...": address}
        with machines.type(HOME, there["doctor"], **given) as doctor:
            doctor.done()
        with machines.type(HOME, there["join"], **given) as joiner:
            joiner.says(TRAINS)
            starter.says(TRAINS)
            with machines.type(HOME, there["status"]) as status:
                assert " 2 peers" in status.done().stdout, status.said
            joiner.interrupt()
        starter.interrupt()


def test_neither_can_be_reached(machines: Machines) -> None:
    """nat.md, the host in the middle; volunteer.md in both homes."""
    host, there = lines_of(DOCS / "nat.md")["host"], lines_of(DOCS / "volunteer.md")
    with machines.type(PUBLIC, host) as middle:
        address = middle.says(r"^diloco join (\S+)")
        with machines.type(HOME, there["doctor"], ADDRESS=address) as doctor:
            doctor.done()
        with (
            machines.type(HOME, there["join"], ADDRESS=address) as one,
            machines.type(OTHER_HOME, there["join"], ADDRESS=address) as other,
        ):
            one.says(TRAINS)
            other.says(TRAINS)
            one.interrupt()
            other.interrupt()
        with machines.type(HOME, there["start"], ADDRESS=address) as worker:
            worker.done()
        with machines.type(HOME, there["status"]) as status:
            status.done()
        with machines.type(HOME, there["logs"]) as logs:
            logs.says("(idle)")
            logs.interrupt()
        with machines.type(HOME, there["stop"]) as stop:
            stop.done()
        middle.interrupt()
