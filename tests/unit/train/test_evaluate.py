"""Evaluation and generation: exact figures, nothing left behind, and the texts of what goes
wrong."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.data import load_tokenizer
from diloco.data.tokenizers import ByteTokenizer
from diloco.errors import ConfigError, DataError, DivergedError
from diloco.train.evaluate import evaluate, generate, prompt_tokens
from tests.support.errors import error_text
from tests.support.models import small_model

BYTES = load_tokenizer("bytes")


class Table(nn.Module):
    """A causal model whose next token depends on the last one only, through a table of logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits)  # (V, V)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.dropout(self.table)[input_ids])


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return small_model(vocab_size=300)


def test_without_held_out_text_there_is_no_loss() -> None:
    nothing = torch.empty(0, 5, dtype=torch.int64)
    text = error_text(ConfigError, evaluate, Table(torch.zeros(2, 2)), nothing, 2, "cpu")
    remedy = "give data=text data.path=FILE data.holdout=0.5"
    assert text == f"data.holdout=0 holds out no text to test; {remedy}"


def test_the_loss_is_exact_over_batches_of_unequal_size() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Table(torch.randn(11, 11, generator=generator))
    holdout = torch.randint(11, (7, 5), generator=generator)
    each = -model.table.detach().double().log_softmax(-1)[holdout[:, :-1], holdout[:, 1:]]
    for batch_size in (1, 3, 7, 100):
        result = evaluate(model, holdout, batch_size, "cpu")
        assert result.loss == pytest.approx(each.mean().item(), rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(result.loss))
        assert result.tokens == 7 * 4
        assert result.bits_per_byte is None


def test_bits_per_byte_count_the_bytes_that_a_token_stands_for() -> None:
    """A uniform model of bytes needs eight."""
    result = evaluate(Table(torch.zeros(256, 256)), torch.randint(256, (2, 9)), 2, "cpu", BYTES)
    assert result.bits_per_byte == pytest.approx(8)
    assert result.perplexity == pytest.approx(256)


def test_evaluating_leaves_everything_as_it_was() -> None:
    model = Table(torch.randn(11, 11))
    model.train()
    model.dropout.eval()
    before, random_state = model.table.detach().clone(), torch.random.get_rng_state()
    evaluate(model, torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0)), 2, "cpu")
    assert (model.training, model.dropout.training) == (True, False)
    assert torch.equal(model.table, before)
    assert model.table.grad is None
    assert torch.equal(torch.random.get_rng_state(), random_state)
    model = Table(torch.randn(4, 4))
    with pytest.raises(IndexError):
        evaluate(model, torch.full((1, 3), 9), 1, "cpu")
    assert model.training and model.dropout.training
    model, text = Table(torch.full((4, 4), math.nan)), r"the held-out loss is nan; lower inner\.lr"
    with pytest.raises(DivergedError, match=rf"{text} or outer\.lr and resume from"):
        evaluate(model, torch.zeros(1, 3, dtype=torch.int64), 1, "cpu")


def test_the_likeliest_tokens_continue_the_text(tmp_path: Path) -> None:
    model = small_model()
    tokens = list(b"abcdefgh")
    for _ in range(12):
        tokens.append(int(model.eval()(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = BYTES.decode(tokens[8:])
    assert generate(model, BYTES, "abcdefgh", max_new_tokens=12, temperature=0) == expected
    models.save(model, tmp_path / "model", BYTES)
    loaded, tokenizer = models.load(tmp_path / "model"), load_tokenizer(str(tmp_path / "model"))
    assert generate(loaded, tokenizer, "abcdefgh", max_new_tokens=12, temperature=0) == expected


def test_sampling_depends_on_its_seed_alone(small: nn.Module) -> None:
    def sampled(seed: int) -> str:
        return generate(small, BYTES, "import ", max_new_tokens=10, temperature=1.0, seed=seed)

    first = sampled(1)
    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    assert sampled(1) == first
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sampled(2) != first and small.training
    assert isinstance(generate(small, BYTES, "", max_new_tokens=4, temperature=0.8), str)


def test_without_a_number_there_are_as_many_tokens_as_positions() -> None:
    model, prompt = small_model(), "x" * 60  # of 64
    four = generate(model, BYTES, prompt, max_new_tokens=4, temperature=0)
    assert generate(model, BYTES, prompt, max_new_tokens=None, temperature=0) == four


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 60}, "60 and 10 tokens of prompt exceed the model's 64 positions;"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is too small; expected at least 1"),
        ({"temperature": -1.0}, "temperature: -1.0 is out of range; expected 0 (likeliest token)"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_line(
    small: nn.Module, values: dict[str, Any], message: str
) -> None:
    values = {"max_new_tokens": None, "temperature": 0.8, **values}
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        generate(small, BYTES, "0123456789", **values)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_cannot_be_encoded_is_refused_by_its_key(small: nn.Module) -> None:
    class Narrow(ByteTokenizer):
        def encode(self, documents: Sequence[bytes]) -> list[Any]:
            raise DataError("data.tokenizer: x cannot encode this text")

    with pytest.raises(ConfigError, match=r"^eval\.prompts: data\.tokenizer: x cannot encode"):
        prompt_tokens(small, Narrow(), "ab", 3, ("eval.prompts", "eval.prompt_tokens"))
