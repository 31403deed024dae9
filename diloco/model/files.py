"""Saves and loads models in the Hugging Face format, which plain `transformers` reads."""

from __future__ import annotations

import functools
import glob
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from diloco.errors import CheckpointError, ConfigError
from diloco.model.adapter import has_adapter, save_adapter
from diloco.text import one_line, plain


class Vocabulary(Protocol):
    """The part of a tokenizer that `save` and `check_fit` use."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def largest(self) -> str: ...
    @property
    def begin(self) -> list[int]: ...
    @property
    def end(self) -> int | None: ...
    def save(self, directory: Path) -> None: ...


def save(
    model: nn.Module, directory: str | os.PathLike[str], tokenizer: Vocabulary | None = None
) -> None:
    """Write `model` to `directory` and replace an old one.

    With a tokenizer, its files are written too, and generation stops at its end token; what else a
    checkpoint says of generation stays. The directory appears as a whole or not at all; an old one
    is absent between two renames. Raises ConfigError if it cannot be written; the old one stays.
    """
    with replacing(directory) as fresh:
        _write(model, fresh, tokenizer)


@contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces `directory` in the end, as `save` says; folders
    that a killed process left beside it are deleted."""
    target = Path(directory)
    for left in target.parent.glob(f".{glob.escape(target.name)}-{'[0-9a-f]' * 8}"):
        shutil.rmtree(left, ignore_errors=True)
    fresh, old = (target.with_name(f".{target.name}-{secrets.token_hex(4)}") for _ in range(2))
    try:
        fresh.mkdir(parents=True)
    except OSError as error:
        wrong = f"{target}: cannot be written ({error.strerror})"
        raise ConfigError(f"{wrong}; choose another directory") from error
    try:
        yield fresh
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            with suppress(OSError):
                old.rename(target)
            raise
    except OSError as error:
        wrong = f"{target}: cannot be written ({one_line(error)})"
        raise ConfigError(f"{wrong}; free space or choose another") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def load(directory: str | os.PathLike[str], *, key: str = "model") -> Any:
    """Load the causal LM of a Hugging Face directory, in eval mode, in the dtype it was saved in.

    Reads local safetensors only: no download, no pickle, no code from the directory. Raises
    CheckpointError, which begins with `key`, the setting of the path.
    """
    path = Path(directory)
    check_directory(path, key)
    if not any(path.glob("*.safetensors")):
        other = "other weight formats are not read, convert them"
        raise CheckpointError(f"{key}: {path} has no *.safetensors; {other}")
    try:
        # The library draws missing weights at random, which must not move the global RNG.
        with torch.random.fork_rng(devices=[]):
            model, report = transformers().AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    # SafetensorError, JSONDecodeError, ValueError, ...: the directory is unusable
    except Exception as error:
        wrong = f"{key}: {path} cannot be loaded: {one_line(error)}"
        raise CheckpointError(f"{wrong}; use another copy") from error
    if missing := sorted(report["missing_keys"]):
        lacks = f"{len(missing)} of the model's weights, {missing[0]} first"
        raise CheckpointError(f"{key}: {path} lacks {lacks}; use a complete checkpoint")
    return model


def check_directory(path: Path, key: str) -> None:
    """Raise CheckpointError, which names the setting `key`, for a directory without a config."""
    if not path.is_dir():
        give = "give a directory with config.json and model.safetensors"
        raise CheckpointError(f"{key}: {path} is no directory; {give}")
    if (adapter := path / "adapter_config.json").is_file():
        base = "another model"
        with suppress(OSError, ValueError, LookupError, TypeError):
            base = json.loads(adapter.read_bytes())["base_model_name_or_path"] or base
        fault = f"{key}: {path} is an adapter of {plain(base)}"
        merge = "diloco export RUN DIR --merge, or merge_and_unload and save_pretrained of peft"
        raise CheckpointError(f"{fault}; merge it into that one ({merge}), and give the result")
    if not (path / "config.json").is_file():
        give = "give a directory in Hugging Face format"
        raise CheckpointError(f"{key}: {path} has no config.json; {give}")


def _write(model: nn.Module, directory: Path, tokenizer: Vocabulary | None) -> None:
    model_any: Any = model  # a PreTrainedModel
    if tokenizer is not None:
        # The default end token of the config (2 for Llama) is an ordinary token in another
        # vocabulary. A checkpoint's own settings may end a text at several tokens.
        end, generation = tokenizer.end, model_any.generation_config
        config = model_any.config.get_text_config()  # the language part of a multimodal model
        if not _ends_at(config, end):
            _end_at_(config, tokenizer)
        if generation is not None and not _ends_at(generation, end):
            model_any.generation_config = type(generation)()
            _end_at_(model_any.generation_config, tokenizer)
            model_any.generation_config.pad_token_id = end
        tokenizer.save(directory)
    try:
        if has_adapter(model):
            save_adapter(model_any, directory)
        else:
            model_any.save_pretrained(directory)
    except Exception as error:
        # safetensors reports a full disk as its own exception type, outside the OSError tree.
        if type(error).__name__ == "SafetensorError":
            raise OSError(one_line(error)) from error
        raise


def _end_at_(config: Any, tokenizer: Vocabulary) -> None:
    # not pad_token_id: some models count positions from it
    config.eos_token_id = tokenizer.end
    config.bos_token_id = next(iter(tokenizer.begin), tokenizer.end)


def _ends_at(config: Any, end: int | None) -> bool:
    ends = getattr(config, "eos_token_id", None)
    return end is not None and end in (ends if isinstance(ends, list) else [ends])


@functools.cache
def transformers() -> Any:
    """Import and return `transformers`: late, because it takes seconds; without progress bars and
    warnings, because output tears the live table."""
    import transformers

    _import_losses()
    module: Any = transformers  # its functions have no annotations
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def _import_losses() -> None:
    """Import the losses of transformers without scipy, a seventh of what all of it takes: only
    those that match boxes in images call it, and they import it then."""
    utils: Any = import_module("transformers.utils")
    has_scipy = utils.is_scipy_available
    if "transformers.loss.loss_utils" in sys.modules or not has_scipy():
        return

    def not_yet() -> bool:
        return False

    def linear_sum_assignment(*arguments: Any, **settings: Any) -> Any:
        return import_module("scipy.optimize").linear_sum_assignment(*arguments, **settings)

    utils.is_scipy_available = not_yet
    try:
        import_module("transformers.loss.loss_utils")
    finally:
        utils.is_scipy_available = has_scipy
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("is_scipy_available") is not_yet:
                vars(module).update(
                    is_scipy_available=has_scipy, linear_sum_assignment=linear_sum_assignment
                )
