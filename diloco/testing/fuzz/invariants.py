"""What holds whatever fails: checked after every turn of the loop, and once the swarm is whole again.

After every turn, of every living node that something happened to:

- its versions never go back, and it leaves no history for one with less work;
- it is syncer of a fragment exactly when it believes that it holds the lease, under the same term; then the next
  version that it collects for is the one after its anchor, and it has the fragment's outer state;
- each of its anchors has the digest that the node names, unless the anchor is moving;
- a version of a fragment under one term has one author and one digest, as long as all peers could always reach each
  other (two sides of a split may claim the same term);
- its public record of who contributed how much is what its anchors are made of, and the swarm clock is the sum of it.

Before the first inner step of a trainer from a version, each fragment is the anchor that it will name as its base.

At the end, when everything is healed and everybody is done:

- all anchors are equal;
- a version that a peer adopted, which trained on to the end, is among those that led there, as long as all peers could
  always reach each other;
- no contribution is in the surviving anchors twice, by its name or by its bytes; at a barrier no sequence of the data
  is, unless its syncer counted that (`units_twice`), or peers lost each other (both sides of a split hand out the same
  sequences);
- tokens are conserved: what a peer that never restarted has processed is applied, counted as discarded, or was not sent
  yet. (With a staleness limit a peer may err when its syncer changed: records name contributors without their base
  versions. It may also err when it contributed twice from one version, of two histories: a syncer knows contributions
  by their base versions.)
- no life failed, nobody left an exception untaken, and no task of an ended life goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.outer.aggregate import Aggregate, Merged, Weighted
from diloco.outer.digest import digest_of
from diloco.outer.fragments import gather_
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.protocol.actions import Note
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import union
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.swarm.node.node import Node
from diloco.testing.fuzz.crowd import Crowd, Life
from diloco.testing.fuzz.lineage import Contributed, Lineage, Made, Total

__all__ = ["Violation", "Watch", "check_end"]


class Violation(Exception):
    """An invariant does not hold."""


class Watch:
    """Looks at the nodes of a crowd after every turn of the loop, and writes the lineage; raises `Violation`."""

    def __init__(self, crowd: Crowd) -> None:
        self.lineage = Lineage()
        self._crowd = crowd
        self._touched: dict[str, Life] = {}
        self._seen: dict[str, tuple[list[int], list[str]]] = {}
        self._authors: dict[tuple[int, int, int], tuple[str, str]] = {}
        crowd.on_life = self._observe
        crowd.loop.on_turn = self._look

    def _observe(self, life: Life) -> None:
        """Be told of everything that happens to the node of a life, and of the versions that it makes."""
        node = life.node
        assert node is not None
        peer = node.protocol
        node.context.do = self._told(life, peer.me, node.context.do)  # type: ignore[method-assign, assignment]
        self._seen[life.owner] = (list(peer.versions), list(peer.digests))
        self._watch_bytes(node.replica)
        if life.sync is not None:
            loaded: dict[int, str] = {}
            life.sync._optimizer.register_step_pre_hook(lambda *_: self._check_loaded(life.name, node, loaded))
        published, adopted, offer = peer.published, peer.adopted, peer.offer

        def makes(index: int, digest: str, contributors: Any, now: float, record: Any = None) -> Any:
            before, syncer = peer.digests[index], peer.syncers.get(index)
            actions = published(index, digest, contributors, now, record)
            if syncer is not None:
                bases = syncer._merged
                made = tuple((Contributed(name, bases[name]), tokens) for name, tokens in sorted(contributors.items()))
                self._made(digest, Made(before, index, syncer.version, peer.me, syncer.term, made))
            return actions

        def moves(
            index: int,
            version: int,
            digest: str,
            now: float,
            contributors: Any = None,
            *further: Any,
            **named: Any,
        ) -> Any:
            before = peer.digests[index]
            if contributors is not None and digest not in self.lineage.made:  # made here, for a lease that was lost
                made = tuple((Contributed(name, version - 1), tokens) for name, tokens in sorted(contributors.items()))
                self.lineage.add(digest, Made(before, index, version, peer.me, -1, made))
            return adopted(index, version, digest, now, contributors, *further, **named)

        def hears(peer_id: str, header: Contribution, now: float = 0.0) -> Verdict:
            verdict = offer(peer_id, header, now)
            if verdict.accepted:
                self._check_base(peer_id, header, node)
            if verdict.accepted or verdict.merged:
                self.lineage.bases.setdefault(Contributed(peer_id, header.base_version), set()).add(header.base_digest)
            if verdict.accepted and header.fragment == CONTROL_FRAGMENT:
                self.lineage.learned_from[Contributed(peer_id, header.base_version)] = union(header.units)
            return verdict

        peer.published, peer.adopted, peer.offer = makes, moves, hears  # type: ignore[method-assign, assignment]

    def _told(self, life: Life, me: str, do: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
        def told(actions: Sequence[Any]) -> None:
            self._touched[life.owner] = life
            twice = [each for each in actions if isinstance(each, Note) and each.kind == "units_twice"]
            self.lineage.units_twice += sum(note.fields["count"] for note in twice)  # type: ignore[misc]
            do(actions)

        return told

    def _check_base(self, peer_id: str, header: Contribution, syncer: Node) -> None:
        """A contribution that is as new as the syncer's anchor was learned from that anchor."""
        contributor = self._crowd.lives[peer_id].node
        if contributor is None or contributor.context.tasks.closed:
            return
        at, theirs = header.fragment, contributor.protocol
        if header.base_version == syncer.protocol.versions[at] == theirs.versions[at]:
            if theirs.digests[at] != syncer.protocol.digests[at]:
                raise Violation(
                    f"{syncer.protocol.me} takes what {peer_id} learned from another version {header.base_version} of "
                    f"fragment {at}"
                )

    def _check_loaded(self, name: str, node: Node, before: dict[int, str]) -> None:
        """What an inner step begins with; `before` has the bases of the one before it."""
        replica = node.replica
        for fragment, (version, digest) in enumerate(node._anchors.loaded):
            if before.get(fragment) != digest:  # a number alone loads nothing
                before[fragment], values = digest, torch.empty(replica.fragments[fragment].numel)
                gather_(values, replica.fragments[fragment], 0, values.numel(), replica.local.tensors)
                if digest_of(values) != digest:
                    self._crowd.failures.append(f"fragment {fragment} of {name} is not its anchor of version {version}")

    def _watch_bytes(self, replica: Replica) -> None:
        """Note the bytes of every payload that goes into a version: a name alone may be that of other bytes."""
        hold, apply_update_, made = replica.hold, replica.apply_update_, dict[int, list[bytes]]()

        def holds(fragment: int, *outer: Any) -> None:
            before = replica.aggregates.get(fragment)
            hold(fragment, *outer)
            if replica.aggregates[fragment] is not before:
                watch(fragment, replica.aggregates[fragment])

        def watch(fragment: int, aggregate: Aggregate) -> None:
            merge = aggregate.merge

            def merges(those: Sequence[Weighted], *rest: Any) -> Merged:
                merged = merge(those, *rest)
                made[fragment] = [one.peer.encode() + one.payload.numpy().tobytes() for one in those]
                return merged

            aggregate.merge = merges  # type: ignore[method-assign, assignment]

        def applies(fragment: int, update: Tensor, step: OuterStep) -> str:
            digest = apply_update_(fragment, update, step)
            if fragment in made:
                self.lineage.payloads[digest] = made.pop(fragment)
            return digest

        replica.hold, replica.apply_update_ = holds, applies  # type: ignore[method-assign, assignment]
        for fragment, aggregate in replica.aggregates.items():
            watch(fragment, aggregate)

    def _made(self, digest: str, made: Made) -> None:
        self.lineage.add(digest, made)
        key = (made.fragment, made.term, made.version)
        known = self._authors.setdefault(key, (made.author, digest))
        if known != (made.author, digest) and not self._crowd.torn:
            raise Violation(
                f"version {made.version} of fragment {made.fragment} under term {made.term} is {digest[:8]} by "
                f"{made.author} and {known[1][:8]} by {known[0]}"
            )

    def _look(self) -> None:
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for owner, life in touched.items():
            if not life.ended and life.node is not None:
                self._check(owner, life, life.node)

    def _check(self, owner: str, life: Life, node: Node) -> None:
        peer = node.protocol
        versions, digests = self._seen[owner]
        self._check_syncers(life.name, node)
        if versions == peer.versions and digests == peer.digests:
            return
        if any(now < before for now, before in zip(peer.versions, versions, strict=True)):
            raise Violation(f"versions of {life.name} go back from {versions} to {peer.versions}")
        self.lineage.had.setdefault(owner, set()).add(peer.digests[CONTROL_FRAGMENT])
        for fragment, digest in enumerate(peer.digests):
            if digest != digests[fragment] and not moving(node, fragment) and node.replica.digest(fragment) != digest:
                raise Violation(f"anchor {fragment} of {life.name} is not what its digest says")
        check_shares(self.lineage, life.name, node)
        self._check_work(life.name, digests, peer.digests)
        self._seen[owner] = (list(peer.versions), list(peer.digests))

    def _check_work(self, name: str, before: Sequence[str], now: Sequence[str]) -> None:
        """A peer leaves a history only for one with more work in it; of equal ones, either may win."""
        for fragment, (old, new) in enumerate(zip(before, now, strict=True)):
            left, won = self.lineage.work(old, new), self.lineage.work(new, old)
            if won < left:
                raise Violation(f"{name} leaves {left:.0f} tokens of work in fragment {fragment} for {won:.0f}")

    def _check_syncers(self, name: str, node: Node) -> None:
        peer = node.protocol
        held = {lease.fragment: lease.term for lease in peer.leases.held_by(name)}
        collecting = {fragment: syncer.term for fragment, syncer in sorted(peer.syncers.items())}
        if held != collecting or not collecting.keys() <= node.replica.aggregates.keys():
            raise Violation(
                f"{name} holds {held} (fragment: term), is syncer of {collecting} and has the outer state of "
                f"{sorted(node.replica.aggregates)}"
            )
        for fragment, syncer in sorted(peer.syncers.items()):
            if syncer.version != peer.versions[fragment]:
                raise Violation(
                    f"{name} collects for version {syncer.version + 1} of fragment {fragment}, and its anchor is at "
                    f"version {peer.versions[fragment]}"
                )


