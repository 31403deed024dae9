"""The parts of a checkpoint that others need to build the same model, without its trained weights.

Config and generation become settings of the run. Parameters that are not trained and buffers, which
no outer step carries, become files that are named by their digests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from diloco.errors import CheckpointError, ConfigError
from diloco.model.adapter import has_adapter
from diloco.model.files import transformers
from diloco.text import one_line

# Every config with rotary embeddings reads these names, although they are no fields.
_ROTARY_NAMES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
# What a saved config says of itself, names of classes, and code of somebody else: a model from here
# reads none of it.
_ABOUT = set("architectures auto_map dtype id2label label2id torch_dtype".split())
_ABOUT.add("transformers_version")


def allowed_names(kind: Any) -> set[str]:
    """Return the settings of a class of transformers configs."""
    # Configs are dataclasses in late versions 5 of transformers only.
    is_new = dataclasses.is_dataclass(kind)
    fields = {field.name for field in dataclasses.fields(kind)} if is_new else set(vars(kind()))
    allowed = fields | set(kind.attribute_map)
    return allowed | _ROTARY_NAMES if "rope_parameters" in allowed else allowed


def is_extra(kind: Any, name: str) -> bool:
    """Return True if a saved config may have this undeclared name: some models read such names."""
    is_public = name.isidentifier() and not name.startswith("_")
    return is_public and name not in _ABOUT and not hasattr(kind, name)


def recipe_of(model: Any) -> dict[str, Any]:
    """Return the settings `model_type`, `config` and `generation` of a loaded model.

    Raises ConfigError for a config that cannot be said in settings: it holds what is not JSON.
    """
    config, kind = model.config, type(model.config)
    allowed = allowed_names(kind)
    given = {key: value for key, value in config.to_diff_dict().items() if key not in _ABOUT}
    settings = {key: value for key, value in given.items() if key in allowed or is_extra(kind, key)}
    # JSON has no infinity; a default one may be left out.
    endless = {key for key, item in settings.items() if "Infinity" in json.dumps(item, default=str)}
    generation = {} if model.generation_config is None else model.generation_config.to_diff_dict()
    generation = {key: value for key, value in generation.items() if key in _generation_names()}
    try:
        recipe = {
            "model_type": config.model_type,
            "config": {key: settings[key] for key in settings.keys() - endless}
            or {"use_cache": True},
            "generation": generation,
        }
        plain: dict[str, Any] = json.loads(json.dumps(recipe, allow_nan=False))
        again = kind(**plain["config"]).to_dict()
    except Exception as error:  # the library's validators raise their own types
        wrong = "model.path: its config cannot be a setting of the run"
        raise ConfigError(f"{wrong}: {one_line(error)}") from error
    for key, value in config.to_dict().items():
        before, after = (json.dumps(item, default=str) for item in (value, again.get(key)))
        if key in settings and json.loads(before) != json.loads(after):
            wrong = f"model.path: {key} of its config cannot be a setting of the run"
            raise ConfigError(f"{wrong}; it changes on the way")
    return plain


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters that require no gradient, and persistent buffers, by name."""
    kept = model.state_dict().keys()
    parameters = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    if has_adapter(model):  # `model.weights` names them
        parameters = {}
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def tensor_bytes(name: str, tensor: Tensor) -> bytes:
    """Serialize a tensor as a safetensors file; equal tensors of one name give equal bytes."""
    from safetensors.torch import save

    return bytes(save({name: tensor.detach().cpu().contiguous()}))


def fill_frozen_(model: nn.Module, digests: Mapping[str, str], directory: Path) -> None:
    """Set untrained parameters and buffers from files of a directory, named by their digests.

    Raises CheckpointError where a file is missing or does not fit the model.
    """
    from safetensors.torch import load

    there = frozen_of(model)
    for name, digest in digests.items():
        key = f"model.frozen.{name}"
        try:
            value = load((directory / digest).read_bytes())[name]
        except OSError as error:
            text = f"{key}: {directory} does not have it ({error.strerror})"
            raise CheckpointError(text) from error
        except Exception as error:  # SafetensorError and others
            text = f"{key}: its file holds no such tensor: {one_line(error)}"
            raise CheckpointError(text) from error
        here = there.get(name)
        if here is None or here.shape != value.shape or here.dtype != value.dtype:
            raise CheckpointError(f"{key}: the model has no such tensor of {list(value.shape)}")
        with torch.no_grad():
            here.copy_(value)


def set_generation_(model: Any, settings: Mapping[str, Any]) -> None:
    """Set the generation config; raises ConfigError for what transformers does not know."""
    if not settings or model.generation_config is None:
        return
    for name in settings:
        if name not in _generation_names():
            unknown = f"model.generation.{name} is no setting of generation_config.json"
            raise ConfigError(f"{unknown}; drop it")
    try:
        # From a file, because many published settings are not valid in the library's eyes, which
        # writes such ones again only if they come from a file and are unchanged.
        with TemporaryDirectory(prefix="diloco-") as directory:
            file, read = Path(directory) / "generation_config.json", transformers().GenerationConfig
            file.write_text(json.dumps(dict(settings)), encoding="utf-8")
            model.generation_config = read.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.generation: {one_line(error)}; change that value") from error


def _generation_names() -> set[str]:
    names = vars(transformers().GenerationConfig())
    return {name for name in names if not name.startswith("_")} - {"transformers_version"}
