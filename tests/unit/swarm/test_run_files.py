"""The small files of a run between two peers: who gives what, and what the asker believes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import PayloadError, SwarmError
from diloco.protocol.limits import FILE_BYTES
from diloco.protocol.messages import Message, Refusal
from diloco.protocol.messages.watching import MAX_FILE_PIECE_BYTES, FileReply, FileRequest
from diloco.swarm.client import ask as visiting
from diloco.swarm.conversations import files
from tests.support.stub_wire import Host, framed

CONTENT = bytes(range(256)) * 4096 + b"the end"  # two whole pieces, and some more
DIGEST = sha256(CONTENT).hexdigest()


def asking(digest: str = DIGEST) -> bytes:
    return framed(FileRequest(digest=digest))


async def test_a_file_of_the_run_comes_in_pieces_and_no_other_is_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    host = Host()
    host.context.files = {DIGEST: tmp_path / "file", "ab" * 32: tmp_path / "gone"}
    replies = await host.serve(asking())
    assert [type(one) for one in replies] == [FileReply] * 3
    assert b"".join(one.data for one in replies if isinstance(one, FileReply)) == CONTENT
    assert [one.more for one in replies if isinstance(one, FileReply)] == [True, True, False]
    secret = sha256(b"secret").hexdigest()
    for digest, why in ((secret, "no file of this run has that digest"), ("ab" * 32, "is not here; ask another peer")):
        [refused] = await host.serve(asking(digest))
        assert isinstance(refused, Refusal) and refused.reason.endswith(why)


async def test_an_asker_gets_only_so_many_bytes_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    monkeypatch.setattr(files, "FILE_BYTES", 2 * len(CONTENT))
    host = Host()
    host.context.files = {DIGEST: tmp_path / "file"}
    assert [len(await host.serve(asking())) for _ in range(2)] == [3, 3]
    [refused] = await host.serve(asking())
    assert isinstance(refused, Refusal) and "enough files were sent for a while" in refused.reason
    assert "penalty" not in host.notes, "to ask often is no offence"
    assert FILE_BYTES >= 2**26, "or a tokenizer of the allowed size could not be fetched"


class Donor:
    """In place of a stream to a peer that answers so."""

    def __init__(self, *replies: Message) -> None:
        self.replies = list(replies)

    async def send(self, message: Message) -> None:
        assert isinstance(message, FileRequest)

    async def receive(self) -> Message:
        return self.replies.pop(0)


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([FileReply(data=CONTENT[:9])], "is another one than the manifest names"),
        ([FileReply(data=b"x" * MAX_FILE_PIECE_BYTES, more=True)] * 9, f"has more than {len(CONTENT)} bytes"),
        ([Refusal(reason="no")], "no"),
    ],
)
async def test_only_the_file_that_the_manifest_names_is_believed(
    replies: list[Message], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor = Donor(*replies)

    @asynccontextmanager
    async def opened(*where: Any) -> AsyncIterator[Donor]:
        yield donor

    monkeypatch.setattr(files, "open_bulk", opened)
    with pytest.raises(PayloadError, match=why):
        await files.request_file(None, "peer", DIGEST, len(CONTENT))  # type: ignore[arg-type]
    assert len(donor.replies) in (0, 6), "it reads no further than the file may be long"


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

    monkeypatch.setattr(visiting.Libp2p, "visit", visit)
    monkeypatch.setattr(visiting, "request_file", request)
    place = tmp_path / "origin" / "tokenizer" / "vocab.json"
    why = r"^no peer there gives vocab\.json, which the run needs \(that file"
    with pytest.raises(SwarmError, match=why) if wrong else nullcontext():
        asyncio.run(visiting.fetch_files(["@x"], {DIGEST: (place, 9)}, 7, None, None))
    assert [file.read_bytes() for file in place.parent.glob("*")] == ([] if wrong else [b"content"])
    assert place.parent.exists() != wrong
