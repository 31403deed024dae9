"""Builds a model with reproducible initial weights from settings.

With `model.path`, config and weights come from that directory; with `model.revision` too, from the
Hugging Face hub at that commit. Once `model.weights` names the weights, `model.config` counts, and
weights come from `model.directory`. A peer that has none there gets them from the swarm, except for
what is not trained (`recipe.py`).

A config is small and may ask for a model of any size, so its numbers and its parts have a limit.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import default_generator, nn

from diloco.config import ModelConfig, flatten
from diloco.config.model_data import HUB_NAME
from diloco.errors import CheckpointError, ConfigError
from diloco.hub import MODEL_FILES, commit_of, files_at
from diloco.model.adapter import add_adapter_, widen_
from diloco.model.cross_entropy import check_causal, prepare_head_
from diloco.model.files import Vocabulary, check_directory, load, transformers
from diloco.model.recipe import allowed_names, fill_frozen_, is_extra, set_generation_
from diloco.text import one_line

# the largest tables have 20M rows, and transformers makes lists of some numbers
MAX_CONFIG_NUMBER = 2**25
MAX_CONFIG_BYTES = 2**20
MAX_PARTS = 2**16  # modules of a model; the largest public ones have some thousands


def build(
    settings: ModelConfig,
    seed: int,
    *,
    tokenizer: Vocabulary | None = None,
    sequence_length: int | None = None,
    narrow: bool = False,
) -> nn.Module:
    """Build a causal LM on the CPU, in training mode, with fp32 parameters. If `narrow`, frozen
    linear layers of a LoRA's base keep their saved dtype, mapped from the file: for `shrink_base_`.

    The weights depend on `seed`, the installed torch, and the CPU's vector instructions: peers take
    those of the run's first one. The global RNG state has no influence and stays as it is.

    Raises ConfigError for an unknown model type or name, an impossible value, or a model too small
    for tokenizer or sequence length; CheckpointError as `load`.
    """
    if has_files(settings):
        if settings.weights is None:
            config_of(settings)  # refuses absurd numbers before layers are built
        else:
            _check_saved(settings)
        loaded: Any = load(directory_of(settings), key="model.path")
        check_fit(loaded.config, tokenizer, sequence_length, "model.path")
        narrow = narrow and settings.adapter == "lora"
        model: nn.Module = loaded.train() if narrow else loaded.float().train()
        prepare_head_(model)
        add_adapter_(model, settings, seed)
        check_causal(model)
        widen_(model)
        return model
    if settings.adapter != "none" and settings.weights is not None:
        raise ConfigError(
            f"model.adapter={settings.adapter} is on {settings.path or 'weights'}, and they are not"
            " here; set model.directory to where this machine has them"
        )
    config = config_of(settings)
    check_fit(config, tokenizer, sequence_length)
    # torch.manual_seed would also reseed every GPU
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        default_generator.manual_seed(seed)
        with _refusals(settings):
            built = _from_config(config)
            # some contradictions, as heads that do not divide the width, show in a forward pass
            prepare_head_(built)
    set_generation_(built, settings.generation)
    if settings.frozen and settings.directory is not None:
        fill_frozen_(built, settings.frozen, Path(settings.directory))
    add_adapter_(built, settings, seed)
    check_causal(built)
    return built.train()


def has_files(settings: ModelConfig) -> bool:
    """Return True if the weights are in files, here or on the hub."""
    if settings.weights is None:
        return settings.path is not None
    return settings.directory is not None and (Path(settings.directory) / "config.json").is_file()


def config_of(settings: ModelConfig) -> Any:
    """Return the transformers config (a `PreTrainedConfig`) of `settings`; allocates no weights.

    Raises ConfigError for a type without a causal LM, and for a name or value that its config
    refuses; CheckpointError where `model.path` has no config.
    """
    library = transformers()
    if settings.path is not None and settings.weights is None:
        return _saved_config(directory_of(settings, ("config.json",), MAX_CONFIG_BYTES))
    _refuse_absurd(settings.config, "model.config")
    names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # imports no model
    if settings.model_type not in names:
        name, known = settings.model_type, settings.model_type in library.CONFIG_MAPPING
        why = "has no causal language model" if known else "is no model type of transformers"
        raise ConfigError(f"model.model_type: {name!r} {why}{_nearest(name, names)}")
    kind = library.CONFIG_MAPPING[settings.model_type]
    allowed = allowed_names(kind)
    for name in settings.config:
        if name not in allowed and not (settings.weights is not None and is_extra(kind, name)):
            # transformers would store it as an attribute that it never reads
            unknown = f"{kind.__name__} has no such setting{_nearest(name, allowed)}"
            raise ConfigError(f"model.config.{name}: {unknown}")
    try:
        return kind(**settings.config)
    except Exception as error:  # the library's validators raise their own types
        text = one_line(error.__cause__ or error)
        raise ConfigError(f"model.config: {text}; change that value") from error


def outline(settings: ModelConfig) -> nn.Module:
    """Build the model without values, on the default device, `meta` or fake; raises as `build`."""
    config = config_of(settings)
    with _refusals(settings):
        built = _from_config(config)
    set_generation_(built, settings.generation)
    add_adapter_(built, settings, 0)
    return built.train()


def import_model(settings: ModelConfig) -> None:
    """Import the code of such a model, which takes seconds; what is wrong is left to `build`."""
    library = transformers()
    names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # imports no model
    if settings.model_type in names:
        getattr(library, names[settings.model_type])


def num_parameters(model: nn.Module) -> int:
    """Count trainable and frozen parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def num_trained(model: nn.Module) -> int:
    """Count trainable parameters: those of the adapter, where there is one."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def directory_of(
    settings: ModelConfig, files: Collection[str] = MODEL_FILES, most_bytes: float = math.inf
) -> Path:
    """Return the directory with the files of `model.path`; fetches those of the hub.

    Raises DataError as `files_at`, and CheckpointError for a name on the hub without a commit.
    """
    if settings.weights is not None and settings.directory is not None:
        return Path(settings.directory)
    assert settings.path is not None
    if settings.revision is not None:
        return files_at("model.path", settings.path, settings.revision, tuple(files), most_bytes)
    directory = Path(settings.path).expanduser()
    if not directory.exists() and HUB_NAME.fullmatch(settings.path):
        commit = commit_of("model", settings.path)
        at = "COMMIT" if commit is None else f"{commit}, the newest"
        missing = f"model.path: {settings.path} is no directory; if it is a name on the hub"
        raise CheckpointError(f"{missing}, write {settings.path}@{at}")
    return directory


def _saved_config(directory: Path) -> Any:
    """Load the config of a directory in Hugging Face format."""
    check_directory(directory, "model.path")
    source = f"model.path: {directory}"
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        _refuse_absurd(content, source)
        read = transformers().AutoConfig.from_pretrained
        return read(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{source} has no config.json that can be read: {one_line(error)}; give a directory in"
            " Hugging Face format"
        ) from error


def _check_saved(settings: ModelConfig) -> None:
    """Raise ConfigError if a directory's config, which peers may have sent, is not the run's."""
    saved, ours = _saved_config(directory_of(settings)), config_of(settings)
    with torch.device("meta"), _refusals(settings):
        sizes = {num_parameters(_from_config(config)) for config in (saved, ours)}
    if len(sizes) > 1:
        fault = f"model.directory={settings.directory} holds another model"
        raise ConfigError(f"{fault}; give the directory of that one from which the run starts")


def _refuse_absurd(config: object, source: str) -> None:
    """Raise ConfigError for a number that no real model has, as transformers makes lists of some
    numbers, and for kernels of the hub, which it would fetch and run."""
    if not isinstance(config, Mapping):
        return
    for key, value in flatten(config):
        if type(value) is int and abs(value) > MAX_CONFIG_NUMBER and "rope" not in key:
            most = f"more than {MAX_CONFIG_NUMBER}, and no model has so many"
            raise ConfigError(f"{source}.{key}: {value} is {most}")
        if "_implementation" in key and "/" in str(value):
            why = "is code of the hub, which no model here runs"
            raise ConfigError(f"{source}.{key}: {value} {why}; drop it, and use train.attention")


@contextlib.contextmanager
def _refusals(settings: ModelConfig) -> Iterator[None]:
    """Turn any exception of a model's layers into a ConfigError."""
    try:
        yield
    except Exception as error:
        refusal = f"model.config: cannot build this {settings.model_type}"
        raise ConfigError(f"{refusal}: {one_line(error)}; change it") from error


