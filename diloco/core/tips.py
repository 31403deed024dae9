"""Rules 1 and 2. An anchor moves up only, when its bytes are here and match what the head says; who
hears of a greater tip asks those who tell it, in turn. Sans-IO.

    told -> ask a donor -> records, one after another  -> the anchor moves by an update -> adopted
                        -> parts, from several donors  -> the anchor is replaced        -> adopted

A donor gives a record to `fanout` peers at a time, and these pass its parts on while they arrive:
all have it after little more than `fanout` times what sending it once takes. Why no circle of peers
waits for parts of each other: (1) a donor gives an arriving record only to who has fewer parts of
it; (2) who gets its parts from a donor never has more than that; (3) so a peer from which it gets
them, over any number of others, has at least as many, and is refused.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from diloco.core import events, pace
from diloco.core.contributions import impossible
from diloco.core.facts import SHUNNED, Facts, Fetch, FragmentState, Goal, Moving
from diloco.core.history import Record, Tip, follow, state_of, wrong, wrong_state
from diloco.core.members import MAX_PEERS, score
from diloco.messages.bulk import Get
from diloco.messages.fields import forget_oldest
from diloco.messages.heads import Head
from diloco.ranges import NONE, difference, overlaps

PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0  # after a donor said: not now; twice that next time
PARTS_EACH = 2  # that one donor is asked for at a time
REFUSED = 1024  # heads that are remembered


# -- asking ----------------------------------------------------------------------------------------


def fetch(core: Facts, f: FragmentState) -> None:
    """Ask for a greater tip, if there is one to be had."""
    now = core.now
    if f.fetch and f.fetch.goal is None and now >= f.fetch.until:
        _failed(core, f, f.fetch.donor)
    late = {donor for donor, until in f.fetch.asked.values() if now > until} if f.fetch else set()
    for donor in late:
        _failed(core, f, donor)
    told = f.greater()
    # who failed is asked only when nobody else tells one
    if good := told.keys() - f.retry_at.keys():
        told = {peer: told[peer] for peer in good}
        if f.fetch and f.fetch.donor in f.retry_at and not f.fetch.goal:
            f.fetch = None
    told = {peer: key for peer, key in told.items() if f.retry_at.get(peer, 0.0) <= now}
    if f.moving or f.received:
        return
    if f.fetch and f.fetch.goal:
        return _ask_parts(core, f, f.fetch, f.fetch.goal)
    highest = max(told.values(), default=f.tip.key)
    best = [peer for peer, key in (f.coming | told).items() if key == highest > f.tip.key]
    best = [peer for peer in best if peer not in f.retry_at or peer in told]
    free = [peer for peer in best if peer not in f.busy_since]
    if best and (f.fetch is None or (free and not f.fetch.donor)):
        donor = min(free or best, key=lambda peer: score(int(now), core.me + peer))
        have = (f.tip.head.work, "") if f.mismatch else f.tip.key
        f.fetch = Fetch(donor, now + pace.deadline_s(core, f))
        core.out.append(events.AskDonor(donor, Get(f.index, have)))


def _ask_parts(core: Facts, f: FragmentState, fetching: Fetch, goal: Goal) -> None:
    """Ask those who have the goal for the parts that are missing."""
    tell = {
        member.peer for member in core.members.all() if member.tips.get(f.index) == goal.head.key
    }
    donors = sorted(tell | ({fetching.donor} if fetching.donor in core.members else set()))
    donors = [donor for donor in donors if f.retry_at.get(donor, 0.0) <= core.now]
    known = fetching.parts.keys() | fetching.asked.keys()
    missing = [part for part in range(f.sizes.parts) if part not in known]
    busy = [donor for donor, _ in fetching.asked.values()]
    until = core.now + pace.deadline_s(core, f)
    for donor in donors * PARTS_EACH:
        if missing and busy.count(donor) < PARTS_EACH:
            part = missing.pop(0)
            busy.append(donor)
            fetching.asked[part] = (donor, until)
            core.out.append(events.AskDonor(donor, Get(f.index, f.tip.key, goal.head.id, part)))
    # nobody has it any more; else those who have it are asked again for what is missing
    if not fetching.asked and (f.behind() or not tell):
        f.fetch = None


def _failed(core: Facts, f: FragmentState, donor: str, seconds: float = 0.0) -> None:
    """Nothing good came from a donor, which is asked again later."""
    if donor:  # else it was a pause
        f.retry_at[donor] = core.now + (seconds or core.settings.refresh_s)
        forget_oldest(f.retry_at, MAX_PEERS)
    f.drop_donor(donor)


# -- what donors give ------------------------------------------------------------------------------


def gave(core: Facts, event: events.Gave) -> None:
    """A donor answered."""
    f = core.fragments[event.get.fragment]
    match event.answer:
        case events.Records(records):
            _gave_records(core, f, event.peer, records)
        case events.AnchorPart() as part:
            _gave_part(core, f, event.peer, part)
        case None:
            broke(core, event.peer, event.get)


def moved(core: Facts, peer: str, get: Get, nbytes: int) -> None:
    """Bytes came from a donor: its stream lives, and ends when no more come."""
    f = core.fragments[get.fragment]
    if f.fetch is None or peer not in (f.fetch.donor, f.fetch.asked.get(get.part, ("",))[0]):
        return
    core.progress(nbytes - f.fetch.moved.get(get.part, 0))
    f.fetch.moved[get.part] = nbytes
    core.settled_at = max(core.settled_at, core.now)
    if get.want and get.part in f.fetch.asked:
        f.fetch.asked[get.part] = (peer, inf)
    elif not get.want:
        f.fetch.until = inf


def arriving(core: Facts, event: events.Arriving) -> None:
    """The next record is arriving from a donor, so others may ask here for its parts."""
    f, head = core.fragments[event.get.fragment], event.head
    if f.fetch is None or f.fetch.goal or f.fetch.donor != event.peer or f.moving or f.received:
        return
    if head.prev != f.tip.head.id:
        return  # a later one of several records
    if not _is_believed(core, event.peer, head):
        _failed(core, f, event.peer)
    elif why := _objection(core, f, head):
        _refuse(core, f, event.peer, why, head)
    else:
        f.arriving, f.fetch.until = head, inf


def served(core: Facts, event: events.Served) -> None:
    """A donor's stream to a peer is over: another one may have its place."""
    f, get = core.fragments[event.get.fragment], event.get
    name = (event.peer, get.want, get.part)
    f.served_at.pop(name, None)
    head = f.serving.pop(name, "")
    # not by the first part alone: the copy may not have been made, if the anchor moved just then
    if get.want and f.pinned and head == f.pinned[0].head.id:
        _pin(core, f, f.pinned[0])