def moving(node: Node, fragment: int) -> bool:
    """Whether the anchor is being changed, maybe in another thread."""
    lock = node.context.locks[fragment]
    return lock._lock.locked() and not lock._readers


def check_shares(lineage: Lineage, name: str, node: Node) -> None:
    """What the node says of its anchors' contributions is true."""
    peer = node.protocol
    for fragment, digest in enumerate(peer.digests):
        shares, truth = peer.fragments[fragment].shares, lineage.totals(digest)
        if {who: Total(*share[:4]) for who, share in shares.items()} != truth:
            raise Violation(f"{name} counts {shares} in fragment {fragment}, and {truth} is in it")
    tokens = sum(share.tokens for share in peer.fragments[CONTROL_FRAGMENT].shares.values())
    if peer.applied_tokens != tokens:
        raise Violation(f"the swarm clock of {name} is {peer.applied_tokens}, and {tokens} tokens are in its anchor")


def check_end(crowd: Crowd, lineage: Lineage) -> None:
    """Check a swarm whose trainers are done; raises `Violation`."""
    gc.collect()  # exceptions that nobody took are told when their tasks are collected
    if crowd.failures:
        raise Violation("; ".join(crowd.failures))
    for life in crowd.started:
        if life.ended and (left := [task.get_coro() for task in crowd.loop.tasks_of(life.owner)]):
            raise Violation(f"{life.name} has ended ({life.ended}), and goes on with {left}")
    # Who has waited in vain for the others to finish may have left before their last version.
    ended = [life for life in crowd.ended if not life.gave_up] or crowd.ended
    done = [life for life in ended if life.ended == "done" and life.node is not None]
    if not done:
        raise Violation("nobody finished")
    one = done[0].node
    assert one is not None
    _check_alike(done, lineage)
    _check_merged_once(one, lineage)
    survived = lineage.of(one.protocol.digests[CONTROL_FRAGMENT])
    for life in done if not crowd.torn else ():
        had = lineage.had.get(life.owner, set()) - survived.keys()
        lost = [lineage.made[each] for each in had if each in lineage.made]
        if lost:
            raise Violation(f"{life.name} had versions {sorted(made.version for made in lost)}, and they are lost")
    repeated = lineage.repeated_sequences(one.protocol.digests[CONTROL_FRAGMENT])
    if one.replica.settings.barrier and not crowd.torn and repeated > lineage.units_twice:
        raise Violation(f"{repeated} sequences are merged more than once, and {lineage.units_twice} are counted so")
    for life in done:
        twice = any(len(digests) > 1 for whose, digests in lineage.bases.items() if whose.peer == life.name)
        if one.replica.settings.quorum is None and life.fresh and not twice:
            _check_tokens(life, lineage)


