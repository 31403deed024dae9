"""Rules 1 and 2 (`Inbox`, and the tip). An anchor moves up only, when its bytes are here and match
what the head says; a peer that hears of a greater tip asks those that tell it, in turn.

    told -> ask a donor -> records, one after another  -> the anchor moves by an update -> adopted
                        -> parts, from several donors  -> the anchor is replaced        -> adopted

A donor gives a record to `fanout` peers at a time (`giving`), and these pass its parts on while
they arrive: all have it after little more than `fanout` times what sending it once takes. No circle
of peers waits for parts of each other:

1. A donor gives an arriving record only to a peer that has fewer parts of it.
2. A peer that gets its parts from a donor never has more of them than that donor.
3. So a peer from which a donor gets its own, over any number of others, has at least as many, and
   is refused.
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal

from msgspec.structs import replace

from diloco.core import events
from diloco.core.facts import SHUNNED, Facts
from diloco.core.fragment import Fetch, Fetching, FragmentState, Goal, Moving
from diloco.core.history import Record, Tip, follow, state_of, wrong, wrong_state
from diloco.core.members import MAX_PEERS, score
from diloco.core.rules import contributions, data, giving, learning, pace
from diloco.messages.bulk import Get
from diloco.messages.fields import forget_oldest
from diloco.messages.heads import Book, Head, Key
from diloco.ranges import overlaps

PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0  # after a donor said: not now; twice that next time
PARTS_EACH = 2  # that one donor is asked for at a time
REFUSED = 1024  # heads that are remembered


# -- asking ----------------------------------------------------------------------------------------


def fetch(core: Facts, f: FragmentState) -> None:
    """Ask for a greater tip, if there is one to be had."""
    now = core.now
    if f.inbox.fetch and f.inbox.fetch.goal is None and now >= f.inbox.fetch.until:
        _failed(core, f, f.inbox.fetch.donor)
    asked = f.inbox.fetch.asked.values() if f.inbox.fetch else ()
    for donor in {donor for donor, until in asked if now > until}:
        _failed(core, f, donor)
    told = f.inbox.greater()
    # who failed is asked only when nobody else tells one
    if good := told.keys() - f.inbox.retry_at.keys():
        told = {peer: told[peer] for peer in good}
        fetching = f.inbox.fetch
        if fetching and fetching.goal is None and fetching.donor in f.inbox.retry_at:
            f.inbox.fetch = None
    told = {peer: key for peer, key in told.items() if f.inbox.retry_at.get(peer, 0.0) <= now}
    if f.inbox.moving or f.inbox.received:
        return
    if f.inbox.fetch and f.inbox.fetch.goal:
        return _ask_parts(core, f, f.inbox.fetch, f.inbox.fetch.goal)
    highest = max(told.values(), default=f.tip.key)
    best = [peer for peer, key in (f.inbox.coming | told).items() if key == highest > f.tip.key]
    best = [peer for peer in best if peer not in f.inbox.retry_at or peer in told]
    free = [peer for peer in best if peer not in f.inbox.busy_since]
    if best and (f.inbox.fetch is None or (free and not f.inbox.fetch.donor)):
        donor = min(free or best, key=lambda peer: score(int(now), core.me + peer))
        have = (f.tip.head.work, "") if f.inbox.mismatch else f.tip.key
        f.inbox.fetch = Fetch(donor, now + pace.deadline_s(core, f))
        core.act(events.AskDonor(donor, Get(f.index, have)))


def _ask_parts(core: Facts, f: FragmentState, fetching: Fetch, goal: Goal) -> None:
    """Ask those who have the goal for the parts that are missing."""
    tell = {
        member.peer for member in core.members.all() if member.tips.get(f.index) == goal.head.key
    }
    donors = sorted(tell | ({fetching.donor} if fetching.donor in core.members else set()))
    donors = [donor for donor in donors if f.inbox.retry_at.get(donor, 0.0) <= core.now]
    known = fetching.parts.keys() | fetching.asked.keys()
    missing = [part for part in range(f.sizes.parts) if part not in known]
    busy = [donor for donor, _ in fetching.asked.values()]
    until = core.now + pace.deadline_s(core, f)
    for donor in donors * PARTS_EACH:
        if missing and busy.count(donor) < PARTS_EACH:
            part = missing.pop(0)
            busy.append(donor)
            fetching.asked[part] = (donor, until)
            core.act(events.AskDonor(donor, Get(f.index, f.tip.key, goal.head.id, part)))
    # nobody has it any more; else those who have it are asked again for what is missing
    if not fetching.asked and (f.inbox.behind() or not tell):
        f.inbox.fetch = None


def _failed(core: Facts, f: FragmentState, donor: str, seconds: float = 0.0) -> None:
    """Nothing good came from a donor, which is asked again later."""
    if donor:  # else it was a pause
        f.inbox.retry_at[donor] = core.now + (seconds or core.settings.refresh_s)
        forget_oldest(f.inbox.retry_at, MAX_PEERS)
    _drop_donor(f, donor)


def _drop_donor(f: FragmentState, donor: str) -> None:
    """Wait no more for what a donor was asked for; others are asked for it."""
    if f.inbox.asked(donor):
        f.inbox.fetch = None
    elif f.inbox.fetch and f.inbox.fetch.goal:
        asked = f.inbox.fetch.asked
        f.inbox.fetch.asked = {part: ask for part, ask in asked.items() if ask[0] != donor}


def lost(f: FragmentState, peer: str) -> None:
    """A peer is gone."""
    f.inbox.ahead.pop(peer, None)
    f.inbox.coming.pop(peer, None)
    _drop_donor(f, peer)


# -- what others tell ------------------------------------------------------------------------------


def told(f: FragmentState, peer: str, key: Key) -> bool:
    """A peer tells its tip. Return True if it is greater, and can be asked for at once."""
    f.inbox.ahead.pop(peer, None)
    if key <= f.tip.key:
        return False
    f.inbox.ahead[peer] = key
    return _asks_nobody(f)


def told_arriving(f: FragmentState, peer: str, key: Key | None) -> bool:
    """A peer tells of which version parts are there. Return True if one can be asked for."""
    f.inbox.coming.pop(peer, None)
    if key is None:
        return False
    f.inbox.coming[peer] = key
    return _asks_nobody(f)


def _asks_nobody(f: FragmentState) -> bool:
    """Return True if no donor is asked yet: most peers tell a tip while one is."""
    return f.inbox.moving is None and not (f.inbox.fetch and f.inbox.fetch.donor)


# -- what donors give ------------------------------------------------------------------------------


def gave(core: Facts, event: events.Gave) -> None:
    """A donor answered."""
    f = core.fragments[event.get.fragment]
    match event.answer:
        case events.Records(records):
            _gave_records(core, f, event.peer, records)
        case events.AnchorPart() as part:
            _gave_part(core, f, event.peer, part)


def moved(core: Facts, peer: str, get: Get, nbytes: int) -> None:
    """Bytes came from a donor: its stream lives, and ends when no more come."""
    f = core.fragments[get.fragment]
    if f.inbox.fetch is None or peer not in (f.inbox.fetch.donor, f.inbox.fetch.donor_of(get.part)):
        return
    core.progress(nbytes - f.inbox.fetch.moved.get(get.part, 0))
    f.inbox.fetch.moved[get.part] = nbytes
    f.inbox.moved_at = core.now
    if get.want and get.part in f.inbox.fetch.asked:
        f.inbox.fetch.asked[get.part] = (peer, inf)
    elif not get.want:
        f.inbox.fetch.until = inf


def arriving(core: Facts, event: events.Arriving) -> None:
    """The next record is arriving from a donor, so others may ask here for its parts."""
    f, head = core.fragments[event.get.fragment], event.head
    fetching = f.inbox.asked(event.peer)
    if fetching is None or f.inbox.moving or f.inbox.received:
        return
    if head.prev != f.tip.head.id:
        return  # a later one of several records
    if not _is_believed(core, event.peer, head):
        _failed(core, f, event.peer)
    elif why := _objection(core, f, head):
        _refuse(core, f, event.peer, why, head)
    else:
        f.inbox.arriving = head
        fetching.until = inf


def broke(core: Facts, peer: str, get: Get, bad: bool = False) -> Literal[False]:
    """A question got no answer, or a `bad` one, or a donor said: not now. The next donor is asked
    here, as in a large swarm most questions end so; nothing else is to be decided at once."""
    f = core.fragments[get.fragment]
    if f.inbox.fetch and get.want:
        if f.inbox.fetch.donor_of(get.part) == peer:
            _failed(core, f, peer)
    elif f.inbox.asked(peer):
        since = f.inbox.busy_since.setdefault(peer, core.now)
        forget_oldest(f.inbox.busy_since, MAX_PEERS)
        if bad or core.now - since > pace.patience_s(core, f) / 2:
            _failed(core, f, peer)
        else:
            pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(f.inbox.times_busy, 8))
            f.inbox.fetch = Fetch("", core.now + pause_s)
            f.inbox.times_busy += 1
    fetch(core, f)
    if f.inbox.fetch and f.inbox.state is Fetching.PAUSED:
        core.wake_after(f.inbox.fetch.until, core.tick_s)
    return False


def _gave_records(core: Facts, f: FragmentState, peer: str, records: tuple[Record, ...]) -> None:
    asked = f.inbox.asked(peer) is not None
    if asked:
        f.inbox.fetch = None
    if f.inbox.received or f.inbox.moving:
        return
    prevs = [record.head.prev for record in records]
    if f.tip.head.id in prevs:
        f.inbox.received = list(records[prevs.index(f.tip.head.id) :])
        _move(core, f, peer)
    elif asked:
        _failed(core, f, peer)


def _move(core: Facts, f: FragmentState, peer: str = "") -> None:
    """Apply the next record that is here."""
    if not f.inbox.received or f.inbox.moving:
        return
    (head, update), tip = f.inbox.received.pop(0), f.tip
    if not _is_believed(core, peer, head):
        f.inbox.received = []
        return _failed(core, f, peer)
    if why := _objection(core, f, head):
        return _refuse(core, f, peer, why, head)
    book, limit = follow(tip, head, core.settings.late, core.arithmetic)
    f.inbox.moving = Moving(head, book, update, peer)
    core.act(events.Apply(f.index, head, book, update, limit, tip.book.pushes))


def _objection(core: Facts, f: FragmentState, head: Head) -> str:
    """Why no honest author makes that head after the tip; empty if one may."""
    if head.id in f.inbox.refused:
        return "before"
    if any(contributions.impossible(core, line) for line, _ in head.lines):
        return "it has a contribution that no honest peer makes"
    return wrong(f.tip, head, core.signed_by)


def _is_believed(core: Facts, donor: str, head: Head) -> bool:
    """Return True if its author may make versions, or its donor: an author may be gone by now."""
    return core.identity.is_author(head.author) or core.identity.is_author(donor)


def _refuse(core: Facts, f: FragmentState, donor: str, why: str, head: Head) -> None:
    """No honest author makes that head. Its donor has made it, unless its author has signed it."""
    f.inbox.received = []
    f.inbox.refused[head.id] = None
    forget_oldest(f.inbox.refused, REFUSED)
    signed, shunned_s = core.signed_by(head, head.author), SHUNNED * core.settings.stuck_s
    if signed:
        core.shun(head.author, shunned_s)
    author = head.author if signed else ""
    core.note("refused_head", fragment=f.index, head=head.id, author=author, why=why)
    _failed(core, f, donor, 0.0 if signed and donor != head.author else shunned_s)


def _gave_part(core: Facts, f: FragmentState, peer: str, part: events.AnchorPart) -> None:
    fetching, head = f.inbox.fetch, part.head
    if f.inbox.moving:  # to a version of this peer: what came is asked for again after that
        return _drop_donor(f, peer)
    if fetching is None:
        return
    if fetching.goal is None:
        if peer != fetching.donor:
            return
        foreign = f.inbox.refused.keys() & {head.id, *part.book.recent}
        good = head.fragment == f.index and head.key > f.tip.key and _is_believed(core, peer, head)
        good = good and len(part.digests) == f.sizes.parts > part.part
        if not good or foreign or wrong_state(head, part.book, part.digests, core.signed_by):
            return _failed(core, f, peer)
        fetching.goal = Goal(head, part.book, part.digests)
        fetching.asked[part.part] = (peer, core.now)
    goal = fetching.goal
    if head.id != goal.head.id or fetching.donor_of(part.part) != peer:
        return
    del fetching.asked[part.part]
    fetching.parts[part.part] = part.values
    f.inbox.moved_at = core.now
    if len(fetching.parts) == f.sizes.parts:
        f.inbox.retry_at.pop(fetching.donor, None)
        f.inbox.fetch = None
        if goal.head.key > f.tip.key:
            f.inbox.moving = Moving(goal.head, goal.book, None, fetching.donor)
            values = tuple(fetching.parts[number] for number in range(f.sizes.parts))
            core.act(events.Replace(f.index, goal.head, values))


# -- moving ----------------------------------------------------------------------------------------


def applied(core: Facts, event: events.Applied) -> None:
    """The anchor was moved, or it could not be."""
    f = core.fragments[event.fragment]
    moving, f.inbox.moving = f.inbox.moving, None
    assert moving and moving.head.id == event.head, "the owner moved an anchor by itself"
    head, number = moving.head, moving.head.number
    if event.why:
        f.inbox.received = []
        if event.why == "far":
            return _refuse(core, f, moving.donor, "it moves too far", head)
        # the anchor here is damaged, or the author's was
        f.inbox.mismatch = True
        f.inbox.damaged = event.damaged
        core.note("digest_mismatch", fragment=f.index, number=number, damaged=event.damaged)
        return
    if moving.own:
        if f.tip.head.next not in ("", core.me):
            core.takeovers += 1
            core.note("takeover", fragment=f.index, number=number, instead_of=f.tip.head.next)
        head = core.sign(replace(head, state=state_of(moving.book, event.parts)))
    core.heals += f.inbox.mismatch
    record = None if moving.update is None else Record(head, moving.update)
    adopt(core, f, Tip(head, moving.book, event.parts), record)
    f.inbox.retry_at.pop(moving.donor, None)
    _move(core, f, moving.donor)


def move_own(core: Facts, f: FragmentState, head: Head, book: Book, update: Any) -> None:
    """Move the anchor to a version that this peer makes."""
    f.inbox.moving = Moving(head, book, update, own=True)
    pushes = f.tip.book.pushes
    core.act(events.Apply(f.index, head, book, update, inf, pushes, own=True))


def adopt(core: Facts, f: FragmentState, tip: Tip, record: Record | None) -> None:
    """The only place where a tip moves."""
    assert tip.key > f.tip.key, "a tip moves up only"
    head = tip.head
    _note_missed(core, f, head)
    f.tip = tip
    f.adopted_at[head.id] = core.now
    forget_oldest(f.adopted_at, core.settings.records)
    f.inbox.mismatch = False
    f.inbox.damaged = False
    f.inbox.times_busy = 0
    f.inbox.arriving = None
    f.inbox.busy_since.clear()
    f.inbox.ahead = {peer: key for peer, key in f.inbox.ahead.items() if key > tip.key}
    f.inbox.coming = {peer: key for peer, key in f.inbox.coming.items() if key > tip.key}
    giving.keep(core, f, record)
    if record:
        core.trust_again(head.author)
    if f.stale or overlaps(tip.book.merged, f.learned.units):
        learning.forget(f)
    if f is core.control:
        data.adopted(core)
    if not f.inbox.behind():  # else what is here may be for a tip that is still to come
        contributions.prune(f)
    core.note(
        "tip",
        fragment=f.index,
        number=head.number,
        head=head.id,
        work=head.work,
        author=head.author,
    )


def _note_missed(core: Facts, f: FragmentState, head: Head) -> None:
    """At a barrier, say that a version has nothing of this peer, and what it was waiting for."""
    late = {line.peer for line, _ in head.lines} - {core.me} and head.prev == f.tip.head.id
    if not (late and core.settings.barrier and core.trains_now) or f.stale:
        return
    if core.me in {line.peer for line, _ in head.lines}:
        return
    fields: dict[str, object] = {"fragment": f.index, "version": head.number}
    if item := f.pool.get(core.me):
        fields |= {"sent_bytes": item.sent_bytes, "nbytes": f.sizes.payload}
    else:
        cycle = core.loop.cycle
        fields |= {"steps": cycle if f.learned.draft else f.learned.steps, "cycle": cycle}
    round_s = round(core.now - f.adopted_at.get(f.tip.head.id, core.now), 1)
    core.note("missed", **fields, author=head.author, round_s=round_s)
