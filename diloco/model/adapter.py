"""Adapters (LoRA, DoRA) on a causal LM, through `peft`: peers train and exchange the adapter only.

All peers draw an adapter from the run's seed, so its first version is equal on all of them. The
base is frozen and compared by its digest.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, default_generator, nn

from diloco.config import ModelConfig
from diloco.errors import ConfigError
from diloco.text import one_line

MARK = ".base_layer"  # in the names of parameters below an adapter
# Of NF4: parameters with one scale, and bytes of a parameter. The scales are in 8 bits.
NF4_BLOCK, NF4_BYTES = 64, 0.516
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_adapter_(model: nn.Module, settings: ModelConfig, seed: int) -> None:
    """Freeze a causal LM and add the adapter of `model.adapter`; without effect for `none`.

    It is fp32, and depends on the base for DoRA only: peers may have one in other dtypes.
    Raises ConfigError: the model has no such layers, one of them shares its weight with another, or
    `peft` is not installed.
    """
    if settings.adapter == "none":
        return
    # which peft imports; on a CPU it says that kernels of the hub are missing
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        refusal = f"model.adapter={settings.adapter} needs peft"
        raise ConfigError(f"{refusal}; pip install 'diloco[lora]'") from None
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
    try:
        # not by `add_adapter` of transformers, which may ask for a peft that is not released yet
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights, for one, which are refused below
            inject_adapter_in_model(recipe, model)
            default_generator.manual_seed(seed)  # peft has rounded to the dtype of the base
            for _, layer in _adapter_layers(model):
                for weight in layer.parameters():
                    weight.data = weight.data.float() if weight.requires_grad else weight.data
                layer.reset_lora_parameters("default", True)
    except ValueError as error:
        wrong, remedy = one_line(error).rstrip("."), "name layers of the model, or all-linear"
        if "dropout" in wrong:  # which peft cannot have on experts
            remedy = "set model.adapter_dropout=0, or name other layers"
        elif settings.adapter == "dora":
            remedy = "use adapter=lora, or name other layers"
        raise ConfigError(f"model.adapter_targets={','.join(named)}: {wrong}; {remedy}") from error
    _refuse_shared(model, named)
    _refuse_unlike(model, named)
    # Layers in an autograd function of their own (Reformer) have gradients only if its inputs do;
    # some models change these in place (CTRL), which a leaf of the graph does not allow.
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(lambda _, inputs, output: output.requires_grad_(True).clone())


def _refuse_unlike(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ConfigError for an adapter on a linear layer whose class has its own `forward`."""
    for name, layer in _adapter_layers(model):
        kind = type(layer.get_base_layer())
        is_own = kind.__module__.startswith("transformers.models.")
        if issubclass(kind, nn.Linear) and is_own and kind.forward is not nn.Linear.forward:
            fault = f"{name} is a {kind.__name__}, for which peft has no adapter"
            raise ConfigError(
                f"model.adapter_targets={','.join(targets)}: {fault}; name other layers"
            )


def _refuse_shared(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ConfigError for an adapter on a weight that other layers have, too: merging it would
    change those."""
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for name, layer in _adapter_layers(model):
        if any(users[id(weight)] > 1 for weight in layer.get_base_layer().parameters()):
            shared = f"{name} shares its weight with another layer"
            raise ConfigError(
                f"model.adapter_targets={','.join(targets)}: {shared}, and an adapter of one would"
                " change both once it is merged; name other layers"
            )


def _adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = model.named_modules()
    return [(name, layer) for name, layer in layers if isinstance(layer, BaseTunerLayer)]


def has_adapter(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters below the adapter, under their names in the plain model."""
    own = (
        {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if has_adapter(model)
        else ()
    )
    return {
        name.replace(MARK, ""): weight.detach()
        for name, weight in model.named_parameters()
        if id(weight) not in own
    }


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of a state dict that `save` writes: with an adapter only the adapter."""
    state = model.state_dict()
    if has_adapter(model):
        state = {name: state[name] for name, p in model.named_parameters() if p.requires_grad}
    return {name: value.detach() for name, value in state.items()}


def base_layers(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name, layer) of the frozen linear layers below an adapter, without the head.

    They are nearly all of a base, and autocast has each compute in 16 bits.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()) if has_adapter(model) else ():
        for name, layer in parent.named_children():
            is_linear = type(layer) is nn.Linear and layer is not head
            if is_linear and not layer.weight.requires_grad:
                yield parent, name, layer


def widen_(model: nn.Module) -> None:
    """Cast all but the `base_layers` to fp32; `shrink_base_` converts those anyway."""
    others = {*model.modules()} - {layer for _, _, layer in base_layers(model)}
    for module in others:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data


def shrink_base_(model: nn.Module, form: str, precision: str) -> None:
    """Convert the base below an adapter to 16 bits, or to 4 once it is moved to a device (`nf4`:
    Dettmers et al. 2023, arXiv:2305.14314, section 3); without effect on a model without adapter.

    In the 16 bits of autocast its products are those of fp32 weights. In 4 bits they are computed
    with `precision`, by `bitsandbytes`.
    """
    bnb: Any = import_module("bitsandbytes.nn") if form == "nf4" else None
    for parent, name, layer in base_layers(model):
        if form != "nf4" or layer.in_features % NF4_BLOCK:  # kernels need whole blocks
            layer.to(DTYPES[precision if form == "nf4" else form])
            continue
        sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
        small: Any = bnb.Linear4bit(
            *sizes, has_bias, DTYPES[precision], quant_type="nf4", device="meta"
        )
        small.weight = bnb.Params4bit(layer.weight.detach(), False, quant_type="nf4", module=small)
        small.bias = layer.bias
        # an evaluation on a CPU would pack the weights anew, and no gradient passes that
        small.support_avx512bf16_for_cpu = False
        setattr(parent, name, small)


def save_adapter(model: Any, directory: Path) -> None:
    """Write the adapter of a model as `peft` reads it, without the embeddings below it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(directory)


def merge_adapter_(model: nn.Module) -> None:
    """Add the adapter's product to the base, and remove the adapter; without effect without one."""
    if not has_adapter(model):
        return
    done = "\0"  # the layer that was merged last; one on experts holds another
    for name, layer in _adapter_layers(model):
        if name.startswith(f"{done}."):
            continue
        done, (parent, _, own) = name, name.rpartition(".")
        if hasattr(layer, "unload_and_optionally_merge_module"):
            base = layer.unload_and_optionally_merge_module(True, False, None)
        else:
            layer.merge()
            base = layer.get_base_layer()
        setattr(model.get_submodule(parent), own, base)
    del model.peft_config
