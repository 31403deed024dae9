"""The Hugging Face hub: whether a name is there, how large its files are, and the files at one commit."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from diloco.errors import DataError
from diloco.text import one_line

__all__ = ["MODEL_FILES", "TOKENIZER_FILES", "check_reachable", "files_at", "size_at"]

MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "config.json", "diloco.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer*.json", "tokenizer.model", "vocab.*",
)  # fmt: skip


def check_reachable(key: str, kind: str, name: str, revision: str | None = None) -> None:
    """Asks the hub once whether it has the `kind` ('dataset' or 'model') called `name`, the value of the setting `key`.

    This comes before the hub's own client, which retries for 20 to 50 s without a network. Does not ask in offline mode
    (HF_HUB_OFFLINE): there the client answers at once, from its cache.

    Raises DataError: no network, no such name or commit, or no permission.
    """
    if not _offline():
        _info(key, kind, name, revision)


def size_at(key: str, name: str, revision: str, files: Sequence[str]) -> int | None:
    """Bytes of the files of a model repository at a commit whose names match; None in offline mode.

    Raises DataError as `check_reachable`.
    """
    if _offline():
        return None
    sizes = (
        file.size or 0 for file in _info(key, "model", name, revision, sizes=True).siblings if _one_of(file, files)
    )
    return sum(sizes)


def files_at(key: str, name: str, revision: str, files: Sequence[str], most_bytes: float = math.inf) -> Path:
    """The directory with the files of a model repository at a commit whose names match, fetched if they are not here.

    The name is one on the hub, also where a directory is called so. Raises DataError if the hub does not have them, if
    they are more than `most_bytes`, or if this machine has no space for them.
    """
    import huggingface_hub

    size, cache = size_at(key, name, revision, files), Path(huggingface_hub.constants.HF_HUB_CACHE)
    place = next(directory for directory in (cache, *cache.parents) if directory.is_dir())
    free = shutil.disk_usage(place).free
    if size is not None and size > most_bytes:
        raise DataError(f"{key}: {', '.join(files)} of {name} has {size} bytes, and no honest one has; use another")
    if size is not None and size > free:
        raise DataError(
            f"{key}: {name} has {size / 1e9:.1f} GB, and {place} has room for {free / 1e9:.1f} GB; free some space, or "
            "set HF_HOME to a directory that has it"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(files), local_files_only=_offline()
            )
        )
    except Exception as error:
        raise DataError(
            f"{key}: {name} at {revision[:12]} cannot be fetched ({one_line(error)}); check the network"
        ) from error


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def _info(key: str, kind: str, name: str, revision: str | None, sizes: bool = False) -> Any:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = huggingface_hub.HfApi()
    try:
        info = hub.dataset_info if kind == "dataset" else hub.model_info
        return info(name, revision=revision, timeout=10, files_metadata=sizes)
    except Exception as error:
        if isinstance(error, HfHubHTTPError | HFValidationError):
            text = f"is no {kind} that the Hugging Face hub shows you ({one_line(error)})"
            remedy = "check the name, or log in with `hf auth login`"
        else:  # huggingface_hub has changed its HTTP client, and so its exceptions, twice
            text = f"cannot be fetched, the Hugging Face hub is not reachable ({one_line(error)})"
            remedy = "check the network, or use local files"
        raise DataError(f"{key}: {name!r} {text}; {remedy}") from error


def _one_of(file: Any, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file.rfilename, pattern) for pattern in patterns)
