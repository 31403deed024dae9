"""Which peer should hold which fragment: weighted rendezvous hashing with a bound on the load.

Every peer computes the same answer from the same set of peers, without talking. When a peer leaves, only its own
fragments move. Plain rendezvous hashing would leave some peers with several fragments and others with none; the bound
gives every peer `fragments / peers` fragments, rounded down or up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

__all__ = ["assign", "order", "score"]


@lru_cache(maxsize=1 << 16)  # asked for again whenever somebody joins or goes
def score(peer: str, fragment: int) -> float:
    """Rendezvous score of a peer for a fragment; higher is better."""
    digest = hashlib.sha256(f"{fragment}:{peer}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64  # in (0, 1), so the logarithm is finite and not zero
    return -1.0 / math.log(uniform)


def order(peers: Iterable[str], fragment: int) -> list[str]:
    """Peers from the best to the worst holder of a fragment; ties are broken by the id."""
    return sorted(peers, key=lambda peer: (-score(peer, fragment), peer))


def assign(fragments: Iterable[int], peers: Collection[str], load: Mapping[str, int]) -> dict[int, str]:
    """Give each of the fragments a holder among the peers: fragment -> peer, empty when there are no peers.

    `load` is how many fragments each of them holds already. They end with equal numbers of fragments, or one more or
    less, unless one of them held too many before. Once some of these peers have claimed their fragments, and `load`
    counts these, the answer for the remaining fragments is still the same.
    """
    wanted = sorted(fragments)
    if not peers:
        return {}
    count = {peer: load.get(peer, 0) for peer in peers}
    share, larger_shares = divmod(len(wanted) + sum(count.values()), len(count))
    assignment = {}
    for fragment in wanted:
        bound = share + (sum(held > share for held in count.values()) < larger_shares)
        holder = next(peer for peer in order(count, fragment) if count[peer] < bound)
        assignment[fragment] = holder
        count[holder] += 1
    return assignment
