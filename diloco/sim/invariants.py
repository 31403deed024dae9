"""What holds whatever fails: checked after every event, and once the swarm is whole again.

After every event, of every living process:

- its versions never go back;
- it is syncer of a fragment exactly when it believes that it holds the lease, under the same term, and then the
  version it collects for is the one after its anchor;
- its anchors are what their digests say, but while they move;
- its public record of who contributed how much is what its anchors are made of, and the swarm clock is the sum of it.

At the end, when everything is healed and everybody is done:

- all anchors are the same, and all believe in the same living syncer and term for each fragment. Both sides of a split
  may author the same version; the side whose version is lower adopts the other's, so one author of it survives;
- no chunk of a contribution is in the surviving anchor twice;
- of every contribution that is over, its peer knows the truth: it is in the anchor, or counted as discarded. A
  contribution may be lost with a version that was made and did not survive: its peer was told, and could not know.
  (With a staleness limit a peer may err about a contribution that was merged when its syncer changed: records name
  contributors, and not from which base they contributed.)
"""

from __future__ import annotations

from collections.abc import Collection

from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.sim.arena import CHUNKS
from diloco.sim.bare import BareNode, Swarm
from diloco.sim.lineage import Contributed, Total
from diloco.sim.world import Node, Violation

__all__ = ["Watch", "check_end"]


class Watch:
    """Looks at a swarm after every event; raises `Violation` with the node and what is wrong."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._seen: dict[BareNode, list[int]] = {}

    def look(self, touched: Collection[Node]) -> None:
        """Check the processes that something happened to."""
        for node in touched:
            if not isinstance(node, BareNode) or not self._swarm.alive(node):
                continue
            versions = node.peer.versions
            seen = self._seen.get(node)
            if seen != versions:
                if seen is not None and any(now < before for now, before in zip(versions, seen, strict=True)):
                    raise Violation(f"versions of {node.name} go back from {seen} to {versions}")
                self._seen[node] = list(versions)
            if not node.moving and node.anchors != node.peer.digests:
                raise Violation(f"an anchor of {node.name} is not what its digest says")
            if seen != versions:
                _check_shares(self._swarm, node)
            if node.peer.syncers or node.peer.leases.held_by(node.name):
                self._look_at_syncers(node)

    def _look_at_syncers(self, node: BareNode) -> None:
        peer = node.peer
        held = {lease.fragment: lease.term for lease in peer.leases.held_by(node.name)}
        collecting = {fragment: syncer.term for fragment, syncer in peer.syncers.items()}
        if held != collecting or not collecting.keys() <= node.momentum.keys():
            raise Violation(
                f"{node.name} holds {held} (fragment: term), is syncer of {collecting} and has the outer state of "
                f"{sorted(node.momentum)}"
            )
        for fragment, syncer in peer.syncers.items():
            if syncer.version != peer.versions[fragment]:
                raise Violation(
                    f"{node.name} collects for version {syncer.version + 1} of fragment {fragment}, and its anchor is "
                    f"at version {peer.versions[fragment]}"
                )


def check_end(swarm: Swarm) -> None:
    """Check a swarm that is whole and done; raises `Violation`."""
    nodes = swarm.alive_nodes()
    one, names = nodes[0].peer, {node.name for node in nodes}
    for node in nodes:
        peer = node.peer
        if (peer.versions, peer.digests) != (one.versions, one.digests):
            raise Violation(
                f"{node.name} ends at {_brief(node)}, {nodes[0].name} at {_brief(nodes[0])} (version, digest)"
            )
        for fragment in range(swarm.fragments):
            lease, its = peer.leases.get(fragment), one.leases.get(fragment)
            if lease is None or its is None or lease.holder not in names:
                raise Violation(f"fragment {fragment} ends without a syncer for {node.name} or {nodes[0].name}")
            if (lease.holder, lease.term) != (its.holder, its.term):
                raise Violation(f"{node.name} believes in {lease}, {nodes[0].name} in {its}")
        if node.anchors != peer.digests:
            raise Violation(f"an anchor of {node.name} ends as something else than its digest says")
        if not node.peer.syncers.keys() == node.momentum.keys():
            raise Violation(f"{node.name} has outer states of {sorted(node.momentum)}, holds {sorted(peer.syncers)}")
    for fragment, digest in enumerate(one.digests):
        if again := swarm.lineage.repeated(digest):
            raise Violation(f"in fragment {fragment} are merged more than once: {again}")
    for node in nodes:
        _check_shares(swarm, node)
    for fragment in range(0 if one.outer.staleness_limit else swarm.fragments):
        _check_ledger(swarm, nodes, fragment)


def _brief(node: BareNode) -> list[tuple[int, str]]:
    return [(version, digest[:8]) for version, digest in zip(node.peer.versions, node.peer.digests, strict=True)]


def _check_shares(swarm: Swarm, node: BareNode) -> None:
    peer = node.peer
    for fragment, digest in enumerate(peer.digests):
        shares, truth = peer.accounts.shares(fragment), swarm.lineage.totals(digest)
        if {name: Total(*share[:4]) for name, share in shares.items()} != truth:
            raise Violation(f"{node.name} counts {shares} in fragment {fragment}, and {truth} is in it")
    tokens = sum(share.tokens for share in peer.accounts.shares(CONTROL_FRAGMENT).values())
    if peer.applied_tokens != tokens:
        raise Violation(
            f"the swarm clock of {node.name} is {peer.applied_tokens}, and {tokens} tokens are in its anchor"
        )


def _check_ledger(swarm: Swarm, nodes: list[BareNode], fragment: int) -> None:
    """Tokens of every peer's contributions: processed = applied + discarded + in flight."""
    lineage, digest = swarm.lineage, nodes[0].peer.digests[fragment]
    survived = lineage.merged(digest, CHUNKS)
    versions = {made for made in lineage.made.values() if made.fragment == fragment} - set(lineage.of(digest))
    lost = {whose for made in versions for whose, _ in made.chunks}
    for node in nodes:
        for exchange in node.exchanges:
            if exchange.fragment != fragment or exchange is node.flying.get(fragment):
                continue
            mine = Contributed(node.name, exchange.base_version)
            if exchange.discarded and mine in survived:
                raise Violation(f"{mine} counts as discarded, and is in fragment {fragment}")
            if not exchange.discarded and mine not in survived | lost:
                raise Violation(f"{mine} is neither in fragment {fragment} nor counted as discarded")
