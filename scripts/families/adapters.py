"""A peer trains an adapter alone. The loss that `eval` finds is the held-out loss at the end of
training, and peft reads the saved adapter into the same logits as those of the merged model.

An adapter on a weight that two layers share is refused. After `qlora` the merged model has the
whole base, and training its 4 bits: losses differ by less than 0.05 nats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from diloco import data
from diloco import model as models
from diloco.cli.model import _model_of
from diloco.config import compose
from diloco.errors import ConfigError
from diloco.train import run
from diloco.train.evaluate import evaluate
from diloco.train.start_files import resolved
from scripts.families import WORKS, Member, refused
from scripts.families._small import small_config, trained_like
from scripts.families.models import SETTINGS, logits, near

SOURCES = ("peft", "transformers", "bitsandbytes", "torch")
# Model type, whether its head is tied to its embedding, and the layers with an adapter.
BASES: dict[str, tuple[str, bool, str]] = {
    "all-linear": ("llama", False, "all-linear"),
    "what peft takes": ("llama", False, "auto"),
    "Conv1D": ("gpt2", False, "auto"),
    "embedding": ("llama", False, "embed_tokens,q_proj"),
    "head": ("llama", False, "lm_head,q_proj"),
    "tied embedding": ("llama", True, "embed_tokens,q_proj"),
    "tied head": ("llama", True, "lm_head,q_proj"),
    "layers below a tied head": ("llama", True, "all-linear"),
    "experts": ("mixtral", False, "all-linear"),
    "experts and their router": ("qwen3_moe", False, "all-linear"),
    "multimodal": ("gemma3", True, "all-linear"),
}
QUICK = {"lora on tied embedding", "lora on experts"}


def members() -> Iterator[Member]:
    for kind in ("lora", "dora", "qlora"):
        for base in BASES:
            name = f"{kind} on {base}"
            yield Member(name, kind, name in QUICK, "bitsandbytes" if kind == "qlora" else "")


def play(name: str) -> str:
    kind, _, base = name.partition(" on ")
    model_type, tied, targets = BASES[base]
    config = small_config(model_type)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    trained_like(config).save_pretrained("base")
    rows = (json.dumps({"text": f"some words of row {one}"}) for one in range(100))
    Path("rows.jsonl").write_text("\n".join(rows))
    chosen = (f"adapter={kind}", f"model.adapter_targets=[{targets}]", "inner.lr=1e-2")
    try:
        settings = resolved(compose((*SETTINGS, *chosen, "outer.sync_every=10")))
        trained: Any = run.run(settings, lambda message: None).eval.loss
    except ConfigError as error:
        assert str(error).startswith("model.adapter"), error
        return refused(error)
    holdout = data.load(settings.data, settings.run.seed).holdout(settings.eval.sequences)
    with _model_of(Path("run")) as place:
        merged = models.load(place)
    found = evaluate(merged, holdout, settings.inner.batch_size, "cpu").loss
    assert abs(found - trained) < (0.05 if kind == "qlora" else 1e-3), f"{found}, not {trained}"
    whole = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    before = logits(whole)
    read: Any = PeftModel.from_pretrained(whole, "run/model")
    assert near(logits(read), logits(merged)), "peft reads another adapter"
    assert not near(before, logits(merged)), "it has learned nothing"
    return WORKS
