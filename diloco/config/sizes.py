"""What files of configs/ leave to the model, where nobody says it.

${fragments_for:${model.config}}    into how many fragments it is cut
${tokenizer_of_model:bytes}         the tokenizer of model.path; without model.path, what stands
                                    after the colon
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Of one fragment: 384 MiB of outer state for its author. Several authors share what all peers send,
# too.
MOST_PARAMETERS = 2**25


def fragments_of(parameters: int) -> int:
    """Fragments of at most `MOST_PARAMETERS`."""
    return max(1, math.ceil(parameters / MOST_PARAMETERS))


def fragments_for(config: Mapping[str, Any]) -> int:
    """The same for the sizes of a model like Llama; 1 where the config does not say them.

    All peers have to agree on the number, so it depends on the settings of the run alone.
    """
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes = [size for key in keys if isinstance(size := config.get(key), int)]
    if len(sizes) < len(keys):
        return 1
    vocabulary, width, inner, layers = sizes
    embeddings = vocabulary * width * (1 if config.get("tie_word_embeddings") else 2)
    return fragments_of(embeddings + layers * width * (4 * width + 3 * inner))


def _tokenizer_of_model(otherwise: str, *, _root_: DictConfig) -> str:
    path, commit = (OmegaConf.select(_root_, f"model.{key}") for key in ("path", "revision"))
    if path is None:
        return otherwise
    return str(path) if commit is None else f"{path}@{commit}"


OmegaConf.register_new_resolver("tokenizer_of_model", _tokenizer_of_model, replace=True)
OmegaConf.register_new_resolver("fragments_for", fragments_for, replace=True)
