"""The syncer of one fragment: collects contributions to the next version and decides when to close. Sans-IO.

    offer -> (chunks arrive) -> arrived -> poll says close -> merge, publish -> advance -> the next version collects

Contributions are keyed by (peer, base version) under one term. A stream that breaks midway leaves the chunks that were
folded in (each chunk has its own weight), and a retry goes on with the next one; so no byte is needed twice and no
chunk counts twice. A contribution whose payload never became whole is not a contributor: its tokens count as discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco.protocol.membership import Member
from diloco.protocol.messages import Contribution, Verdict

__all__ = ["Close", "Syncer"]


@dataclass(frozen=True)
class Close:
    """Decision to make the next version out of these whole contributions; `missing` were expected and are left out."""

    fragment: int
    base_version: int
    contributors: tuple[str, ...]
    tokens: int
    missing: tuple[str, ...]


@dataclass
class _Offer:
    tokens: int
    chunks: int = 0
    whole: bool = False
    polled: int = 0  # chunks at the last poll
    progress_at: float = 0.0


class Syncer:
    """State of the fragment's next version under the `sync` policy: close when every expected peer has arrived.

    A peer is expected while it is alive and gets on: its inner steps or its chunks do (see `Member.stalled`). So nobody
    waits for the dead, nor for one that stopped, and there is no fixed round time-out to tune.
    """

    def __init__(self, fragment: int, term: int, version: int) -> None:
        self.fragment = fragment
        self.term = term
        self.version = version
        self._offers: dict[str, _Offer] = {}
        self._unit_tokens = 0
        self.last_contributors: frozenset[str] = frozenset()
        self._closing = False

    def offer(self, peer: str, header: Contribution) -> Verdict:
        """Judge a contribution by its header. Never raises: a wrong one is refused with the reason."""
        known = self._offers.get(peer)
        whole = known is not None and known.whole
        reason = ""
        if header.term != self.term:
            reason = f"fragment {self.fragment} is under term {self.term}, not {header.term}"
        elif header.base_version < self.version:
            reason = f"fragment {self.fragment} is at version {self.version}, past base version {header.base_version}"
        elif header.base_version > self.version:
            reason = f"fragment {self.fragment} is at version {self.version}, {header.base_version} is in the future"
        elif self._closing and not whole:
            reason = f"fragment {self.fragment} is closing version {self.version + 1} without this contribution"
        elif known is not None and whole and known.tokens != header.tokens:
            reason = f"a contribution of {known.tokens} tokens is here already, this one claims {header.tokens}"
        if reason:
            return Verdict(accepted=False, reason=reason, version=self.version, term=self.term)
        if known is None:
            known = self._offers[peer] = _Offer(header.tokens)
            self._unit_tokens = self._unit_tokens or header.tokens
        known.tokens = header.tokens  # other tokens come from a peer that restarted; each chunk has a weight of its own
        return Verdict(accepted=True, first_chunk=known.chunks, version=self.version, term=self.term)

    def weight(self, peer: str) -> float:
        """Weight of this peer's contribution: its tokens over those of the first contribution to this version.

        Equal contributions so have weight 1, and sums of 4- and 8-bit payloads are exact in fp32, in any order of
        arrival.
        """
        return self._offers[peer].tokens / self._unit_tokens

    def wants(self, peer: str, chunk: int) -> bool:
        """Whether this chunk may be folded in; not when the version closed meanwhile, nor when it was folded before."""
        offer = self._offers.get(peer)
        return offer is not None and not self._closing and chunk == offer.chunks

    def folded(self, peer: str) -> None:
        """The next chunk of this peer is folded in."""
        self._offers[peer].chunks += 1

    def arrived(self, peer: str) -> None:
        """The payload of this peer is whole."""
        offer = self._offers.get(peer)
        if offer is not None and not self._closing:
            offer.whole = True

    def poll(self, members: Mapping[str, Member], now: float) -> Close | None:
        """Decide whether to close.

        Args:
            members: the live peers by id; this peer is one of them, for it waits for itself like for any other.
            now: seconds of a monotonic clock.
        """
        for offer in self._offers.values():
            if offer.chunks > offer.polled:
                offer.polled, offer.progress_at = offer.chunks, now
        whole = {peer for peer, offer in self._offers.items() if offer.whole}
        if self._closing or not whole:
            return None
        expected = {peer for peer, member in members.items() if self._expected(member, now)}
        if expected - whole:
            return None
        self._closing = True
        missing = (self.last_contributors | set(self._offers)) - whole
        tokens = sum(self._offers[peer].tokens for peer in whole)
        return Close(self.fragment, self.version, tuple(sorted(whole)), tokens, tuple(sorted(missing)))

    def _expected(self, member: Member, now: float) -> bool:
        status = member.status
        if not member.trains or status.state in ("starting", "leaving", "done"):
            return False
        offer = self._offers.get(member.peer)
        if member.stalled(now, progress_at=0.0 if offer is None else offer.progress_at):
            return False
        base = status.versions[self.fragment]
        # Right after a publication the contributors' statuses still name the version before.
        return base == self.version or (base == self.version - 1 and member.peer in self.last_contributors)

    def advance(self, version: int) -> None:
        """The next version is published (or was caught up with): forget its contributions, collect the one after it."""
        published = version == self.version + 1 and self._closing
        whole = (peer for peer, offer in self._offers.items() if offer.whole)
        self.last_contributors = frozenset(whole if published else ())
        self.version = version
        self._offers = {}
        self._unit_tokens = 0
        self._closing = False
