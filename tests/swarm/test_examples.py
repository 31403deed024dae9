"""Each file of scripts/examples is run as its first lines say: a starter, and a second peer at the printed address."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.examples import ADDRESS, FOLDER, NAMES
from tests.support.peers import Command, command, eventually
from tests.support.slow import slow

SLOW_S = 280.0  # a busy machine; a laptop takes a tenth of it


DATA = re.compile(r"^first (?:batch|conversation|file): (.+)$|in an order of its own \((seed \d+)\)$", re.MULTILINE)


def printed_address(starter: Command) -> str:
    def found() -> str | None:
        text = starter.stdout + starter.stderr
        assert starter.process.poll() is None, text
        match = ADDRESS.search(text)
        return match and match[0]

    return eventually(found, "an address")


def ended(peer: Command) -> str:
    assert peer.wait(SLOW_S) == 0, f"{peer.stdout}\n{peer.stderr}"
    return peer.stdout


def anchors(output: str, directory: Path) -> str:
    """What a peer printed at its end; of a command it is in the run's directory."""
    if match := re.search(r"anchors (\w{64})$", output.strip()):
        return match[1]
    [summary] = directory.rglob("summary.json")
    return str(json.loads(summary.read_text())["peers"][0]["anchor_digest"])


# One loop of its own and one of a library; the others are played each night.
@pytest.mark.parametrize("name", [one if one in ("plain_torch", "trainer") else slow(one) for one in NAMES])
def test_two_peers_of_an_example_have_different_data_and_end_with_the_same_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, places = str(FOLDER / f"{name}.py"), [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(places[1] / "home"))
    with command(file, directory=places[0]) as starter:
        with command(file, printed_address(starter), directory=places[1]) as joiner:
            outputs = [ended(one) for one in (starter, joiner)]
            one, other = (DATA.findall(peer.stdout + peer.stderr)[0] for peer in (starter, joiner))
    here, there = (anchors(*both) for both in zip(outputs, places, strict=True))
    assert here == there
    assert one != other


@pytest.mark.slow
def test_the_model_of_an_example_is_read_by_transformers_and_a_directory_is_as_good_as_a_name(tmp_path: Path) -> None:
    file, steps = str(FOLDER / "hub_model.py"), ("--steps", "10", "--model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a cat sat on a mat and ate a rat. " * 500)
    made = (
        "from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast\n"
        "from tokenizers import ByteLevelBPETokenizer\n"
        "plain = ByteLevelBPETokenizer()\n"
        "plain.train_from_iterator(['a cat sat on a mat'], 300, show_progress=False)\n"
        "PreTrainedTokenizerFast(tokenizer_object=plain._tokenizer).save_pretrained('base')\n"
        "GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)).save_pretrained('base')\n"
    )
    with command("-c", made, directory=tmp_path) as maker:
        ended(maker)
    text = ("--text", "notes")
    with command(file, *steps, "base", *text, directory=tmp_path) as starter:
        address = printed_address(starter)
        with command(file, address, *steps, "base", *text, "--out", "other", directory=tmp_path) as joiner:
            outputs = [ended(one) for one in (starter, joiner)]
    assert len({re.findall(r"anchors (\w+)", output)[0] for output in outputs}) == 1
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "gpt2"
