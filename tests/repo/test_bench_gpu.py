"""`scripts/bench_gpu`: what it counts, what it says of what it cannot run, and that it works without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from diloco import model as models
from diloco.config import compose
from tests.support.scripts import script_module


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script_module("bench_gpu")


def test_the_flops_of_a_token_are_those_of_its_matrices_and_of_attention(bench: ModuleType) -> None:
    with torch.device("meta"):
        tied, untied = (models.outline(compose([f"model={name}"]).model) for name in ("20m", "1b"))
    # 6 layers, width 256, 704 inside, 32,000 tokens, tied; norms are counted, too.
    matrices = 6 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256) + 256 + 32000 * 256
    assert bench.flops_per_token(tied, 1024) == 6 * matrices + 6 * 6 * 256 * 1024
    parameters = models.num_parameters(untied) - 32000 * 2048
    assert bench.flops_per_token(untied, 1024) == 6 * parameters + 6 * 22 * 2048 * 1024


@pytest.mark.parametrize(
    ("model", "steps", "mode"), [("smoke", 24, "data_parallel"), ("150m", 60, "diloco"), ("150m", 120, "streaming")]
)
def test_a_row_is_a_valid_run(bench: ModuleType, model: str, steps: int, mode: str, tmp_path: Path) -> None:
    options = {"model": model, "mode": mode, "steps": steps, "devices": ["cpu", "cpu"], "overrides": []}
    config = bench.config_of(1, options, tmp_path)
    assert config.outer.sync_every == steps // 3 and bool(config.outer.overlap) == (mode == "streaming")
