"""Pushes models of checkpoints to a URL while training goes on: `URL/step-00000012/`.

The URL is a directory, or whatever fsspec writes to: an object store, or the hub. The first peer
that pushes a version claims it by a file; the others skip it, as their models are equal.
`complete.json` comes last: a version without it is incomplete. A version of an earlier training is
replaced. So is the last version, at the end of the run: where fragments have versions of their own,
the model pushed before may be between two of them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diloco.errors import ConfigError
from diloco.text import one_line

COMPLETE = "complete.json"
PATIENCE_S = 600.0

logger = logging.getLogger(__name__)


class Pusher:
    """Pushes one version at a time, the newest that waits first, in a thread of its own.

    `digest` identifies a model, `write` writes it into a directory. A version that still fails
    after the waits `retry_s` is given up. Raises `ConfigError` if the URL cannot be written to.
    """

    def __init__(
        self,
        url: str,
        digest: Callable[[Any], str | None],
        write: Callable[[Any, Path], None],
        retry_s: Sequence[float] = (2.0, 10.0, 60.0),
    ) -> None:
        self._url, self._digest = url, digest
        self._write, self._retry_s = write, retry_s
        self._me, self._fails = token_hex(8), False
        self._queue: Queue[tuple[int, Any, bool]] = Queue()
        try:
            self._files, self._root = fsspec.url_to_fs(url)
            self._is_local = isinstance(self._files, LocalFileSystem)
            self._files.auto_mkdir = self._is_local
            self._files.pipe_file(probe := f"{self._root}/probe-{self._me}", b"diloco")
            there = self._files.ls(self._root, detail=False)
            self._old = {name.rpartition("/")[2] for name in there}
            self._files.rm_file(probe)
        except Exception as error:  # each store has its own exceptions
            remedy = (
                "name a directory, or a URL whose library is installed and to which the environment"
                " gives access"
            )
            why = f"cannot be written ({one_line(error)})"
            raise ConfigError(f"checkpoint.push={url} {why}; {remedy}") from error
        threading.Thread(target=self._work, name="push", daemon=True).start()

    def begin(self, version: int, model: Any, final: bool = False) -> None:
        """Push a model; a `final` one, after some waiting, even if another peer has claimed it."""
        with suppress(Empty):
            self._queue.get_nowait()
            self._queue.task_done()
        self._queue.put((version, model, final))

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all begun pushes are done, or warn after `timeout_s`."""
        with (done := self._queue.all_tasks_done):
            if not done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s):
                text = "checkpoint.push: the last model is not at %s after %.0f s"
                logger.warning(text, self._url, timeout_s)

    def _work(self) -> None:
        while True:
            self._push(*self._queue.get())
            self._queue.task_done()

    def _push(self, version: int, model: Any, final: bool) -> None:
        for wait_s in (*self._retry_s, None):
            try:
                with TemporaryDirectory(prefix="diloco-") as scratch:
                    self._upload(version, model, Path(scratch) / "model", final, wait_s is None)
            except Exception as error:  # of the store, or of this machine's disk
                if wait_s is not None:
                    time.sleep(wait_s)
                    continue
                if not self._fails:
                    failure = f"outer step {version} is not at {self._url} ({one_line(error)})"
                    rest = "training goes on, and later ones are tried"
                    logger.warning("checkpoint.push: %s; %s", failure, rest)
                self._fails = True
                return
            if self._fails:
                again = f"{self._url} takes models again, from outer step {version} on"
                logger.warning("checkpoint.push: %s", again)
            self._fails = False
            return

    def _upload(self, version: int, model: Any, folder: Path, final: bool, last_try: bool) -> None:
        files, name, digest = self._files, f"step-{version:08d}", str(self._digest(model))
        target, anew = f"{self._root}/{name}", final or name in self._old
        complete, claim = f"{target}/{COMPLETE}", f"{target}/claim"
        mine = f"{digest} {self._me}".encode()
        whole = json.dumps({"version": version, "values": digest}).encode()
        files.invalidate_cache()
        there, claimed = (
            files.cat_file(path) if files.exists(path) else b"" for path in (complete, claim)
        )
        if there == whole or (there and not anew):
            return
        taken = claimed not in (b"", mine) and (claimed.startswith(digest.encode()) or not anew)
        if taken and not (final and last_try):
            if final:
                raise ConfigError("another peer is at it")
            return
        files.pipe_file(claim, mine)
        if there:
            files.rm_file(complete)
        self._write(model, folder)
        for file in filter(Path.is_file, folder.rglob("*")):
            name = f"{target}/{file.relative_to(folder).as_posix()}"
            part = f"{name}.{self._me}" if self._is_local else name  # stores show whole files only
            files.put_file(str(file), part)
            if self._is_local:
                files.mv(part, name)
        files.pipe_file(complete, whole)
