"""The loss plot: what is read from damaged and resumed runs, and that it becomes a picture without
a display."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from diloco.rundir.plot import Curve, held_out_curve, plot_losses, training_curves


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def train(peer: str, step: int, tokens: int, loss: Any) -> dict[str, Any]:
    return {"peer": peer, "inner_step": step, "tokens": tokens, "loss": loss}


def held_out(version: int, tokens: int, loss: Any) -> dict[str, Any]:
    return {"peer": "p0", "version": version, "tokens": tokens, "eval_loss": loss}


def evaluated(records: list[dict[str, Any]]) -> list[tuple[float | None, float]]:
    return [(point.tokens, point.loss) for point in held_out_curve(records)]


def test_curves_are_per_peer_over_the_swarm_clock() -> None:
    records = [
        held_out(0, 0, 5.0),
        *[train(peer, step, 0, 5.0 - step) for step in (1, 2) for peer in ("p1", "p0")],
        held_out(1, 80, 4.0),
        *[train(peer, step, 80, 5.0 - step) for step in (3, 4) for peer in ("p0", "p1")],
    ]
    training = training_curves(records)
    assert list(training) == ["p0", "p1"]
    assert training["p0"] == Curve([0, 40, 80, 120], [4.0, 3.0, 2.0, 1.0])
    ends = [train("p0", 4 * round_, 256 * round_, 5.0) for round_ in (1, 2, 3)]
    assert training_curves(ends)["p0"].x == [256, 512, 768], "as far as the held-out loss"
    assert evaluated(records) == [(0, 5.0), (80, 4.0)]


def test_steps_that_a_resumed_run_repeats_count_once() -> None:
    """A peer that rejoins with nothing keeps its history."""
    before = [train("p0", step, 10 * (step // 2), 9.0) for step in range(1, 6)]
    before += [held_out(1, 10, 9.0), held_out(2, 20, 9.0)]
    after = [train("p0", step, 10 * (step // 2), 1.0) for step in range(2, 8)]
    records = [*before, *after, held_out(2, 20, 1.0)]
    assert training_curves(records)["p0"].loss == [9.0] + [1.0] * 6
    assert evaluated(records) == [(10, 9.0), (20, 1.0)]
    again = [train("p0", 1, 10, 5.0), train("p0", 2, 20, 4.0), train("p0", 1, 90, 3.0)]
    assert training_curves(again)["p0"].loss == [5.0, 4.0, 3.0]


@pytest.mark.parametrize("peers", [0, 1, 9])
def test_any_number_of_peers_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    names = [f"_p{peer}" for peer in range(peers)]
    steps = [train(name, step, 10 * step, 5.0 / step) for step in range(1, 100) for name in names]
    path = write(tmp_path / "m", *steps, *[held_out(one, 100 * one, 4.0) for one in range(peers)])
    plot_losses(path, tmp_path / "loss.png", "no $\\formula$ and 100 %")
    pixels = image.imread(tmp_path / "loss.png")  # (H, W, 4)
    assert pixels.shape == (650, 1040, 4)
    coloured = (pixels[..., :3].max(-1) - pixels[..., :3].min(-1) > 0.2).sum()
    assert (coloured > 1000) == (peers > 0)
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "m"]