def _from_config(config: Any) -> nn.Module:
    """Build a model from its config. Raises ValueError once it has too many modules."""
    made = itertools.count(1)

    def check(*_: object) -> None:
        if next(made) > MAX_PARTS:
            raise ValueError(f"it has more than {MAX_PARTS} layers and other parts")

    with nn.modules.module.register_module_module_registration_hook(check):
        auto = transformers().AutoModelForCausalLM
        built: nn.Module = auto.from_config(config, dtype=torch.float32)
    return built


def check_fit(
    config: Any,
    tokenizer: Vocabulary | None,
    sequence_length: int | None = None,
    key: str = "model.config.vocab_size",
) -> None:
    """Raise ConfigError if a model of this config, given by `key`, is too small for the data."""
    # the language part of a multimodal model, else the config itself
    text_config = config.get_text_config()
    vocabulary = text_config.vocab_size
    if tokenizer is not None and vocabulary < tokenizer.vocab_size:
        number = tokenizer.vocab_size - 1
        remedy = f"set it to {number + 1} or " if key.endswith("vocab_size") else ""
        raise ConfigError(
            f"{key}: a vocabulary of {vocabulary} has no id {number}, which the tokenizer gives to "
            f"{tokenizer.largest}; {remedy}choose another data.tokenizer"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if sequence_length is not None and isinstance(positions, int) and positions < sequence_length:
        raise ConfigError(
            f"data.sequence_length: {sequence_length} tokens are more than the model's {positions}"
            " positions; lower it or raise model.config.max_position_embeddings"
        )


def _nearest(name: str, known: Collection[str]) -> str:
    if near := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {near[0]!r}?"
    return f"; one of {', '.join(sorted(known)[:8])}, ..."
