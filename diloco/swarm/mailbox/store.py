"""An object store, as a mailbox needs it: list, read, write and delete objects of a folder.

`FileStore` is one over fsspec: a directory, S3, Google Cloud Storage, a bucket of the hub, or
memory. Keys and tokens come from where each store's library looks for them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.swarm.wire.tasks import in_thread
from diloco.text import one_line, plain

READ_BYTES = 1 << 24  # of a large object, read at a time
# extras of the package by scheme, and the modules that fsspec imports for them
EXTRAS = {"s3": ("s3", "s3fs"), "gs": ("gcs", "gcsfs"), "gcs": ("gcs", "gcsfs")}
# fields of fsspec's description of an object that change when it is written again
_CHANGES = "ETag etag mtime LastModified last_modified xet_hash created updated size".split()
_BUGS = (TypeError, AttributeError, NameError, AssertionError)


class Away(ConnectionError):
    """Error: the store does not answer now; `retry_s` is how long it asks to wait, 0 if unknown."""

    def __init__(self, why: str, retry_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_s = retry_s


class Store(Protocol):
    """Objects by name, such as `peers/ID`. Every call may raise `Away`.

    A list may be stale by seconds; an object that was written whole is read whole.
    """

    url: str
    requests: int  # made so far

    async def tags(self, folder: str) -> dict[str, str]:
        """Return a tag of each object under a folder, by name; a written object has another."""

    async def read(
        self, name: str, most_bytes: int, on_bytes: Callable[[int], object] = lambda nbytes: None
    ) -> memoryview:
        """Return an object; `FileNotFoundError`, or `PayloadError` if it has more bytes."""

    async def write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        """Write an object, or replace it."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is gone is no error."""


class FileStore:
    """A `Store` over fsspec; its calls run in threads.

    On failure: what the store refuses for good (permissions, no such bucket) is a `SwarmError` that
    names the object; everything else is `Away`, as networks and servers fail for a while.
    """

    def __init__(self, url: str) -> None:
        self.url, self.requests = url.rstrip("/"), 0
        self._scheme = url.partition("://")[0]
        extra, module = EXTRAS.get(self._scheme, ("", ""))
        try:
            if module:
                import_module(module)
            import fsspec

            self._files, self._root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            remedy = f"pip install 'diloco[{extra}]'" if extra else "install what it names"
            why = f"swarm.mailbox={url} cannot be opened: {one_line(error)}"
            raise ConfigError(f"{why}; {remedy}") from None
        self._root = self._root.rstrip("/")

    async def tags(self, folder: str) -> dict[str, str]:
        tags: dict[str, str] = await self._call(self._list, folder, folder)
        return tags

    async def read(
        self, name: str, most_bytes: int, on_bytes: Callable[[int], object] = lambda nbytes: None
    ) -> memoryview:
        loop = asyncio.get_running_loop()

        def tell(nbytes: int) -> None:
            loop.call_soon_threadsafe(on_bytes, nbytes)

        content: memoryview = await self._call(self._read, name, name, most_bytes, tell)
        return content

    async def write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        await self._call(self._write, name, name, chunks)

    async def delete(self, names: Sequence[str]) -> None:
        if names:
            await self._call(self._delete, names[0], names)

    # -- in threads --------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _list(self, folder: str) -> dict[str, str]:
        path = self._path(folder)
        self._files.invalidate_cache()
        try:
            entries = self._files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._files._strip_protocol(self._root)) + 1
        return {
            name[start:]: " ".join(str(entry[key]) for key in _CHANGES if key in entry)
            for name, entry in entries.items()
            if not name.rpartition("/")[2].startswith(".")
        }

    def _read(self, name: str, most_bytes: int, tell: Callable[[int], None]) -> memoryview:
        """Read by ranges: opening a file would ask for its size first, and fail when it changes."""
        path, content, nbytes = self._path(name), bytearray(), READ_BYTES
        while nbytes == READ_BYTES:
            # from the last byte that is here, as a range behind the end would be an error
            start = max(0, len(content) - 1)
            piece = self._files.cat_file(path, start=start, end=start + READ_BYTES)
            nbytes = len(piece)
            content += memoryview(piece)[len(content) - start :]
            self.requests += start > 0
            if len(content) > most_bytes:
                raise PayloadError(f"{name} has more than {most_bytes} bytes")
            tell(len(content))
        return memoryview(content)

    def _write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        folder, _, base = path.rpartition("/")
        if self._scheme != "file":  # object stores show an object when all of it is there
            return self._files.pipe_file(path, b"".join(chunks))  # type: ignore[no-any-return]
        part = f"{folder}/.{base[:64]}-{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):
            return self._write_file(folder, part, path, chunks)
        self._write_file(folder, part, path, chunks)  # another peer has deleted the empty folder

    def _write_file(
        self, folder: str, part: str, path: str, chunks: Sequence[bytes | memoryview]
    ) -> None:
        self._files.makedirs(folder, exist_ok=True)
        with self._files.open(part, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        self._files.mv(part, path)

    def _delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        try:
            self._files.rm(paths)
        except FileNotFoundError:  # one is gone: by whoever cleaned up
            for path in paths:
                with suppress(FileNotFoundError):
                    self._files.rm_file(path)
        if self._scheme == "file":
            for folder in {path.rpartition("/")[0] for path in paths}:
                with suppress(OSError):  # there are other objects in it
                    self._files.rmdir(folder)

    async def _call(self, work: Callable[..., Any], name: str, *arguments: object) -> Any:
        self.requests += 1
        try:
            return await in_thread(work, *arguments)
        except (FileNotFoundError, PayloadError, *_BUGS):
            raise
        except PermissionError as error:
            what = f"{self.url}/{name}: {one_line(error)}"
            remedy = "check the keys of this store, and what they allow"
            raise SwarmError(f"the mailbox refuses this peer: {what}; {remedy}") from None
        except Exception as error:
            # each store's library has its own tree of errors
            raise Away(f"{name}: {plain(one_line(error))[:300]}", _retry_s(error)) from error


def _retry_s(error: object) -> float:
    """Return how long an HTTP answer asks to wait; 0 where it does not."""
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or {}
    if isinstance(response, dict):  # of botocore
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
    return min(float(text), 3600.0) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0
