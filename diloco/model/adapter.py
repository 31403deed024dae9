"""Adapters (LoRA, DoRA) on a causal LM, through `peft`: only they are trained, and travel.

All peers draw an adapter from the run's seed, so its first version is equal on all of them. The
base is frozen and compared by its digest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, default_generator, nn

from diloco.config import ModelConfig
from diloco.errors import ConfigError
from diloco.text import one_line

MARK = ".base_layer"  # in the names of parameters below an adapter


def add_adapter_(model: nn.Module, settings: ModelConfig, seed: int) -> None:
    """Freeze a causal LM, and put the adapter of `model.adapter` on it; nothing for `none`.

    Raises ConfigError: the model has no such layers, or `peft` is not installed.
    """
    if settings.adapter == "none":
        return
    try:
        from peft import LoraConfig
    except ImportError:
        what = f"model.adapter={settings.adapter} needs peft"
        raise ConfigError(f"{what}; pip install 'diloco[lora]'") from None
    named = settings.adapter_targets
    targets = {"auto": None, "all-linear": "all-linear"}.get(named[0], list(named))
    recipe = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.adapter_rank,
        lora_alpha=settings.adapter_alpha,
        lora_dropout=settings.adapter_dropout,
        target_modules=targets,
        use_dora=settings.adapter == "dora",
        base_model_name_or_path=settings.path or settings.directory,
        revision=settings.revision,
    )
    model_any: Any = model  # a PreTrainedModel
    try:
        with torch.random.fork_rng(devices=[]):
            default_generator.manual_seed(seed)
            model_any.add_adapter(recipe)
    except ValueError as error:
        what = f"model.adapter_targets={','.join(named)}: {one_line(error).rstrip('.')}"
        raise ConfigError(f"{what}; name layers of the model, or all-linear") from error


def has_adapter(model: nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the model below its adapter, by their names without one."""
    own = {id(one) for one in model.parameters() if one.requires_grad} if has_adapter(model) else ()
    return {
        name.replace(MARK, ""): one.detach()
        for name, one in model.named_parameters()
        if id(one) not in own
    }


def merge_adapter_(model: nn.Module) -> None:
    """Add the adapter's product to the base, and take the adapter away; nothing without one."""
    if not has_adapter(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer.get_base_layer())
    model._hf_peft_config_loaded = False  # type: ignore[assignment]
    model.peft_config = {}  # type: ignore[assignment]
