"""Files of a run directory that stay readable when a writer dies.

All peers of `diloco local` append to the same JSON-lines files. A line is one `write` in append
mode, so lines of several processes never mix; a process that dies leaves at most one torn line,
which `read_json_lines` skips. Other files are replaced as a whole. Non-finite numbers become null.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diloco.atomic import replace_file
from diloco.config import Config, Manifest
from diloco.config.manifest import planned, raised
from diloco.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


def data_home() -> Path:
    """Return the directory of this user's keys and joined runs; `ConfigError` without a home."""
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "diloco")
    except RuntimeError:
        remedy = "set XDG_DATA_HOME=DIRECTORY for keys and runs"
        raise ConfigError(f"this user has no home directory; {remedy}") from None


def prepare_run_directory(path: Path) -> None:
    """Create the run directory; raise `ConfigError` if it cannot be written."""
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(probe, bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def origin_of(config: Config) -> Path:
    """Return the directory of the tokenizer and the untrained tensors that the run starts from."""
    return (config.run.dir / "origin").absolute()


def files_of(config: Config) -> dict[str, Path]:
    """Return the paths of the small files that the manifest names, by digest."""
    origin, files = origin_of(config), config.data.tokenizer_files
    tokenizer = {digest: origin / "tokenizer" / name for name, digest in files.items()}
    return tokenizer | {digest: origin / digest for digest in config.model.frozen.values()}


def check_same_run(config: Config, manifest: str) -> Config:
    """Take the greater of the configuration's and the run's budget and planned rounds.

    Raises `CheckpointError` if other settings differ from those of the run's `manifest`.
    """
    run_dir = config.run.dir
    try:
        saved = Manifest.from_json(manifest, any_wire_version=True)
    except ConfigError as error:
        remedy = "use that one, or another run.dir"
        text = f"run.dir={run_dir} holds a run of another diloco ({error}); {remedy}"
        raise CheckpointError(text) from None
    lines = config.manifest().differences(saved)
    lines = [line for line in lines if not line.startswith(("budget.", "outer.rounds:"))]
    if lines:
        shown, remedy = "; ".join(lines[:4]), "use the same settings, or another run.dir"
        text = f"run.dir={run_dir} holds a run with other settings ({shown}); {remedy}"
        raise CheckpointError(text)
    return raised(config, planned(saved))


@contextlib.contextmanager
def exclusive(directory: Path, key: str = "run.dir") -> Iterator[int]:
    """Lock a directory until this process ends, and create it if it is missing.

    It yields the descriptor that holds the lock: a process that inherits it holds the lock, too.

    Two commands in one run directory would overwrite each other's checkpoints. Without effect on
    file systems without locks. Raises `ConfigError` if another process holds the lock or the
    directory cannot be made; `key` is the setting that names it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{key}: {directory}: {error.strerror}; choose another {key}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"{directory} is in use by another process; end that process"
            raise ConfigError(f"{key}: {why}, or choose another {key}") from None
        except OSError as error:
            logger.debug("%s cannot be locked: %s", directory, error)
        yield descriptor
    finally:
        os.close(descriptor)


def in_use(directory: Path) -> bool:
    """Return True if a process has locked that directory."""
    try:
        with exclusive(directory):
            return False
    except ConfigError:
        return True


def write_atomic(path: Path, content: bytes | str) -> None:
    """Call `replace_file` with `ConfigError` for its errors; the old content stays then."""
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(path, error) from error


class JsonLines:
    """Appends objects to a file that several processes and threads share, one `write` per line.

    Raises `ConfigError` if the file cannot be opened or written. A line that a full disk or a dying
    process cut short is ended by the next write, so that no other is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`, a JSON object; non-finite numbers become null."""
        assert self._descriptor >= 0, f"{self.path} is closed"
        data = b"\n" * self._torn + json.dumps(finite(record)).encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._torn = written < len(data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, without torn lines; empty if there is no file."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # torn: JSONDecodeError or UnicodeDecodeError
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def _unwritable(path: Path, error: OSError) -> ConfigError:
    remedy = "choose a directory that you may write to and that has free space"
    why = f"cannot write {path}: {error.strerror or error}"
    return ConfigError(f"run.dir: {why}; {remedy}, such as run.dir=runs/mine")


def number(value: Any) -> float | None:
    """Return `value`, read from a file or a message, if it is a finite number; else None."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def finite(value: Any) -> Any:
    """Copy `value`, a JSON structure, with None for every number that JSON lacks."""
    return msgspec.json.decode(msgspec.json.encode(value))
