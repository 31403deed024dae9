"""What one peer keeps of the run's accounts: what each version of its anchors is made of. Sans-IO.

records, states, checkpoints -> who is merged, up to where; what of the data is handed out -> states, checkpoints
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from diloco.protocol.actions import Action, Note
from diloco.protocol.dealer import DataCursor, Dealer, fields_of
from diloco.protocol.ledger import Units
from diloco.protocol.membership import Member
from diloco.protocol.messages.bulk import Record, StateHeader
from diloco.protocol.messages.control import Claim, Published, Status
from diloco.protocol.shares import OTHERS, Contributor, Share, Shares, credited, short_name
from diloco.protocol.view import View

__all__ = ["CONTROL_FRAGMENT", "Accounts"]

CONTROL_FRAGMENT = 0  # its update records carry the swarm clock and the word on the data; its syncer deals out units


class Accounts(View):
    """The base of `Peer`. What is said of a version goes with that version: who adopts it adopts its accounts.

    A contribution counts as merged for its peer once that peer has the version, so a version that dies with its syncer
    has only this one's own tokens in it:

    1. Without a barrier a syncer makes versions of its own contributions alone, and dies before anybody has them.
    2. Its successor goes on from the version before. Its claim carries the swarm clock there, which so goes back for
       all, and the shares there have nothing of what was lost. Whoever else contributed makes its contribution again.
    3. If the syncer comes back from a checkpoint of such a version, and the others are not behind that, it adopts
       theirs, and counts its tokens as discarded.
    """

    def _begin(self) -> None:
        self._shares: list[Shares] = [{} for _ in self.versions]
        self.dealer = Dealer(self.versions[CONTROL_FRAGMENT])

    # -- contributions ------------------------------------------------------------------------------------------------

    def shares(self, fragment: int) -> Shares:
        """Who contributed how much to the anchor here; goes with the fragment's state."""
        return self._shares[fragment]

    def restore_shares(self, shares: Sequence[Mapping[str, Share]]) -> None:
        """What `shares` was for each fragment when a checkpoint was written."""
        for fragment, known in enumerate(shares):
            self._shares[fragment] = dict(known)

    def merged(self, fragment: int) -> dict[str, int]:
        """For each peer the base version up to which its contributions are in the anchor here, or were left out; so
        that a successor merges nothing again.
        """
        return {peer: share.last_version - 1 for peer, share in self._shares[fragment].items() if peer != OTHERS}

    def contributions(self) -> list[Contributor]:
        """Who contributed how much to the run, as far as this peer's anchors go; who gave most comes first.

        Equal on all peers with equal anchors, but for names of peers that somebody has never met. A peer stands in it
        from its first contribution to the control fragment.
        """
        names = self._names()
        rows = [
            Contributor(
                peer, names.get(peer) or share.name or ("others" if peer == OTHERS else ""),
                share.contributions, share.tokens, self._bytes_of(peer), share.first_version, share.last_version,
            )
            for peer, share in self._shares[CONTROL_FRAGMENT].items()
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (-row.tokens, row.peer_id))

    def _bytes_of(self, peer: str) -> int:
        return sum(
            shares[peer].contributions * size
            for shares, size in zip(self._shares, self.payload_bytes, strict=False)
            if peer in shares
        )

    def _names(self) -> dict[str, str]:
        members = [(self.me, self.name), *((member.peer, member.name) for member in self.members.all())]
        return {peer: short_name(name) for peer, name in members}

    def _credit(self, fragment: int, version: int, contributors: Mapping[str, int]) -> None:
        self._shares[fragment] = credited(self._shares[fragment], version, contributors, self._names())

    # -- work units ---------------------------------------------------------------------------------------------------

    def lease_units(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """Lease that many sequences more to a member, or to this peer, who has no others than `has`.

        None when another peer deals them out, and for who is no member (nobody would notice that it is gone).
        """
        member = peer == self.me or peer in self.members
        return self.dealer.lease(peer, wanted, has) if member else None

    def leased_to(self, peer: str) -> Units | None:
        """Sequences that are this peer's to learn from; None when another peer deals them out."""
        ledger = self.dealer.ledger
        return None if ledger is None else ledger.leased.get(peer, [])

    def data_cursor(self, fragment: int, contributors: Collection[str] | None = None) -> dict[str, Any]:
        if fragment != CONTROL_FRAGMENT:
            return {}
        if contributors is not None and self.dealer.ledger is not None:  # of the version that they are about to make
            return fields_of(self.dealer.after(contributors))
        return fields_of(self.dealer.cursor_at(self.versions[fragment]))

    def hear_data_cursor(self, said: Claim | Published | Record | StateHeader) -> None:
        """What the author of a version says of the data."""
        if said.fragment == CONTROL_FRAGMENT:
            self.dealer.hear(said)

    def restore_data_cursor(self, cursor: DataCursor) -> None:
        """What the word on this peer's version was when a checkpoint was written."""
        self.dealer.know(self.versions[CONTROL_FRAGMENT], cursor)

    def _heard_units(self, peer: str, status: Status) -> None:
        if status.state in ("leaving", "done"):
            self.dealer.give_back(peer)
        else:
            self.dealer.has(peer, status.units)

    def _deal(self, fragment: int) -> None:
        """As syncer of the control fragment, deal out units behind what is in the anchor here."""
        if fragment == CONTROL_FRAGMENT:
            said = {member.peer: member.status.units for member in self.members.all() if self._live(member.peer)}
            self.dealer.resume(self.versions[fragment], {**said, self.me: self.units})

    def _apply_units(self, version: int, contributors: Collection[str]) -> list[Action]:
        live = {self.me, *(member.peer for member in self.members.all() if self._live(member.peer))}
        twice = self.dealer.published(version, contributors, live)
        return [Note("units_twice", {"count": twice, "version": version})] if twice else []

    def _live(self, peer: str) -> Member | None:
        member = self.members.get(peer)
        return None if member is None or member.status.state in ("leaving", "done") else member
