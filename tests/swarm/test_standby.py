"""When a peer pauses: what the machine shows, what was sent today, what the user says; and how it comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from diloco.cli import runs
from diloco.errors import ConfigError
from diloco.rundir.here import runs_here
from tests.support.peers import SMOKE, command, eventually, json_lines


@pytest.mark.slow
def test_a_volunteer_that_pauses_comes_back_as_the_same_peer_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    begin = ["-m", "diloco", "train", *SMOKE, "run.dir=runs/mine", "budget.outer_steps=40000", "eval.every=0"]

    monkeypatch.chdir(tmp_path)

    def states() -> dict[str, str]:
        return {run.where.parts[0]: run.state for run in runs_here()}

    def events(kind: str) -> list[dict[str, object]]:
        return [event for event in json_lines(joined / "events.jsonl") if event["kind"] == kind]

    with command(*begin, "train.step_delay_s=0.01", directory=tmp_path) as starter:
        eventually(lambda: (tmp_path / "runs/mine/address").exists(), "an address")
        with command("-m", "diloco", "join", "@runs/mine/address", "train.threads=1", directory=tmp_path) as guest:
            joined = tmp_path / "home/diloco/peer-0/runs/smoke"
            eventually(lambda: "first contribution: in outer step" in guest.stdout, "a first contribution")
            assert runs.pause(joined) == 0
            eventually(lambda: states() == {"runs": "training", "/": "paused"}, "a pause")
            paused_at = version(starter.stdout)
            with pytest.raises(ConfigError, match="pauses already"):
                runs.pause(joined)
            eventually(lambda: version(starter.stdout) > paused_at + 2, "the other to train on")
            assert runs.resume(None) == 0, "it is the only one that was paused"
            eventually(lambda: version(guest.stdout) > paused_at + 2, "the guest to train on")
            guest.process.send_signal(signal.SIGINT)
            guest.done()
        starter.process.send_signal(signal.SIGINT)
        starter.done()
    assert "paused: diloco pause" in guest.stdout and states() == {"runs": "left", "/": "left"}
    [paused], [came_back], [resumed] = events("pause"), events("go_on"), events("resume")
    assert came_back["paused_s"] > 0 and resumed["version"] == paused["version"]  # type: ignore[operator]
    rows = (tmp_path / "runs/mine/contributions.csv").read_text().splitlines()[1:]
    assert len(rows) == 2, "the guest came back by the key that it had"
    # At the ends of rounds: steps of a round that the pause broke off are in no checkpoint, as after Ctrl+C.
    steps = [line["inner_step"] for line in json_lines(joined / "metrics.jsonl") if "bytes_sent" in line]
    [mine] = json.loads((joined / "summary.json").read_text())["peers"]
    # It goes on from the last boundary: steps that it took after that are taken again.
    assert steps[-1] <= mine["steps"] and mine["tokens"] == 64 * mine["steps"]


def version(shown: str) -> int:
    """The newest outer step in the lines of a table without a terminal."""
    found = [word for line in shown.splitlines() for word in line.split() if word[:1] == "v" and word[1:2].isdigit()]
    return int(found[-1][1:].partition("/")[0]) if found else 0
