"""Causal language models of `transformers`; no other package imports it for models."""

from __future__ import annotations

from diloco.model.build import (
    build,
    check_fit,
    config_of,
    directory_of,
    has_files,
    num_parameters,
    outline,
)
from diloco.model.cross_entropy import evaluating, loss, prepare_head_
from diloco.model.files import Vocabulary, load, save
from diloco.model.recipe import frozen_of, pack, recipe_of

__all__ = [
    "Vocabulary",
    "build",
    "check_fit",
    "config_of",
    "directory_of",
    "evaluating",
    "frozen_of",
    "has_files",
    "load",
    "loss",
    "num_parameters",
    "outline",
    "pack",
    "prepare_head_",
    "recipe_of",
    "save",
]
