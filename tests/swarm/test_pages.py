"""What the pages show runs: the loop of the README, and the page of adapters."""

import json
import shlex
import sys
from contextlib import ExitStack
from itertools import islice, product
from pathlib import Path

import pytest

from tests.support.models import small_model, word_tokenizer
from tests.support.pages import DOCS, block, code, typed
from tests.support.peers import Command, command, program, typed_as
from tests.support.stub_hub import COMMIT, NAME, stub_hub

TEXT = "user assistant who are you the cat sat on a mat and ate"
TEMPLATE = """{% for one in messages %}{{ one.role }} {% if one.role == "assistant" %}
{% generation %}{{ one.content }} <eos> {% endgeneration %}{% else %}{{ one.content }} {% endif %}
{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"""


def save_base(place: Path) -> None:
    tokenizer = word_tokenizer(TEXT, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    small_model(max_position_embeddings=512).save_pretrained(place)


def write_chats(place: Path, count: int) -> None:
    questions = [" ".join(words) for words in islice(product(TEXT.split(), repeat=3), count)]
    chats = [
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "the cat sat on a mat and ate"},
        ]
        for question in questions
    ]
    place.write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats))


def test_the_swarm_loop_runs_and_learns(tmp_path: Path) -> None:
    said = "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    done = program(block("swarm loop") + said, directory=tmp_path)
    assert "exchanges 3 " in done.stdout


def test_the_adapter_of_a_page_is_all_that_its_peer_sends(tmp_path: Path) -> None:
    """With a small model and a conversation in place of the names on the page."""
    save_base(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", 32)
    page = code("adapters.md").replace("ORG/MODEL", "base")
    page = page.replace("max_steps=200", "max_steps=40, use_cpu=True")
    page += """
[own] = [one for one in trainer.callback_handler.callbacks if isinstance(one, DilocoCallback)]
trained = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
print("version", own.attachment.version, all("lora_" in name for name in trained), len(trained) > 0)
"""
    done = program(page, directory=tmp_path)
    assert done.stdout.rstrip().endswith("version 2 True True"), done.stderr


def test_the_commands_of_the_adapters_page_work_as_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two users, of a hub that has the model; with `--yes`, as there is no terminal."""
    save_base(tmp_path / "base")
    for name in ("chats", "my_chats"):
        write_chats(tmp_path / f"{name}.jsonl", 1000)
    address, done = "ADDRESS", list[str]()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with ExitStack() as stack:
        hub = stack.enter_context(stub_hub(tmp_path / "base"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

        def start(line: str, user: str) -> Command:
            monkeypatch.setenv("HF_HOME", str(tmp_path / user / "hub"))
            monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / user / "data"))
            words = [sys.executable, "-m", *shlex.split(line)]  # none warm: those are offline
            return stack.enter_context(command(line, directory=tmp_path, start=typed_as(words)))

        for line in typed(DOCS / "adapters.md"):
            kind = line.split()[1]
            if kind == "train":  # a test stays on the loopback
                line = line.replace("ORG/MODEL@COMMIT", f"{NAME}@{COMMIT}")
                starter = start(line.replace(" swarm=network", ""), "one")
                address = starter.says(r"^diloco join (\S+)")
            elif kind == "join":
                joiner = start(f"{line.replace('ADDRESS', address)} --yes", "two")
                joiner.says(r" v([1-9]\d*)/")
                joiner.interrupt().wait()
                starter.interrupt().wait()
            else:
                start(line.replace("RUN", "runs/diloco"), "one").done()
            done.append(kind)
    assert done == ["train", "join", "export", "generate"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
