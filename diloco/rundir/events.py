"""The kinds of lines in `events.jsonl`, and what people read of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from diloco.text import counted, human_bytes, plain

COUNTED = ("join", "leave", "unreachable")  # a display has the number of peers, and the advice


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
    STORE_AWAY = "store_away"  # the bucket does not answer; this peer goes on calling
    STORE_BACK = "store_back"  # it answers again
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
    INDIRECT = "indirect"  # this peer reaches an author by way of others only
    STANDS_BACK = "stands_back"  # so do most others reach this one, which makes no versions now
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


class EventText:
    """Words the events of one peer for whoever runs it: None for those that need nobody.

    A peer that comes back after it vanished is worded as that. A kind of `shown_elsewhere` has no
    line, unless it is the end of a time without any other peer.
    """

    def __init__(self, shown_elsewhere: tuple[str, ...] = ()) -> None:
        self._shown_elsewhere = shown_elsewhere
        self._vanished, self._alone = set[str](), False

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> str | None:
        peer, live = fields.get("subject", fields.get("peer", "")), fields.get("live")
        returns, was_alone = kind == "join" and peer in self._vanished, self._alone
        if kind == "lost":
            self._vanished.add(peer)
        elif kind in ("join", "leave"):
            self._vanished.discard(peer)
        if live is not None:
            self._alone = live == 1 and (kind == "lost" or was_alone)
        if returns:
            return f"{_name(fields)} is back, {_now(fields)}"
        if kind not in _LINES or (kind in self._shown_elsewhere and not was_alone):
            return None
        return _LINES[kind](fields)


def _name(fields: Mapping[str, Any]) -> str:
    """Name of a peer in a line: its own, or else the end of its id."""
    name = plain(fields.get("name", "peer"))
    peer = plain(fields.get("subject", fields.get("peer", "")))
    return f"{name} ...{peer[-6:]}" if name == "peer" else name


def _now(fields: Mapping[str, Any]) -> str:
    return f"{counted(fields.get('live', 1), 'peer')} now"


def _lost(fields: Mapping[str, Any]) -> str:
    vanished = f"{_name(fields)} vanished ({plain(fields.get('why', ''))})"
    if fields.get("live") == 1:
        return f"{vanished}; no other peer can be reached now, and this one goes on calling them"
    return f"{vanished}, {_now(fields)}"


def _left_out(fields: Mapping[str, Any]) -> str:
    peers = ", ".join(f"...{peer[-6:]}" for peer in map(plain, fields["peers"]))
    at = f"version {fields['version']} of fragment {fields['fragment']}"
    return f"{at} leaves out what {peers} contributed: {fields['why']}"


def _missed(fields: Mapping[str, Any]) -> str:
    version, took = fields["version"], f"the round took {fields['round_s']:g} s"
    if "nbytes" not in fields:
        why = f"it had made {fields['steps']} of {fields['cycle']} inner steps"
    else:
        sent, size = (human_bytes(fields[name]) for name in ("sent_bytes", "nbytes"))
        why = f"its contribution was still under way ({sent} of {size})"
    return f"left out of version {version} of fragment {fields['fragment']}: {why}; {took}"


def _other_data(fields: Mapping[str, Any]) -> str:
    who = f"{plain(fields['name'])} ...{str(fields.get('subject', fields.get('peer')))[-6:]}"
    return f"{who} has other data ({fields['there']}; here {fields['here']}): {fields['so']}"


def _same_data(fields: Mapping[str, Any]) -> str:
    pairs = zip(fields["names"], fields["peers"], strict=True)
    both = " and ".join(_name({"name": name, "peer": peer}) for name, peer in pairs)
    return (
        f"{both} train on the same data (cosine of what they contribute"
        f" {fields['cosine']:.4f}), so together they learn what one learns; give each peer other"
        " data: swarm.shard(dataset), or a seed of its own (swarm.seed)"
    )


def _alone_again(fields: Mapping[str, Any]) -> str:
    wait = f" in {fields['wait_s']:.0f} s, unless somebody comes" if fields["wait_s"] else ""
    goes_on = f"it goes on alone from outer step {fields['version']}{wait}"
    return f"nobody whom this peer knew answers; {goes_on}"


def _planned(fields: Mapping[str, Any]) -> str | None:
    planned, typed = fields["planned"][0], fields["typed"][0]
    if not planned > typed > 0:
        return None
    return (
        f"another peer plans {planned} outer steps, and this one {typed}: it ends before the"
        " others, and its learning rate falls sooner; give all peers the same max_steps"
    )


_LINES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "join": lambda of: f"{_name(of)} joined, {_now(of)}",
    "leave": lambda of: f"{_name(of)} left, {_now(of)}",
    "lost": _lost,
    "slept": lambda of: (
        f"this machine slept for {of['seconds']:.0f} s; first its peer gets what the others have"
    ),
    "store_away": lambda of: (
        f"{plain(of['url'])} does not answer, and this peer goes on calling ({plain(of['why'])})"
    ),
    "store_back": lambda of: f"{plain(of['url'])} answers again, after {of['seconds']:.0f} s",
    "missed": _missed,
    "left_out": _left_out,
    "other_data": _other_data,
    "same_data": _same_data,
    "untrained": lambda of: (
        f"{of['parameters']} of {of['of']} trained parameters {of['why']}: {of['names']}"
    ),
    "alone_again": _alone_again,
    "calls_again": lambda of: (
        f"nobody answers yet; this peer calls its swarm for {of['patience_s']:.0f} s"
    ),
    "rounds_over": lambda of: (
        f"rounds={of['rounds']} are over, and training goes on with the last outer momentum; plan"
        " as many as there are exchanges: rounds=max_steps / sync_every"
    ),
    "model_kept": lambda _: (
        "the model stays as it was written after the last step (an average, the best one?); the"
        " swarm's is in it inside `with sync.anchored():`"
    ),
    "planned": _planned,
    "unreachable": lambda of: (
        f"others cannot call this peer; it trains all the same ({plain(of.get('advice', ''))})"
    ),
    "indirect": lambda of: (
        f"...{plain(of['author'])[-6:]}, which makes versions, cannot be reached from here; what"
        f" this peer learns goes by way of ...{plain(of['via'])[-6:]}, so rounds take longer"
    ),
    "stands_back": lambda of: (
        f"{counted(len(of['peers']), 'peer')} cannot reach this one, so others make the versions"
    ),
    "micro_batch": lambda of: (
        f"memory is short: from now on {counted(of['sequences'], 'sequence')} at a time"
    ),
}
