"""What the facts of the core are in a snapshot: rows for watchers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from diloco.core.facts import Facts, FragmentState
from diloco.core.members import Member
from diloco.core.peer import Peer
from diloco.messages import snapshot as schema
from diloco.messages.control import Figures
from diloco.messages.fields import MAX_BYTES, MAX_SECONDS, MAX_TOKENS, at_most, within_bounds
from diloco.messages.snapshot import PHASES, PhaseSeconds

ID_DIGITS = 16
State = Literal["starting", "ready", "training", "exchanging", "evaluating", "leaving"]


def phase_seconds(figures: Figures) -> PhaseSeconds | None:
    """Wall seconds of a peer's last round; None before the first."""
    return PhaseSeconds(*figures.seconds) if len(figures.seconds) == len(PHASES) else None


def _fewest_steps(facts: Facts) -> int:
    return min(f.tip.head.number for f in facts.fragments)


def run_info(core: Peer, manifest_text: str, at: float) -> schema.RunInfo:
    """Which run it is, and how far."""
    facts, manifest = core.facts, json.loads(manifest_text)
    settings, (steps, tokens, _) = facts.settings, facts.planned
    concurrent = "streaming" if settings.barrier else "asynchronous"
    return schema.RunInfo(
        facts.identity.run_id,
        "synchronous" if settings.lockstep else concurrent,
        str((manifest.get("model") or {}).get("name") or "")[:128],
        at_most(steps) or None,
        tokens or None,
        _fewest_steps(facts),
        facts.control.tip.head.work,
        at,
        facts.me,
    )


def peer_row(core: Peer, member: Member, now: float) -> schema.PeerRow:
    """A peer as it says itself, which may be this one."""
    facts, hello, status, figures = core.facts, member.hello, member.status, member.figures
    version = min(_version(f, member) for f in facts.fragments)
    return schema.PeerRow(
        peer_id=member.peer,
        name=hello.name,
        state=_state(member),
        trains=hello.trains,
        authors=hello.authors,
        device=hello.device,
        version=version,
        version_lag=max(0, _fewest_steps(facts) - version),
        inner_step=status.position,
        target_steps=status.cycle,
        steps_per_s=status.steps_per_s,
        tokens=figures.tokens,
        loss=figures.loss or None,
        bytes_sent=figures.bytes_sent,
        bytes_received=figures.bytes_received,
        last_seen_s=within_bounds(now - member.heard_at, MAX_SECONDS),
        seconds=phase_seconds(figures),
        addresses=list(core.addresses.of(member.peer)),
    )


def _version(f: FragmentState, member: Member) -> int:
    """Number of the head that a member tells, at most that of the one here; of an unknown one, the
    number before all known ones."""
    key, recent, number = member.tips.get(f.index, (0, "")), f.tip.book.recent, f.tip.head.number
    if tuple(key) >= f.tip.key:
        return number
    return max(0, number - len(recent) + (recent.index(key[1]) if key[1] in recent else -1))


def _state(member: Member) -> State:
    status = member.status
    if status.leaves:
        return "leaving"
    if not status.trains:
        return "starting" if member.hello.trains else "ready"
    return "evaluating" if status.pauses else "exchanging" if status.waits else "training"


def fragment_row(facts: Facts, f: FragmentState) -> schema.FragmentRow:
    """A fragment's tip here, and what this peer does about it."""
    head, author = f.tip.head, facts.author_of(f)
    state: Literal["following", "collecting", "fetching", "settling", "alone"]
    state = "collecting" if author == facts.me else "following" if author else "alone"
    state = "fetching" if f.behind() else state if facts.ready else "settling"
    here = sum(not f.tip.objection(item.line) for item in f.pool.values())
    numbers, short = (f.index, head.number, head.work), head.id[:ID_DIGITS]
    return schema.FragmentRow(*numbers, short, head.next, author or None, here, state)


def ledger_totals(facts: Facts, last: Mapping[str, Figures]) -> schema.LedgerTotals:
    """Totals as far as they are known here: of peers that left before this one came, only the
    tokens in the model."""
    tip = facts.control.tip
    applied = tip.head.work
    processed = max(applied, at_most(sum(figures.tokens for figures in last.values()), MAX_TOKENS))
    discarded = min(processed - applied, sum(figures.discarded for figures in last.values()))
    rows = [
        schema.Contributor(
            *(peer, one.name, one.contributions, one.tokens),
            *(_payload_bytes(facts, peer), one.first, one.last),
        )
        for peer, one in tip.book.ledger.items()
        if one.contributions
    ]
    under_way = processed - applied - discarded
    return schema.LedgerTotals(processed, applied, discarded, under_way, rows[: schema.MAX_PEERS])


def _payload_bytes(facts: Facts, peer: str) -> int:
    known = ((f.tip.book.ledger.get(peer), f.sizes.payload) for f in facts.fragments)
    return at_most(sum(entry.contributions * nbytes for entry, nbytes in known if entry), MAX_BYTES)
