"""The Hugging Face hub: look-ups, files at one commit, and an upload."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from diloco.errors import DataError, TermsError
from diloco.text import one_line

WEIGHTS = "*.safetensors"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
MODEL_FILES = ("config.json", "generation_config.json", WEIGHTS, "*.safetensors.index.json")
TOKENIZER_FILES = tuple(
    "added_tokens.json chat_template.jinja config.json diloco.json merges.txt"
    " special_tokens_map.json spiece.model tokenizer*.json tokenizer.model vocab.*".split()
)


def check_reachable(key: str, kind: str, name: str, revision: str | None = None) -> None:
    """Ask the hub once for the `kind` ('dataset' or 'model') `name`, the value of `key`.

    The hub's own client would retry for 20 to 50 s without a network. In offline mode
    (HF_HUB_OFFLINE) nobody is asked. Raises DataError: no network, no such name or commit, or no
    permission.
    """
    if not _offline():
        _info(key, kind, name, revision)


def commit_of(kind: str, name: str, revision: str | None = None) -> str | None:
    """Return the commit of a branch or a tag (by default the main branch); None if unknown."""
    with contextlib.suppress(Exception):  # whatever it is, a commit has to be typed
        commit: str | None = None if _offline() else _ask(kind, name, revision).sha
        return commit
    return None


def files_at(
    key: str, name: str, revision: str, files: Sequence[str], most_bytes: float = math.inf
) -> Path:
    """Return the directory with the matching files of a model repository at a commit.

    Fetches them if they are not in the cache. Raises DataError if the hub does not have them, if
    they are more than `most_bytes`, or if this machine has no space for them.
    """
    import huggingface_hub

    if not _offline():
        there = _info(key, "model", name, revision, sizes=True).siblings
        _check_size(key, name, files, list(there), most_bytes)
    options: Any = {"allow_patterns": list(files), "local_files_only": _offline()}
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, **options))
    except Exception as error:
        if not _offline():
            raise _refusal(key, "model", name, revision, error) from error
        missing = f"{name} at {revision[:12]} is not in the cache, and HF_HUB_OFFLINE is set"
        remedy = "fetch it once without that, or set HF_HOME to a directory that has it"
        raise DataError(f"{key}: {missing}; {remedy}") from error


def opened(path: str, mode: str) -> Any:
    """Open a seekable file of the hub; `path`: datasets/OWNER/NAME@COMMIT/FILE, hf:// optional."""
    import huggingface_hub

    return huggingface_hub.HfFileSystem().open(path, mode)


def dataset_file(path: str) -> Path:
    """Fetch hf://datasets/NAME@COMMIT/FILE into the cache of the hub's library; return its path."""
    from huggingface_hub import hf_hub_download

    name, _, rest = path.removeprefix("hf://datasets/").partition("@")
    commit, _, file = rest.partition("/")
    return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit))


def check_push(key: str, name: str) -> None:
    """Raise DataError if `push` would fail at once: not logged in, or an invalid name."""
    import huggingface_hub
    from huggingface_hub import utils
    from huggingface_hub.errors import HFValidationError

    checks: Any = utils  # it does not declare the name
    try:
        checks.validate_repo_id(name)
    except HFValidationError as error:
        why = one_line(error)
        raise DataError(f"{key}={name} is no name on the hub ({why}); give USER/NAME") from error
    if _offline():
        raise DataError(f"{key}={name}: the hub is switched off by HF_HUB_OFFLINE; unset it")
    if huggingface_hub.get_token() is None:
        raise DataError(
            f"{key}={name}: nobody is logged in to the Hugging Face hub; run `hf auth login`"
        )


def push(key: str, name: str, directory: Path, private: bool, message: str) -> str:
    """Upload a directory as the model repository `name`, made if missing; return its address.

    `name` is the value of `key`. Raises DataError: the hub cannot be reached, or does not let this
    user write there.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=directory, commit_message=message)
    except Exception as error:
        text, remedy = f"{key}={name}: the Hugging Face hub is not reachable", "check the network"
        if isinstance(error, HfHubHTTPError):
            text = f"{key}={name}: the Hugging Face hub refuses it"
            remedy = "give USER/NAME, where you may write"
        raise DataError(f"{text} ({one_line(error)}); {remedy}") from error
    return str(address)


def _check_size(
    key: str, name: str, files: Sequence[str], there: Sequence[Any], most_bytes: float
) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    folder = next(directory for directory in (cache, *cache.parents) if directory.is_dir())
    free = shutil.disk_usage(folder).free
    size = sum(file.size or 0 for file in there if _one_of(file, files))
    if size > most_bytes:
        fault = f"{', '.join(files)} of {name} has {size} bytes, and no honest one has"
        raise DataError(f"{key}: {fault}; use another")
    if size > free:
        fault = f"{name} has {size / 1e9:.1f} GB, and {folder} has room for {free / 1e9:.1f} GB"
        remedy = "free some space, or set HF_HOME to a directory that has it"
        raise DataError(f"{key}: {fault}; {remedy}")
    if WEIGHTS in files and not any(_one_of(file, [WEIGHTS]) for file in there):
        others = (file.rfilename for file in there if file.rfilename.endswith(OTHER_WEIGHTS))
        fault = f"{name} has no *.safetensors, but {next(others, 'no weights')}"
        raise DataError(f"{key}: {fault}; other formats are not read, convert them")


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def _info(key: str, kind: str, name: str, revision: str | None, sizes: bool = False) -> Any:
    try:
        return _ask(kind, name, revision, sizes)
    except Exception as error:
        raise _refusal(key, kind, name, revision, error) from error


def _ask(kind: str, name: str, revision: str | None, sizes: bool = False) -> Any:
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    info = hub.dataset_info if kind == "dataset" else hub.model_info
    return info(name, revision=revision, timeout=10, files_metadata=sizes)


def _refusal(key: str, kind: str, name: str, revision: str | None, error: Exception) -> DataError:
    """Explain an error of the hub, in one line, to the user who typed the name."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RevisionNotFoundError,
    )

    reason: BaseException = error
    while reason.__cause__ is not None and not isinstance(reason, HfHubHTTPError):
        reason = reason.__cause__  # of a download, the reason is inside what the client makes of it
    if isinstance(reason, GatedRepoError):
        return TermsError(
            f"{key}: {name!r} is shown only to those who accept its terms; accept them at"
            f" {constants.ENDPOINT}/{name}, and log in with `hf auth login`"
        )
    if isinstance(reason, RevisionNotFoundError):
        newest = commit_of(kind, name)
        remedy = "take a commit from its page" if newest is None else f"the newest one is {newest}"
        return DataError(f"{key}: {name!r} has no commit {revision}; {remedy}")
    if isinstance(reason, HfHubHTTPError) and reason.response.status_code >= 500:
        text, remedy = "cannot be fetched, the Hugging Face hub has a fault", "try again later"
    elif isinstance(reason, HfHubHTTPError | HFValidationError):
        text = f"is no {kind} that the Hugging Face hub shows you"
        remedy = "check the name, or log in with `hf auth login`"
    else:  # huggingface_hub has changed its HTTP client, and so its exceptions, twice
        text = "cannot be fetched, the Hugging Face hub is not reachable"
        remedy = (
            "check the network, set HF_HUB_OFFLINE=1 if it was fetched before, or use local files"
        )
    return DataError(f"{key}: {name!r} {text} ({one_line(reason)}); {remedy}")


def _one_of(file: Any, patterns: Sequence[str]) -> bool:
    return any(fnmatch(file.rfilename, pattern) for pattern in patterns)
