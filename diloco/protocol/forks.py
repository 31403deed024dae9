"""Which of two histories of a fragment goes on when they meet: the one with more work since they parted. Sans-IO.

    common history ── 71 versions of six peers          <- goes on, as version 238
                  └── 237 versions of one fast peer     <- its tokens are discarded

*Work* is tokens. The shares of two anchors tell it: what both histories have in common cancels out, so for each peer
the difference of its tokens is its work on one side since they parted. A peer's work counts at most twice the median of
all that worked on either side, as a contribution weighs at most twice the median of its version. So a peer that trains
alone cannot outweigh several others, however many versions it makes, or says that it has made. Of equal histories, that
of the fragment's syncer goes on.

The number of versions says nothing: a peer that is alone waits for nobody. But numbers of versions never go back,
because contributions are known by them. Therefore the history that goes on gets a number above both, and counts how
many numbers it has *skipped*; budgets and learning rates go by the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco.protocol.shares import Share
from diloco.protocol.work import capped

__all__ = ["outweighs"]


def outweighs(one: Mapping[str, Share], other: Mapping[str, Share]) -> bool:
    """Whether the one history has more work than the other one; on equal work, whether more peers worked on it.

    A history that goes on from another one outweighs it.
    """
    more, less = _leads(one, other), _leads(other, one)
    work = capped({**more, **less})
    mine, theirs = (sum(work[peer] for peer in sorted(leads)) for leads in (more, less))
    return (mine, len(more)) > (theirs, len(less))


def _leads(one: Mapping[str, Share], other: Mapping[str, Share]) -> dict[str, float]:
    """By peer the tokens that it has more in the one history than in the other one, of those that have more."""
    leads = {peer: share.tokens - (other[peer].tokens if peer in other else 0) for peer, share in one.items()}
    return {peer: float(lead) for peer, lead in leads.items() if lead > 0}
