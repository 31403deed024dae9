"""Causal language models of `transformers`; other rooms reach them through this package only."""

from __future__ import annotations

from diloco.model.adapter import (
    NF4_BYTES,
    base_layers,
    base_parameters,
    has_adapter,
    merge_adapter_,
    saved_state,
    shrink_base_,
)
from diloco.model.build import (
    build,
    check_fit,
    config_of,
    directory_of,
    has_files,
    num_parameters,
    num_trained,
    outline,
)
from diloco.model.cross_entropy import (
    check_segments,
    evaluating,
    loss,
    num_targets,
    prepare_head_,
)
from diloco.model.files import Vocabulary, load, replacing, save
from diloco.model.recipe import frozen_of, recipe_of, tensor_bytes

__all__ = [
    "NF4_BYTES",
    "Vocabulary",
    "base_layers",
    "base_parameters",
    "build",
    "check_fit",
    "check_segments",
    "config_of",
    "directory_of",
    "evaluating",
    "frozen_of",
    "has_adapter",
    "has_files",
    "load",
    "loss",
    "merge_adapter_",
    "num_parameters",
    "num_targets",
    "num_trained",
    "outline",
    "prepare_head_",
    "recipe_of",
    "replacing",
    "save",
    "saved_state",
    "shrink_base_",
    "tensor_bytes",
]
