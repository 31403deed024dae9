"""Models that are built in a moment."""

from typing import Any

from torch import nn

from diloco import model as models
from diloco.config import ModelConfig

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def word_tokenizer(text: str, **marks: str) -> Any:
    """A tokenizer of Hugging Face that knows the words of a text, and these marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = {"unk_token": "<unk>", **marks}
    words = dict.fromkeys([*marks.values(), *text.split()])
    numbers = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, **marks)


def small_model(model_type: str = "llama", **config: Any) -> nn.Module:
    """A model of `SMALL` with these changes; its weights are always the same."""
    return models.build(
        ModelConfig(name="small", model_type=model_type, config={**SMALL, **config}), seed=0
    )
