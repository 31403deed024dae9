"""A run that trains an adapter: what of it travels, and a base that is another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diloco import model as models
from diloco.config import Config, compose
from diloco.errors import CheckpointError, ConfigError
from diloco.train import start_files
from tests.support.models import small_model
from tests.support.simulated import digests, simulated

pytestmark = pytest.mark.usefixtures("own_home")


def chats(place: Path) -> Path:
    rows = [{"prompt": f"{n} + {n} = ", "completion": f"{2 * n}"} for n in range(400)]
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def test_a_swarm_fine_tunes_an_adapter_on_conversations(tmp_path: Path) -> None:
    """Of the model only the adapter travels, and all end with the same."""
    data = ("data=chat", f"data.path={chats(tmp_path / 'chats.jsonl')}", "data.sequence_length=64")
    sent = {}
    for adapter in ("none", "lora"):
        overrides = (*data, f"adapter={adapter}", "model.adapter_rank=2", "local.peers=2")
        outcome = simulated(tmp_path / adapter, *overrides)
        assert len(digests(outcome)) == 1
        sent[adapter] = sum(peer.bytes_sent for peer in outcome.summary.peers)
    assert sent["lora"] < sent["none"] / 2


def started(base: Path) -> Config:
    return start_files.resolved(
        compose(["model=pretrained", f"model.path={base}", "adapter=lora", "data.tokenizer=bytes"])
    )


def test_an_adapter_is_of_one_base_only(tmp_path: Path) -> None:
    """One tensor that differs is enough; and the base does not travel."""
    model = small_model(max_position_embeddings=256)
    models.save(model, tmp_path / "base")
    config = started(tmp_path / "base")
    start_files.keep(config, models.build(config.model, 0))
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1.0
    models.save(model, tmp_path / "other")
    there = {"directory": str(tmp_path / "other")}
    other = config.model_copy(update={"model": config.model.model_copy(update=there)})
    with pytest.raises(CheckpointError, match="an adapter fits only its own base"):
        start_files.keep(other, models.build(other.model, 0))
    nowhere = config.model.model_copy(update={"directory": None, "path": None})
    with pytest.raises(ConfigError, match=r"do not travel; set model\.directory"):
        models.build(nowhere, 0)
