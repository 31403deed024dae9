"""Each is saved by transformers as a base with weights as large as trained ones. Two peers train
from it for two rounds and have equal anchors; transformers reads what is saved at the end, with
equal logits; packed conversations have the loss of each alone, or are refused; a LoRA merges into
the model that it was. A later token changes no logits of an earlier one.

A member `works with` settings: `data.format=text` where packed conversations are refused, and what
`model.adapter_targets` has to be, or `model.adapter=none`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from diloco import model as models
from diloco.config import Config, compose
from diloco.data import load_tokenizer
from diloco.data.conversations import Sample, pack_samples
from diloco.errors import CheckpointError, ConfigError
from diloco.sim.run import simulate
from diloco.train import run
from diloco.train.start_files import resolved
from scripts.families import WORKS, Member, refused, works_with
from scripts.families._small import NOT_MADE, small_config, trained_like

SOURCES = ("transformers", "torch", "peft")
QUICK = {"ctrl", "deepseek_v4", "gemma3", "lfm2", "recurrent_gemma", "reformer", "roberta"}
ROUNDING = 2e-4  # of the largest value: fp32, in another order
SETTINGS = (
    *("model=pretrained", "model.path=base", "run.id=small", "run.dir=run", "local.peers=2"),
    *("budget.outer_steps=2", "outer.sync_every=2", "data.sequence_length=16", "data=json"),
    *("data.path=rows.jsonl", "data.holdout=0.2", "data.tokenizer=bytes"),
    *("inner.lr=1e-3", "inner.warmup_steps=0", "inner.batch_size=2", "eval.sequences=4"),
    *("train.device=cpu", "train.threads=1"),
)
# Slow imports, before the processes of members are forked.
for module in (
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "peft", "peft.tuners.lora.bnb"),
    *("torch._dynamo", "transformers.models.llama.modeling_llama", "diloco.cli.model"),
):
    with suppress(ModuleNotFoundError):
        import_module(module)
COMPOSED = compose(SETTINGS)
get_checkpoint_conversion_mapping("llama")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def members() -> Iterator[Member]:
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name not in NOT_MADE:
            yield Member(name, quick=name in QUICK)


def play(name: str) -> str:
    config = small_config(name)
    trained_like(config).save_pretrained("base")
    rows = (json.dumps({"text": f"some words of row {one}"}) for one in range(100))
    Path("rows.jsonl").write_text("\n".join(rows))
    needed: list[str] = []
    try:
        settings = trained()
    except (ConfigError, CheckpointError) as error:
        assert str(error).startswith("model."), error
        if "is_decoder" not in str(error):
            return refused(error)
        change("base/config.json", is_decoder=True)
        needed.append("is_decoder of its config.json")
        try:
            settings = trained()
        except ConfigError as again:
            return refused(again)
    built = models.build(settings.model, 0).eval()
    check_causal(built)
    check_saved(settings, built)
    needed += [*packing(built), *adapters(settings)]
    return works_with(", ".join(needed)) if needed else WORKS


def change(file: str, **settings: Any) -> None:
    content = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps({**content, **settings}))


def trained() -> Config:
    """The settings of a run of two peers, after it."""
    settings = resolved(COMPOSED)
    outcome = simulate(settings, lambda message: None)
    peers = outcome.summary.peers
    assert len({peer.anchor_digest for peer in peers}) == 1 and len(peers) == 2, "anchors differ"
    assert outcome.summary.outer_steps == 2, outcome.summary
    return settings


def near(ones: Tensor, others: Tensor, part: float = ROUNDING) -> bool:
    return float((ones - others).abs().max()) <= part * float(others.abs().max())


@torch.no_grad()
def logits(model: nn.Module, rows: Tensor | None = None) -> Tensor:
    found: Tensor = model.eval()(input_ids=ROWS if rows is None else rows, use_cache=False).logits
    return found


def check_causal(model: nn.Module) -> None:
    changed = ROWS.clone()
    changed[:, 8:] += 1
    assert near(logits(model, changed)[:, :8], logits(model)[:, :8]), "it sees later tokens"


def check_saved(settings: Config, model: nn.Module) -> None:
    """What the end of a run writes is the model, for transformers, too."""
    tokenizer = load_tokenizer("bytes")
    run._write(settings, tokenizer, models.saved_state(model), Path("model"))
    read = AutoModelForCausalLM.from_pretrained("model", local_files_only=True)
    assert near(logits(read), logits(model), 1e-6), "saved and read again, it is another model"


def packing(model: nn.Module) -> Iterator[str]:
    """What conversations need; raises where packed ones have another loss than each alone."""
    try:
        models.check_segments(model)
    except ConfigError:
        yield "data.format=text"
        return
    samples = [
        Sample(row[:size].numpy(), (torch.arange(size) >= size // 2).numpy())
        for row, size in zip(ROWS.repeat(2, 1), (4, 5, 6, 8), strict=True)
    ]
    whole = torch.from_numpy(pack_samples(samples, 16)).long()
    alone = [torch.from_numpy(pack_samples([one], len(one.tokens))).long() for one in samples]
    with torch.no_grad():
        total = sum(models.loss(model, one) * models.num_targets(one) for one in alone)
        mean, packed = total / models.num_targets(whole), models.loss(model, whole)
    assert len(whole) < len(samples) and near(packed, mean), f"packed {packed}, alone {mean}"


def adapters(settings: Config) -> Iterator[str]:
    """What an adapter needs; raises where its merged model is another one."""
    for targets in ("auto", "all-linear"):
        chosen = {"adapter": "lora", "adapter_targets": (targets,)}
        try:
            model = models.build(settings.model.model_copy(update=chosen), 0)
        except ConfigError as error:
            refused(error)  # in one line
            continue
        models.loss(model.train(), ROWS).backward()
        with torch.no_grad():  # what has no gradient, such as a vision tower, stays zero
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is not None and parameter.grad.any():
                    draw = torch.Generator().manual_seed(number)
                    parameter.normal_(0, 0.1, generator=draw)
        before = logits(model)
        assert not near(before, logits(models.build(settings.model, 0))), "the adapter does nothing"
        models.merge_adapter_(model)
        assert near(logits(model), before), "merged, it is another model"
        if targets != "auto":
            yield f"model.adapter_targets={targets}"
        return
    yield "model.adapter=none"


ROWS = torch.randint(1, 250, (2, 16), generator=torch.Generator().manual_seed(1))
