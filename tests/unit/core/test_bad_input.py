"""Nothing from the network raises, makes a peer wait for ever, or grows without a bound."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as altered

from diloco.core import events
from diloco.core.history import sign, state_of
from diloco.core.rules import data
from diloco.messages.bulk import Get
from diloco.messages.control import Answer, Dealt, Lease, Offer, Status
from diloco.messages.fields import MAX_COUNT, MAX_FRAGMENTS, MAX_TOKENS
from diloco.messages.heads import Entry, Head
from tests.support.core import ME, OTHER, core, line_of
from tests.support.fake_tensors import RUN, Signer, gradient, hexed
from tests.support.swarm_without_tensors import Peer, begun

MANY = MAX_FRAGMENTS - 1
DIGEST = "0" * 64


def said(actions: list[events.Action], kind: type) -> list[Any]:
    sent = [action.message for action in actions if isinstance(action, events.Send)]
    return [message for message in sent if isinstance(message, kind)]


ABSURD = [
    Status(tips={MANY: (1, DIGEST)}),
    Status(tips={0: (MAX_TOKENS, "")}),
    Status(whole=True),
    Status(steps=MAX_COUNT),
    Status(hears=["x" * 128] * 4096),
    Status(units=((0, MAX_TOKENS),)),
    Status(units=((9, 3), (5, 5), (0, 7))),
    Status(steps_per_s=1e6, position=MAX_COUNT, cycle=MAX_COUNT, trains=True),
    Status(planned=(MAX_TOKENS,) * 3),
    Offer(line_of("x", DIGEST, fragment=MANY)),
    Offer(line_of("x", DIGEST, stamp=MAX_TOKENS, tokens=MAX_TOKENS)),
    Answer(MANY, "b", 1, "want"),
    Answer(0, "nobody", MAX_TOKENS, "got", 2**60),
    Answer(0, "", 0, "no"),
    Lease("nobody", 2**20, ((0, MAX_TOKENS),)),
    Lease("", 0, ((9, 3),)),
    Dealt("a", ((0, MAX_TOKENS),)),
    Dealt("b", ((9, 3),)),
    Dealt("nobody", ((0, 1),)),
]


@pytest.mark.parametrize("message", ABSURD, ids=[type(message).__name__ for message in ABSURD])
def test_absurd_messages_are_survived(message: Any) -> None:
    swarm, author, other = begun()
    for peer, sender in ((author, other.name), (other, author.name), (author, "a stranger")):
        swarm.tell(peer, events.Heard(sender, message))
    at = swarm.now
    swarm.until(swarm.now + 60.0)
    assert swarm.made[-1][0] > at + 30.0


def test_questions_about_what_is_not_there_are_answered_with_no() -> None:
    _, author, other = begun()
    key, head = (0, ""), author.tip().head.id
    assert author.core
    for absent in ((MANY, key), (0, key, DIGEST), (0, key, head, MAX_COUNT), (0, (MAX_TOKENS, ""))):
        get = Get(*absent)  # type: ignore[arg-type]
        actions = author.core.receive(events.Asked(other.name, get), 100.0)
        assert [action.answer for action in actions if isinstance(action, events.Reply)] == [None]


IMPOSSIBLE = [{"fragment": MANY}, {"steps": MAX_COUNT}, {"stamp": 0}, {}, {"units": ((9, 3),)}]


@pytest.mark.parametrize("fields", IMPOSSIBLE)
def test_lines_that_no_honest_peer_makes_are_not_wanted(fields: dict[str, Any]) -> None:
    _, author, other = begun()
    line = line_of("x", author.tip().head.id, **fields)
    line = line if fields else altered(line, tokens=5)  # after it was signed
    assert author.core
    told = author.core.receive(events.Heard(other.name, Offer(line)), 100.0)
    assert [answer.says for answer in said(told, Answer)] == ["no"]
    author.core.receive(events.Delivered(other.name, line, gradient(line)), 100.0)
    assert "x" not in author.facts.control.pool


def test_a_pool_full_of_contributions_to_other_tips_makes_room() -> None:
    swarm, author, other = begun(pool=3)
    for number in range(20):
        line = line_of(f"x{number}", hexed(number))
        swarm.tell(author, events.Delivered(other.name, line, gradient(line)))
    assert len(author.facts.control.pool) <= 4
    number = len(swarm.made)
    swarm.until(swarm.now + 30.0, lambda: len(swarm.made) > number)
    assert {line.peer for line, _ in swarm.made[-1][1].lines} == {author.name, other.name}


def test_a_payload_is_sent_once_per_offer() -> None:
    """Else a few bytes of answers would cost a stream each."""
    swarm, author, other = begun()
    core, pool = other.core, other.facts.control.pool
    swarm.until(swarm.now + 20.0, lambda: other.name in pool)
    assert core
    line, now = pool[other.name].line, swarm.now

    def pushes() -> int:
        want = events.Heard(author.name, Answer(0, other.name, line.stamp, "want"))
        done = [one for _ in range(50) for one in core.receive(want, now)]
        return sum(isinstance(one, events.SendPayload) for one in done)

    assert pushes() == 0  # the first goes unasked
    core.receive(events.Broke(author.name, line), now)
    now += 5.0
    assert said(core.receive(events.Tick(), now), Offer)
    assert pushes() == 1


def test_data_comes_only_from_whom_it_was_asked_for_and_not_more_than_that() -> None:
    swarm, author, other = begun()
    before = other.facts.data.queue
    swarm.tell(other, events.Heard(author.name, Dealt(other.name, ((0, 2**40),))))
    assert other.facts.data.queue == before
    other.facts.data.lease_from = author.name
    swarm.tell(other, events.Heard(author.name, Dealt(other.name, ((2**30, 2**40),))))
    assert (
        sum(stop - start for start, stop in other.facts.data.queue) <= 2 * other.facts.data.wanted
    )


def test_one_peer_cannot_use_up_the_list_of_sequences() -> None:
    swarm, author, other = begun()
    swarm.tell(author, events.Heard(other.name, Status(units=((0, MAX_TOKENS),))))
    assert data.deal(author.facts, "x", 5, ((0, MAX_TOKENS),))


def record(author: Peer, signer: str, **fields: Any) -> events.Gave:
    """The version after the author's, perhaps forged."""
    tip = author.tip()
    lines = ((line_of("x", tip.head.id, stamp=10**10), 1.0),)
    known: dict[str, Any] = dict(fragment=0, number=tip.head.number + 1, prev=tip.head.id)
    known |= dict(author=author.name, next=author.name, lines=lines, delay=1)
    known |= dict(work=tip.head.work + 1, update=hexed(0), state=DIGEST)
    head = sign(Head(**(known | fields)), Signer(signer), RUN)
    return events.Gave(signer, Get(0, tip.key), events.Records((events.Record(head, (0, 0, 0)),)))


