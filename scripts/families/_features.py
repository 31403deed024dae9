"""What the loops of each library are played with."""

from __future__ import annotations

from typing import Any

from scripts.families._sides import EVERY, STEPS

# -- loops that their users write ------------------------------------------------------------------

SIMPLE = (
    "nothing else",
    "gradient accumulation",
    "clipping",
    "early stopping",
    "its own checkpoint",
)
AVERAGES = ("EMA beside the model", "EMA in each evaluation", "EMA at the end", "SWA")
OWN = {
    "torch": (*SIMPLE, *AVERAGES),
    "Accelerate": (*SIMPLE, *AVERAGES, "LocalSGD"),
    "Fabric": (*SIMPLE, *AVERAGES),
    "FSDP2": SIMPLE,  # AveragedModel makes a deep copy, which FSDP2 refuses
}

# -- the Trainers of transformers and of TRL: their arguments --------------------------------------

STEPPED = {"eval_strategy": "steps", "eval_steps": EVERY, "save_steps": EVERY}
BEST = {
    **STEPPED,
    "save_strategy": "steps",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "learning_rate": 0.1,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "EMA at the end, in a callback before": {},
    "EMA at the end, in a callback after": {},
    "EMA in each evaluation": STEPPED,
    "early stopping": BEST,
    "load_best_model_at_end": BEST,
    "checkpoints": {"save_strategy": "steps", "save_steps": 6, "save_total_limit": 2},
    "resume_from_checkpoint": {"save_strategy": "steps", "save_steps": STEPS // 2},
    "num_train_epochs": {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "eval_on_start": {**STEPPED, "eval_on_start": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
}
ONLY_TRL: dict[str, dict[str, Any]] = {
    "packing": {"packing": True},
    "BEMA": {},
    "sync_ref_model": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "precompute_ref_log_probs": {"precompute_ref_log_probs": True},
}
FIRST = ("nothing else", "gradient_accumulation_steps", "max_grad_norm")
TRAINERS = {
    "Trainer": tuple(ARGUMENTS),
    "SFT": (*FIRST, "packing", "BEMA", "early stopping"),
    "DPO": (*FIRST, "sync_ref_model", "precompute_ref_log_probs"),
    "reward": FIRST,
    "KTO": FIRST[:1],
    "GRPO": FIRST[:2],
    "RLOO": FIRST[:1],
}

# -- Lightning's Trainer ---------------------------------------------------------------------------

FLAGS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "gradient_clip_val": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "precision=bf16-mixed": {"precision": "bf16-mixed"},
    "manual optimization": {},
    "ckpt_path in the middle": {},
}
# Callbacks: how each is made, and which of its figures have to be equal.
CALLBACKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "WeightAveraging": ({}, ()),
    "EMAWeightAveraging": ({"decay": 0.8}, ()),
    "StochasticWeightAveraging": ({"swa_lrs": 0.01, "swa_epoch_start": 2}, ()),
    "StochasticWeightAveraging of epochs": ({"swa_lrs": 0.01, "swa_epoch_start": 2}, ()),
    "EarlyStopping": ({"monitor": "held", "min_delta": 0.05, "patience": 1}, ("stopped_epoch",)),
    "ModelCheckpoint": (
        {"monitor": "held", "save_top_k": 2, "dirpath": "kept"},
        ("best_k_models",),
    ),
    "LearningRateMonitor": ({"logging_interval": "step"}, ()),
    "GradientAccumulationScheduler": ({"scheduling": {0: 1, 2: 2}}, ()),
    "LearningRateFinder": ({"num_training_steps": 8}, ()),
    "BatchSizeFinder": ({"max_trials": 1, "init_val": 16, "steps_per_trial": 1}, ()),
    "BackboneFinetuning": ({"unfreeze_backbone_at_epoch": 2}, ()),
    "ModelPruning": ({"pruning_fn": "l1_unstructured", "amount": 0.2}, ()),
    "SpikeDetection": ({}, ()),
    "ThroughputMonitor": ({"batch_size_fn": len}, ()),
    "OnExceptionCheckpoint": ({"dirpath": "kept"}, ()),
    "Timer": ({"duration": {"hours": 1}}, ()),
}
# Steps of the optimizer before a callback puts the start back.
TRIED = {"LearningRateFinder": 8, "BatchSizeFinder": 1}
LIGHTNING = {"Lightning": (*FLAGS, *CALLBACKS)}
