"""Which of two histories of a fragment goes on when they meet: the one with more work since they parted. Sans-IO.

    common history ── 71 versions of six peers          <- goes on, as version 238
                  └── 237 versions of one fast peer     <- its tokens are discarded

*Work* is tokens. The shares of two anchors tell it: what both histories have in common cancels out, so for each peer
the difference of its tokens is its work on one side since they parted. A peer's work counts at most `CAP` times the
median of all that worked on either side. So a peer that trains alone cannot outweigh several others, however many
versions it makes, or says that it has made.

The number of versions says nothing: a peer that is alone waits for nobody. But numbers of versions never go back,
because contributions are known by them. Therefore the history that goes on gets a number above both, and counts how
many numbers it has *skipped*; budgets go by the difference.

The syncer in whom most peers believe decides (see `elections`). It fetches what others have under a higher number, and
takes it over if it believes it (`belief`) and it outweighs its own. Otherwise it signs an *empty head* (`renumbered`):
the anchor that is here, without contributions, under a number above theirs. Then they can follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from diloco.protocol.fragment import Fragment
from diloco.protocol.heads import lines_digest, shares_digest, sign_head
from diloco.protocol.messages.bulk import Anchor
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.shares import Share
from diloco.protocol.view import View

__all__ = ["CAP", "goes_on", "outweighs", "renumbered"]

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


def goes_on(theirs: Anchor, here: Fragment) -> bool:
    """Whether the syncer takes their anchor over. One of an older term must be of a history that parted, because
    nobody goes on from the newest version after another peer was elected.
    """
    newest = 0 if here.record is None else here.record.head.term
    older = theirs.record is not None and theirs.record.head.term < newest
    if older and all(_tokens(theirs.shares, peer) >= _tokens(here.shares, peer) for peer in here.shares):
        return False
    return outweighs(theirs.shares, here.shares, (theirs.digest, here.digest))


def renumbered(view: View, here: Fragment, term: int, version: int, state: tuple[bytes, int, int]) -> Record:
    """The certificate by which the anchor that is here gets a higher number from its syncer, under this term.

    `state` is the root of the outer state, with `pushes` and `delay` of its window. Of everything else it says what the
    certificate of the version here says.
    """
    root, pushes, delay = state
    head = Head(
        fragment=here.index, term=term, version=version, author=view.me, digest_before=here.digest, digest=here.digest,
        lines=lines_digest([]), shares=shares_digest(here.shares), state=root, pushes=pushes, delay=delay,
        skipped=here.skipped + version - here.version,
    )  # fmt: skip
    if here.record is not None:
        clock, cursor, units = (getattr(here.record.head, name) for name in ("applied_tokens", "cursor", "open"))
        head = head.model_copy(update={"applied_tokens": clock, "cursor": cursor, "open": units})
    return Record(head=sign_head(view.signer, view.manifest_hash, head), lines=[])


def _tokens(shares: Mapping[str, Share], peer: str) -> int:
    return shares[peer].tokens if peer in shares else 0
