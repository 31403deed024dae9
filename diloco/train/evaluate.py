"""Evaluation of parameters: the loss on held-out text, and text that the model writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach.devices import forked_random, seed_random
from diloco.attach.ranks import RankGroup
from diloco.data import Tokenizer
from diloco.errors import ConfigError, DataError, DivergedError


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean cross entropy in nats per predicted token, its exponential, and bits per byte with a
    tokenizer."""

    loss: float
    perplexity: float
    tokens: int
    bits_per_byte: float | None


def evaluate(
    model: nn.Module,
    holdout: Tensor,
    batch_size: int,
    device: torch.device | str,
    tokenizer: Tokenizer | None = None,
    ranks: RankGroup | None = None,
) -> EvalResult:
    """Return the loss of `model` on `holdout`, (N, T) or (N, 2, T) int64 (`models.loss`); each rank
    computes a part. Sums in float64.

    Raises `DivergedError` if the loss is not finite, `ConfigError` without sequences.
    """
    if not len(holdout):
        raise ConfigError(
            "data.holdout=0 holds out no text to test; give data=text data.path=FILE"
            " data.holdout=0.5"
        )
    total = torch.zeros((), dtype=torch.float64)
    ranks = ranks or RankGroup(torch.device(device))
    rank, size = ranks.rank, ranks.size
    with models.evaluating(model):
        for tokens in torch.split(holdout, batch_size * size):
            own = tokens[rank::size]
            # A rank without sequences goes forward, too: sharded layers are gathered from all.
            mean = models.loss(model, (own if len(own) else tokens[:1]).to(device)).double().cpu()
            total += mean * models.num_targets(own) if len(own) else 0.0
    [summed] = ranks.sum(total.item())
    num_tokens = models.num_targets(holdout)
    loss = summed / num_tokens
    if not math.isfinite(loss):
        raise DivergedError(
            f"the held-out loss is {loss}; lower inner.lr or outer.lr and resume from a checkpoint"
        )
    bits_per_byte = None
    if tokenizer is not None:
        predicted = [
            row[1:].tolist() if row.ndim == 1 else row[0][row[1] % 2 == 1].tolist()
            for row in holdout
        ]
        num_bytes = sum(map(tokenizer.num_bytes, predicted))
        bits_per_byte = loss * num_tokens / max(num_bytes, 1) / math.log(2)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return EvalResult(loss, perplexity, num_tokens, bits_per_byte)


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int | None,
    temperature: float,
    seed: int = 0,
) -> str:
    """Return the text that `model` writes after `prompt`, until the document ends or
    `max_new_tokens`; None: 256, or as many as its positions have room for.

    Temperature 0 takes the likeliest token. The same arguments give the same text; the global RNG
    is left as it was. Raises `ConfigError` if the tokens do not fit the model's positions, or a
    value is out of range.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: {max_new_tokens} is too small; expected at least 1")
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"temperature: {temperature} is out of range; expected 0 (likeliest token) or more"
        )
    model_any: Any = model  # a PreTrainedModel
    tokens = prompt_tokens(model, tokenizer, prompt, max_new_tokens or 1)
    if max_new_tokens is None:
        positions = getattr(model_any.config.get_text_config(), "max_position_embeddings", None)
        max_new_tokens = min(256, positions - len(tokens) if isinstance(positions, int) else 256)
    device = next(model.parameters()).device
    given = torch.tensor([tokens], device=device)  # (1, P)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with models.evaluating(model), forked_random(device):
        seed_random(device, seed)
        output = model_any.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.end,
            pad_token_id=tokenizer.end,
            **sampling,
        )
    before, whole = tokenizer.decode(tokens), tokenizer.decode(output[0].tolist())
    if whole.startswith(before):  # a space that begins a text may be lost where it is decoded alone
        return whole[len(before) :]
    return tokenizer.decode(output[0, len(tokens) :].tolist())


def prompt_tokens(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    more: int,
    keys: tuple[str, str] = ("prompt", "max_new_tokens"),
) -> list[int]:
    """Tokenise a prompt. In a `ConfigError`, `keys` name it and the `more` tokens that follow."""
    try:
        encoded = tokenizer.encode([prompt.encode("utf-8", errors="replace")])[0]
        tokens: list[int] = encoded.tolist()
        if tokens[: len(tokenizer.begin)] != tokenizer.begin:  # as a chat template has written it
            tokens = [*tokenizer.begin, *tokens]
        tokens = tokens or [tokenizer.end or 0]
    except DataError as error:
        raise ConfigError(f"{keys[0]}: {error}") from error
    config = model.config.get_text_config()
    if max(tokens) >= config.vocab_size:
        raise ConfigError(
            f"{keys[0]}: the tokenizer makes the id {max(tokens)} of"
            f" {tokenizer.decode([max(tokens)])!r}, and the model's vocabulary has"
            f" {config.vocab_size}; leave it out, or use the model's own tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and len(tokens) + more > positions:
        raise ConfigError(
            f"{keys[1]}: {more} and {len(tokens)} tokens of prompt exceed the model's {positions}"
            f" positions; expected at most {max(positions - len(tokens), 0)}, or shorten the prompt"
        )
    return tokens
