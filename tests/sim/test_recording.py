"""A recording of the events of a core plays again, and leads to the same tips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco.swarm.node import recording
from diloco.swarm.node.recording import NAME, Recording, read
from tests.support.places import script_module
from tests.support.stories import Story, story


def recorded(swarm: Story, path: Path, name: str) -> None:
    """What happens to that peer is recorded from its first event on."""
    watch = swarm.on_life

    def observe(life: Any) -> None:
        watch(life)
        if life.name == name:
            one, look = Recording(path, life.node.core.facts), life.node.context.tap
            life.node.context.tap = lambda event, now: (one.event(event, now), look(event, now))

    swarm.on_life = observe


def plays(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["replay", str(path)])
    script_module("replay").main()
    return capsys.readouterr().out


def test_a_recording_leads_to_the_same_tips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with story(0, fragments=2, loss=0.1) as swarm:
        recorded(swarm, tmp_path / NAME, "b")
        swarm.starts("abc", min_peers=3)
        nodes = swarm.run_to_the_end()
        tips = {
            f.index: (f.tip.head.number, f.tip.head.id) for f in nodes["b"].core.facts.fragments
        }
    said = plays(tmp_path / NAME, monkeypatch, capsys)
    assert said.splitlines()[-1] == str(tips) and "-> Capture" in said


def test_a_recording_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "MOST_BYTES", 200_000)
    with story(0, fragments=2, outer_steps=20) as swarm:
        recorded(swarm, tmp_path / NAME, "b")
        swarm.starts("abc", min_peers=3)
        swarm.run_to_the_end()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["recording.bin", "recording.old"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 210_000
    (_, start), *_ = read(tmp_path / NAME)
    assert start.tips[0].head.number > 5
    assert "Status" in plays(tmp_path / NAME, monkeypatch, capsys)
