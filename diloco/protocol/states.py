"""The states of a peer: what each one means to the others, and which may follow which.

    starting <-> ready -> training <-> exchanging          any of these -> leaving or done, and nothing follows
       ^____________________/_____________/

A peer says its state in every `Status`. Code asks what a state means and does not list states by name.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["STATES", "Meaning", "State", "may_follow"]

State = Literal["starting", "ready", "training", "exchanging", "leaving", "done"]


class Meaning(NamedTuple):
    """What a state means.

    Attributes:
        in_round: the peer is between the beginning of a round and the adoption of its update.
        counted_in: others count on contributions of this peer, if it trains at all.
        gone: it makes no more contributions, claims nothing, and backs nothing up.
        following: states that it may enter next. Entering the same state again is always allowed.
    """

    in_round: bool
    counted_in: bool
    gone: bool
    following: tuple[State, ...]


STATES: dict[State, Meaning] = {
    # A loop of the user's own may not report that it trains again, so exchanges can begin from any living state.
    "starting": Meaning(False, False, False, ("ready", "training", "exchanging", "leaving", "done")),
    "ready": Meaning(False, True, False, ("starting", "training", "exchanging", "leaving", "done")),
    "training": Meaning(True, True, False, ("starting", "exchanging", "leaving", "done")),
    "exchanging": Meaning(True, True, False, ("starting", "training", "leaving", "done")),
    "leaving": Meaning(False, False, True, ()),
    "done": Meaning(False, False, True, ()),
}


def may_follow(state: State, before: State) -> bool:
    """Whether a peer may enter a state from the one before."""
    return state == before or state in STATES[before].following
