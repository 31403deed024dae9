"""Which versions one peer believes to be the swarm's. Their certificates are right; only their authors are in doubt.

A peer believes what the living syncer has, or has announced; what was authored under a term by whom it believed to hold
that; and, where it knows nothing of that, what most peers say they have, or what the peer authored in whom most
believed when they met. Of another history the syncer believes older terms as well, because it weighs the two (`forks`).
It weighs what is disputed too, but believes of it only what contributors have signed.
"""

from __future__ import annotations

from diloco.protocol.fragment import Fragment
from diloco.protocol.messages.control import mark
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.numbers import LEAP
from diloco.protocol.view import View

__all__ = ["disputants", "donors", "doubt", "number_to_pass", "passed", "unbelieved"]


def unbelieved(view: View, record: Record, donor: str) -> str | None:
    """Why this peer does not believe that a version is the swarm's; None when it does."""
    head, here, lease = record.head, view.fragments[record.fragment], view.live_lease(record.fragment)
    if lease is not None and lease.holder != view.me:
        if donor == lease.holder or (head.version, head.digest) == (lease.version, lease.digest):
            return None
    newest = 0 if here.record is None else here.record.head.term
    weighed = here.syncer is not None and head.digest_before != here.digest
    if here.authors.get(head.term) == head.author and (head.term >= newest or weighed):
        return None
    # Of a version that is past here, only peers would be asked that went another way.
    if head.version > here.version and _named_by_most(view, record.fragment, head.version, head.digest):
        return None
    if weighed and _backed_by_most(view, here, head):
        return None
    return (
        f"version {head.version} of fragment {record.fragment} is by {head.author} under term {head.term}, "
        "which it did not hold, and few have it"
    )


def _named_by_most(view: View, fragment: int, version: int, digest: str) -> bool:
    """Whether most of the peers that are not past a version say that they have it, and that it is this one."""
    members = [m for m in view.members.all() if not m.status.gone and m.status.versions[fragment] <= version]
    named = [m for m in members if m.status.versions[fragment] == version and m.status.mark(fragment) == mark(digest)]
    return 2 * len(named) > len(members)


def _backed_by_most(view: View, here: Fragment, head: Head) -> bool:
    """Whether most of the other peers took the author of a head for the syncer when they met this peer, or do now."""
    term = (head.term, head.author)
    others = [m.peer for m in view.members.all() if m.holds and not m.status.gone]
    backers = [one for one in others if one == head.author or term in (here.votes.get(one), here.met.get(one))]
    return 2 * len(backers) > len(others)


def disputants(view: View, fragment: Fragment) -> list[str]:
    """Other peers that say that the syncer of a fragment goes on from a history with less work than their own."""
    return [member.peer for member in view.members.all() if fragment.index in member.status.disputed]


def donors(view: View, fragment: int, version: int) -> list[str]:
    """Members that say they have that version or a later one, latest first; without those whose version is doubted."""
    able = filter(None, map(view.members.get, view.members.donors(fragment, version)))
    return [m.peer for m in able if m.status.versions[fragment] > view.doubted.get((fragment, m.peer), (-1, 0))[0]]


def doubt(view: View, fragment: int, donor: str, version: int) -> None:
    """What a donor has, with a certificate of that version, is not what goes on: it is not asked again until it says
    that it has a later one. `View.doubted` has the version that it says it has, and the one with the certificate.
    """
    member = view.members.get(donor)
    view.fragments[fragment].outweighed.add(donor)
    if member is not None:
        view.doubted[fragment, donor] = (member.status.versions[fragment], version)


def passed(view: View, fragment: int) -> None:
    """The syncer here gives its anchor a number above those with a certificate. Who says that it has a later version is
    asked again: it may have shown a certificate of an earlier one only, and would wait for a number above its own.
    """
    for doubted in [one for one in view.doubted if one[0] == fragment]:
        del view.doubted[doubted]


def number_to_pass(view: View, fragment: int) -> int:
    """The highest number of a version of which a member has a certificate, and which is not what goes on; 0 if there
    is none near.
    """
    here = view.fragments[fragment].version
    found = [certified for (index, peer), (_, certified) in view.doubted.items() if index == fragment]
    return max((number for number in found if here <= number <= here + LEAP), default=0)
