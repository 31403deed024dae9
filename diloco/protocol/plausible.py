"""Whether a contribution's claims can be true. Pure.

Tokens weigh in the mean and move the swarm clock, so they are not taken on trust:

    tokens <= steps x tokens of an inner step          exact: the manifest says how large a batch is
    steps  <= 8 x what the peer can have done          by its own pace and the time since its base version, or H

The pace is what the peer said of itself in its heartbeats, long before this contribution, and what others plan by: one
that lies there is waited for, or is not. The slack is for clocks, for heartbeats that are late, and for peers that
trained on while they could not send. So a peer can claim a few times what it did, and no more.
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
        steps_per_s: the peer's last word on its pace, 0 for none.
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
