"""The kinds of lines in `events.jsonl`."""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """The kind of an event. In a line, `peer` writes it, and it is about the peer `subject`."""

    # Peers come and go.
    JOIN = "join"  # a peer is a member now
    LEAVE = "leave"  # it said goodbye
    LOST = "lost"  # it is gone without a goodbye
    REFUSED = "refused"  # this peer refuses it
    REFUSED_US = "refused_us"  # it refuses this peer
    REVOKED = "revoked"  # a newer list of revoked invitations came
    PENALTY = "penalty"  # it sent what no honest peer sends, and is refused for a while
    UNREACHABLE = "unreachable"  # others cannot call this peer
    CALLS_AGAIN = "calls_again"  # nobody answers yet; this peer goes on calling
    ALONE_AGAIN = "alone_again"  # nobody answers, and this peer goes on alone
    CLOSED_LATE = "closed_late"  # something was still at work when this peer closed
    SLEPT = "slept"  # this machine was suspended
    RECORDER_FAILED = "recorder_failed"  # the records for `diloco status` end here
    # Data and budget.
    OTHER_DATA = "other_data"  # a peer has other data
    SAME_DATA = "same_data"  # two peers train on the same data
    PLANNED = "planned"  # the budget is a peer's greater one now
    PLAN_IGNORED = "plan_ignored"  # a peer's budget is too great to follow
    ROUNDS_OVER = "rounds_over"  # the planned rounds are over; the outer momentum stays as it is
    # Versions.
    TIP = "tip"  # a fragment has a newer version (only for `diloco status`)
    TAKEOVER = "takeover"  # this peer made a version in place of the one whose turn it was
    STUCK = "stuck"  # an author makes no version, and is passed over
    NOT_SHUNNED = "not_shunned"  # such an author made a version after all
    MISSING = "missing"  # a round was closed without the contributions of these peers
    MISSED = "missed"  # a version was made without this peer's contribution
    DISCARDED = "discarded"  # so many tokens of this peer are in no version
    CONTRIBUTION_BROKE = "contribution_broke"  # sending one failed; it is sent again
    CLIPPED = "clipped"  # the contributions of these peers were too long, and were shortened
    LEFT_OUT = "left_out"  # those of these peers point against the others'
    REFUSED_HEAD = "refused_head"  # a version breaks a rule
    DIGEST_MISMATCH = "digest_mismatch"  # the anchor is not what a version says; it is fetched
    FETCH_FAILED = "fetch_failed"  # fetching an anchor or an update from a peer failed
    # Training of this peer.
    COMPUTES = "computes"  # device, precision and the like
    RESUME = "resume"  # it goes on from a checkpoint
    INNER_STATE = "inner_state"  # the inner optimizer's state came from a peer
    INNER_STATE_FAILED = "inner_state_failed"  # that failed with one peer
    COLD_START = "cold_start"  # the inner optimizer begins anew
    MICRO_BATCH = "micro_batch"  # batches are split further, because memory was short
    STEP_SKIPPED = "step_skipped"  # the gradient was not finite in fp16; the scale is halved
    UNTRAINED = "untrained"  # parameters that this peer does not train
    OWN_BUFFERS = "own_buffers"  # buffers that training changes, and that no peer sends
    MODEL_KEPT = "model_kept"  # it has what the loop wrote at the end, and not the last anchor
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # the one before was still being written
    CHECKPOINT_FAILED = "checkpoint_failed"  # it could not be written
    SAMPLE = "sample"  # what the model writes after a prompt