def test_who_forges_a_head_is_not_asked_again_and_its_alleged_author_stays() -> None:
    swarm, author, other = begun()
    swarm.tell(other, record(author, "x"))
    assert author.name not in other.facts.shunned
    assert other.facts.control.inbox.retry_at["x"] > swarm.now + 100.0
    assert "refused_head" in [kind for _, kind, _ in other.notes]


@pytest.mark.parametrize(
    "what", ["number", "work", "no lines", "fragment", "two lines of a peer", "an impossible line"]
)
def test_an_author_that_signs_what_no_honest_one_makes_is_passed_over(what: str) -> None:
    swarm, author, other = begun()
    base, work = author.tip().head.id, author.tip().head.work
    twice = tuple((line_of("x", base, stamp=10**10 + i), 1.0) for i in range(2))
    forged: dict[str, dict[str, Any]] = {
        "number": {"number": MAX_COUNT},
        "work": {"work": MAX_TOKENS},
        "no lines": {"lines": ()},
        "fragment": {"fragment": 7},
        "two lines of a peer": {"lines": twice, "work": work + 2},
        "an impossible line": {"lines": ((line_of("x", base, steps=MAX_COUNT), 1.0),)},
    }
    swarm.tell(other, record(author, author.name, **forged[what]))
    assert other.tip().head.id == base and not other.facts.control.inbox.moving
    assert author.name in other.facts.shunned


