"""What tests of the protocol core use in place of tensors and keys: digests by name, and certificates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from diloco.protocol.heads import lines_digest, shares_digest, sign_head, sign_line
from diloco.protocol.messages.heads import Head, Line, Record
from diloco.protocol.shares import Share, credited
from diloco.sim.notary import Notary

CHUNKS = 3


def digest_of(*history: object) -> str:
    """Digest that stands for an anchor with that history."""
    return sha256(repr(history).encode()).hexdigest()


MANIFEST = digest_of("manifest")
RUN = "run"


class Nobody:
    """A peer without identity: it cannot sign, and believes no signature."""

    def sign(self, content: bytes) -> bytes:
        return b""

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return False


class Keys:
    """Signs as one peer, and checks the signatures of all, in place of a transport."""

    def __init__(self, me: str) -> None:
        self.sign, self.verify = NOTARY.signer(me), NOTARY.verify


NOTARY = Notary(0)


def line_of(
    peer: str, base_version: int, base: str, tokens: int = 10, *, before: int = 0, fragment: int = 0, steps: int = 1
) -> Line:
    """A line that the peer has signed; it had so many tokens in the anchor `before`."""
    line = Line(peer, base_version, bytes.fromhex(base), steps, tokens, before + tokens)
    return sign_line(Keys(peer), RUN, fragment, line)


def record_of(
    version: int, before: str, digest: str, contributors: Mapping[str, int], *, fragment: int = 0,
    shares: Mapping[str, Share] = MappingProxyType({}), **fields: Any,
) -> Record:  # fmt: skip
    """The certificate of a version; `shares` are those before it."""
    had = {peer: shares[peer].tokens if peer in shares else 0 for peer in contributors}
    lines = [
        line_of(peer, version - 1, before, tokens, before=had[peer], fragment=fragment)
        for peer, tokens in sorted(contributors.items())
    ]
    return certified(lines, version, before, digest, fragment=fragment, shares=shares, **fields)


def certified(
    lines: Sequence[Line], version: int, before: str, digest: str, *, author: str = "s", term: int = 1,
    fragment: int = 0, shares: Mapping[str, Share] = MappingProxyType({}), **fields: Any,
) -> Record:  # fmt: skip
    """A certificate with these lines, which may be wrong."""
    after = credited(shares, version, {line.peer: line.tokens for line in lines}, {})
    clock = sum(share.tokens for share in after.values()) if fragment == 0 else 0
    named: dict[str, Any] = {"fragment": fragment, "term": term, "version": version, "author": author}
    named |= {"digest_before": before, "digest": digest, "applied_tokens": clock}
    head = Head(**{**named, "lines": lines_digest(lines), "shares": shares_digest(after), **fields})
    return Record(head=sign_head(Keys(author), RUN, head), lines=list(lines))