def broke(core: Facts, peer: str, get: Get, bad: bool = False) -> None:
    """A question got no answer, or a `bad` one, or a donor said: not now."""
    f = core.fragments[get.fragment]
    if f.fetch and get.want:
        if f.fetch.asked.get(get.part, ("",))[0] == peer:
            _failed(core, f, peer)
    elif f.fetch and f.fetch.goal is None and f.fetch.donor == peer:
        since = f.busy_since.setdefault(peer, core.now)
        forget_oldest(f.busy_since, MAX_PEERS)
        if bad or core.now - since > pace.patience_s(core, f) / 2:
            return _failed(core, f, peer)
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(f.times_busy, 8))
        f.fetch, f.times_busy = Fetch("", core.now + pause_s), f.times_busy + 1
        core.wake(core.now + pause_s)


def _gave_records(core: Facts, f: FragmentState, peer: str, records: tuple[Record, ...]) -> None:
    asked = f.fetch is not None and f.fetch.goal is None and f.fetch.donor == peer
    if asked:
        f.fetch = None
    if f.received or f.moving:
        return
    prevs = [record.head.prev for record in records]
    if f.tip.head.id in prevs:
        f.received = list(records[prevs.index(f.tip.head.id) :])
        _move(core, f, peer)
    elif asked:
        _failed(core, f, peer)


def _move(core: Facts, f: FragmentState, peer: str = "") -> None:
    """Apply the next record that is here."""
    if not f.received or f.moving:
        return
    (head, update), tip = f.received.pop(0), f.tip
    if not _is_believed(core, peer, head):
        f.received = []
        return _failed(core, f, peer)
    if why := _objection(core, f, head):
        return _refuse(core, f, peer, why, head)
    book, limit = follow(tip, head, core.settings.late, core.arithmetic)
    f.moving = Moving(head, book, update, peer)
    core.out.append(events.Apply(f.index, head, book, update, limit, tip.book.pushes))


