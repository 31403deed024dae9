"""What of a checkpoint others need to build the same model, without its trained weights.

Config and generation become settings of the run. Parameters that are not trained and buffers, which
no outer step carries, become files that are named by their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from diloco.errors import CheckpointError, ConfigError
from diloco.model.files import transformers
from diloco.text import one_line

# Every config with rotary embeddings reads these names, although they are not fields of the
# dataclass.
_ROTARY_NAMES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
# What a saved config says of itself, names of classes, and code of somebody else: a model from here
# reads none of it.
_ABOUT = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "id2label",
        "label2id",
        "torch_dtype",
        "transformers_version",
    }
)


def allowed_names(kind: Any) -> set[str]:
    """The settings of a class of transformers configs."""
    import dataclasses

    # Configs are dataclasses only in late versions 5 of transformers; before, a default instance
    # shows the settings.
    fields = (
        (field.name for field in dataclasses.fields(kind))
        if dataclasses.is_dataclass(kind)
        else vars(kind())
    )
    allowed = set(fields) | set(kind.attribute_map)
    return allowed | _ROTARY_NAMES if "rope_parameters" in allowed else allowed


def is_extra(kind: Any, name: str) -> bool:
    """Whether a saved config may have this name beside its settings: some models read names that no
    field declares."""
    return (
        name.isidentifier()
        and not name.startswith("_")
        and name not in _ABOUT
        and not hasattr(kind, name)
    )


def recipe_of(model: Any) -> dict[str, Any]:
    """The settings `model_type`, `config` and `generation` of a loaded model (a `PreTrainedModel`).

    Raises ConfigError: its config cannot be said in settings, because it holds what is not JSON.
    """
    config, kind = model.config, type(model.config)
    allowed = allowed_names(kind)
    told = {key: value for key, value in config.to_diff_dict().items() if key not in _ABOUT}
    settings = {key: value for key, value in told.items() if key in allowed or is_extra(kind, key)}
    generation = {} if model.generation_config is None else model.generation_config.to_diff_dict()
    generation = {key: value for key, value in generation.items() if key in _generation_names()}
    try:
        recipe = {
            "model_type": config.model_type,
            "config": settings or {"use_cache": True},
            "generation": generation,
        }
        said: dict[str, Any] = json.loads(json.dumps(recipe, allow_nan=False))
        again = kind(**said["config"]).to_dict()
    except Exception as error:  # the library's validators raise their own types
        raise ConfigError(
            f"model.path: its config cannot be a setting of the run: {one_line(error)}"
        ) from error
    for key, value in json.loads(json.dumps(config.to_dict(), default=str)).items():
        if key in settings and json.loads(json.dumps(again[key], default=str)) != value:
            raise ConfigError(
                f"model.path: {key} of its config cannot be a setting of the run; it changes on"
                " the way"
            )
    return said


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that require no gradient, and the buffers that a checkpoint has, by name."""
    kept = model.state_dict().keys()
    parameters = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return parameters | {name: one for name, one in model.named_buffers() if name in kept}


def pack(name: str, tensor: Tensor) -> bytes:
    """A tensor as a safetensors file; equal bytes for equal name, shape, dtype and values."""
    from safetensors.torch import save

    return bytes(save({name: tensor.detach().cpu().contiguous()}))


def fill_frozen_(model: nn.Module, digests: Mapping[str, str], directory: Path) -> None:
    """Set what is not trained to the values in the files of a directory, which are called by their
    digests.

    Raises CheckpointError: a file is missing or does not fit the model.
    """
    from safetensors.torch import load

    there = frozen_of(model)
    for name, digest in digests.items():
        try:
            value = load((directory / digest).read_bytes())[name]
        except OSError as error:
            raise CheckpointError(
                f"model.frozen.{name}: {directory} does not have it ({error.strerror})"
            ) from error
        except Exception as error:  # SafetensorError and others
            raise CheckpointError(
                f"model.frozen.{name}: its file holds no such tensor: {one_line(error)}"
            ) from error
        here = there.get(name)
        if here is None or here.shape != value.shape or here.dtype != value.dtype:
            raise CheckpointError(
                f"model.frozen.{name}: the model has no such tensor of {list(value.shape)}"
            )
        with torch.no_grad():
            here.copy_(value)


def set_generation_(model: Any, settings: Mapping[str, Any]) -> None:
    """Set how the model generates, as the run says it. Raises ConfigError for what transformers
    does not know."""
    if not settings or model.generation_config is None:
        return
    for name in settings:
        if name not in _generation_names():
            raise ConfigError(
                f"model.generation.{name} is no setting of generation_config.json; drop it"
            )
    try:
        # From a file, because many published settings are not valid in the library's eyes, which
        # writes such ones again only if they come from a file and are unchanged.
        with TemporaryDirectory(prefix="diloco-") as directory:
            (Path(directory) / "generation_config.json").write_text(
                json.dumps(dict(settings)), encoding="utf-8"
            )
            model.generation_config = transformers().GenerationConfig.from_pretrained(
                directory, local_files_only=True
            )
    except Exception as error:
        raise ConfigError(f"model.generation: {one_line(error)}; change that value") from error


def _generation_names() -> set[str]:
    about = {"transformers_version"}
    return {
        name for name in vars(transformers().GenerationConfig()) if not name.startswith("_")
    } - about
