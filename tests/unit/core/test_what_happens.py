"""What happens when: the rows of the table in the core's README, in virtual time.

Four peers, a barrier, ten steps of a second to a round; a healthy round takes 11 to 14 seconds.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_field

from diloco.core import events
from diloco.core.history import blank
from diloco.core.members import score
from diloco.core.settings import ProtocolSettings
from diloco.messages import bulk
from diloco.messages.control import Status
from diloco.messages.heads import Head
from tests.support.fake_tensors import PARTS, Saved, hexed
from tests.support.swarm_without_tensors import Peer, Swarm

BARRIER = ProtocolSettings(sync_every=10)
ROUND_S = 15.0
RESEND_S = 6.0  # a contribution is offered again after 5 s, and is on its way
FOR_GOOD = 10.0**9


class Scene(Swarm):
    """A swarm that has trained for a while: `after` seconds into a round."""

    def __init__(
        self,
        settings: ProtocolSettings = BARRIER,
        peers: str = "abcd",
        after: float = 0.0,
        bulk_s: float = 0.5,
    ) -> None:
        super().__init__(settings, bulk_s=bulk_s)
        for name in peers:
            self.add(name)
        self.until(100.0)
        self.next_version()
        self.begun_at = self.now
        self.until(self.now + after)

    def next_version(self) -> Head:
        number = len(self.made)
        self.until(self.now + 500.0, lambda: len(self.made) > number)
        return self.made[-1][1]

    def author(self) -> Peer:
        core = next(peer.facts for peer in self.peers.values() if peer.core)
        return self.peers[core.author_of(core.control)]

    def contributor(self) -> Peer:
        return next(peer for peer in self.peers.values() if peer.core and peer is not self.author())

    def longest(self) -> float:
        """Seconds between two versions of fragment 0."""
        times = [at for at, head in self.made if not head.fragment and at >= self.begun_at]
        return max(after - before for before, after in itertools.pairwise(times))

    def discarded(self) -> dict[str, int]:
        return {peer.name: peer.core.discarded() for peer in self.peers.values() if peer.core}

    def chain(self, head: Head) -> list[str]:
        ids = [head.id]
        while self.heads[ids[-1]].prev in self.heads:
            ids.append(self.heads[ids[-1]].prev)
        return ids

    def in_step(self) -> bool:
        """Whether all have the newest version before the next one is made."""
        self.next_version()
        self.until(self.now + 20.0, self.same)
        return self.same()

    def same(self) -> bool:
        alive = [peer for peer in self.peers.values() if peer.core and not peer.frozen]
        return len({peer.tip().head.id for peer in alive}) == 1

    def goes_on(self, longest: float = ROUND_S, lost: int = 0, seconds: float = 60.0) -> None:
        """Versions are made, everybody has them, and few tokens are lost."""
        self.until(self.now + seconds)
        assert self.longest() < longest
        assert sum(self.discarded().values()) <= lost
        assert self.in_step()


def test_healthy() -> None:
    swarm = Scene()
    swarm.goes_on()
    assert all(len(head.lines) == 4 for at, head in swarm.made if at > 30)


@pytest.mark.parametrize("sent", [False, True])
def test_killed_contributor(sent: bool) -> None:
    swarm = Scene(after=5.0)
    victim, author = swarm.contributor(), swarm.author()
    swarm.until(swarm.now + 20.0, lambda: not sent or victim.name in author.facts.control.pool)
    swarm.die(victim)
    assert (victim.name in [line.peer for line, _ in swarm.next_version().lines]) == sent
    swarm.goes_on()


def test_hung_contributor() -> None:
    swarm = Scene()
    swarm.contributor().hangs = True
    swarm.goes_on(BARRIER.stall_s + 3.0)


def test_frozen_contributor() -> None:
    swarm = Scene(after=5.0)
    swarm.contributor().frozen = True
    swarm.goes_on(5.0 + BARRIER.silence_s + 3.0)


@pytest.mark.parametrize("after", [5.0, 10.5, 11.2])
def test_killed_author(after: float) -> None:
    swarm = Scene(after=after)
    swarm.die(swarm.author())
    swarm.goes_on()


@pytest.mark.parametrize("asleep_s", [8.0, 15.0, 30.0])
def test_frozen_author(asleep_s: float) -> None:
    """It loses its own last round at most, and nobody else a token."""
    swarm = Scene(after=11.3)
    author = swarm.author()
    author.frozen = True
    swarm.until(swarm.now + asleep_s)
    swarm.thaw(author)
    swarm.goes_on(11.3 + BARRIER.silence_s + 2.0, lost=10)
    assert swarm.discarded()[author.name] == sum(swarm.discarded().values())


@pytest.mark.parametrize("number", [1, 2])
def test_hung_merge(number: int) -> None:
    swarm = Scene(after=5.0)
    author = swarm.author()
    order = sorted(swarm.peers.values(), key=lambda one: (one is not author, score(0, one.name)))
    for peer in order[:number]:
        peer.stuck = True
    swarm.goes_on(ROUND_S + number * BARRIER.stuck_s + 10.0, seconds=300.0)
    assert any(kind == "stuck" for peer in order for _, kind, _ in peer.notes)


@pytest.mark.parametrize("served", [False, True])
def test_lost_version(served: bool) -> None:
    """The author dies with its newest version. If one other peer has it, that goes on; else the one
    before."""
    swarm = Scene(after=5.0)
    head = swarm.next_version()
    author = swarm.peers[head.author]
    others = [peer for peer in swarm.peers.values() if peer is not author]
    if served:
        swarm.until(swarm.now + 9.0, lambda: any(peer.tip().head.id == head.id for peer in others))
    swarm.die(author)
    swarm.goes_on(ROUND_S + BARRIER.deadline_s)
    assert (head.id in swarm.chain(swarm.contributor().tip().head)) == served


@pytest.mark.parametrize("side", ["ab", "ac", "ad"])
def test_split(side: str) -> None:
    """Each side goes on; when they meet, more tokens win, in all fragments alike, and only the
    losers lose theirs."""
    swarm = Scene(replace(BARRIER, fragments=3), after=2.0)
    others = "".join(sorted(set("abcd") - set(side)))
    swarm.block([frozenset((one, two)) for one in side for two in others], FOR_GOOD)
    for name in others:
        swarm.peers[name].step_s = 1.3  # when they meet, one side is more than a round ahead
    swarm.until(swarm.now + 90.0)
    assert swarm.longest() < 14.0 + BARRIER.silence_s
    assert swarm.peers[side[0]].tip().head.id != swarm.peers[others[0]].tip().head.id
    keys = [[swarm.peers[group[0]].tip(i).key for i in range(3)] for group in (side, others)]
    before = [[swarm.peers[group[0]].tip(i).head for i in range(3)] for group in (side, others)]
    swarm.unblock(list(swarm.blocked))
    swarm.until(swarm.now + 60.0)
    winners, losers = (side, others) if keys[0] > keys[1] else (others, side)
    won = before[0] if keys[0] > keys[1] else before[1]
    for i in range(3):
        assert all(won[i].id in swarm.chain(peer.tip(i).head) for peer in swarm.peers.values())
    assert all(swarm.discarded()[name] == 0 for name in winners)
    assert all(swarm.discarded()[name] > 50 for name in losers)


def test_a_tie_of_two_sides_falls_alike_in_all_fragments() -> None:
    swarm = Scene(replace(BARRIER, fragments=4), after=2.0)
    swarm.block([frozenset((one, two)) for one in "ab" for two in "cd"], FOR_GOOD)
    one, other = swarm.peers["a"].facts.fragments, swarm.peers["c"].facts.fragments

    def tied() -> bool:
        works = {f.tip.head.work for f in (*one, *other)}
        return len(works) == 1 and one[0].tip.head.id != other[0].tip.head.id

    swarm.until(swarm.now + 200.0, tied)
    assert tied()
    for peer in swarm.peers.values():
        peer.hangs = True
    assert len({mine.tip.key > its.tip.key for mine, its in zip(one, other, strict=True)}) == 1
    swarm.unblock(list(swarm.blocked))
    swarm.until(swarm.now + 100.0)
    for i in range(4):
        assert len({peer.tip(i).head.id for peer in swarm.peers.values()}) == 1


@pytest.mark.parametrize("index", [1, 3])
def test_broken_link(index: int) -> None:
    swarm = Scene(after=5.0)
    author = swarm.author()
    order = sorted(set(swarm.peers) - {author.name}, key=lambda name: score(0, name))
    other, since = order[index - 1], swarm.now
    swarm.block([frozenset((author.name, other))], FOR_GOOD)
    swarm.drop(frozenset((author.name, other)), other)
    for name, lost in ((author.name, other), (other, author.name)):
        swarm.tell(swarm.peers[name], events.Lost(lost))
    swarm.goes_on(lost=10, seconds=160.0)
    versions = [[line.peer for line, _ in head.lines] for at, head in swarm.made if at > since]
    assert sum(other in peers for peers in versions) > len(versions) / 2


@pytest.mark.parametrize("closed", [False, True])
def test_an_author_that_half_of_the_others_cannot_reach_hands_over(closed: bool) -> None:
    """As two machines of one home, of which one can be called, and a friend elsewhere."""
    swarm = Swarm(BARRIER)
    home, server = swarm.add("b"), swarm.add("a")
    swarm.block([frozenset("bf")], FOR_GOOD)
    friend = swarm.add("f", authors=not closed)
    swarm.until(400.0)
    versions = [head for at, head in swarm.made if at > 200.0]
    assert {head.author for head in versions} == {"a"}
    assert all(len(head.lines) == 3 for head in versions)
    assert [kind for _, kind, _ in home.notes].count("stands_back") == 1
    indirect = [said for _, kind, said in friend.notes if kind == "indirect"]
    assert indirect == [{"author": "b", "via": "a"}]
    assert not home.facts.is_author() and not server.facts.members.authors() & {"b"}
    swarm.die(server)
    swarm.until(410.0)
    assert home.facts.is_author(), "nobody is left to whom it could leave versions"


def test_two_who_never_meet_begin_with_the_third_that_both_meet() -> None:
    swarm = Swarm(replace(BARRIER, min_peers=3))
    swarm.block([frozenset("bc")], FOR_GOOD)
    swarm.add("a")
    for name in "bc":
        swarm.add(name, authors=False)
    swarm.until(60.0)
    assert [line.peer for line, _ in swarm.made[0][1].lines] == ["a", "b", "c"]


@pytest.mark.parametrize(("after", "bulk_s"), [(1.0, 0.5), (5.0, 0.5), (9.0, 0.5), (5.0, 4.0)])
def test_joiner(after: float, bulk_s: float) -> None:
    """It begins with what the others have, in step with them, and loses no token."""
    swarm = Scene(after=after)
    at, swarm.bulk_s = swarm.now, bulk_s
    there = swarm.peers["a"].tip().key
    swarm.add("e")
    swarm.until(at + 80.0, lambda: swarm.peers["e"].facts.life.ready)
    assert swarm.peers["e"].tip().key >= there
    swarm.until(at + 80.0, lambda: "e" in [line.peer for line, _ in swarm.made[-1][1].lines])
    assert swarm.now < at + 20.0 + 8 * bulk_s
    swarm.goes_on(ROUND_S + 4 * bulk_s)


def test_nobody_begins_before_all_who_are_here_are_about_to() -> None:
    swarm = Swarm(replace(BARRIER, min_peers=2))
    late, other = swarm.add("a", begins=False), swarm.add("b")
    swarm.until(60.0)
    assert late.facts.life.ready and not late.facts.trains_now
    assert other.facts.trains_now and other.facts.loop.steps == 0
    swarm.tell(late, events.Begun())
    swarm.until(100.0, lambda: bool(swarm.made))
    assert [line.peer for line, _ in swarm.made[0][1].lines] == ["a", "b"]


def test_who_lacks_what_the_run_starts_from_gets_it_from_the_other() -> None:
    swarm = Swarm(replace(BARRIER, fragments=8, min_peers=2))
    starter = swarm.add("a")
    lacks = Saved(tuple(map(blank, range(8))), ((0,) * PARTS,) * 8, 0, 0)
    guest = swarm.add("b", lacks)
    swarm.until(40.0, lambda: len(swarm.made) >= 8)
    assert len(swarm.made) >= 8, "both train"
    swarm.until(swarm.now + 20.0, lambda: starter.anchors.now == guest.anchors.now)
    assert starter.anchors.now == guest.anchors.now


def test_all_restart() -> None:
    swarm = Scene()
    saves = []
    for _ in range(4):
        saves.append({name: peer.saved() for name, peer in swarm.peers.items()})
        swarm.until(swarm.now + 20.0)
    for peer in swarm.peers.values():
        swarm.die(peer)
    swarm.until(swarm.now + 5.0)
    at = swarm.now
    for age, peer in zip((0, 3, 1, 2), swarm.peers.values(), strict=True):
        swarm.start(peer, saves[age][peer.name])
    assert swarm.next_version().number == saves[3]["b"].tips[0].head.number + 1
    assert swarm.now < at + 30.0


@pytest.mark.parametrize("who", ["author", "contributor"])
@pytest.mark.parametrize("after", [0.0, 6.0])
def test_leaver(who: str, after: float) -> None:
    """What it has learned is in the model of the others, and it is gone soon."""
    swarm = Scene(after=after)
    peer, at = swarm.author() if who == "author" else swarm.contributor(), swarm.now
    processed = peer.facts.loop.processed
    swarm.tell(peer, events.Leave())
    swarm.until(swarm.now + 100.0, lambda: peer.core is None)
    assert swarm.now < at + 5.0
    swarm.goes_on()
    assert swarm.contributor().tip().book.of(peer.name)[1] == processed


@pytest.mark.parametrize(("part", "what"), [("round", "merge"), ("inbox", "moving")])
def test_an_author_that_leaves_while_it_makes_a_version(part: str, what: str) -> None:
    """Nobody makes that version again, and no token is lost."""
    swarm = Scene(after=5.0)
    swarm.work_s = 1.0
    author = swarm.author()
    made_by = getattr(author.facts.control, part)
    swarm.until(swarm.now + 30.0, lambda: getattr(made_by, what) is not None)
    swarm.tell(author, events.Leave())
    swarm.goes_on(ROUND_S + RESEND_S)
    numbers = [head.number for _, head in swarm.made]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("who", ["author", "contributor"])
def test_damaged(who: str) -> None:
    """A bit flips in an anchor: parts are fetched. Damage at the author gets into the history."""
    swarm = Scene(after=5.0)
    peer = swarm.author() if who == "author" else swarm.contributor()
    first, *rest = peer.anchors.now[0]
    peer.anchors.now[0] = (first ^ 64, *rest)
    swarm.goes_on(ROUND_S + RESEND_S * (who == "author"))
    for one in swarm.peers.values():
        assert one.tip().parts == tuple(map(hexed, one.anchors.now[0]))
        assert one.anchors.now[0] == peer.anchors.now[0]


@pytest.mark.parametrize("what", ["hangs", "lies", "has nothing", "repeats itself"])
def test_bad_donor(what: str) -> None:
    """One peer tells a tip that nobody has; it holds up no version."""

    class Bad(Scene):
        bad: Peer | None = None

        def do(self, peer: Peer, action: events.Action) -> None:
            if peer is not self.bad:
                return super().do(peer, action)
            match action:
                case events.Reply(to, get) if what != "hangs":
                    tip = peer.tip()
                    part = events.AnchorPart(tip.head, tip.book, tip.parts, 0)
                    old = events.Records((next(iter(peer.facts.control.outbox.records.values())),))
                    lie = replace_field(part, values=7)
                    answer = {"lies": lie, "repeats itself": old}.get(what)
                    self.carry(peer.name, to, events.Gave(peer.name, get, answer), bulk=True)
                case events.Reply():
                    pass
                case events.Broadcast(Status() as status):
                    told = replace_field(status, tips={0: (10**9, "f" * 64)})
                    super().do(peer, events.Broadcast(told))
                case _:
                    super().do(peer, action)

    swarm = Bad(after=8.0)
    swarm.bad = swarm.contributor()
    swarm.until(swarm.now + 100.0)
    limit_s = BARRIER.stuck_s / 2 if what == "has nothing" else BARRIER.deadline_s
    assert swarm.longest() < ROUND_S + limit_s
    swarm.until(swarm.now + 20.0, lambda: swarm.now > swarm.made[-1][0] + 5.0)
    assert len({peer.tip().head.id for peer in swarm.peers.values() if peer is not swarm.bad}) == 1


def test_uplink() -> None:
    """With sixteen peers nobody serves a record to all of the others."""
    served: list[tuple[str, str]] = []

    class Counted(Scene):
        def do(self, peer: Peer, action: events.Action) -> None:
            match action:
                case events.Reply(_, _, events.Records(records)):
                    served.append((peer.name, records[-1].head.id))
            super().do(peer, action)

    swarm = Counted(peers="abcdefghijklmnop")
    swarm.goes_on(20.0, seconds=40.0)
    assert max(map(served.count, set(served))) <= BARRIER.fanout


def test_uplink_of_newcomers() -> None:
    """The first part of an anchor has places as a record has, also when the tip moves meanwhile."""
    settings = replace(BARRIER, fanout=1)
    swarm = Scene(settings)
    donor = swarm.author()
    given: list[events.Action] = []
    nothing = blank(0).head.key
    for newcomer in ("e", "f"):
        donor.facts.control.outbox.records.clear()
        asked = events.Asked(newcomer, bulk.Get(0, nothing))
        given += donor.core.receive(asked, swarm.now)
        newer = replace_field(donor.tip().head, number=donor.tip().head.number + 1)
        donor.facts.control.tip = replace(donor.tip(), head=newer)
    replies = [action.answer for action in given if isinstance(action, events.Reply)]
    assert isinstance(replies[0], events.AnchorPart) and replies[1] is None


def test_meeting_of_nearly_equal_sides() -> None:
    """One history after a transfer, though the lighter side goes on meanwhile."""
    settings = replace(BARRIER, sync_every=2, quorum=1, late=64)
    swarm = Scene(settings, "ac", bulk_s=4.0)
    swarm.block([frozenset("ac")], FOR_GOOD)
    swarm.until(swarm.now + 30.0)
    swarm.unblock(list(swarm.blocked))
    at = swarm.now
    heads = [peer.tip().head for peer in swarm.peers.values()]

    def met() -> bool:
        chains = [swarm.chain(peer.tip().head) for peer in swarm.peers.values()]
        return any(all(head.id in chain for chain in chains) for head in heads)

    swarm.until(at + 100.0, met)
    assert swarm.now < at + 30.0


def test_liar() -> None:
    """An author whose version moves farther than its contributions allow is passed over."""
    swarm = Scene(after=5.0)
    liar = swarm.author()
    done = liar.anchors.done

    def lies(action: Any) -> events.Event:
        event = done(action)
        far = tuple(10**6 for _ in event.update) if isinstance(event, events.Merged) else ()
        return replace_field(event, update=far, digest=hexed(far)) if far else event

    liar.anchors.done = lies  # type: ignore[method-assign]
    swarm.until(swarm.now + 60.0)
    others = [peer for peer in swarm.peers.values() if peer is not liar]
    swarm.until(swarm.now + 5.0, lambda: len({peer.tip().head.id for peer in others}) == 1)
    assert all(max(map(abs, peer.anchors.now[0])) < 10**5 for peer in others)
    assert len({peer.tip().head.id for peer in others}) == 1
    assert others[0].tip().head.author != liar.name
    assert all(liar.name in peer.facts.shunned for peer in others)


def test_what_waits_for_another_fragment_stays_within_what_a_line_may_claim() -> None:
    """Staggered: while one fragment has no author that makes versions, training goes on with the
    others for a while."""
    cycle = dict(sync_every=2, fragments=2, staggered=True, overlap=1)
    swarm = Swarm(ProtocolSettings(quorum=2, grace_s=1.0, **cycle))  # type: ignore[arg-type]
    for name in "abcd":
        swarm.add(name, step_s=0.5)
    swarm.until(40.0)
    core = swarm.peers["a"].facts
    swarm.peers[core.author_of(core.fragments[1])].stuck = True
    swarm.until(300.0)
    assert max(line.steps for _, head in swarm.made for line, _ in head.lines) <= 16
    assert all(at > 290.0 for at in {head.fragment: at for at, head in swarm.made}.values())


@pytest.mark.parametrize("victim", "abc")
def test_who_follows_the_momentum_is_the_heir(victim: str) -> None:
    swarm = Swarm(ProtocolSettings(fragments=8))
    for name in "abc":
        swarm.add(name)
    swarm.until(60.0)
    core = next(peer.facts for peer in swarm.peers.values() if peer.name != victim)
    heirs = {f.index: core.second(f) for f in core.fragments if core.author_of(f) == victim}
    swarm.die(swarm.peers[victim])
    swarm.until(swarm.now + 60.0, lambda: victim not in core.members.able(myself=True))
    assert heirs and {index: core.author_of(core.fragments[index]) for index in heirs} == heirs


MODES = {
    "barrier": ProtocolSettings(sync_every=10),
    "quorum": ProtocolSettings(sync_every=10, quorum=2, grace_s=1.0),
    "staggered": ProtocolSettings(sync_every=10, staggered=True, fragments=2),
    "overlap": ProtocolSettings(sync_every=10, overlap=2),
    "few late versions": ProtocolSettings(sync_every=10, late=2),
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_the_tokens_of_a_peer_that_is_twenty_times_slower_arrive(
    settings: ProtocolSettings,
) -> None:
    swarm = Swarm(settings)
    for name in "abc":
        swarm.add(name)
    slow = swarm.add("d", step_s=20.0)
    swarm.until(600.0)
    assert slow.facts.loop.processed > 25
    for f in slow.facts.fragments:
        assert slow.tip(f.index).book.of("d")[1] > 20
        assert slow.core and slow.core.discarded() <= 1
    others = [peer.core for peer in swarm.peers.values() if peer is not slow]
    assert not any(core.discarded() for core in others if core)
    assert slow.tip().head.number > 25, "the others waited"  # for whole rounds of it: 4


def test_peers_of_one_speed_send_after_a_whole_cycle() -> None:
    swarm = Swarm(ProtocolSettings(sync_every=10))
    for name in "abc":
        swarm.add(name)
    swarm.until(200.0)
    assert {line.tokens for _, head in swarm.made for line, _ in head.lines} == {10}


def test_a_newcomer_of_a_public_run_weighs_a_quarter() -> None:
    swarm = Swarm(ProtocolSettings(sync_every=10, probation=3, staleness_exponent=0.0))
    for name in "abc":
        swarm.add(name)
    swarm.until(60.0)
    swarm.add("d")
    swarm.until(200.0)
    weights: dict[str, list[float]] = {name: [] for name in "abcd"}
    for _, head in swarm.made:
        for line, weight in head.lines:  # its first one is of a part of a round
            weights[line.peer].append(weight if line.tokens == 10 else 0.25)
    assert {weight for name in "abc" for weight in weights[name]} == {1.0}
    assert weights["d"][:3] == [0.25] * 3 and {*weights["d"][3:]} == {1.0}
