"""The tutorial, typed as it stands, by two machines that are two directories."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.pages import DOCS, typed
from tests.support.peers import Command, command

# minutes; `scripts/quickstart`
ELSEWHERE = ("diloco local experiment=quickstart", "diloco generate runs/quickstart")


class Machine:
    """A directory with a user of its own."""

    def __init__(self, place: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._stack, self._patch = place, stack, monkeypatch
        (place / "notes").mkdir(parents=True)
        for number in range(40):  # of 40 documents, 2 % are kept to evaluate
            text = f"{place.name} writes note {number} of many.\n" * 40
            (place / "notes" / f"{number}.txt").write_text(text)

    def start(self, line: str) -> Command:
        for kind in ("DATA", "CACHE"):
            self._patch.setenv(f"XDG_{kind}_HOME", str(self.place / kind))
        return self._stack.enter_context(command("-m", line, directory=self.place))

    def run(self, line: str) -> str:
        return self.start(line).done().stdout


def test_the_tutorial_works_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, done = "ADDRESS", []
    with ExitStack() as stack:
        first, second = (Machine(tmp_path / name, stack, monkeypatch) for name in ("one", "two"))
        for line in [one for one in typed(DOCS / "tutorial.md") if not one.startswith(ELSEWHERE)]:
            name = line.split()[1]
            if name == "train":  # a test stays on the loopback
                starter = first.start(line.replace(" swarm=network", ""))
                address = starter.says(r"^diloco join (\S+)")
            elif name == "join":
                joiner = second.start(line.replace("ADDRESS", address))
                joiner.says(r" v([1-9]\d*)/2000 ")
            elif name == "eval":
                joiner.interrupt()
                # "the same command again, and it comes back"
                joiner = second.start(f"diloco join {address}")
                joiner.says(r" v(\d+)/2000 .* training")
                starter.interrupt()
                joiner.interrupt()
                assert first.run(line)
            else:
                machine = second if "ADDRESS" in line else first
                output = machine.run(line.replace("ADDRESS", address))
                assert name != "local" or "equal anchors on all peers" in " ".join(output.split())
            done.append(name)
    assert done == "doctor local local train doctor join status eval export".split()
    assert (first.place / "model" / "config.json").is_file()
