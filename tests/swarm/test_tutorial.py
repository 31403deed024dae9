"""The tutorial, typed as it stands, by two machines that are two directories."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import warm
from tests.support.pages import DOCS, typed
from tests.support.peers import DEADLINE_S

# minutes; `scripts/quickstart`
ELSEWHERE = ("diloco local experiment=quickstart", "diloco generate runs/quickstart")


PATIENCE_S = DEADLINE_S


class Machine:
    """A directory with a user of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "notes").mkdir(parents=True)
        for number in range(40):  # of 40 documents, 2 % are kept to evaluate
            (place / "notes" / f"{number}.txt").write_text(
                f"{place.name} writes note {number} of many.\n" * 40
            )
        self.environment = os.environ | {
            "XDG_DATA_HOME": str(place / "data"),
            "XDG_CACHE_HOME": str(place / "cache"),
        }

    def start(self, line: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", *shlex.split(line)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return warm.Popen(arguments, cwd=self.place, env=self.environment, text=True, **streams)

    def run(self, line: str) -> str:
        process = self.start(line)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{line}\n{said}"
        return said


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    """The first match of the pattern in what the process says; its end before that is a failure."""
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError("".join(said))


def stop(process: subprocess.Popen[str]) -> None:
    """Ctrl+C: it leaves cleanly."""
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said


def test_the_tutorial_works_as_it_is_typed(tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "first"), Machine(tmp_path / "second")
    first_peer: subprocess.Popen[str] | None = None
    second_peer: subprocess.Popen[str] | None = None
    address, done = "ADDRESS", []
    try:
        for line in typed(DOCS / "tutorial.md"):
            if line.startswith(ELSEWHERE):
                continue
            command = line.split()[1]
            if command == "train":
                # a test stays on the loopback
                first_peer = first.start(line.replace(" swarm=network", ""))
                address = wait_for(first_peer, r"^diloco join (\S+)")
            elif command == "join":
                second_peer = second.start(line.replace("ADDRESS", address))
                wait_for(second_peer, r" v([1-9]\d*)/2000 ")
            elif command == "eval":
                stop(second_peer)
                # "the same command again, and it comes back"
                second_peer = second.start(f"diloco join {address}")
                wait_for(second_peer, r" v(\d+)/2000 .* training")
                stop(first_peer)
                stop(second_peer)
                assert first.run(line)
            else:
                said = (second if address in line or "ADDRESS" in line else first).run(
                    line.replace("ADDRESS", address)
                )
                assert "equal anchors on all peers" in " ".join(said.split()) or command != "local"
            done.append(command)
    finally:
        for peer in (first_peer, second_peer):
            if peer is not None and peer.poll() is None:
                peer.kill()
                peer.wait()
    assert done == [
        "doctor",
        "local",
        "local",
        "train",
        "doctor",
        "join",
        "status",
        "eval",
        "export",
    ]
    assert (first.place / "model" / "config.json").is_file()
