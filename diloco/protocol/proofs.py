"""Who was proved a liar is out: it signed two anchors of one version, or a version that an audit refutes. Sans-IO.

1. Every status marks the anchors of its sender. A peer that has another anchor of the same version, or refused another
   one (`beyond`), sends the head of that, once for each peer and version, and gets the other's.
2. Two heads of one author, fragment, term and version that differ are a *proof*: an honest author signs one. A peer
   that can show it tells everybody, and so does each peer that hears of it.
3. Each checks the two signatures alone. The author is out for good: no stream of its is accepted, also after a restart,
   and its fragments are vacant.
4. What an audit proves (see `outer.audit`) travels on bulk streams; who checked it calls `condemn` in the same way.

Two heads of different authors or terms prove nothing: a swarm was split, and went on as two histories.
"""

from __future__ import annotations

from diloco.protocol.actions import Action, Broadcast, Condemn, Note, Tell
from diloco.protocol.heads import equivocates, signed_head
from diloco.protocol.messages.control import Status, mark
from diloco.protocol.messages.heads import Head, Proof
from diloco.protocol.view import View

__all__ = ["condemn", "convict", "disagreements", "hear_head"]


def disagreements(view: View, peer: str, status: Status) -> list[Action]:
    """This peer's heads of the versions of which another peer has another anchor, also of those that it refused."""
    told: list[Action] = []
    for here in view.fragments:
        version, theirs = status.versions[here.index], status.mark(here.index)
        heads = [head for head in view.beyond.values() if head.fragment == here.index]
        heads += [] if here.record is None else [here.record.head]
        heads = [head for head in heads if head.version == version and theirs not in (b"", mark(head.digest))]
        if heads and here.told.get(peer) != version:
            here.told[peer] = version
            told += [Tell(peer, head) for head in heads]
    return told


def hear_head(view: View, head: Head) -> list[Action]:
    """A peer has this head of a version of which another anchor is here."""
    if head.fragment >= len(view.fragments):
        return []
    here = view.fragments[head.fragment]
    mine = None if here.record is None else here.record.head
    if mine is None or (head.author, head.term, head.version) != (mine.author, mine.term, mine.version):
        return []
    if head == mine or not signed_head(view.signer, view.run_id, head):
        return []
    return convict(view, Proof(one=mine, other=head))


def convict(view: View, proof: Proof) -> list[Action]:
    """An author that signed two heads of one version is out; nothing happens when that is not proved, or is known.

    Whoever was never in this swarm is let be: identities cost nothing, and a member may prove lies of its own ones.
    """
    author = proof.one.author
    if author in view.liars or not _known(view, author) or not equivocates(view.signer, view.run_id, proof):
        return []
    why = f"signed two anchors of version {proof.one.version} of fragment {proof.one.fragment}"
    noted, condemned = condemn(view, proof.one, why)
    return [noted, Broadcast(proof), condemned]


def condemn(view: View, head: Head, why: str) -> list[Action]:
    """The author of this head has been proved a liar; nothing happens if that is known, or it was never here."""
    author = head.author
    if author in view.liars or not _known(view, author):
        return []
    view.liars.add(author)
    named = {"peer": author, "fragment": head.fragment, "version": head.version, "term": head.term}
    return [Note("proved", {**named, "why": why}), Condemn(author, why)]


def _known(view: View, peer: str) -> bool:
    if peer in view.members:
        return True
    return any(peer in one.shares or peer in one.authors.values() for one in view.fragments)
