"""The loss of parameters other than the model's, with which a syncer checks contributions (`outer.spot_check`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from diloco import model as models
from diloco.data import Dataset
from diloco.swarm.node.spot import SEQUENCES, Loss

__all__ = ["loss_of"]


def loss_of(model: nn.Module, dataset: Dataset, holdout: Tensor, *, numbered: bool = True) -> Loss:
    """Losses for `Attachment.check_contributions`, in evaluation mode, beside a model that trains.

    Modules and buffers are copied, so the model does not change; parameters are not copied. Sequences are computed one
    at a time, which takes the least memory, and in fp32 whatever `train.precision` is: bf16 would round away the
    difference of two losses.

    Args:
        model: gives the architecture.
        dataset: holds the sequences that peers name by number.
        holdout: (N, T) int64; its first sequences are used where a peer names none.
        numbered: whether the numbers that peers name are numbers of this dataset.
    """
    modules = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    device = next(model.parameters()).device

    def loss(parameters: Mapping[str, Tensor], numbers: Sequence[int]) -> list[float]:
        def forward(**inputs: object) -> object:
            return functional_call(modules, dict(parameters), (), inputs)

        found = dataset.sequences(numbers) if numbers and numbered else None
        tokens = holdout[:SEQUENCES] if found is None else found  # (N, T)
        with torch.inference_mode():
            return [float(models.loss(forward, row.to(device))) for row in torch.split(tokens, 1)]

    return loss