def _objection(core: Facts, f: FragmentState, head: Head) -> str:
    """Why no honest author makes that head after the tip; empty if one may."""
    if head.id in f.refused:
        return "before"
    if any(impossible(core, line) for line, _ in head.lines):
        return "it has a contribution that no honest peer makes"
    return wrong(f.tip, head, core.signed_by)


def _is_believed(core: Facts, donor: str, head: Head) -> bool:
    """Whether its author may make versions, or its donor, as an author may be gone by now."""
    return core.identity.is_author(head.author) or core.identity.is_author(donor)


def _refuse(core: Facts, f: FragmentState, donor: str, why: str, head: Head) -> None:
    """No honest author makes that head. Its donor has made it, unless its author has signed it."""
    f.received = []
    f.refused[head.id] = None
    forget_oldest(f.refused, REFUSED)
    signed, shunned_s = core.signed_by(head, head.author), SHUNNED * core.settings.stuck_s
    if signed:
        core.shun(head.author, shunned_s)
    author = head.author if signed else ""
    core.note("refused_head", fragment=f.index, head=head.id, author=author, why=why)
    _failed(core, f, donor, 0.0 if signed and donor != head.author else shunned_s)


def _gave_part(core: Facts, f: FragmentState, peer: str, part: events.AnchorPart) -> None:
    fetching, head = f.fetch, part.head
    if fetching is None or f.moving:
        return
    if fetching.goal is None:
        if peer != fetching.donor:
            return
        foreign = f.refused.keys() & {head.id, *part.book.recent}
        good = head.fragment == f.index and head.key > f.tip.key and _is_believed(core, peer, head)
        good = good and len(part.digests) == f.sizes.parts > part.part
        if not good or foreign or wrong_state(head, part.book, part.digests, core.signed_by):
            return _failed(core, f, peer)
        fetching.goal = Goal(head, part.book, part.digests)
        fetching.asked[part.part] = (peer, core.now)
    goal = fetching.goal
    if head.id != goal.head.id or fetching.asked.get(part.part, ("",))[0] != peer:
        return
    del fetching.asked[part.part]
    fetching.parts[part.part] = part.values
    core.settled_at = max(core.settled_at, core.now)
    if len(fetching.parts) == f.sizes.parts:
        f.retry_at.pop(fetching.donor, None)
        f.fetch = None
        if goal.head.key > f.tip.key:
            f.moving = Moving(goal.head, goal.book, None, fetching.donor)
            values = tuple(fetching.parts[number] for number in range(f.sizes.parts))
            core.out.append(events.Replace(f.index, goal.head, values))


# -- moving ----------------------------------------------------------------------------------------


def applied(core: Facts, event: events.Applied) -> None:
    """The anchor was moved, or it could not be."""
    f = core.fragments[event.fragment]
    moving, f.moving = f.moving, None
    assert moving and moving.head.id == event.head, "the owner moved an anchor by itself"
    head, number = moving.head, moving.head.number
    if event.why:
        f.received = []
        if event.why == "far":
            return _refuse(core, f, moving.donor, "it moves too far", head)
        # the anchor here is damaged, or the author's was
        f.mismatch, f.damaged = True, event.damaged
        core.note("digest_mismatch", fragment=f.index, number=number, damaged=event.damaged)
        return
    if moving.own:
        if f.tip.head.next not in ("", core.me):
            core.takeovers += 1
            core.note("takeover", fragment=f.index, number=number, instead_of=f.tip.head.next)
        head = core.sign(replace(head, state=state_of(moving.book, event.parts)))
    core.heals += f.mismatch
    record = None if moving.update is None else Record(head, moving.update)
    adopt(core, f, Tip(head, moving.book, event.parts), record)
    f.retry_at.pop(moving.donor, None)
    _move(core, f, moving.donor)


