"""Signed heads and lines: how they are signed, and what is wrong with those of others. Sans-IO.

    contributor: line -> syncer: lines, head -> record -> everybody: is it signed? does it add up? does it follow?

Whoever answers "why is this wrong" gets one line of text, and None when nothing is. Nothing from the network raises.
A signature is over the id of the run too, so that one of another run says nothing here. It is not over the manifest:
after a restart a run may go on with other settings, such as a larger budget, and its history stays what it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgpack

from diloco.protocol.messages.heads import Head, Line, Record
from diloco.protocol.numbers import MAX_TOKENS, at_most
from diloco.protocol.shares import OTHERS, Share, clock_of, credited

__all__ = [
    "Signer", "does_not_follow", "lines_digest", "shares_digest", "sign_head", "sign_line",
    "wrong_line", "wrong_record", "wrong_shares",
]  # fmt: skip


class Signer(Protocol):
    """Signs as this peer, and checks the signatures of all; a transport is one."""

    def sign(self, content: bytes) -> bytes: ...
    def verify(self, peer: str, content: bytes, signature: bytes) -> bool: ...


# -- lines ------------------------------------------------------------------------------------------------------------


def sign_line(signer: Signer, run_id: str, fragment: int, line: Line) -> Line:
    """The line with its contributor's signature."""
    return line._replace(signature=signer.sign(_line_content(run_id, fragment, line)))


def wrong_line(signer: Signer, run_id: str, fragment: int, line: Line) -> str | None:
    """What is wrong with a line by itself."""
    if line.total < line.tokens:
        return f"a line of {line.peer} has {line.tokens} tokens, and {line.total} with all before"
    if not signer.verify(line.peer, _line_content(run_id, fragment, line), line.signature):
        return f"a line is not signed by {line.peer}, which it names"
    return None


def _line_content(run_id: str, fragment: int, line: Line) -> bytes:
    return b"line" + bytes(msgpack.packb([run_id, fragment, *line[:-1]]))


def lines_digest(lines: Sequence[Line]) -> bytes:
    """The digest (32 bytes) by which a head names its lines."""
    return hashlib.sha256(b"lines" + bytes(msgpack.packb([list(line) for line in lines]))).digest()


# -- heads ------------------------------------------------------------------------------------------------------------


def sign_head(signer: Signer, run_id: str, head: Head) -> Head:
    """The head with its author's signature."""
    return head.model_copy(update={"signature": signer.sign(_head_content(run_id, head))})


def _head_content(run_id: str, head: Head) -> bytes:
    said = head.model_dump(exclude={"signature"})
    return b"head" + bytes(msgpack.packb([run_id, *(said[key] for key in sorted(said))]))


def shares_digest(shares: Mapping[str, Share]) -> bytes:
    """The digest (32 bytes) by which a head names shares, without the display names that peers may not all know."""
    rows = [[peer, *share[:4]] for peer, share in sorted(shares.items())]
    return hashlib.sha256(b"shares" + bytes(msgpack.packb(rows))).digest()


def wrong_record(signer: Signer, run_id: str, record: Record) -> str | None:
    """What is wrong with a certificate by itself: no honest peer passes such a one on."""
    head, lines = record.head, record.lines
    if not signer.verify(head.author, _head_content(run_id, head), head.signature):
        return f"a head is not signed by {head.author}, which it names as its author"
    if lines_digest(lines) != head.lines:
        return "a certificate has other lines than its head"
    if [line.peer for line in lines] != sorted({line.peer for line in lines}):
        return "the lines of a certificate are not one of each contributor, in the order of their names"
    before = bytes.fromhex(head.digest_before)
    for line in lines:
        if line.base_version >= head.version:
            return f"a contribution to version {head.version} was learned from version {line.base_version}"
        if line.base_version == head.version - 1 and line.base != before:
            return f"a contribution to version {head.version} was learned from another anchor"
        if (why := wrong_line(signer, run_id, head.fragment, line)) is not None:
            return why
    return None


def does_not_follow(
    record: Record, version: int, digest: str, shares: Mapping[str, Share], clock: bool, skipped: int = 0
) -> str | None:
    """Why a certificate is not that of the next version after this one, which is here with these shares, and which
    skipped so many numbers.

    `clock`: the swarm clock is in versions of this fragment.
    """
    head = record.head
    same = head.digest_before == head.digest == digest and not record.lines
    if same and head.version > version and head.skipped == skipped + head.version - version:  # a higher number
        return wrong_shares(record, shares, clock)
    if (head.version, head.digest_before, head.skipped) != (version + 1, digest, skipped):
        return f"a record to version {head.version} of fragment {head.fragment} does not follow version {version}"
    for line in record.lines:
        known = shares[line.peer].tokens if line.peer in shares else 0
        total = at_most(known + line.tokens, MAX_TOKENS)
        if line.total != total and OTHERS not in shares:
            return f"{line.peer} signed {line.total} tokens, and has {total} with version {head.version}"
    return wrong_shares(record, credited(shares, head.version, record.contributors, {}), clock)


def wrong_shares(record: Record, shares: Mapping[str, Share], clock: bool) -> str | None:
    """Why these shares, or the swarm clock, are not those of the version."""
    if shares_digest(shares) != record.head.shares:
        return f"version {record.version} of fragment {record.fragment} is made of other contributions than it names"
    applied = clock_of(shares) if clock else 0
    if record.head.applied_tokens != applied:
        return f"the swarm clock of version {record.version} is {record.head.applied_tokens}, not {applied}"
    return None
