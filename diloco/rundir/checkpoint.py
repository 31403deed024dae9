"""Checkpoints. A crash, a full disk or a bad sector never leads to a wrong resume.

A reader sees only step 4 of a save, which is a single rename:

1. Make `.tmp-step-00000012-PID/` beside the older checkpoints.
2. Write every group of tensors to `NAME.safetensors`, hash it on the way, and fsync it.
3. Write `state.json`: format, step, size and sha256 of every file, and a digest of all this.
4. Fsync the directory and rename it to `step-00000012/`.
5. Rename checkpoints beyond `keep` back to temporary names, then delete them.

Nothing is pickled: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.errors import CheckpointError

Groups = Mapping[str, Mapping[str, Tensor]]

FORMAT = 3
STATE_FILE = "state.json"
BLOCK_BYTES = 16 * 2**20  # still in the cache when it is written after hashing

_TEMPORARY = ".tmp-"
# a suffix ".1", ".2", ... counts repeated saves of a step
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")
_STEM = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(rf"{_STEM.pattern}\.safetensors")
DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)}
DTYPES |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)}
DTYPES |= {torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"}

logger = logging.getLogger(__name__)


class _UnusableError(Exception):
    """One checkpoint cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was verified.

    `tensors[stem]` reads that file again at each access, into copies on the CPU; it stays readable
    if it is pruned. `skipped` names newer checkpoints that could not be used, with the reasons.
    """

    path: Path
    step: int
    state: dict[str, Any]
    tensors: Mapping[str, dict[str, Tensor]]
    skipped: list[str] = field(default_factory=list)


class CheckpointStore:
    """The checkpoints of one peer in one directory; the `keep` newest stay.

    A directory has one writer and any number of readers: nothing is created or deleted before the
    first `save`. A crash leaves at most a temporary directory, which the next `save` removes.
    `key` is the setting that chose the directory.
    """

    def __init__(self, directory: Path, keep: int, key: str = "run.dir") -> None:
        assert keep >= 1, f"keep={keep}"
        self.directory, self.keep, self._key = Path(directory), keep, key
        self._rejected: set[str] = set()  # unusable ones; they do not count towards `keep`
        self._clean = False

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> Path:
        """Write `tensors` (file stem -> name -> tensor, any shape and device) and a JSON `state`.

        Afterwards `load_latest` returns this checkpoint, even if there were later steps: they
        belong to a timeline that this run has left. Saving a step again replaces it. Raises
        `CheckpointError` without space, permission or the like; nothing half-written remains.
        """
        assert step >= 0, f"step={step}"
        assert all(_STEM.fullmatch(stem) for stem in tensors), f"file stems {sorted(tensors)}"
        plain = json.loads(json.dumps(state))  # a TypeError comes before there are files
        temporary = self.directory / f"{_TEMPORARY}step-{step:08d}-{os.getpid()}"
        try:
            if not self._clean:  # a crashed process may have left something behind
                os.makedirs(self.directory, exist_ok=True)
                for name in os.listdir(self.directory):
                    if name.startswith(_TEMPORARY):
                        shutil.rmtree(self.directory / name, ignore_errors=True)
                self._clean = True
            # A step that was saved before gets a suffix, because POSIX cannot swap two directories.
            saves = [save for saved_step, save in map(_age, self._names()) if saved_step == step]
            target = self.directory / (f"step-{step:08d}" + (f".{max(saves) + 1}" if saves else ""))
            _write_directory(temporary, step, tensors, plain)
            os.replace(temporary, target)
            _fsync_directory(self.directory)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            key, where = self._key, f"{self.directory}: {error.strerror or error}"
            raise CheckpointError(
                f"{key}: cannot write the checkpoint of outer step {step} to {where}; free some"
                f" space or choose another {key} (older checkpoints are intact)"
            ) from error
        self._prune(target.name)
        return target

    def load_latest(self) -> Checkpoint | None:
        """Load the newest usable checkpoint; None without any. Warns of each unusable one.

        Raises `CheckpointError` if there are checkpoints and none of them can be used.
        """
        reasons: list[str] = []
        tried: set[str] = set()
        # Listed again each time: the writer may prune what we read, and add a newer one.
        while names := [name for name in self._names() if name not in tried]:
            name = names[0]
            tried.add(name)
            try:
                step, state, tensors = _read_directory(self.directory / name)
            except _UnusableError as error:
                if (self.directory / name).exists():
                    self._rejected.add(name)
                    reasons.append(f"{name}: {error}")
                continue
            skipped = [f"{reason}; using {name} instead" for reason in reasons]
            for warning in skipped:
                logger.warning("unusable checkpoint %s", warning)
            return Checkpoint(self.directory / name, step, state, tensors, skipped)
        if reasons:
            raise CheckpointError(
                f"{self._key}: no usable checkpoint in {self.directory} ({'; '.join(reasons)}); put"
                f" a good copy back, or delete that directory or choose another {self._key} to"
                " start over"
            )
        return None

    def _names(self) -> list[str]:
        """List the checkpoint directories by name, newest first."""
        try:
            names = filter(_NAME.fullmatch, os.listdir(self.directory))
            return sorted(names, key=_age, reverse=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self._key}: cannot read the checkpoints in {self.directory}: {error.strerror}; "
                f"correct its permissions or choose another {self._key}"
            ) from error

    def _prune(self, saved: str) -> None:
        """Keep `saved` and the newest older ones. A failure to delete does not stop the run."""
        try:
            names = self._names()
            step, older = _age(saved)[0], names[names.index(saved) :]
            older = [n for n in older if _age(n)[0] != step and n not in self._rejected]
            for name in set(names) - {saved, *older[: self.keep - 1]}:
                # Renamed first: a crash during the deletion must not leave a damaged checkpoint.
                doomed = self.directory / f"{_TEMPORARY}{name}-{os.getpid()}"
                os.replace(self.directory / name, doomed)
                shutil.rmtree(doomed)
        except (OSError, CheckpointError) as error:
            logger.warning("cannot delete old checkpoints in %s: %s", self.directory, error)


def copied(tensors: Groups) -> dict[str, dict[str, Tensor]]:
    """Copy groups of tensors to the CPU, into memory that no one else writes to."""
    with torch.no_grad():
        return {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
            for stem, group in tensors.items()
        }


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, which Python joins before it ends."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> None:
        """Write `tensors`, which must not change now, and a copy of `state`; after `result`."""
        assert self._writing is None, "one checkpoint at a time"
        copy = json.loads(json.dumps(state))
        self._writing = self._threads.submit(self._store.save, step, tensors, copy)

    def result(self) -> CheckpointError | None:
        """Wait until nothing is being written; return the last checkpoint's error, once."""
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error


