"""Versions that moved farther than what was contributed to them allows: what a peer remembers of them. Sans-IO.

    a version is beyond its bound -> its author is lost and penalised -> its fragment is vacant -> the next in order

Every peer that followed the fragment finds the same, alone, from the certificates (`outer.bounds`). Therefore most
refuse the version together, the next peer in order claims the fragment, and all go on from the anchor before. A peer
that came late knows less, and may have adopted it: of the two histories that of the elected syncer goes on (`forks`).

An anchor says nothing of the update that led to it. So whoever refused a version refuses also to fetch its anchor, and
every later version of its author under that term, unless most of all peers have it. Then this peer is the one that
erred.
"""

from __future__ import annotations

from diloco.protocol.messages.control import mark
from diloco.protocol.messages.heads import Record
from diloco.protocol.view import View

__all__ = ["forgive", "refuse", "refused"]

REMEMBERED = 256  # refusals


def refuse(view: View, record: Record) -> None:
    """Remember that a version was refused. Its author is gone as syncer of the fragment, and holds nothing any more."""
    head = record.head
    view.beyond[head.fragment, head.term, head.author] = head
    while len(view.beyond) > REMEMBERED:
        del view.beyond[next(iter(view.beyond))]
    view.deposed.add(head.author)
    lease = view.leases.get(head.fragment)
    if lease is not None and lease.holder == head.author:
        view.leases.vacate(head.fragment)


def forgive(view: View, record: Record) -> bool:
    """This version is adopted; whether one of the same author was refused here, which was wrong then."""
    head = record.head
    if view.beyond.pop((head.fragment, head.term, head.author), None) is None:
        return False
    view.deposed.discard(head.author)
    return True


def refused(view: View, record: Record) -> str | None:
    """Why a version is not fetched: it, or one that its author made before it, was refused here."""
    head = record.head
    since = view.beyond.get((head.fragment, head.term, head.author))
    if since is None or head.version < since.version or _most_have_it(view, record):
        return None
    return f"version {since.version} of fragment {head.fragment} by {head.author} was beyond its bound"


def _most_have_it(view: View, record: Record) -> bool:
    """Whether most of all peers say that they have a version; this one has not."""
    others = [member.status for member in view.members.all() if not member.status.gone]
    where, what = record.fragment, (record.version, mark(record.digest))
    return 2 * sum((one.versions[where], one.mark(where)) == what for one in others) > len(others) + 1