def adopt(core: Facts, f: FragmentState, tip: Tip, record: Record | None) -> None:
    """The only place where a tip moves."""
    assert tip.key > f.tip.key, "a tip moves up only"
    head, sizes, records = tip.head, f.sizes, core.settings.records
    _note_missed(core, f, head)
    f.tip, f.mismatch, f.damaged, f.quorum_at, f.times_busy = tip, False, False, None, 0
    f.adopted_at[head.id] = core.now
    f.arriving = None
    f.busy_since.clear()
    f.ahead = {peer: key for peer, key in f.ahead.items() if key > tip.key}
    f.coming = {peer: key for peer, key in f.coming.items() if key > tip.key}
    if record:
        f.records[head.prev] = record
        if core.shunned.pop(head.author, None):  # who makes versions is not stuck
            core.note("not_shunned", author=head.author)
    forget_oldest(f.adopted_at, records)
    forget_oldest(f.records, max(1, min(records, (sizes.anchor - 1) // sizes.update)))
    if f.stale or overlaps(tip.book.merged, f.units):  # what was learned since the base is lost
        f.forget()
    if f is core.control:
        core.queue = NONE if f.stale else difference(core.queue, tip.book.merged)
        core.changed_data = True
    if not f.behind():  # else what is here may be for a tip that is still to come
        f.pool = {peer: item for peer, item in f.pool.items() if not tip.objection(item.line)}
    core.changed_tips.add(f.index)
    said = {"fragment": f.index, "number": head.number, "head": head.id, "work": head.work}
    core.note("tip", **said, author=head.author)


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
        fields |= {"steps": core.cycle if f.draft else f.steps, "cycle": core.cycle}
    round_s = round(core.now - f.adopted_at.get(f.tip.head.id, core.now), 1)
    core.note("missed", **fields, author=head.author, round_s=round_s)


def load(core: Facts, f: FragmentState) -> None:
    """Have training go on from the new anchor, but throw no inner step under way away for it."""
    if f.loading or not (core.identity.trains and f.needs_load()):
        return
    in_step = f.steps_left is None and not (f.stale or core.waits or core.pauses)
    if not in_step:
        f.loading = True
        core.out.append(events.Load(f.index))


# -- giving ----------------------------------------------------------------------------------------


def answer(core: Facts, event: events.Asked) -> None:
    """A peer asks. Parts of an anchor are given to all who ask for them."""
    get = event.get
    known = get.fragment < len(core.fragments)
    answer: events.Records | events.AnchorPart | None = None
    if known and get.want:
        answer = _part(core, core.fragments[get.fragment], event.peer, get)
    elif known:
        answer = _newer(core, core.fragments[get.fragment], event.peer, get)
    core.out.append(events.Reply(event.peer, get, answer))


def _part(core: Facts, f: FragmentState, peer: str, get: Get) -> events.AnchorPart | None:
    """A part of the anchor of the tip, or of the one that is pinned."""
    tips = (f.tip, f.kept(core.now))
    kept = next((tip for tip in tips if tip and tip.head.id == get.want), None)
    if kept is None or get.part >= len(kept.parts):
        return None
    f.serving[peer, get.want, get.part] = kept.head.id
    return events.AnchorPart(kept.head, kept.book, kept.parts, get.part)


def _pin(core: Facts, f: FragmentState, tip: Tip) -> None:
    f.pinned = (tip, core.now + 2 * core.settings.deadline_s)


def _newer(
    core: Facts, f: FragmentState, peer: str, get: Get
) -> events.Records | events.AnchorPart | None:
    """The records after a head, or the first part of an anchor, to few peers at a time."""
    tip, have = f.tip, get.have
    passes_on = f.arriving is not None and f.arriving.prev == have[1] and f.is_to_be_had()
    head = f.arriving if f.arriving and passes_on else tip.head
    asked = (peer, "", get.part)
    # a peer that reads slowly, or hangs, has its place for a round at most
    since = core.now - max(core.settings.deadline_s, pace.round_s(core, f))
    served = (name for name, at in f.served_at.items() if at > since and name != asked)
    others = [f.serving.get(name, "") for name in served]
    if head.key <= have or others.count(head.id) >= core.settings.fanout:
        return None  # it is no news, or to be had elsewhere
    f.serving[asked], f.served_at[asked] = head.id, core.now
    if passes_on:
        return events.Records((Record(head, None),))
    chain, prev = list[Record](), get.have[1]
    while prev in f.records:
        chain.append(f.records[prev])
        prev = chain[-1].head.id
    if chain and prev == tip.head.id:
        return events.Records(tuple(chain))
    kept = f.kept(core.now)
    if kept is None or kept.key <= have:
        _pin(core, f, tip)
    else:
        tip = kept
    if not tip.parts:
        del f.serving[asked], f.served_at[asked]
        return None
    f.serving[asked] = tip.head.id
    return events.AnchorPart(tip.head, tip.book, tip.parts, 0)
