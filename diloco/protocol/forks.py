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
many numbers it has *skipped*; budgets go by the difference.

The syncer in whom most peers believe decides (see `elections`). It fetches what others have under a higher number, and
what they dispute: a follower whose own history has more work than the syncer's says so in its status, and does not
follow. The syncer takes over what it believes (`belief`) and what outweighs its own. Of what it does not believe, only
*proved* work counts: tokens that their contributors have signed, and the median is that of all peers that train. So a
peer that goes on alone from the syncer's anchor has nothing to show, because the others did nothing there.

The history that goes on gets its number by an *empty head* (`renumbered`), which the syncer signs: the anchor that is
here, without contributions, under a number above both. Then all can follow. A syncer whom most holders dispute for long
counts as gone (`succession`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from diloco.protocol.belief import disputants
from diloco.protocol.fragment import Fragment
from diloco.protocol.heads import lines_digest, shares_digest, sign_head, wrong_line
from diloco.protocol.messages.bulk import Anchor
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.numbers import at_most
from diloco.protocol.shares import Share
from diloco.protocol.view import View
from diloco.protocol.work import capped

__all__ = ["goes_on", "outweighs", "proved_heavier", "renumbered"]


def outweighs(one: Mapping[str, Share], other: Mapping[str, Share], idle: Collection[str] = ()) -> bool:
    """Whether the one history has more work than the other one; on equal work, whether more peers worked on it.

    A history that goes on from another one outweighs it, unless most of the peers that may be `idle` did nothing for
    either since they parted.
    """
    more, less = _leads(one, other), _leads(other, one)
    work = capped({**dict.fromkeys(idle, 0.0), **more, **less})
    mine, theirs = ([work[peer] for peer in sorted(leads) if work[peer]] for leads in (more, less))
    return (sum(mine), len(mine)) > (sum(theirs), len(theirs))


def proved_heavier(view: View, theirs: Anchor) -> bool:
    """Whether the work on an anchor that this peer has no other reason to believe outweighs that on the one here.

    It has to do so also as it is said, because all go by that once it is here. Where less is proved than said, the
    median is lower, and what one peer did here counts less.
    """
    here = view.fragments[theirs.fragment]
    if not outweighs(theirs.shares, here.shares):
        return False
    shares = _proved(view, theirs, here)
    others = disputants(view, here)
    idle = [one.peer for one in view.members.all() if one.trains and not one.status.gone and one.peer not in others]
    own = [view.me] if view.trains else []
    return outweighs(shares, here.shares) and outweighs(shares, here.shares, [*idle, *own])


def _proved(view: View, theirs: Anchor, here: Fragment) -> dict[str, Share]:
    """The shares of an anchor, where nobody has more tokens than here but by a line that it has signed."""
    newest = {line.peer: line for line in [*theirs.lines, *(theirs.record.lines if theirs.record else ())]}
    found = {}
    for peer in _leads(theirs.shares, here.shares):
        line, known = newest.get(peer), here.shares.get(peer, Share(0, 0, 0, 0))
        signed = line is not None and wrong_line(view.signer, view.run_id, theirs.fragment, line) is None
        tokens = line.total if signed and line is not None else 0
        found[peer] = theirs.shares[peer]._replace(tokens=max(known.tokens, min(tokens, theirs.shares[peer].tokens)))
    return {**theirs.shares, **found}


def goes_on(theirs: Anchor, here: Fragment, donor: str) -> bool:
    """Whether an anchor of another history is taken over here. Of equal histories, that of the syncer goes on."""
    if here.lease is not None and here.lease.holder == donor:
        return not outweighs(here.shares, theirs.shares)
    return outweighs(theirs.shares, here.shares)


def renumbered(view: View, anchor: Fragment | Anchor, term: int, version: int, window: tuple[int, int]) -> Record:
    """The certificate by which an anchor gets a higher number from this peer, its syncer, under this term.

    `window` are `pushes` and `delay` of the outer state. Of everything else it says what the certificate of the anchor
    says.
    """
    pushes, delay = window
    before = None if anchor.record is None else anchor.record.head
    skipped = (0 if before is None else before.skipped) + version - anchor.version
    head = Head(
        fragment=anchor.fragment if isinstance(anchor, Anchor) else anchor.index, term=term, version=version,
        author=view.me, digest_before=anchor.digest, digest=anchor.digest, lines=lines_digest([]),
        shares=shares_digest(anchor.shares), pushes=pushes, delay=delay, skipped=at_most(skipped),
    )  # fmt: skip
    if before is not None:
        head = head.model_copy(update={name: getattr(before, name) for name in ("applied_tokens", "cursor", "open")})
    return Record(head=sign_head(view.signer, view.run_id, head), lines=[])


def _leads(one: Mapping[str, Share], other: Mapping[str, Share]) -> dict[str, float]:
    """By peer the tokens that it has more in the one history than in the other one, of those that have more."""
    leads = {peer: share.tokens - (other[peer].tokens if peer in other else 0) for peer, share in one.items()}
    return {peer: float(lead) for peer, lead in leads.items() if lead > 0}
