"""Which of two histories of a fragment goes on when they meet: the one with more work since they parted. Sans-IO.

    common history ── 71 versions of six peers          <- goes on, as version 238
                  └── 237 versions of one fast peer     <- its tokens are discarded

*Work* is tokens. The shares of two anchors tell it: what both histories have in common cancels out, so for each peer
the difference of its tokens is its work on one side since they parted. A peer's work counts at most `CAP` times the
median of all that worked on either side. So a peer that trains alone cannot outweigh several others, however many
versions it makes, or says that it has made.

The number of versions says nothing: a peer that is alone waits for nobody. But numbers of versions never go back,
because contributions are known by them. Therefore the history that goes on gets a number above both, and counts how
many numbers it has *skipped*; budgets and learning rates go by the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from diloco.protocol.shares import Share

__all__ = ["CAP", "outweighs"]

CAP = 2.0  # times the median


def outweighs(theirs: Mapping[str, Share], mine: Mapping[str, Share], digests: tuple[str, str] = ("", "")) -> bool:
    """Whether the history of their anchor goes on, rather than that of mine.

    All peers come to the same answer: `outweighs(a, b) != outweighs(b, a)` for two histories with different `digests`
    (theirs, mine), because on equal work the side with more peers goes on, and then the lower digest. A history that
    contains all of mine outweighs it.
    """
    peers = sorted(theirs.keys() | mine.keys())
    leads = [_tokens(theirs, peer) - _tokens(mine, peer) for peer in peers]
    leads = [lead for lead in leads if lead]
    most = CAP * median(map(abs, leads)) if leads else 0.0
    lead = sum(max(-most, min(most, lead)) for lead in leads)
    ahead = sum((lead > 0) - (lead < 0) for lead in leads)
    return (lead, ahead, digests[1]) > (0, 0, digests[0])


def _tokens(shares: Mapping[str, Share], peer: str) -> int:
    return shares[peer].tokens if peer in shares else 0
