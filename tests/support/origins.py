"""Checkpoints that a run starts from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import model as models
from diloco.data.tokenizers import HubTokenizer
from diloco.model.files import transformers
from tests.support.models import SMALL

EXPERTS: dict[str, Any] = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}
EXPERTS |= {"head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4}
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"  # a buffer that a checkpoint has


def bpe(directory: Path) -> HubTokenizer:
    """A tokenizer with a chat template, of files in that directory."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:-1]]
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    pipeline = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast
    template = "{{ messages[0].content }}"
    words = made(tokenizer_object=pipeline, eos_token="<end>", chat_template=template)
    words.save_pretrained(directory)
    return HubTokenizer(str(directory))


def experts(shift: float = 0.0) -> nn.Module:
    library = transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = library.CONFIG_MAPPING["glm4_moe"](**EXPERTS)
        model: Any = library.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_buffer(BIAS).copy_(torch.arange(4.0) + shift)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as one finds it: its end tokens, its way to generate, and a buffer with values
    of its own."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    models.save(experts(), directory, bpe(directory.parent / "words"))
    # As published models have it, and as transformers refuses to write it: settings of sampling
    # without sampling.
    changes = {"generation_config": {"top_k": 5}, "config": {"pad_token_id": 7}}
    for name, change in changes.items():
        file = directory / f"{name}.json"
        content = json.loads(file.read_text()) if name == "config" else {}
        file.write_text(json.dumps({**content, "eos_token_id": [0, 9], **change}))
    return directory


def lines(directory: Path) -> Path:
    """Text in many documents, of which some are held out."""
    texts = [{"text": f"def number_{index}(): return {index}\n" * 4} for index in range(60)]
    (directory / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return directory / "text.jsonl"
