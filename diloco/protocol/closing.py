"""Which of a peer's fragments close their version now. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from diloco.protocol.fragment import Busy, Fragment
from diloco.protocol.membership import Member
from diloco.protocol.syncer import Close

__all__ = ["close_versions"]


def close_versions(
    fragments: Iterable[Fragment], members: Callable[[], Mapping[str, Member]], now: float, sync_s: float
) -> tuple[list[Close], list[float]]:
    """Close what can be closed; each such fragment is `MERGING` from then on.

    Args:
        fragments: those that this peer is syncer of do something.
        members: gives the peers that may be waited for, this one included. It is asked only if a version may close.
        now: seconds of a monotonic clock.
        sync_s: measured seconds from a decision to close to its publication.

    Returns:
        What was decided, and when grace periods end that began.
    """
    closes, grace_ends = [], []
    for fragment in fragments:
        syncer = fragment.syncer
        if syncer is None or fragment.busy is not Busy.NO or fragment.handed_over or not syncer.may_close(now):
            continue
        close = syncer.poll(members(), now, sync_s)
        if close is not None:
            fragment.busy, fragment.closed_at = Busy.MERGING, now
            closes.append(close)
        elif syncer.grace_until is not None:
            grace_ends.append(syncer.grace_until)
    return closes, grace_ends
