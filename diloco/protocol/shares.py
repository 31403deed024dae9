"""Which peer contributed how much to a fragment's anchor: the public record of the swarm. Sans-IO.

    version 4: {a: 2 contributions} -- merge of a's third and b's first --> version 5: {a: 3 contributions, b: 1}

Shares travel with the anchor that they describe, in states and checkpoints; an update record says what it adds. Peers
with the same anchor therefore have the same shares, whichever peer was syncer. When a history loses, its shares end
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from diloco.protocol.numbers import MAX_TOKENS, Bytes, Count, Tokens, Version, at_most
from diloco.text import plain

__all__ = [
    "MAX_NAME_BYTES",
    "MAX_SHARES",
    "OTHERS",
    "Contributor",
    "Share",
    "Shares",
    "clock_of",
    "credited",
    "short_name",
]

MAX_SHARES = 2048  # They fit into a frame, beside the digests of all parts of an anchor.
MAX_NAME_BYTES = 24
_Name = Annotated[str, Field(max_length=128), AfterValidator(plain)]
OTHERS = ""  # stands for the peers whose shares are too many; those that ended first are summed up


class Share(NamedTuple):
    """One peer's part in a fragment's anchor; `last_version` is the version that contains its newest contribution."""

    contributions: Count
    tokens: Tokens
    first_version: Version
    last_version: Version
    name: str = ""


Shares = dict[str, Share]
"""By peer id."""


@dataclass(frozen=True)
class Contributor:
    """One line of the public record.

    Attributes:
        peer_id, name: the peer; the id is empty for the sum of the peers that are too many to list.
        outer_steps: versions of the control fragment that contain one of its contributions.
        tokens: tokens that these contributions were learned from.
        bytes: payload of all its merged contributions, over all fragments.
        first_version, last_version: of the control fragment.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)  # read inside a snapshot

    peer_id: _Name
    name: _Name
    outer_steps: Count
    tokens: Tokens
    bytes: Bytes
    first_version: Version
    last_version: Version


def credited(shares: Mapping[str, Share], version: int, tokens: Mapping[str, int], names: Mapping[str, str]) -> Shares:
    """The shares in a version that contributions of so many `tokens` made of the version before."""
    after = dict(shares)
    for peer, number in sorted(tokens.items()):
        new = Share(1, number, version, version, names.get(peer, ""))
        known = after.get(peer)
        after[peer] = new if known is None else _sum(known, new)
    while len(after) > MAX_SHARES:
        ended_first = min(after.keys() - {OTHERS}, key=lambda peer: (after[peer].last_version, peer))
        share = after.pop(ended_first)._replace(name="")
        after[OTHERS] = _sum(after[OTHERS], share) if OTHERS in after else share
    return after


def clock_of(shares: Mapping[str, Share]) -> int:
    """The swarm clock at a version of the control fragment with these shares: all tokens in the model."""
    return at_most(sum(share.tokens for share in shares.values()), MAX_TOKENS)


def short_name(name: str) -> str:
    """A display name that fits into a share: its printable characters, cut to `MAX_NAME_BYTES` of UTF-8."""
    shown = "".join(letter for letter in name if letter.isprintable())
    return shown.encode(errors="ignore")[:MAX_NAME_BYTES].decode(errors="ignore")


def _sum(one: Share, other: Share) -> Share:
    return Share(
        at_most(one.contributions + other.contributions),
        at_most(one.tokens + other.tokens, MAX_TOKENS),
        min(one.first_version, other.first_version),
        max(one.last_version, other.last_version),
        other.name or one.name,
    )
