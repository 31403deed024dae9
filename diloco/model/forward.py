"""How a model's layers are computed: with which attention, compiled or not, and with which
activations kept for the backward pass. Parameters, their names, copies and checkpoints stay the
same."""

from __future__ import annotations

import importlib.util
import warnings
from functools import wraps
from typing import Any

from torch import nn

from diloco.errors import ConfigError
from diloco.model.cross_entropy import reads_plain_rows
from diloco.model.files import transformers
from diloco.text import one_line

FLASH = {"flash_attention_2": "flash_attn"}  # packages that transformers does not bring


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the layers of the largest stack; each is a unit of compilation and of FSDP2."""

    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]

    def numel(stack: list[nn.Module]) -> int:
        return sum(parameter.numel() for layer in stack for parameter in layer.parameters())

    return max(stacks, key=numel, default=[])


def choose_attention_(model: nn.Module, attention: str) -> str:
    """Set the attention of a transformers model; returns the kind that it uses.

    Raises `ConfigError` if a package is missing, or the model has no such attention.
    """
    any_model: Any = model
    if attention != "auto":
        package = FLASH.get(attention)
        if package is not None and importlib.util.find_spec(package) is None:
            needs = f"train.attention={attention} needs the package {package}"
            raise ConfigError(f"{needs}; install it, or use sdpa")
        try:
            any_model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            text = f"train.attention={attention}: {one_line(error)}; use auto"
            raise ConfigError(text) from error
    used = str(any_model.config.get_text_config()._attn_implementation)
    if attention not in ("auto", used):
        only = f"a {type(model).__name__} computes with {used} only"
        raise ConfigError(f"train.attention={attention}: {only}; use auto")
    return used


def recompute_layers_(model: nn.Module) -> None:
    """Keep only the input of each layer, and compute the layer again in the backward pass (Chen et
    al. 2016, arXiv:1604.06174): a third more time for a fraction of the memory. Raises
    `ConfigError` for models that cannot."""
    any_model: Any = model
    try:
        with warnings.catch_warnings():
            # of another name, which early versions 5 do not have
            warnings.simplefilter("ignore", FutureWarning)
            options = {"use_reentrant": False}
            any_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        text = f"train.checkpointing=true: {one_line(error)}; lower train.micro_batch"
        raise ConfigError(text) from error


def compile_layers_(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every layer at its first call; raises `ConfigError` for models without layers.

    Layers are alike, so the first one's code serves all; a whole model would take minutes.
    """
    layers = layers_of(model)
    if not layers:
        none = f"{type(model).__name__} has no stack of layers to compile"
        raise ConfigError(f"train.compile=true: {none}; drop it")
    for layer in layers:
        layer.compile(backend=backend)


def never_wait_for_masks() -> None:
    """Stop transformers from looking for packed sequences in the forward pass of `loss`: it would
    read the positions back from the device, and a GPU would idle."""
    masks = transformers().masking_utils
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None or hasattr(look, "__wrapped__"):
        return

    @wraps(look)
    def look_unless_known(*args: Any, **kwargs: Any) -> Any:
        return None if reads_plain_rows() else look(*args, **kwargs)

    masks.find_packed_sequence_indices = look_unless_known
