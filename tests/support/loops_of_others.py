"""One of two peers in the loops of other libraries: `python tests/support/loops_of_others.py NAME
DIRECTORY PHASE...`.

Both work in directories of their own below DIRECTORY. Peer `a` starts each swarm and leaves its
address for `b`. The ranks of torchrun, all called `ranks`, are one peer alone. A phase runs a code
block of diloco/docs/loops.md, or code of this file; each prints lines of JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from diloco.atomic import replace_file  # noqa: E402

README = (ROOT / "diloco" / "docs" / "loops.md").read_text()
Names = dict[str, Any]


def block(name: str) -> str:
    """The code under `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, name
    return found[1]


def settings(phase: str) -> Names:
    """What `Swarm` is told besides: who starts, and where the other one finds it."""
    place = Path("..") / f"{phase}.address"
    common: Names = {"min_peers": 2, "name": NAME, "heartbeat_s": 0.2}
    common |= {"codec_up": "fp32", "codec_down": "fp32"}
    if NAME == "ranks":
        return {"name": NAME}
    if NAME == "a":
        return {**common, "on_ready": lambda address: replace_file(place, address.encode())}
    deadline = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < deadline, f"waited 60 s for {place}"
        time.sleep(0.02)
    return {**common, "address": place.read_text()}


def ran(name: str, code: str, **given: object) -> Names:
    """The names of a code block that was run."""
    torch.manual_seed(sum(NAME.encode()))  # other data and another model than the other peer has
    names: Names = {"__name__": "__main__", **given}
    exec(compile(code, f"README: {name}", "exec"), names)
    return names


def readme(name: str, phase: str = "") -> Names:
    """Run a code block of the README as one of two peers."""
    code = block(name).replace('run_id="readme"', 'run_id="readme", **SWARM')
    code = code.replace("TrainingArguments(", "TrainingArguments(use_cpu=True, output_dir=")
    return ran(name, code, SWARM=settings(phase or name))


def report(phase: str, attachment: Any, model: Any, **more: object) -> None:
    """What the test compares."""
    from diloco.attach.parameters import values_digest

    parameters = {name: one.detach() for name, one in model.named_parameters()}
    found = {
        "phase": phase,
        "version": attachment.version,
        "steps": attachment.steps,
        "tokens": attachment.tokens,
        "applied": attachment.applied_tokens,
        "discarded": attachment.discarded_tokens,
        "peer": attachment.node.core.facts.me if attachment.view else None,
        "model": values_digest(parameters),
        **more,
    }
    print(json.dumps(found), flush=True)


def callback_of(names: Names, kind: str, callbacks: Any) -> Any:
    [own] = (one for one in callbacks if isinstance(one, names[kind]))
    return own


def trainer() -> None:
    names = readme("trainer")
    own = callback_of(names, "DilocoCallback", names["trainer"].callback_handler.callbacks)
    report("trainer", own.attachment, names["model"])
    from transformers import LlamaForCausalLM, Trainer

    from diloco import DilocoCallback

    model = LlamaForCausalLM(names["model"].config)
    own = DilocoCallback(run_id="readme", sync_every=4, **settings("trainer_resumed"))
    again = Trainer(model, names["arguments"], train_dataset=names["data"], callbacks=[own])
    again.train(resume_from_checkpoint="out/checkpoint-8")
    report("trainer_resumed", own.attachment, model)


def accelerate() -> None:
    for phase in ("accelerate", "accelerate_resumed"):
        names = readme("accelerate", phase)
        found = {"rates": names["scheduler"].get_last_lr(), "clock": names["swarm"].steps}
        report(phase, names["swarm"].attachment, names["model"], **found)


def lightning() -> None:
    names = readme("lightning")
    own = callback_of(names, "DilocoLightningCallback", names["trainer"].callbacks)
    report("lightning", own.attachment, names["trainer"].lightning_module)
    [saved] = Path("out").rglob("*.ckpt")
    made = names["DilocoLightningCallback"]
    own = made(run_id="readme", sync_every=4, **settings("lightning_resumed"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    steps = {"max_steps": 16, "accumulate_grad_batches": 2, "default_root_dir": "out"}
    module = names["Regression"]()
    again = names["Trainer"](callbacks=[own], **steps, **quiet)
    again.fit(module, names["loader"], ckpt_path=saved)
    report("lightning_resumed", own.attachment, module)


def word_tokenizer(more: str = "") -> Any:
    """Of few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = f"<pad> <eos> <unk> {more} the cat sat on a mat and ate".split()
    numbers = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **named)


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def trl() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from diloco import DilocoCallback

    data = Dataset.from_dict({"text": ["the cat sat on a mat", "a cat ate the mat and sat"] * 32})
    off = {"save_strategy": "no", "bf16": False, "report_to": "none"}
    arguments = SFTConfig("sft", max_steps=8, max_length=16, **off)
    own, model = DilocoCallback(run_id="sft", sync_every=4, **settings("trl")), tiny_llama()
    given = {"train_dataset": data, "processing_class": word_tokenizer(), "callbacks": [own]}
    SFTTrainer(model, arguments, **given).train()
    report("trl", own.attachment, model)


def checkpoints() -> None:
    """Every peer alone, twice: the second goes on to the 100th inner step."""
    for steps in (60, 100):
        code = block("checkpoints").replace("swarm.steps < 60", f"swarm.steps < {steps}")
        names = ran("checkpoints", code)
        rate = names["optimizer"].param_groups[0]["lr"]
        report(f"checkpoints {steps}", names["sync"], names["model"], seen=names["seen"], rate=rate)


def ranks() -> None:
    """A Trainer on all ranks, and then a loop with ranks, for which the process group is there
    already."""
    names = readme("trainer")
    own = callback_of(names, "DilocoCallback", names["trainer"].callback_handler.callbacks)
    report("trainer", own.attachment, names["model"], size=own.attachment.ranks.size)
    torch.manual_seed(int(os.environ["RANK"]))  # the ranks have other data, and rank 0's model
    names = {}
    exec(compile(block("ranks"), "README: ranks", "exec"), names)
    report("ranks", names["swarm"].attachment, names["model"], size=names["ranks"].size)
    torch.distributed.destroy_process_group()  # the Trainer's, which it has left alone


if __name__ == "__main__":
    NAME, directory = sys.argv[1], Path(sys.argv[2]) / sys.argv[1]
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    for phase in sys.argv[3:]:
        globals()[phase]()
