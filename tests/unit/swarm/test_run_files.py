"""The small files of a run, as a newcomer gets them."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import PayloadError, SwarmError
from diloco.swarm.client import ask as visiting

DIGEST = sha256(b"content").hexdigest()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_file_is_written_whole_or_not_at_all(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Visitor:
        seeds = ("liar", "donor")

        async def aclose(self) -> None: ...

    async def visit(*where: Any) -> Visitor:
        return Visitor()

    async def request(visitor: Visitor, peer: str, digest: str, most_bytes: int) -> bytes:
        assert most_bytes == 7
        if peer == "liar" or wrong:
            raise PayloadError("that file is not here")
        return b"content"

    monkeypatch.setattr(visiting.Libp2p, "client", visit)
    monkeypatch.setattr(visiting, "request_file", request)
    place = tmp_path / "origin" / "tokenizer" / "vocab.json"
    why = r"^no peer there gives vocab\.json, which the run needs \(that file"
    with pytest.raises(SwarmError, match=why) if wrong else nullcontext():
        asyncio.run(visiting.fetch_files(["@x"], {DIGEST: (place, 9)}, 7, None, None))
    assert [file.read_bytes() for file in place.parent.glob("*")] == ([] if wrong else [b"content"])
    assert place.parent.exists() != wrong
