"""Whether a contribution's claims can be true. Pure.

Tokens weigh in the mean and move the swarm clock, so claims about them are checked:

    tokens <= steps x tokens of an inner step          exact: the manifest says how large a batch is
    steps  <= 8 x what the peer can have done          by its own pace and the time since its base version, or H

The peer said its pace in its heartbeats, long before this contribution. Others plan by that pace, so a peer that lies
about it harms itself: the others wait for it too long, or not at all. The slack covers inexact clocks, late heartbeats,
and peers that trained on while they could not send. A peer can thus claim a few times its true work, and no more.
"""

from __future__ import annotations

from diloco.protocol.messages.bulk import Contribution

__all__ = ["SLACK", "implausible"]

SLACK = 8.0


def implausible(
    header: Contribution, tokens_per_step: int | None, sync_every: int, steps_per_s: float, since_base_s: float | None
) -> str | None:
    """What is wrong with the claims of a contribution, in one line; None when they can be true.

    Args:
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        sync_every: H, which a peer may always have done.
        steps_per_s: the pace in the peer's last status; 0 while it had no measurement.
        since_base_s: seconds since its base version was published here; None when that is not known.
    """
    if tokens_per_step is not None and header.tokens > header.steps * tokens_per_step:
        return f"{header.tokens} tokens in {header.steps} steps are claimed, and a step has {tokens_per_step}"
    if since_base_s is None:
        return None
    possible = SLACK * max(sync_every, steps_per_s * since_base_s)
    if header.steps > possible:
        return (
            f"{header.steps} steps are claimed, {since_base_s:.0f} s after version {header.base_version} at "
            f"{steps_per_s:.3g} steps/s"
        )
    return None
