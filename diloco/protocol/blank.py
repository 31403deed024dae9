"""A peer that begins without the values that the run starts from, and gets them from the others. Sans-IO.

Where a run starts from a config and a seed, every peer has version 0 of all anchors by itself. Where it starts from a
checkpoint, only those have it who have the files. Until a *blank* peer has an anchor of each fragment from another
peer, it holds none and does not train, so its own values reach nobody:

1. The first two peers of a run find each other, and one is blank.
2. Both would claim half of the fragments, in version 0, and give each other their anchors.
3. Half of the model would begin with random values.

It says in its status that it is blank, and so no peer waits for its claims.
"""

from __future__ import annotations

from diloco.protocol.view import View

__all__ = ["begin_blank", "fill"]


def begin_blank(view: View) -> None:
    """None of the anchors here is the run's."""
    view.blank, view.holds = True, False


def fill(view: View) -> None:
    """See whether an anchor of each fragment has come, or is that of its syncer; then the peer is like any other."""
    if view.blank:
        view.blank = any(fragment.came_at is None and not fragment.agrees() for fragment in view.fragments)
        view.holds = view.may_hold and not view.blank
