"""Adapters: what is trained, what all peers have in common, and what others read of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.config import ModelConfig
from diloco.errors import ConfigError
from tests.support.models import SMALL, small_model

ROWS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def adapted(seed: int = 0, **settings: Any) -> nn.Module:
    values = {"name": "small", "config": SMALL, "adapter": "lora", "adapter_rank": 2, **settings}
    return models.build(ModelConfig(**values), seed)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def equal(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return ones.keys() == others.keys() and all(torch.equal(ones[k], others[k]) for k in ones)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_only_the_adapter_is_trained_and_it_is_that_of_the_seed(kind: str) -> None:
    model = adapted(adapter=kind)
    assert trained(model) and all("lora_" in name for name in trained(model))
    assert equal(trained(model), trained(adapted(adapter=kind)))
    assert not equal(trained(model), trained(adapted(1, adapter=kind)))
    plain = {name: p.detach() for name, p in small_model().named_parameters()}
    assert equal(models.base_parameters(model), plain)
    assert torch.allclose(models.loss(model, ROWS), models.loss(small_model(), ROWS), rtol=1e-6)
    with torch.device("meta"):
        values = {"name": "small", "config": SMALL, "adapter": kind, "adapter_rank": 2}
        outline = models.outline(ModelConfig(**values))
    assert models.num_trained(outline) == sum(p.numel() for p in trained(model).values())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_merged_or_written_as_peft_reads_it(tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted()
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05)
    expected = models.loss(model, ROWS)
    assert not torch.allclose(expected, models.loss(small_model(), ROWS), rtol=1e-3)
    models.save(model, tmp_path / "adapter")
    read: Any = PeftModel.from_pretrained(small_model(), str(tmp_path / "adapter"))
    assert torch.allclose(models.loss(read, ROWS), expected, rtol=1e-5)
    models.merge_adapter_(model)
    models.save(model, tmp_path / "merged")
    loaded = models.load(tmp_path / "merged")
    assert torch.allclose(models.loss(loaded, ROWS), expected, rtol=1e-5)
    assert [name for name, _ in loaded.named_parameters()] == list(models.base_parameters(loaded))


def test_layers_that_are_not_there_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"adapter_targets=q_poj: .*'q_poj'.*; name layers"):
        adapted(adapter_targets=("q_poj",))