@pytest.mark.parametrize("part, digests", [(7, 3), (0, 5), (0, 0)])
def test_parts_that_do_not_exist_are_refused(part: int, digests: int) -> None:
    swarm, author, other = begun()
    f, tip = other.facts.control, author.tip()
    swarm.tell(other, events.Heard(author.name, Status(tips={0: (tip.head.work + 5, "f" * 64)})))
    assert f.inbox.fetch and f.inbox.fetch.donor == author.name
    head = altered(tip.head, work=tip.head.work + 5)
    answer = events.AnchorPart(head, tip.book, (DIGEST,) * digests, part, 0)
    swarm.tell(other, events.Gave(author.name, Get(0, f.tip.key), answer))
    assert author.name in f.inbox.retry_at and f.inbox.fetch is None


def test_a_history_without_a_beginning_is_no_state() -> None:
    """A head of number 0 is signed by nobody, so nothing is in it."""
    swarm, author, other = begun()
    f, tip = other.facts.control, author.tip()
    swarm.tell(other, events.Heard(author.name, Status(tips={0: (10**9, "f" * 64)})))
    book = altered(tip.book, ledger={"": Entry(0, 10**9)})
    head = Head(0, 0, RUN, "", "", (), 1, 10**9, "", state_of(book, [DIGEST] * 3))
    part = events.AnchorPart(head, book, (DIGEST,) * 3, 0, 0)
    swarm.tell(other, events.Gave(author.name, Get(0, f.tip.key), part))
    assert author.name in f.inbox.retry_at and f.tip.head.work < 10**9


def test_the_work_of_a_history_has_a_bound_at_which_it_ends() -> None:
    swarm, author, _ = begun()
    f = author.facts.control
    f.tip = replace(f.tip, head=altered(f.tip.head, work=MAX_TOKENS))
    swarm.block(list(swarm.epochs), 10.0**9)
    number = f.tip.head.number
    swarm.until(swarm.now + 30.0)
    assert f.tip.head.number == number


def test_a_merge_that_fails_is_tried_again_later() -> None:
    swarm, author, _ = begun()
    asked: list[float] = []

    def fails(action: Any) -> events.Event:
        if isinstance(action, events.Merge):
            asked.append(swarm.now)
            assert len(asked) < 100, "again and again"
            return events.Merged(action.fragment, action.base)
        return done(action)

    done = author.anchors.done
    author.anchors.done = fails  # type: ignore[method-assign]
    swarm.until(swarm.now + 30.0)
    assert 2 <= len(asked) <= 8


def test_what_others_say_is_kept_within_bounds() -> None:
    """Identities cost nothing: ears, donors, authors that are passed over."""
    swarm, author, other = begun()
    for number in range(200):
        names = [f"{number} {i}" for i in range(100)]
        swarm.tell(author, events.Heard(other.name, Status(hears=names)))
        author.facts.shun(f"x{number}", 1e9)
    member = author.facts.members.get(other.name)
    assert member and len(member.hears) <= 4096
    for number in range(2000):
        author.facts.shun(f"x{number}", 1e9)
    assert len(author.facts.shunned) <= 1024


def test_a_signature_that_is_right_is_checked_once_and_a_wrong_one_each_time() -> None:
    """A contribution comes as an offer, as a payload and in a head."""
    peer = core()
    checks = list[str]()
    identity = peer.facts.identity

    class Counted(Signer):
        def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
            checks.append(peer)
            return super().verify(peer, content, signature)

    peer.facts.identity = replace(identity, run_id=RUN, signer=Counted(ME))
    line = line_of(OTHER, base=peer.facts.control.tip.head.id)
    assert peer.facts.signed_by(line, OTHER) and peer.facts.signed_by(line, OTHER)
    assert len(checks) == 1
    for changed in (altered(line, tokens=2), altered(line, signature=b"")):
        assert not peer.facts.signed_by(changed, OTHER)
        assert not peer.facts.signed_by(changed, OTHER)
    assert not peer.facts.signed_by(line, ME), "it is another peer's"
    assert len(checks) == 6