def _age(name: str) -> tuple[int, int]:
    """Parse a directory's name into the step, and the number of the save of that step."""
    step, _, save = name.removeprefix("step-").partition(".")
    return int(step), int(save or 0)


def _write_directory(path: Path, step: int, tensors: Groups, state: dict[str, Any]) -> None:
    os.mkdir(path)
    files = {
        (name := f"{stem}.safetensors"): _write_file(path / name, _safetensors(group))
        for stem, group in tensors.items()
    }
    body = {"format": FORMAT, "step": step, "files": files, "state": state}
    text = json.dumps({"sha256": _digest(body), **body}, indent=1)
    _write_file(path / STATE_FILE, [text.encode()])
    _fsync_directory(path)


def _read_directory(path: Path) -> tuple[int, dict[str, Any], Mapping[str, dict[str, Tensor]]]:
    try:
        body = json.loads((path / STATE_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise _UnusableError(_reason(STATE_FILE, error)) from error
    if not isinstance(body, dict):
        raise _UnusableError(f"{STATE_FILE} is corrupt")
    if body.get("format", FORMAT) != FORMAT:
        other = body["format"]
        raise _UnusableError(f"it has format {other}, this version of diloco reads {FORMAT}")
    if body.pop("sha256", None) != _digest(body):
        raise _UnusableError(f"{STATE_FILE} is corrupt (its digest differs)")
    if not _is_complete(body):
        raise _UnusableError(f"{STATE_FILE} is corrupt (something is missing in it)")
    for name, expected in body["files"].items():
        try:
            with open(path / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["bytes"]:
                    raise _UnusableError(f"{name} has {size} bytes instead of {expected['bytes']}")
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    raise _UnusableError(f"{name} is corrupt (its sha256 differs)")
        except OSError as error:
            raise _UnusableError(_reason(name, error)) from error
    return body["step"], body["state"], _Groups(path, body["files"])


def _is_complete(body: dict[str, Any]) -> bool:
    """Return True if a state file has all our fields, and names no file outside its directory."""
    try:
        kinds = {(type(entry["bytes"]), type(entry["sha256"])) for entry in body["files"].values()}
        known = all(map(_FILE.fullmatch, body["files"])) and kinds <= {(int, str)}
        return known and type(body["step"]) is int and isinstance(body["state"], dict)
    except (KeyError, TypeError, AttributeError):
        return False


class _Groups(UserDict[str, Any]):
    """The tensor files of one checkpoint: all are mapped at once, and each is read on access."""

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        try:
            super().__init__({Path(file).stem: safe_open(path / file, "pt") for file in files})
        except (OSError, SafetensorError) as error:
            raise _UnusableError(f"its tensors cannot be read: {error}") from error

    def __getitem__(self, stem: str) -> dict[str, Tensor]:
        file = self.data[stem]
        # Cloned: a mapped tensor would kill the process if somebody truncated the file later.
        return {name: file.get_tensor(name).clone() for name in file.keys()}


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces; the library's `save_file` can neither hash nor fsync."""
    assert "__metadata__" not in tensors, "safetensors reserves this name"
    header: dict[str, Any] = {}
    stop = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name}: a checkpoint cannot hold {tensor.dtype}")
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [start, stop]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().flatten()  # (numel,)
        yield flat.view(torch.uint8).numpy().data


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a new file; return its entry of `state.json`."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            size += len(piece)
            for start in range(0, len(piece), BLOCK_BYTES):
                block = memoryview(piece)[start : start + BLOCK_BYTES]
                digest.update(block)
                while block:
                    block = block[os.write(descriptor, block) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(name: str, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if isinstance(error, OSError):
        return f"{name} cannot be read: {error.strerror}"
    return f"{name} is corrupt"


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
