"""Causal language models of `transformers`; no other package imports it for models.

1. `build` makes a model from a config, with the initial weights of a seed, or loads `model.path`; in fp32.
2. `loss` is the mean next-token cross entropy of a batch of token sequences, in nats.
3. `save` writes the Hugging Face format beside its tokenizer, atomically; `load` reads such a directory back.
"""

from __future__ import annotations

from diloco.model.build import build, config_of, num_parameters, outline
from diloco.model.cross_entropy import loss, prepare_head_
from diloco.model.files import Vocabulary, load, save

__all__ = ["Vocabulary", "build", "config_of", "load", "loss", "num_parameters", "outline", "prepare_head_", "save"]