def _check_alike(done: list[Life], lineage: Lineage) -> None:
    """All who finished have the same versions, and count the same shares."""
    its = _brief(done[0].node)
    for life in done:
        if (mine := _brief(life.node)) != its:
            raise Violation(f"{life.name} ends at {mine}, {done[0].name} at {its} (version, digest)")
        assert life.node is not None
        check_shares(lineage, life.name, life.node)


def _check_merged_once(node: Node, lineage: Lineage) -> None:
    for fragment, digest in enumerate(node.protocol.digests):
        if again := lineage.repeated(digest):
            raise Violation(f"in fragment {fragment} are merged more than once: {again}")
        if twice := lineage.repeated_payloads(digest):
            raise Violation(f"in fragment {fragment} {twice} payloads are merged more than once")


def _brief(node: Node | None) -> list[tuple[int, str]]:
    assert node is not None
    return [(v, digest[:8]) for v, digest in zip(node.protocol.versions, node.protocol.digests, strict=True)]


def _check_tokens(life: Life, lineage: Lineage) -> None:
    """processed = applied + discarded + in flight, of a peer whose only life this was.

    Tokens may also be lost: they were merged into a version that died with everybody who had it, before this peer did.
    """
    sync, node = life.sync, life.node
    assert sync is not None and node is not None
    share = node.protocol.fragments[CONTROL_FRAGMENT].shares.get(life.name)
    applied = 0 if share is None else share.tokens
    in_flight = sync.unsent_tokens
    counted = applied + sync.discarded_tokens + in_flight
    if not 0 <= sync.tokens - counted <= _lost(lineage, node.protocol.digests[CONTROL_FRAGMENT], life):
        raise Violation(
            f"{life.name} processed {sync.tokens} tokens, of which {applied} are applied, {sync.discarded_tokens} "
            f"discarded and {in_flight} in flight"
        )


def _lost(lineage: Lineage, digest: str, life: Life) -> int:
    """Tokens of a peer in versions of the control fragment that it never had, and that did not survive."""
    survived, had = lineage.merged(digest), lineage.had.get(life.owner, ())
    made = {
        whose: tokens
        for each, version in lineage.made.items()
        for whose, tokens in version.contributions
        if version.fragment == CONTROL_FRAGMENT and whose.peer == life.name
        if whose not in survived and each not in had
    }
    return sum(made.values())
