"""One peer's accounts of the run: what each version of its anchors is made of, and who has which data. Sans-IO.

records, states, checkpoints -> shares of each anchor -> contributors, merged contributions, swarm clock
statuses, requests, contributions -> dealer -> data cursor of each version
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from diloco.protocol.actions import Action, Note
from diloco.protocol.fragment import CONTROL_FRAGMENT, Fragment
from diloco.protocol.ledger import Dealer, Units, union
from diloco.protocol.membership import Membership
from diloco.protocol.messages.base import MAX_RANGES
from diloco.protocol.messages.control import Claim, Published, Status
from diloco.protocol.messages.heads import Head
from diloco.protocol.numbers import MAX_BYTES, MAX_TOKENS, at_most
from diloco.protocol.shares import OTHERS, Contributor, Share, Shares, clock_of, credited, short_name

__all__ = ["Accounts"]


class Accounts:
    """Everything here belongs to a version: a peer that adopts a version adopts its accounts.

    Args:
        me, name: id and display name of this peer.
        fragments: the fragments of this peer; their `shares` change here. members: the other peers.
        applied_tokens: swarm clock at the versions that this peer starts with.
        payload_bytes: length of a contribution to each fragment, for the record of who contributed how much.

    A contribution counts as merged for its peer once that peer has the version. When a version dies with its syncer,
    the claim of the successor carries the swarm clock of the version before, which thus goes back for all, and others
    contribute again. Should the syncer come back with that version, it counts its own tokens in it as discarded.
    """

    def __init__(
        self,
        me: str,
        name: str,
        fragments: Sequence[Fragment],
        members: Membership,
        applied_tokens: int = 0,
        payload_bytes: Sequence[int] = (),
    ) -> None:
        self.units: Units = []  # leased to this peer, and not in the model as far as it knows
        self.dealer = Dealer(fragments[CONTROL_FRAGMENT].version)
        self._me, self._name = me, name
        self._fragments, self._members = fragments, members
        self._payload_bytes = tuple(payload_bytes)
        self._fill_clock(applied_tokens)

    # -- contributions ------------------------------------------------------------------------------------------------

    @property
    def applied_tokens(self) -> int:
        """The swarm clock: tokens in the anchor of the control fragment here."""
        return clock_of(self._fragments[CONTROL_FRAGMENT].shares)

    def restore_shares(self, shares: Sequence[Mapping[str, Share]]) -> None:
        """Take over the `shares` of each fragment from a checkpoint; the swarm clock stays where it is."""
        clock = self.applied_tokens
        for fragment, known in zip(self._fragments, shares, strict=False):
            fragment.shares = dict(known)
        self._fill_clock(clock)

    def _fill_clock(self, applied_tokens: int) -> None:
        """Tokens that no share explains, as in a checkpoint without shares, are those of others."""
        missing = applied_tokens - self.applied_tokens
        if missing > 0:
            control = self._fragments[CONTROL_FRAGMENT]
            known = control.shares.get(OTHERS, Share(0, 0, control.version, control.version))
            tokens = at_most(known.tokens + missing, MAX_TOKENS)
            control.shares = {**control.shares, OTHERS: known._replace(tokens=tokens)}

    def shares_after(self, fragment: Fragment, version: int, contributors: Mapping[str, int]) -> Shares:
        """The shares of the version that contributions of so many tokens make of the one that is here."""
        return credited(fragment.shares, version, contributors, self._names())

    def contributions(self) -> list[Contributor]:
        """Which peer contributed how much to the run, as far as this peer's anchors go; the largest comes first.

        Peers with equal anchors have equal lists, except for names of peers that they never met. A peer appears after
        its first contribution to the control fragment.
        """
        names = self._names()
        rows = [
            Contributor(
                peer, names.get(peer) or share.name or ("others" if peer == OTHERS else ""),
                share.contributions, share.tokens, self._bytes_of(peer), share.first_version, share.last_version,
            )
            for peer, share in self._fragments[CONTROL_FRAGMENT].shares.items()
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (-row.tokens, row.peer_id))

    def _bytes_of(self, peer: str) -> int:
        nbytes = sum(
            fragment.shares[peer].contributions * size
            for fragment, size in zip(self._fragments, self._payload_bytes, strict=False)
            if peer in fragment.shares
        )
        return at_most(nbytes, MAX_BYTES)

    def _names(self) -> dict[str, str]:
        members = [(self._me, self._name), *((member.peer, member.name) for member in self._members.all())]
        return {peer: short_name(name) for peer, name in members}

    # -- work units ---------------------------------------------------------------------------------------------------

    def lease_units(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """Lease that many more sequences to a member or to this peer; `has` is all that the peer has left.

        None when another peer deals them out, and for a peer that is no member: nobody would notice its death.
        """
        member = peer == self._me or peer in self._members
        return self.dealer.lease(peer, wanted, has) if member else None

    def data_cursor(self, fragment: int, contributors: Collection[str] | None = None) -> dict[str, Any]:
        """Fields `cursor` and `open` of a message about the version of a fragment here, or about the next version,
        which these contributors make. Only the control fragment has any.
        """
        if fragment != CONTROL_FRAGMENT:
            return {}
        if contributors is not None and self.dealer.ledger is not None:
            first, open_ = self.dealer.after(contributors)
        else:
            first, open_ = self.dealer.cursor_at(self._fragments[fragment].version)
        # Ranges that do not fit are never handed out again, rather than twice.
        return {"cursor": first, "open": [list(unit) for unit in open_[:MAX_RANGES]]}

    def hear_data_cursor(self, said: Claim | Published | Head) -> None:
        """Take in the data cursor of a version from its author."""
        if said.fragment == CONTROL_FRAGMENT:
            self.dealer.know(said.version, (said.cursor, union(said.open)))

    def heard_units(self, peer: str, status: Status) -> None:
        """A peer says in its status which units it has."""
        if status.gone:
            self.dealer.give_back(peer)
        else:
            self.dealer.has(peer, status.units)

    def deal(self) -> None:
        """Deal out units from now on: this peer is syncer of the control fragment, at the version here."""
        said = {member.peer: member.status.units for member in self._members.all() if not member.status.gone}
        self.dealer.resume(self._fragments[CONTROL_FRAGMENT].version, {**said, self._me: self.units})

    def apply_units(self, version: int, contributors: Collection[str]) -> list[Action]:
        """The units of these contributors are in this version of the control fragment."""
        live = {self._me, *(member.peer for member in self._members.all() if not member.status.gone)}
        twice = self.dealer.published(version, contributors, live)
        return [Note("units_twice", {"count": twice, "version": version})] if twice else []
