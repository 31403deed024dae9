"""How many tokens a batch is: equal batches count alike, whatever is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.integrations.batches import tokens_of
from tests.support.loops import LastFlight
from tests.unit.integrations.test_callbacks import Going, callback, fit, pytestmark, trainer

__all__ = ["pytestmark"]  # of the libraries
IDS = torch.arange(12).reshape(2, 6)
MASK = (IDS % 6 < 4).long()
IMAGES = torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": IDS}, 12),
        ({"attention_mask": MASK, "labels": IDS, "input_ids": IDS}, 8),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)}, 12),  # no mask of tokens
        ({"chosen_input_ids": IDS, "chosen_attention_mask": MASK, "rejected_input_ids": IDS}, 20),
        ({"tokens": IDS, "targets": IDS}, 12),
        ({"idx": IDS, "mask": MASK}, 12),
        ((IDS, IDS), 12),
        ({"inputs_embeds": torch.zeros(2, 6, 8), "labels": IDS.where(MASK > 0, -100)}, 8),
        ({"input_ids": IDS.reshape(1, 12), "position_ids": IDS.reshape(1, 12)}, 12),  # packed
        ({"pixel_values": IMAGES, "labels": torch.tensor([1, 2])}, 2),
        ({"pixel_values": IMAGES.to(torch.uint8)}, 2),
        ((IMAGES, torch.tensor([1, 2])), 2),
        ([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], 3),
        (object(), 1),
    ],
)
def test_the_batch_alone_tells_how_many_tokens_it_is(batch: Any, count: int) -> None:
    assert int(tokens_of(batch)) == count


class Language(nn.Module):
    """Its loss never calls the whole of it, as that of a compiled one, or of a trainer with its own
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not self.training
        return {"loss": self.loss(input_ids)}

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten())


def compute_loss(model: Language, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    loss = model.loss(inputs["input_ids"])
    return (loss, {}) if return_outputs else loss


def test_a_trainer_counts_what_its_own_loss_reads(tmp_path: Path) -> None:
    """And not what it evaluates; again and again with one callback in several trainers."""
    item = {"input_ids": torch.arange(6), "labels": torch.arange(6)}
    own, told = callback(Going()), {"learning_rate": 1e-5, "gradient_accumulation_steps": 3}
    told |= {"eval_strategy": "steps", "eval_steps": 1}
    told |= {"remove_unused_columns": False, "prediction_loss_only": True}
    made = [trainer(tmp_path, own, model=Language(), data=[item] * 32, **told) for _ in range(2)]
    for one in (*made, *made):
        one.compute_loss = compute_loss
        own._membership._settings["runtime"]._node = Going()
        one.train()
        assert own.attachment.tokens == 4 * 3 * 2 * 6


def test_a_trainer_whose_batches_nobody_sees_is_refused(tmp_path: Path) -> None:
    own = callback(LastFlight())
    one = trainer(tmp_path, own)
    seen = one.training_step
    one.training_step = lambda *arguments: seen.__wrapped__(*arguments)
    with pytest.raises(ConfigError, match=r"^callbacks: this trainer calls no training_step, so"):
        one.train()


def test_lightning_counts_batches_too(tmp_path: Path) -> None:
    """Each micro-batch is two samples of four numbers."""
    own = callback(Going(), "DilocoLightningCallback")
    fit(tmp_path, own, accumulate_grad_batches=3)
    assert own.attachment.tokens == 4 * 3 * 2
