"""Atomic replacement of a file."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the file `path`: a reader sees the old or the new content, also after a crash.

    The new content is written beside it, under a random name that must not exist: a link there
    would lead the write elsewhere. Raises OSError; the old content stays then.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
