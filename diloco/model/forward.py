"""How the layers of a model are computed: with which attention, compiled or not, and what is kept
for going backward.

The model stays the same one: parameters, their names, and what copies and checkpoints see of them
do not change.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import wraps
from typing import Any

from torch import nn

from diloco.errors import ConfigError
from diloco.model.cross_entropy import computes_loss
from diloco.model.files import transformers
from diloco.text import one_line

FLASH = {"flash_attention_2": "flash_attn"}  # packages that transformers does not bring


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the largest stack in a model, each of which is compiled, and gathered by FSDP2,
    as a whole."""
    stacks = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    largest = max(
        stacks,
        key=lambda stack: sum(one.numel() for one in stack.parameters()),
        default=nn.ModuleList(),
    )
    return list(largest)


def choose_attention_(model: nn.Module, attention: str) -> str:
    """Have a transformers model compute attention this way (`auto`: as it likes); returns what it
    uses.

    Raises `ConfigError` if a package is missing, or the model has no such attention.
    """
    any_model: Any = model
    if attention != "auto":
        package = FLASH.get(attention)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"train.attention={attention} needs the package {package}; install it, or use sdpa"
            )
        try:
            any_model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"train.attention={attention}: {one_line(error)}; use auto"
            ) from error
    used = str(any_model.config.get_text_config()._attn_implementation)
    if attention not in ("auto", used):
        raise ConfigError(
            f"train.attention={attention}: a {type(model).__name__} computes with {used} only; use"
            " auto"
        )
    return used


def recompute_layers_(model: nn.Module) -> None:
    """Keep only what goes into each layer, and compute the layer again in the backward pass (Chen
    et al. 2016, arXiv:1604.06174): a third more time for a fraction of the memory. Raises
    `ConfigError` for models that cannot.
    """
    any_model: Any = model
    try:
        with warnings.catch_warnings():
            # of another name, which early versions 5 do not have
            warnings.simplefilter("ignore", FutureWarning)
            any_model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    except ValueError as error:
        raise ConfigError(
            f"train.checkpointing=true: {one_line(error)}; lower train.micro_batch"
        ) from error


def compile_layers_(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every layer at its first call; raises `ConfigError` for models without a stack of
    layers.

    Layers are alike, so the first one's code serves all, where a compiled whole model takes
    minutes.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"train.compile=true: {type(model).__name__} has no stack of layers to compile; drop it"
        )
    for layer in layers:
        layer.compile(backend=backend)


def never_wait_for_masks() -> None:
    """Have transformers not look for rows that hold several sequences, while the training loss is
    computed.

    It waits for the device to see the positions of the tokens, and a GPU would idle. `loss` gives
    no positions.
    """
    masks = transformers().masking_utils
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is None or hasattr(look, "__wrapped__"):
        return

    @wraps(look)
    def look_unless_known(*args: Any, **kwargs: Any) -> Any:
        return None if computes_loss() else look(*args, **kwargs)

    masks.find_packed_sequence_indices = look_unless_known
