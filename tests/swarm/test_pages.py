"""What the pages show runs: the loop of the README, and the adapter of a page."""

import json
from pathlib import Path

import pytest

from tests.support.models import small_model, word_tokenizer
from tests.support.pages import block, code
from tests.support.peers import program


def test_the_swarm_loop_runs_and_learns(tmp_path: Path) -> None:
    said = "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    done = program(block("swarm loop") + said, directory=tmp_path)
    assert "exchanges 3 " in done.stdout


@pytest.mark.slow
def test_the_adapter_of_a_page_is_all_that_its_peer_sends(tmp_path: Path) -> None:
    """With a small model and a conversation in place of the names on the page."""
    text = "user assistant the cat sat on a mat and ate"
    tokenizer = word_tokenizer(text, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }} {{ one.content }} <eos> {% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    small_model().save_pretrained(tmp_path / "base")
    turns = [
        {"role": "user", "content": "the cat sat"},
        {"role": "assistant", "content": "on a mat and ate"},
    ]
    chats = [json.dumps({"messages": turns})] * 32
    (tmp_path / "chats.jsonl").write_text("\n".join(chats) + "\n")
    page = code("adapters.md").replace("ORG/MODEL", "base")
    page = page.replace("max_steps=200", "max_steps=40, use_cpu=True")
    page += """
[own] = [one for one in trainer.callback_handler.callbacks if isinstance(one, DilocoCallback)]
trained = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
print("version", own.attachment.version, all("lora_" in name for name in trained), len(trained) > 0)
"""
    done = program(page, directory=tmp_path)
    assert done.stdout.rstrip().endswith("version 2 True True"), done.stderr
