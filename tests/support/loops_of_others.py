"""One of two peers in the loops of other libraries: `python tests/support/loops_of_others.py NAME
DIRECTORY PHASE...`.

Both work in directories of their own below DIRECTORY. Peer `a` starts each swarm and leaves its
address for `b`. The ranks of torchrun, all called `ranks`, are one peer alone. A phase runs a code
block of the README of the integrations, or code of this file; each prints lines of JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[2] / "diloco" / "integrations" / "README.md"
sys.path.insert(0, str(Path(__file__).parents[2]))
from diloco.atomic import replace_file  # noqa: E402

Names = dict[str, Any]


def block(name: str) -> str:
    """The code under `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None, name
    return found[1]


def settings(phase: str) -> Names:
    """What `Swarm` is told besides: who starts, and where the other one finds it."""
    place = Path("..") / f"{phase}.address"
    common: Names = {
        "min_peers": 2,
        "name": NAME,
        "heartbeat_s": 0.2,
        "codec_up": "fp32",
        "codec_down": "fp32",
    }
    if NAME == "ranks":
        return {"name": NAME}
    if NAME == "a":
        return {**common, "on_ready": lambda address: replace_file(place, address.encode())}
    deadline = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < deadline, f"waited 60 s for {place}"
        time.sleep(0.02)
    return {**common, "address": place.read_text()}


def readme(name: str, phase: str = "") -> Names:
    """Run a code block of the README as one of two peers."""
    phase = phase or name
    code = block(name).replace('run_id="readme"', 'run_id="readme", **SWARM')
    code = code.replace("TrainingArguments(", "TrainingArguments(use_cpu=True, output_dir=")
    torch.manual_seed(sum(NAME.encode()))  # other data and another model than the other peer has
    names: Names = {"SWARM": settings(phase), "__name__": "__main__"}
    exec(compile(code, f"README: {phase}", "exec"), names)
    return names


def report(phase: str, attachment: Any, model: Any, **more: object) -> None:
    """What the test compares."""
    from diloco.attach.parameters import values_digest

    print(
        json.dumps(
            {
                "phase": phase,
                "version": attachment.version,
                "steps": attachment.steps,
                "tokens": attachment.tokens,
                "applied": attachment.applied_tokens,
                "discarded": attachment.discarded_tokens,
                "peer": attachment.node.core.facts.me if attachment.view else None,
                "model": values_digest(
                    {name: one.detach() for name, one in model.named_parameters()}
                ),
                **more,
            }
        ),
        flush=True,
    )


def trainer() -> None:
    names = readme("trainer")
    [own] = (
        one
        for one in names["trainer"].callback_handler.callbacks
        if isinstance(one, names["DilocoCallback"])
    )
    rates = [
        line["learning_rate"]
        for line in names["trainer"].state.log_history
        if "learning_rate" in line
    ]
    report("trainer", own.attachment, names["model"], rates=rates)
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
        rates = names["scheduler"].get_last_lr()
        report(
            phase,
            names["swarm"].attachment,
            names["model"],
            rates=rates,
            clock=names["swarm"].steps,
        )


def lightning() -> None:
    names = readme("lightning")
    [own] = (
        one
        for one in names["trainer"].callbacks
        if isinstance(one, names["DilocoLightningCallback"])
    )
    report("lightning", own.attachment, names["trainer"].lightning_module)
    [saved] = Path("out").rglob("*.ckpt")
    own = names["DilocoLightningCallback"](
        run_id="readme", sync_every=4, **settings("lightning_resumed")
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    again = names["Trainer"](
        max_steps=16, accumulate_grad_batches=2, default_root_dir="out", callbacks=[own], **quiet
    )
    module = names["Regression"]()
    again.fit(module, names["loader"], ckpt_path=saved)
    report(
        "lightning_resumed",
        own.attachment,
        module,
        rates=again.lr_scheduler_configs[0].scheduler.get_last_lr(),
    )


def trl() -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from diloco import DilocoCallback

    words = ["<pad>", "<eos>", "<unk>", *"the cat sat on a mat and ate".split()]
    plain = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape))
    data = Dataset.from_dict({"text": ["the cat sat on a mat", "a cat ate the mat and sat"] * 32})
    arguments = SFTConfig(
        "sft", max_steps=8, max_length=16, save_strategy="no", bf16=False, report_to="none"
    )
    own = DilocoCallback(run_id="sft", sync_every=4, **settings("trl"))
    SFTTrainer(
        model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[own]
    ).train()
    report("trl", own.attachment, model)


def checkpoints() -> None:
    """Every peer alone, twice: the second goes on to the 100th inner step."""
    for steps in (60, 100):
        torch.manual_seed(sum(NAME.encode()))
        names: Names = {}
        code = block("checkpoints").replace("swarm.steps < 60", f"swarm.steps < {steps}")
        exec(compile(code, "README: checkpoints", "exec"), names)
        rate = names["optimizer"].param_groups[0]["lr"]
        report(f"checkpoints {steps}", names["sync"], names["model"], seen=names["seen"], rate=rate)


def ranks() -> None:
    """A Trainer on all ranks, and then a loop with an ranks, for which the process group is there
    already."""
    names = readme("trainer")
    [own] = (
        one
        for one in names["trainer"].callback_handler.callbacks
        if isinstance(one, names["DilocoCallback"])
    )
    report("trainer", own.attachment, names["model"], size=own.attachment.ranks.size)
    torch.manual_seed(int(os.environ["RANK"]))  # the ranks have other data, and rank 0's model
    names = {}
    exec(compile(block("ranks"), "README: ranks", "exec"), names)
    report("ranks", names["swarm"].attachment, names["model"], size=names["ranks"].size)
    torch.distributed.destroy_process_group()  # the Trainer's, which it has left alone


PHASES: dict[str, Callable[[], None]] = {
    "trainer": trainer,
    "trl": trl,
    "accelerate": accelerate,
    "lightning": lightning,
    "checkpoints": checkpoints,
    "ranks": ranks,
}

if __name__ == "__main__":
    NAME, directory = sys.argv[1], Path(sys.argv[2]) / sys.argv[1]
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    for phase in sys.argv[3:]:
        PHASES[phase]()
