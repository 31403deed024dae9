"""The Trainers of transformers and of TRL, with their callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import (
    BEMACallback,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from scripts.families._features import ARGUMENTS, ONLY_TRL
from scripts.families._sides import STEPS, Ended, Side, values
from tests.support.models import word_tokenizer

RATE = 1e-2
TEXTS = [f"the {a} {b} on a {c}" for a in ("cat", "dog") for b in ("sat", "ate") for c in "mno"]
ROWS = (TEXTS * 3)[:32]  # two epochs have STEPS batches of 4
WORDS = word_tokenizer(" ".join(TEXTS), pad_token="<pad>", eos_token="<eos>")


def model(kind: type = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        pad_token_id=WORDS.pad_token_id,
        eos_token_id=WORDS.eos_token_id,
        num_labels=1,
    )
    return kind(config)


def train(library: str, feature: str, side: Side) -> Ended:
    """Let a Trainer train; what came of it, in its logs and files too."""
    make = _of_transformers if library == "Trainer" else OF_TRL_MADE[library]
    average = [_Average(feature)] if "EMA" in feature and feature != "BEMA" else []
    stopping = [EarlyStoppingCallback(1)] if feature == "early stopping" else []
    bema: list[Any] = [BEMACallback(update_freq=2, device="cpu")] if feature == "BEMA" else []
    told = {
        "output_dir": "out",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": RATE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        **ARGUMENTS.get(feature, {}),
        **ONLY_TRL.get(feature, {}),
    }

    def trained(steps: int, **more: Any) -> Any:
        own = side.callbacks("DilocoCallback")
        before = average if feature.endswith("before") else []
        after = [] if before else average
        trainer = make({**told, "max_steps": steps}, [*before, *own, *after, *stopping, *bema])
        trainer.train(**more)
        return trainer

    if feature == "resume_from_checkpoint":
        trained(STEPS // 2)
        trainer = trained(STEPS, resume_from_checkpoint=True)
    else:
        trainer = trained(told["max_steps"])
    ended = {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_metric,
        "logged": [_logged(row) for row in trainer.state.log_history],
        "model": values(trainer.model),
        "files": _saved(Path("out")),
    }
    if bema:
        ended["average"] = values(bema[0].running_model)
    if getattr(trainer, "ref_model", None) is not None:
        ended["reference"] = values(trainer.ref_model)
    return ended


def _logged(row: dict[str, Any]) -> dict[str, Any]:
    times = ("runtime", "step_time", "second", "diloco", "flos")
    return {key: one for key, one in row.items() if not any(time in key for time in times)}


def _saved(folder: Path) -> dict[str, Any]:
    files = folder.glob("checkpoint-*/*.safetensors")
    found: dict[str, Any] = {str(path): load_file(path) for path in sorted(files)}
    for path in sorted(folder.glob("checkpoint-*/trainer_state.json")):
        found[str(path)] = json.loads(path.read_text())["global_step"]
    return found


class _Average(TrainerCallback):
    """Of the weights of all steps; it is put into the model at the end, or for each evaluation."""

    def __init__(self, feature: str) -> None:
        self._in_evaluations = feature == "EMA in each evaluation"
        self._average: Any = None
        self._own: dict[str, torch.Tensor] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **own: Any) -> None:
        self._average = AveragedModel(own["model"], multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_step_end(self, args: Any, state: Any, control: Any, **own: Any) -> None:
        self._average.update_parameters(own["model"])
        if control.should_evaluate and self._in_evaluations:
            self._own = values(own["model"])
            own["model"].load_state_dict(self._average.module.state_dict())

    def on_evaluate(self, args: Any, state: Any, control: Any, **own: Any) -> None:
        if self._own is not None:
            own["model"].load_state_dict(self._own)

    def on_train_end(self, args: Any, state: Any, control: Any, **own: Any) -> None:
        if not self._in_evaluations:
            own["model"].load_state_dict(self._average.module.state_dict())


# -- their makers ----------------------------------------------------------------------------------


def _of_transformers(told: dict[str, Any], callbacks: list[Any]) -> Trainer:
    texts = (WORDS(text, padding="max_length", max_length=8) for text in ROWS)
    rows = [{**text, "labels": text["input_ids"]} for text in texts]
    for row in rows:
        row.pop("token_type_ids", None)
    sets: Any = {"train_dataset": rows, "eval_dataset": rows[::5]}
    return Trainer(model(), TrainingArguments(**told), **sets, callbacks=callbacks)


def _of_trl(
    trainer: type, config: type, rows: Callable[[str], dict[str, Any]], **own: Any
) -> Callable[[dict[str, Any], list[Any]], Any]:
    kind = own.pop("kind", LlamaForCausalLM)
    rewards = {"reward_funcs": own.pop("reward_funcs")} if "reward_funcs" in own else {}

    def make(told: dict[str, Any], callbacks: list[Any]) -> Any:
        data = Dataset.from_list([rows(text) for text in ROWS])
        arguments = config(**{**told, **own})
        sets: dict[str, Any] = {
            "train_dataset": data,
            "processing_class": WORDS,
            "callbacks": callbacks,
        }
        if trainer in (DPOTrainer, KTOTrainer):
            sets["ref_model"] = model(kind)
        if arguments.eval_strategy != "no":
            sets["eval_dataset"] = data
        return trainer(model(kind), args=arguments, **sets, **rewards)

    return make


def _pair(text: str) -> dict[str, Any]:
    begin, _, end = text.rpartition(" ")
    return {"prompt": begin, "chosen": f" {end} mat", "rejected": f" {end} {end}"}


def _judged(text: str) -> dict[str, Any]:
    pair = _pair(text)
    good = "cat" in text
    return {
        "prompt": pair["prompt"],
        "completion": pair["chosen" if good else "rejected"],
        "label": good,
    }


def _lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one) % 7) for one in completions]


GENERATED = {
    "num_generations": 2,
    "max_completion_length": 4,
    "shuffle_dataset": False,
    "beta": 0.0,
    "reward_funcs": _lengths,
}
OF_TRL_MADE = {
    "SFT": _of_trl(SFTTrainer, SFTConfig, lambda text: {"text": text}, max_length=16),
    "DPO": _of_trl(DPOTrainer, DPOConfig, _pair, max_length=16),
    "reward": _of_trl(
        RewardTrainer, RewardConfig, _pair, max_length=16, kind=LlamaForSequenceClassification
    ),
    "KTO": _of_trl(KTOTrainer, KTOConfig, _judged, max_length=16),
    "GRPO": _of_trl(GRPOTrainer, GRPOConfig, _pair, **GENERATED),
    "RLOO": _of_trl(RLOOTrainer, RLOOConfig, _pair, **GENERATED),
}
