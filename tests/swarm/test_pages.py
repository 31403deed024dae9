"""What the pages show runs: the loop of the README, and the adapter of a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pages import block, code
from tests.support.peers import program


def test_the_swarm_loop_runs_and_learns(tmp_path: Path) -> None:
    code = (
        block("swarm loop")
        + "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    )
    assert "exchanges 3 " in program(code, directory=tmp_path).stdout


@pytest.mark.slow
def test_the_adapter_of_a_page_is_all_that_its_peer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model and a conversation in place of the names on the page."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    words = [
        "<pad>",
        "<eos>",
        "<unk>",
        "user",
        "assistant",
        *"the cat sat on a mat and ate".split(),
    ]
    plain = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }} {{ one.content }} <eos> {% endfor %}"
    )
    tokenizer.save_pretrained("base")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape)).save_pretrained("base")
    turns = [
        {"role": "user", "content": "the cat sat"},
        {"role": "assistant", "content": "on a mat and ate"},
    ]
    Path("chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 32) + "\n")
    typed_in = (
        code("adapters.md")
        .replace("ORG/MODEL", "base")
        .replace("max_steps=200", "max_steps=40, use_cpu=True")
    )
    typed_in += """
[own] = [one for one in trainer.callback_handler.callbacks if isinstance(one, DilocoCallback)]
trained = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
print("version", own.attachment.version, all("lora_" in name for name in trained), len(trained) > 0)
"""
    done = program(typed_in, directory=tmp_path)
    assert done.stdout.rstrip().endswith("version 2 True True"), done.stderr
