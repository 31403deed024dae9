"""The files that a run starts from, behind `model.path` and `data.tokenizer`, for all of its peers.

The peer that starts a run has them, from a directory or the hub (`resolved`). The manifest gets the
model's config, and digests of the trained weights, of each tensor that is not trained, of the
tokenizer's files, and of the base of an adapter, but no path. Each peer keeps the small files
(`keep`), and its node sends them and the base, in parts, to peers that name a digest
(`fetch_start_files`). The trained weights come as the swarm's anchor; before the first outer step
no version certifies one, so it is compared with the manifest.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from diloco import data
from diloco import model as models
from diloco.attach.parameters import values_digest
from diloco.config import Config, DataConfig, Manifest, ModelConfig
from diloco.config.model_data import FILES, MAX_FROZEN, MAX_TOKENIZER_FILES
from diloco.errors import CheckpointError, ConfigError, DataError, SwarmError, TermsError
from diloco.hub import TOKENIZER_FILES, files_at
from diloco.rundir import base_files
from diloco.rundir.files import files_of, origin_of, write_atomic
from diloco.swarm.client.ask import fetch_files
from diloco.swarm.context import FilePart
from diloco.swarm.wire.gate import Gate

# of a tokenizer in the swarm; the largest public vocabularies have some 40 MB
MAX_TOKENIZER_BYTES = 2**26
HEADER_BYTES = 2**12  # of a file with one tensor, beside its values

Values = Mapping[str, object]
Ask = Callable[..., Coroutine[Any, Any, None]]


def resolved(config: Config) -> Config:
    """Replace names of directories by config and digests; `Config.names_files` is false then.

    A tokenizer of the hub without a commit stays as it is: nobody can join such a run. Raises
    ConfigError, DataError and CheckpointError for files that no run can start from.
    """
    has_names = config.model.path is not None and config.model.weights is None
    model = _model(config) if has_names else {}
    return Config.parse(_with(config, model, _tokenizer(config)).model_dump())


def with_origin(config: Config, run_dir: Path | None = None) -> Config:
    """Return the configuration of a peer that has only `run.dir/origin`, now in `run_dir`."""
    origin = origin_of(config) if run_dir is None else (run_dir / "origin").absolute()
    has_model, has_tokenizer = config.model.weights is not None, config.data.tokenizer_files
    base = origin
    if has_model and config.model.adapter != "none" and not (base := _base_of(config)).is_dir():
        base = origin / "base"  # which has moved with its run
    model, tokenizer = (
        {"directory": str(base)},
        {"tokenizer_directory": str(origin / "tokenizer")},
    )
    return _with(config, model if has_model else {}, tokenizer if has_tokenizer else {})


def _base_of(config: Config) -> Path:
    """Return the directory with the base of the adapter on this peer."""
    if config.model.directory is None and config.model.revision is not None:
        return models.directory_of(config.model.model_copy(update={"weights": None}))
    return Path(config.model.directory or origin_of(config))


def with_manifest(config: Config, manifest: Manifest) -> Config:
    """Add what a run starts from to the configuration of a host, which does not train."""
    names = ("tokenizer", "tokenizer_revision", "tokenizer_files")
    tokenizer = {name: getattr(manifest.data, name) for name in names}
    return _with(config, manifest.model.model_dump(), tokenizer)


def keep(config: Config, model: nn.Module) -> None:
    """Keep the small files of the run, where `files_of` says.

    Raises CheckpointError if one is not that of the run.
    """
    weights = config.model.weights
    if weights is not None and models.has_files(config.model) and _trained_digest(model) != weights:
        raise CheckpointError(
            f"model.directory={config.model.directory} has other weights than {weights[:12]}, from"
            f" which the run starts; {_remedy(config)}"
        )
    frozen = models.frozen_of(model) if config.model.weights is not None else {}
    if unknown := sorted(frozen.keys() ^ config.model.frozen.keys()):
        raise CheckpointError(
            f"model.frozen.{unknown[0]} is here or in the run, and not in both; start from other"
            " files"
        )
    if config.model.base and config.model.directory and base_files.saved_index(config) is None:
        index = base_files.index_of(Path(config.model.directory))
        if sha256(index).hexdigest() == config.model.base:  # else it has the same in other files
            _keep(index, base_files.index_place(config), config.model.base, "model.base")
    packed = {name: models.tensor_bytes(name, tensor) for name, tensor in frozen.items()}
    for name, digest in config.model.frozen.items():
        _keep(packed[name], origin_of(config) / digest, digest, f"model.frozen.{name}")
    here = config.data.tokenizer_directory
    if here is not None:
        for name, digest in config.data.tokenizer_files.items():
            path = origin_of(config) / "tokenizer" / name
            _keep(_read(Path(here) / name), path, digest, f"data.tokenizer_files.{name}")


def _remedy(config: Config) -> str:
    if config.model.adapter != "none":
        return "an adapter fits only its own base: give the directory of that one"
    return "drop it, and they come from the swarm"


def fetch_start_files(
    config: Config,
    addresses: Sequence[str],
    gate: Gate | None = None,
    identity: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Config:
    """Fetch the files of the run from its peers; return the config with their paths.

    The base of an adapter is among them if neither this peer nor the hub has it; `on_progress` gets
    its bytes that are here, and all. Raises SwarmError, and ConfigError for no room.
    """
    ask: Ask = partial(fetch_files, addresses, identity_path=identity, gate=gate)
    if config.model.base is not None and config.model.directory is None:
        base = _base_of_hub(config) or _base_of_peers(config, ask, on_progress)
        config = _with(config, {"directory": str(base)}, {})
    paths, origin = files_of(config), origin_of(config)
    if paths:  # of an earlier run of that name
        shutil.rmtree(origin / "tokenizer" if config.model.base else origin, ignore_errors=True)
        frozen = config.model.frozen
        with torch.device("meta"):
            expected = models.frozen_of(models.outline(config.model)) if frozen else {}
        sizes = {
            digest: expected[name].nbytes + HEADER_BYTES
            for name, digest in frozen.items()
            if name in expected
        }
        wanted = {
            digest: ([FilePart(path)], sizes.get(digest, MAX_TOKENIZER_BYTES))
            for digest, path in paths.items()
        }
        most = MAX_TOKENIZER_BYTES + sum(sizes.values())
        asyncio.run(ask(wanted, most))
    return with_origin(config)


def base_bytes(config: Config, addresses: Sequence[str], gate: Gate, identity: Path) -> int:
    """Return the bytes of the base that this peer has to fetch; 0 if it has one, or no peer
    answers. Nothing in `run.dir` changes: the volunteer may say no."""
    if config.model.base is None or config.model.directory is not None:
        return 0
    ask = partial(fetch_files, addresses, identity_path=identity, gate=gate)
    with TemporaryDirectory(prefix="diloco-") as scratch, suppress(SwarmError):
        run = config.run.model_copy(update={"dir": Path(scratch)})
        index = _index(config.model_copy(update={"run": run}), ask)
        return sum(nbytes for nbytes, _ in index.values())
    return 0


def _base_of_hub(config: Config) -> Path | None:
    try:
        return None if config.model.revision is None else _base_of(config)
    except TermsError:
        raise
    except DataError:  # nobody answers there, or not with this model
        return None


def _base_of_peers(config: Config, ask: Ask, on_progress: Callable[[int, int], None]) -> Path:
    """Fetch all parts; return their directory. Parts of an earlier attempt are kept."""
    index, directory = _index(config, ask), origin_of(config) / "base"
    parts = base_files.missing(index, directory)
    total = sum(nbytes for nbytes, _ in index.values())
    lacking = sum(part.nbytes or 0 for places in parts.values() for part in places)
    free = shutil.disk_usage(origin_of(config)).free
    if lacking > free:
        text = f"run.dir={config.run.dir} has room for {free} bytes, and the base needs {lacking}"
        raise ConfigError(f"{text}; free some, choose another run.dir, or set model.directory")
    if parts:
        wanted = {digest: (places, places[0].nbytes or 0) for digest, places in parts.items()}
        asyncio.run(ask(wanted, lacking, on_progress=lambda left: on_progress(total - left, total)))
    return directory


def _index(config: Config, ask: Ask) -> base_files.Index:
    if (index := base_files.saved_index(config)) is not None:
        return index
    shutil.rmtree(origin_of(config), ignore_errors=True)  # of an earlier run of that name
    file, most = FilePart(base_files.index_place(config)), base_files.MAX_INDEX_BYTES
    asyncio.run(ask({config.model.base: ([file], most)}, most))
    return base_files.saved_index(config) or {}


def check_start(config: Config, model: nn.Module) -> None:
    """Raise SwarmError unless the trained parameters are those of the manifest."""
    if models.has_adapter(model):
        return  # the manifest names the base, which `keep` has compared and nobody sends
    if config.model.weights is not None and _trained_digest(model) != config.model.weights:
        raise SwarmError(
            f"the run starts from weights {config.model.weights[:12]}, and the swarm sent others;"
            " join at the address of another peer"
        )


def _model(config: Config) -> Values:
    """Read the settings of the model from the files."""
    directory = models.directory_of(config.model)
    built = models.build(config.model, config.run.seed, narrow=True)
    frozen = models.frozen_of(built)
    if len(frozen) > MAX_FROZEN:
        raise ConfigError(
            f"model.path={config.model.path} has {len(frozen)} buffers and parameters that are not"
            f" trained; a run has room for the digests of {MAX_FROZEN}"
        )
    packed = {name: models.tensor_bytes(name, tensor) for name, tensor in frozen.items()}
    index = None if config.model.adapter == "none" else base_files.index_of(directory)
    return {
        **models.recipe_of(built),
        "path": config.model.path if config.model.revision is not None else None,
        "directory": str(directory.resolve()),
        "weights": _trained_digest(built),
        "frozen": {name: sha256(content).hexdigest() for name, content in packed.items()},
        "base": index and sha256(index).hexdigest(),
    }


def _tokenizer(config: Config) -> Values:
    """Read the settings of the tokenizer from the files."""
    named, commit = config.data.tokenizer, config.data.tokenizer_revision
    if named in ("bytes", FILES) or config.data.tokenizer_files:
        return {}
    if commit is None:
        directory = Path(named).expanduser()
    else:
        directory = files_at("data.tokenizer", named, commit, TOKENIZER_FILES, MAX_TOKENIZER_BYTES)
    if data.is_bytes(directory):
        return {"tokenizer": "bytes", "tokenizer_revision": None}
    if not directory.is_dir():
        return {}
    inside = sorted(directory.iterdir())
    files = [file for file in inside if any(fnmatch(file.name, glob) for glob in TOKENIZER_FILES)]
    nbytes = sum(file.stat().st_size for file in files)
    if not files:
        raise DataError(
            f"data.tokenizer={named} has no tokenizer; set it to bytes, or to a directory or name"
            " that has one"
        )
    if len(files) > MAX_TOKENIZER_FILES or nbytes > MAX_TOKENIZER_BYTES:
        raise DataError(
            f"data.tokenizer: {named} has {len(files)} files of a tokenizer with {nbytes} bytes; a"
            f" run takes at most {MAX_TOKENIZER_FILES} of {MAX_TOKENIZER_BYTES} bytes in all"
        )
    return {
        "tokenizer": FILES if commit is None else named,
        "tokenizer_files": {file.name: sha256(_read(file)).hexdigest() for file in files},
        "tokenizer_directory": str(directory.resolve()),
    }


def _with(config: Config, model: Values, tokenizer: Values) -> Config:
    model_config = ModelConfig.parse({**config.model.model_dump(), **model})
    data_config = DataConfig.parse({**config.data.model_dump(), **tokenizer})
    return config.model_copy(update={"model": model_config, "data": data_config})


def _trained_digest(model: nn.Module) -> str | None:
    """Return the digest of the parameters at the start; of the base, under an adapter."""
    if models.has_adapter(model):
        return values_digest(models.base_parameters(model))
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return values_digest({name: p.detach() for name, p in trained})


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        text = f"data.tokenizer: {file} cannot be read ({error.strerror})"
        raise CheckpointError(text) from error


def _keep(content: bytes, path: Path, digest: str, key: str) -> None:
    if sha256(content).hexdigest() != digest:
        raise CheckpointError(
            f"{key} is not what the run starts from; use the files of the run, or join it instead"
        )
    if not path.is_file() or path.read_bytes() != content:  # of another run that was here
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
