"""Files of a run directory that stay readable when a writer dies.

All peers of `diloco local` append to the same JSON-lines files. A line is one `write` in append
mode; therefore lines of several processes never mix. A process that dies during a write leaves at
most one torn line, and `read_json_lines` skips it. Other files are replaced as a whole. Non-finite
numbers become null: any JSON reader can read every file.
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

from diloco.atomic import replace_file
from diloco.config import Config, Manifest
from diloco.config.manifest import planned, raised
from diloco.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


def data_home() -> Path:
    """Where this user's peers keep their keys and the runs that they joined; `ConfigError` for one
    without a home."""
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "diloco")
    except RuntimeError:
        raise ConfigError(
            "this user has no home directory; set XDG_DATA_HOME=DIRECTORY for keys and runs"
        ) from None


def prepare_run_directory(path: Path) -> None:
    """Creates the run directory and checks that it can be written, before anything slow or shared
    starts. Raises `ConfigError` if it cannot be created or written.
    """
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
    """Where a peer keeps the small files that the run starts from: tokenizer, and tensors that are
    not trained."""
    return (config.run.dir / "origin").absolute()


def files_of(config: Config) -> dict[str, Path]:
    """Where the small files are that the manifest names, by digest."""
    origin = origin_of(config)
    tokenizer = {
        digest: origin / "tokenizer" / name for name, digest in config.data.tokenizer_files.items()
    }
    return tokenizer | {digest: origin / digest for digest in config.model.frozen.values()}


def check_same_run(config: Config, manifest: str) -> Config:
    """The configuration with the greater of its budget and planned rounds and those of the run's
    `manifest`.

    Raises `CheckpointError`, which names them, if other settings differ.
    """
    try:
        saved = Manifest.from_json(manifest, any_wire_version=True)
    except ConfigError as error:
        raise CheckpointError(
            f"run.dir={config.run.dir} holds a run of another diloco ({error}); use that one, or"
            " another run.dir"
        ) from None
    differing = config.manifest().differences(saved)
    differing = [line for line in differing if not line.startswith(("budget.", "outer.rounds:"))]
    if differing:
        raise CheckpointError(
            f"run.dir={config.run.dir} holds a run with other settings"
            f" ({'; '.join(differing[:4])}); use the same settings, or another run.dir"
        )
    return raised(config, planned(saved))


@contextlib.contextmanager
def exclusive(directory: Path, key: str = "run.dir") -> Iterator[None]:
    """Locks a directory for this process, and creates it if it is missing. The lock ends with the
    process.

    Two commands in one run directory would overwrite each other's checkpoints. Without effect on
    file systems that have no locks. Raises `ConfigError` if another process holds it or it cannot
    be made; `key` is the setting that chose it.
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
            raise ConfigError(
                f"{key}: {directory} is in use by another process; end that process, or choose"
                f" another {key}"
            ) from None
        except OSError as error:
            logger.debug("%s cannot be locked: %s", directory, error)
        yield
    finally:
        os.close(descriptor)


def in_use(directory: Path) -> bool:
    """Whether a process has locked that directory."""
    try:
        with exclusive(directory):
            return False
    except ConfigError:
        return True


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replaces the file `path` as a whole: a reader sees the old or the new content, also after a
    crash. Raises `ConfigError` when there is no space, no permission or the like; the old content
    stays.
    """
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(path, error) from error


class JsonLines:
    """Appends objects to a file that several processes and threads share; one `write` per line.
    Raises `ConfigError` if the file cannot be opened or written. A full disk or a dying process may
    cut a line short; the next write ends that line first, so that only this one is lost.
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
        """Appends `record`, a JSON object; non-finite numbers become null."""
        assert self._descriptor >= 0, f"{self.path} is closed"
        line = json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        data = b"\n" + line if self._torn else line
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
    """The objects of a JSON-lines file in order, without torn lines; empty if there is no such
    file."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # torn: JSONDecodeError or UnicodeDecodeError
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir: cannot write {path}: {error.strerror or error}; choose a directory that you may"
        " write to and that has free space, such as run.dir=runs/mine"
    )


def number(value: Any) -> float | None:
    """`value`, read from a file or a message, if it is a finite number; else None."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def finite(value: Any) -> Any:
    """A copy of `value`, a JSON structure, with None for every number that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
