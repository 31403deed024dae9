"""Measures the input of a plan: the number of parameters of a model, and the time of an inner step here."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from diloco import model as models
from diloco.config import Config, ModelConfig
from diloco.errors import ConfigError
from diloco.model.files import one_line, transformers
from diloco.train.island import Island
from diloco.train.loop import autocast

__all__ = ["parameters_of", "step_seconds", "without_values"]

WARMUP_STEPS = 2
TIMED_STEPS = 5


def parameters_of(settings: ModelConfig) -> int:
    """The number of parameters; tied ones count once. Allocates no weights, unless `model.path` holds them.

    Raises:
        ConfigError: as for `diloco.model.build`.
    """
    return models.num_parameters(without_values(settings, "meta"))


def without_values(settings: ModelConfig, device: str) -> nn.Module:
    """The model without values: on PyTorch's `meta` device, or on any device under `FakeTensorMode`.

    Allocates no weights, unless `model.path` holds them.

    Raises:
        ConfigError: as for `diloco.model.build`.
    """
    if settings.path is not None:
        loaded: nn.Module = models.load(settings.path, key="model.path")
        return loaded
    config = models.config_of(settings)
    try:
        with torch.device(device):
            built: nn.Module = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # its layers raise various types
        raise ConfigError(
            f"model.config: cannot build this {settings.model_type}: {one_line(error)}; change it"
        ) from error
    built.train()
    return built


def step_seconds(config: Config) -> float:
    """Median seconds of an inner step of this configuration on this machine, on random tokens.

    Takes the memory of training: weights, gradients, AdamW's two moments and the activations of a batch.
    """
    island = Island.from_environment(config.train.device)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    model = models.build(config.model, config.run.seed, sequence_length=config.data.sequence_length).to(island.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    vocabulary = 256 if config.data.tokenizer == "bytes" else model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (config.inner.batch_size, config.data.sequence_length)
    seconds = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        tokens = torch.randint(vocabulary, shape, generator=generator).to(island.device)  # (B, T)
        began_at = time.perf_counter()
        with autocast(config, island.device):
            loss = models.loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # waits for the device
        if island.device.type == "cuda":
            torch.cuda.synchronize(island.device)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds[WARMUP_STEPS:])
