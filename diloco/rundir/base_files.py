"""Base models of adapters, served to joiners in parts.

`model.base` is the SHA-256 of the index: by file its bytes, and the SHA-256 of each part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from diloco.config import Config
from diloco.errors import SwarmError
from diloco.messages.fields import Digest
from diloco.rundir.files import files_of, origin_of
from diloco.swarm.context import FilePart
from diloco.text import one_line

PART_BYTES = 2**24
MAX_INDEX_BYTES = 2**20  # of 250 GB
FILE = (  # what transformers reads; consolidated.safetensors is a second copy
    r"^(?:(?:config|generation_config|model\.safetensors\.index)\.json"
    r"|(?!consolidated)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.safetensors)\Z"
)
Parts = tuple[Annotated[int, Meta(ge=1, le=2**48)], list[Digest]]
Index = dict[Annotated[str, Meta(pattern=FILE)], Parts]


def index_of(directory: Path) -> bytes:
    """Return the index of the model in a directory, as canonical JSON."""
    files = [file for file in directory.iterdir() if re.match(FILE, file.name)]
    cut = {file: _cut(file, file.stat().st_size) for file in files}
    index = {file.name: (file.stat().st_size, _digests(parts)) for file, parts in cut.items()}
    return msgspec.json.encode(index, order="sorted")


def index_place(config: Config) -> Path:
    return origin_of(config) / "base.json"


def saved_index(config: Config) -> Index | None:
    """Load the index if this peer has it. `SwarmError` if the run's is invalid."""
    path = index_place(config)
    content = path.read_bytes() if path.is_file() else b""
    if sha256(content).hexdigest() != config.model.base:
        return None
    try:
        index = msgspec.json.decode(content, type=Index)
        for name, (nbytes, digests) in index.items():
            most = 1 if name.endswith(".json") else len(digests)
            if len(range(0, nbytes, PART_BYTES)) != len(digests) or len(digests) > most:
                raise ValueError(f"{name} has {nbytes} bytes in {len(digests)} parts")
    except (ValueError, RecursionError) as error:  # MsgspecError is a ValueError
        why = f"model.base of the run lists no files of a model ({one_line(error)})"
        raise SwarmError(f"{why}; join no such run") from None
    return index


def parts_of(index: Index, directory: Path) -> list[tuple[str, FilePart]]:
    """List the digest and the file range of each part."""
    cut = ((digests, _cut(directory / name, size)) for name, (size, digests) in index.items())
    return [pair for digests, parts in cut for pair in zip(digests, parts, strict=True)]


def missing(index: Index, directory: Path) -> dict[str, list[FilePart]]:
    """Return the parts that are not in the directory, by digest."""
    lacking, parts = dict[str, list[FilePart]](), parts_of(index, directory)
    for (digest, part), here in zip(parts, _digests(part for _, part in parts), strict=True):
        if here != digest:
            lacking.setdefault(digest, []).append(part)
    return lacking


def served(config: Config) -> dict[str, FilePart]:
    """Return the files that a peer gives to joiners, by digest: small ones, and a base if here."""
    small = {digest: FilePart(file) for digest, file in files_of(config).items()}
    index, here = saved_index(config), Path(config.model.directory or "")
    if index is None:
        return small
    files = {here / name: nbytes for name, (nbytes, _) in index.items()}
    if any(not file.is_file() or file.stat().st_size != size for file, size in files.items()):
        return small
    small[str(config.model.base)] = FilePart(index_place(config))
    return small | dict(parts_of(index, here))


def _cut(file: Path, size: int) -> list[FilePart]:
    offsets = range(0, size, PART_BYTES)
    return [FilePart(file, offset, min(PART_BYTES, size - offset)) for offset in offsets]


def _digests(parts: Iterable[FilePart]) -> list[str]:
    """Return the SHA-256 of each part; empty for a part of a missing file."""

    def digest(part: FilePart) -> str:
        with suppress(FileNotFoundError), part.path.open("rb") as file:
            file.seek(part.offset)
            return sha256(file.read(PART_BYTES)).hexdigest()
        return ""

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(digest, parts))
