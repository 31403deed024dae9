"""What a core asks its owner to do with tensors, where these are three integers."""

import hashlib
from statistics import median_low
from typing import Any, NamedTuple

from diloco.core import events
from diloco.core.facts import Facts
from diloco.core.history import Bounds, Tip, state_of
from diloco.messages.heads import Line

Tensor = tuple[int, ...]
PARTS = 3
ZERO: Tensor = (0,) * PARTS
RUN = "run"


def hexed(what: object) -> str:
    """Digest of a payload, an update, or a part of an anchor."""
    return hashlib.blake2b(repr(what).encode(), digest_size=32).hexdigest()


def gradient(line: Line) -> Tensor:
    """Stands for a pseudo-gradient."""
    numbers = [int(hexed((line.peer, line.stamp, part))[:8], 16) for part in range(PARTS)]
    return tuple((1 if number % 2 else -1) * (500 + number % 500) for number in numbers)


class Signer(NamedTuple):
    """A signature is a digest: nobody forges one here."""

    me: str

    def sign(self, content: bytes) -> bytes:
        return hashlib.blake2b(self.me.encode() + content, digest_size=16).digest()

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return Signer(peer).sign(content) == signature


class Arithmetic:
    """The bounds that follow from `Anchors._merged`."""

    def bounds(self, *given: Any) -> Bounds:
        longest, reach = given[-2:]
        momentum = (3 * reach[0] + 2 * longest) // 4 + 4
        return Bounds(longest + reach[0] // 2 + 4, (momentum, 0.0, 0.0))


class Saved(NamedTuple):
    """A checkpoint."""

    tips: tuple[Tip, ...]
    anchors: tuple[Tensor, ...]
    processed: int
    stamp: int


class Anchors:
    """The anchors of one peer, and what its core asks to have done with them."""

    def __init__(self, facts: Facts, anchors: tuple[Tensor, ...]) -> None:
        self.facts, self.learn = facts, gradient
        self.now, self.momenta = list(anchors), [ZERO] * len(anchors)
        self.pinned: list[dict[str, Tensor]] = [{} for _ in anchors]

    def done(self, action: Any) -> events.Event:
        """Do what one action asks for."""
        match action:
            case events.Capture(line):
                delta = self.learn(line)
                return events.Captured(line, delta, float(max(map(abs, delta))), hexed(delta))
            case events.Load(index):
                return events.Loaded(index, self.facts.fragments[index].tip.head.id)
            case events.Merge():
                return self._merged(action)
            case events.Apply():
                return self._applied(action)
            case events.Replace(index, head, parts):
                return self.moved(index, head.id, tuple(parts), ZERO)
        raise AssertionError(action)

    def _merged(self, merge: events.Merge) -> events.Merged:
        norms = [share.line.norm for share in merge.shares]
        long = 3 * median_low(norms) if len(norms) > 2 else max(norms)
        weights = [int(1000 * s.weight * s.discount) * (s.line.norm <= long) for s in merge.shares]
        weights = weights if any(weights) else [1] * len(weights)
        pairs = list(zip(weights, merge.shares, strict=True))
        sums = [sum(w * share.payload[part] for w, share in pairs) for part in range(PARTS)]
        steps = merge.pushes + sum(map(bool, weights)) >= merge.delay  # a window is full
        both = zip(self.momenta[merge.fragment], sums, strict=True)
        update = tuple(m // 2 * steps - part // sum(weights) for m, part in both)
        left_out = frozenset(share.line.peer for w, share in pairs if not w)
        return events.Merged(merge.fragment, merge.base, update, hexed(update), left_out)

    def _applied(self, apply: events.Apply) -> events.Applied:
        index, before = apply.fragment, self.now[apply.fragment]
        anchor = tuple(a + u for a, u in zip(before, apply.update, strict=True))
        if max(map(abs, apply.update)) > apply.limit:
            return events.Applied(index, apply.head.id, why="far")
        if not apply.own and state_of(apply.book, tuple(map(hexed, anchor))) != apply.head.state:
            damaged = tuple(map(hexed, before)) != self.facts.fragments[index].tip.parts
            return events.Applied(index, apply.head.id, why="digest", damaged=damaged)
        pairs = zip(self.momenta[index], apply.update, strict=True)
        momentum = tuple((m + u) // 2 for m, u in pairs)
        return self.moved(index, apply.head.id, anchor, momentum)

    def moved(self, index: int, head: str, anchor: Tensor, momentum: Tensor) -> events.Applied:
        """Move an anchor. The one before is kept while others fetch its parts."""
        f = self.facts.fragments[index]
        kept = {**self.pinned[index], f.tip.head.id: self.now[index]}
        pinned = f.outbox.pinned[0].head.id if f.outbox.pinned else ""
        self.pinned[index] = {id_: one for id_, one in kept.items() if id_ == pinned}
        self.now[index], self.momenta[index] = anchor, momentum
        return events.Applied(index, head, tuple(map(hexed, anchor)))

    def filled(self, index: int, part: events.AnchorPart) -> events.AnchorPart:
        """With its values."""
        here = part.head.id == self.facts.fragments[index].tip.head.id
        anchor = self.now[index] if here else self.pinned[index][part.head.id]
        digests = tuple(map(hexed, anchor))
        return events.AnchorPart(part.head, part.book, digests, part.part, anchor[part.part])
