"""A recording of the events of a core plays again."""

from pathlib import Path
from typing import Any

import pytest

from diloco.swarm.node import recording
from diloco.swarm.node.recording import NAME, Recording, read
from tests.support.places import script_module
from tests.support.stories import story


@pytest.mark.parametrize(("most", "outer_steps", "files"), [(10**8, 3, 1), (200_000, 21, 2)])
def test_a_recording_keeps_the_newest_and_a_whole_one_leads_to_the_same_tips(
    most: int,
    outer_steps: int,
    files: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recording, "MOST_BYTES", most)
    with story(0, fragments=2, outer_steps=outer_steps, loss=0.1) as swarm:
        watch = swarm.on_life

        def observe(life: Any) -> None:
            """What happens to b is recorded from its first event on."""
            watch(life)
            if life.name == "b":
                kept, look = Recording(tmp_path / NAME, swarm.facts("b")), life.node.context.tap
                life.node.context.tap = lambda *event: (kept.event(*event), look(*event))

        swarm.on_life = observe
        swarm.starts("abc", min_peers=3)
        facts = swarm.run_to_the_end()["b"].core.facts
    tips = {f.index: (f.tip.head.number, f.tip.head.id) for f in facts.fragments}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["recording.bin", "recording.old"][:files]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < most + 10_000
    (_, start), *_ = read(tmp_path / NAME)
    assert (start.tips[0].head.number > 5) == (files == 2)
    for name in reversed(names):  # the newest last, which may have begun just before the end
        monkeypatch.setattr("sys.argv", ["replay", str(tmp_path / name)])
        script_module("replay").main()
    said = capsys.readouterr().out
    assert "Status" in said and "-> Capture" in said
    assert said.splitlines()[-1] == str(tips) or files == 2, "what was under way is not recorded"
