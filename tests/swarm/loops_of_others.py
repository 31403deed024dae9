"""One of two peers in the loops of other libraries: `loops_of_others.py NAME DIRECTORY PHASE...`.

Both work in directories of their own below DIRECTORY. Peer `a` starts each swarm and leaves its
address for `b`. The ranks of torchrun, all called `ranks`, are one peer alone. A phase runs a code
block of docs/loops.md, or code of this file; each prints lines of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from diloco.atomic import replace_file
from tests.support.models import small_model, word_tokenizer
from tests.support.pages import DOCS, block
from tests.support.peers import eventually

PAGE = DOCS / "loops.md"
Names = dict[str, Any]


def settings(phase: str) -> Names:
    """What `Swarm` is told besides: who starts, and where the other one finds it."""
    if NAME == "ranks":
        return {"name": NAME}
    place, exact = Path("..") / f"{phase}.address", {"codec_up": "fp32", "codec_down": "fp32"}
    common = {"min_peers": 2, "name": NAME, "heartbeat_s": 0.2, **exact}
    if NAME == "a":
        return {**common, "on_ready": lambda address: replace_file(place, address.encode())}
    eventually(place.exists, str(place))
    return {**common, "address": place.read_text()}


def ran(name: str, code: str, **given: object) -> Names:
    """The names of a code block that was run."""
    torch.manual_seed(sum(NAME.encode()))  # other data and another model than the other peer has
    names: Names = {"__name__": "__main__", **given}
    exec(compile(code, f"loops.md: {name}", "exec"), names)
    return names


def page(name: str, phase: str = "") -> Names:
    """Run a code block of the page as one of two peers."""
    code = block(name, PAGE).replace('run_id="readme"', 'run_id="readme", **SWARM')
    code = code.replace("TrainingArguments(", "TrainingArguments(use_cpu=True, output_dir=")
    return ran(name, code, SWARM=settings(phase or name))


def report(phase: str, attachment: Any, model: Any, **more: object) -> None:
    """What the test compares."""
    from diloco.attach.parameters import values_digest

    found = {
        "phase": phase,
        "version": attachment.version,
        "steps": attachment.steps,
        "tokens": attachment.tokens,
        "applied": attachment.applied_tokens,
        "discarded": attachment.discarded_tokens,
        "peer": attachment.node.record().peer if attachment.node else None,
        "model": values_digest({name: one.detach() for name, one in model.named_parameters()}),
        **more,
    }
    print(json.dumps(found), flush=True)


def callback_of(names: Names, kind: str, callbacks: Any) -> Any:
    [own] = (one for one in callbacks if isinstance(one, names[kind]))
    return own


def trainer() -> None:
    names = page("trainer")
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
        names = page("accelerate", phase)
        found = {"rates": names["scheduler"].get_last_lr(), "clock": names["swarm"].steps}
        report(phase, names["swarm"].attachment, names["model"], **found)


def lightning() -> None:
    names = page("lightning")
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


def trl() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from diloco import DilocoCallback

    texts = ["the cat sat on a mat", "a cat ate the mat and sat"]
    data = Dataset.from_dict({"text": texts * 32})
    off = {"save_strategy": "no", "bf16": False, "report_to": "none"}
    arguments = SFTConfig("sft", max_steps=8, max_length=16, **off)
    own, model = DilocoCallback(run_id="sft", sync_every=4, **settings("trl")), small_model()
    words = word_tokenizer(" ".join(texts), pad_token="<pad>", eos_token="<eos>")
    given = {"train_dataset": data, "processing_class": words, "callbacks": [own]}
    SFTTrainer(model, arguments, **given).train()
    report("trl", own.attachment, model)


def checkpoints() -> None:
    """Every peer alone, twice: the second goes on to the 100th inner step."""
    for steps in (60, 100):
        code = block("checkpoints", PAGE).replace("swarm.steps < 60", f"swarm.steps < {steps}")
        names = ran("checkpoints", code)
        rate = names["optimizer"].param_groups[0]["lr"]
        report(f"checkpoints {steps}", names["sync"], names["model"], seen=names["seen"], rate=rate)


def ranks() -> None:
    """A Trainer on all ranks, and then a loop with ranks, for which the process group is there
    already."""
    names = page("trainer")
    own = callback_of(names, "DilocoCallback", names["trainer"].callback_handler.callbacks)
    report("trainer", own.attachment, names["model"], size=own.attachment.ranks.size)
    torch.manual_seed(int(os.environ["RANK"]))  # the ranks have other data, and rank 0's model
    names = {}
    exec(block("ranks", PAGE), names)
    report("ranks", names["swarm"].attachment, names["model"], size=names["ranks"].size)
    torch.distributed.destroy_process_group()  # the Trainer's, which it has left alone


if __name__ == "__main__":
    NAME, directory = sys.argv[1], Path(sys.argv[2]) / sys.argv[1]
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    for phase in sys.argv[3:]:
        globals()[phase]()
